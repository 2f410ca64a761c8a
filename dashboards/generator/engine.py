"""The dashboard of one server: now, preemption, KV and queue, user impact, fix."""

from typing import Any, Final

from exporter.analysis.history import KV_BOUNDS
from generator.panels import Column, Query, Row, by_query, graph, heatmap, stat, table, thresholds
from generator.queries import (
    ENGINE,
    NATIVE,
    SERVER,
    WHERE,
    WHO,
    by,
    copied,
    named,
    narrowed,
    native,
    nothing,
    or_else,
    ours,
    quantile,
    rate,
)
from generator.shared import assembled, verdict_table
from generator.words import (
    AS_TEXT,
    EFFECTS,
    FINDINGS,
    FIXES,
    FLAGS,
    FROM_ONE,
    LIMITS,
    VERDICT_FIELDS,
    WRAPPED,
    runbook,
    short,
    title,
    unit,
)

__all__ = ["build"]

Json = dict[str, Any]

# A target has its own verdict if no engine can be read.
_OF_ENGINES: Final = by(["verdict"], f"{ours('verdict')} == 1")
_OF_TARGETS: Final = by(["verdict"], narrowed(ours("target_verdict"), 'verdict!="reachable"') + " == 1")
_VERDICT_NOW: Final = f"{_OF_ENGINES} or {_OF_TARGETS}"


def _now() -> Row:
    return Row(
        "Now: what is wrong, and what to do first",
        [
            stat(
                "Verdict",
                "The current verdicts of the selected engines, one tile each. Green is healthy; the table "
                "on the right explains the verdict and names the first fix.",
                Query(_VERDICT_NOW, "{{verdict}}", instant=True),
                size=(5, 6),
                shown="name",
                background=True,
                course=False,
                none="No engine seen",
                overrides=VERDICT_FIELDS,
            ),
            verdict_table(
                "In words",
                "The meaning of each engine's verdict, and the first fix. There should be no red or orange "
                "row.",
                (19, 6),
            ),
            stat(
                short("kv_usage_max_ratio"),
                "Highest KV usage of the selected engines in the last minute. A full cache alone is "
                "harmless; check preemptions and tokens per second next.",
                Query(by([], f"max_over_time({ours('kv_usage_max_ratio')}[$__rate_interval])", "max")),
                unit=unit("kv_usage_max_ratio"),
                defaults={"max": 1},
                limits=thresholds((LIMITS.kv_full, "orange")),
            ),
            stat(
                short("preemptions_per_second"),
                "Preemptions per second, sum of the selected engines. Should be 0; a few are harmless.",
                Query(by([], rate(ours("preemptions")))),
                defaults={"decimals": 2},
                limits=thresholds((LIMITS.light_ratio, "yellow")),
            ),
            stat(
                "Preempt. / finished",
                "Preemptions per finished request over five minutes, of the worst selected engine. Should "
                "be far below 1; at about 1 the engine loses most of its work.",
                Query(by([], ours("preemptions_per_finished_request"), "max")),
                none="nothing finishes",
                defaults={"decimals": 2},
                limits=thresholds((LIMITS.light_ratio, "yellow"), (LIMITS.thrash_ratio, "red")),
            ),
            stat(
                short("requests_running"),
                "Requests that the engines compute now. Should follow the load; a flat line at the top "
                "means a limit, either seats or KV.",
                Query(by([], ours("requests_running"))),
            ),
            stat(
                short("requests_waiting"),
                "Requests in the queue, including preempted ones. Should be 0; the verdict names the cause "
                "of a lasting queue.",
                Query(by([], ours("requests_waiting"))),
                limits=thresholds((1, "orange")),
            ),
            stat(
                short("generation_tokens_per_second"),
                "Tokens generated per second, sum of the selected engines. Should follow the load; in a "
                "storm it falls although the GPU is busy.",
                Query(by([], ours("generation_tokens_per_second"))),
                defaults={"decimals": 0},
            ),
            graph(
                "Verdict over time",
                "Number of selected engines in each verdict. Should be green throughout; red means lost "
                "work, orange a queue or pressure.",
                Query(f"{by(['verdict'], ours('verdict'))} > 0", "{{verdict}}"),
                size=(24, 5),
                stacked="normal",
                defaults={"decimals": 0},
                overrides=VERDICT_FIELDS,
            ),
        ],
    )


def _preemption() -> Row:
    return Row(
        "Preemption: is work lost?",
        [
            graph(
                title("preemptions_per_second"),
                "Preemptions per second, counted by the exporter and by vLLM (dashed). Should be 0; an "
                "occasional burst is harmless, a plateau is a storm.",
                Query(named(rate(ours("preemptions"))), WHO),
                Query(named(by(ENGINE, native("preemptions", rate))), NATIVE),
                overrides=[_NATIVE_LINE],
            )
            | runbook("preemption_thrash"),
            graph(
                title("preemptions_per_finished_request"),
                "Preemptions divided by finished requests, over five minutes. Should stay well below the "
                "dashed line; a gap means that nothing finished.",
                Query(named(ours("preemptions_per_finished_request")), WHO),
                limits=thresholds((LIMITS.thrash_ratio, "red")),
            )
            | runbook("preemption_thrash"),
            graph(
                title("recomputed_ratio"),
                "Estimated share of computed tokens that repeat work lost to preemption. Should stay "
                "below a few per cent.",
                Query(named(ours("recomputed_ratio")), WHO),
                unit=unit("recomputed_ratio"),
                defaults={"max": 1},
            ),
        ],
    )


_NATIVE_LINE: Final = by_query(
    "B", custom__lineStyle={"fill": "dash", "dash": [6, 6]}, custom__lineWidth=1, custom__fillOpacity=0
)


def _kv_and_queue() -> Row:
    full = f"{KV_BOUNDS[-4]:g}"
    return Row(
        "KV cache and queue: what is short?",
        [
            graph(
                title("kv_usage_ratio"),
                "Usage at the exporter's last poll, its peak in each minute, and vLLM's own gauge at the "
                "scrape (dashed). High usage is fine while nothing is preempted and nothing waits.",
                Query(named(ours("kv_usage_ratio")), WHO),
                Query(named(by(ENGINE, native("kv_usage"), "max")), NATIVE),
                Query(
                    named(f"max_over_time({ours('kv_usage_max_ratio')}[$__rate_interval])"), f"{WHO} highest"
                ),
                unit=unit("kv_usage_ratio"),
                defaults={"max": 1},
                overrides=[_NATIVE_LINE, by_query("C", custom__lineWidth=1, custom__fillOpacity=0)],
                size=(12, 8),
            ),
            heatmap(
                "Polls by KV usage",
                "Number of polls at each KV usage, including polls between two scrapes. Most polls at the "
                "top together with preemptions mean a shortage; without preemptions they mean good use.",
                Query(
                    by(["le"], f"increase({ours('kv_usage_polled_ratio', '_bucket')}[$__rate_interval])"),
                    "{{le}}",
                    form="heatmap",
                ),
                unit="percentunit",
                size=(12, 8),
            ),
            graph(
                "Running and waiting",
                "Running requests, waiting requests, and those that wait for something other than seats or "
                "KV (deferred). There should be no queue; in a storm running falls as much as waiting "
                "rises.",
                Query(named(ours("requests_running")), f"{WHO} running"),
                Query(named(ours("requests_waiting")), f"{WHO} waiting"),
                Query(named(ours("requests_deferred")), f"{WHO} deferred"),
                overrides=[
                    by_query("A", color={"mode": "shades", "fixedColor": "green"}),
                    by_query("B", color={"mode": "shades", "fixedColor": "orange"}),
                    by_query("C", color={"mode": "shades", "fixedColor": "purple"}),
                ],
                size=(12, 8),
            )
            | runbook("kv_bound", "seat_bound", "prefill_bound", "deferred_wait"),
            graph(
                "Demand on KV and seats",
                "Demand of all running and waiting requests divided by capacity, for KV and for seats; 1 is"
                " full. Should stay below the line; the resource that crosses it first is the short one.",
                Query(named(ours("saturation_ratio")), f"{WHO} {{{{resource}}}}"),
                limits=thresholds((1, "red")),
                size=(12, 8),
            ),
            graph(
                title("requests_refused_per_second"),
                "Requests that the server refuses with status 503 because its queue is at the limit that was "
                "set, by the engine's share. Should be 0: they are demand that the queue does not show.",
                Query(named(ours("requests_refused_per_second")), WHO),
                size=(24, 6),
            )
            | runbook("requests_refused"),
            graph(
                f"Time with the KV cache above {float(full):.0%}",
                "Share of polls above that usage, including short peaks. May be high on a busy server; "
                "together with preemptions it means that the pool is too small.",
                Query(
                    named(
                        f"1 - {by(ENGINE, rate(ours('kv_usage_polled_ratio', '_bucket', le=full)))}"
                        f" / ({by(ENGINE, rate(ours('kv_usage_polled_ratio', '_count')))} > 0)"
                    ),
                    WHO,
                ),
                unit="percentunit",
                defaults={"max": 1},
                size=(8, 7),
            ),
            graph(
                title("prefix_cache_hit_ratio"),
                "Share of prompt tokens found in the cache. Higher is cheaper; it falls when a full cache "
                "evicts blocks early.",
                Query(named(ours("prefix_cache_hit_ratio")), WHO),
                unit=unit("prefix_cache_hit_ratio"),
                defaults={"max": 1},
                size=(8, 7),
            ),
            stat(
                short("kv_seconds_to_full"),
                "Time until the first of the selected engines is full, at the current growth. Should read "
                '"not rising"; minutes are a warning.',
                Query(by([], ours("kv_seconds_to_full"), "min"), instant=True),
                unit=unit("kv_seconds_to_full"),
                none="not rising",
                limits=thresholds((0, "orange"), (LIMITS.pressure_horizon, "text"), base="text"),
                course=False,
                size=(4, 7),
            ),
            stat(
                "Longest requests",
                "Requests of the maximum length that fit into the smallest selected cache. Should be above "
                "2; below 2 one long request evicts all others, below 1 it never runs.",
                Query(by([], ours("kv_max_concurrency"), "min")),
                none="unknown",
                defaults={"decimals": 1},
                limits=thresholds((1, "orange"), (2, "text"), base="red"),
                course=False,
                size=(4, 7),
            ),
        ],
    )


def _impact() -> Row:
    return Row(
        "User impact: who feels it?",
        [
            graph(
                title("generation_tokens_per_second"),
                "Tokens generated per second, with this engine's mean of the last hour (dotted). Should "
                "stay near that mean; half of it at the same load is harm.",
                Query(named(ours("generation_tokens_per_second")), WHO),
                Query(named(by(ENGINE, native("generation_tokens", rate))), NATIVE),
                Query(
                    named(f"avg_over_time({ours('generation_tokens_per_second')}[1h])"), f"{WHO} mean of 1 h"
                ),
                overrides=[
                    _NATIVE_LINE,
                    by_query("C", custom__lineStyle={"fill": "dot", "dash": [2, 6]}, custom__fillOpacity=0),
                ],
            ),
            graph(
                title("inter_token_latency_mean_seconds"),
                "Mean time between two tokens of an answer over one minute, including the stalls of "
                "preempted requests. Should be steady; the level depends on the model.",
                Query(named(ours("inter_token_latency_mean_seconds")), WHO),
                unit=unit("inter_token_latency_mean_seconds"),
            )
            | runbook("decode_slow"),
            graph(
                title("requests_finished_per_second"),
                "Requests finished per second. Should follow the traffic; 0 while requests run means very "
                "long answers or a stuck engine.",
                Query(named(rate(ours("requests_finished"))), WHO),
                unit="reqps",
            )
            | runbook("engine_stalled", "scheduler_deadlock"),
        ],
    )


def _by_fix(name: str) -> str:
    """Return a metric of each fix, with the labels of the table's columns."""
    return by(
        (*ENGINE, "server", "fix", "flag", "effect"), copied(named(ours(name)), "fix", "flag", "effect")
    )


def _fix() -> Row:
    return Row(
        "Fix: what to change",
        [
            table(
                "Recommended changes by rank",
                "Fixes for each engine's verdict, best first where a simulation matches the server, else "
                "cheapest first: the value for the flag, and tokens/s after the change / now by that "
                "simulation. The exporter's page and its command check add the fixes that will not help; the "
                "runbook lists the risks.",
                *(
                    Query(expr, instant=True, form="table")
                    for expr in (
                        or_else(_by_fix("fix_rank"), copied(nothing("fix"), "fix", "flag", "effect")),
                        _by_fix("fix_value"),
                        _by_fix("fix_gain_ratio"),
                    )
                ),
                columns=[
                    Column("Value #A", "Rank", 60, look={"decimals": 0}),
                    Column("server", "Server", 115),
                    Column("engine", "Engine", 65, unit=AS_TEXT),
                    Column("fix", "Change", 250, [FIXES], look=WRAPPED),
                    Column("flag", "Flag of vLLM", 240, [FLAGS], look=WRAPPED),
                    Column("Value #B", "Value", 75),
                    Column("Value #C", "Tokens/s after / now", 90, look={"decimals": 2}),
                    Column("effect", "Effect on the KV cache", None, [EFFECTS], look=WRAPPED),
                ],
                sort=("Rank", False),
                hidden=(*SERVER, "model_name"),
                tall=True,
                size=(24, 9),
            ),
            table(
                "Findings",
                "Further facts about these engines, such as known limits, restarts and estimates. Should "
                'read "No findings".',
                Query(
                    or_else(by((*ENGINE, "server", "finding"), named(ours("finding"))), nothing("finding")),
                    instant=True,
                    form="table",
                ),
                columns=[
                    Column("server", "Server", 170),
                    Column("model_name", "Model", 150),
                    Column("engine", "Engine", 70, unit=AS_TEXT),
                    Column("finding", "Finding", None, [FINDINGS], look=WRAPPED),
                ],
                hidden=(*SERVER, "Value"),
                size=(12, 6),
            ),
            table(
                "Engines and their KV cache",
                "Version, cache type and capacity of each engine. Names since: the oldest release that "
                "exports such metrics. All engines of a model should have the same.",
                Query(
                    by(
                        (*ENGINE, "server", "vllm_version", "names_since", "cache_dtype", "block_size"),
                        named(ours("engine")),
                    ),
                    instant=True,
                    form="table",
                ),
                Query(
                    by((*ENGINE, "server"), named(ours("kv_capacity_tokens"))),
                    instant=True,
                    form="table",
                ),
                columns=[
                    Column("server", "Server", 115),
                    Column("model_name", "Model", None),
                    Column("engine", "Engine", 65, unit=AS_TEXT),
                    Column("vllm_version", "vLLM", 75, unit=AS_TEXT),
                    Column("names_since", "Names since", 95, unit=AS_TEXT),
                    Column("cache_dtype", "Cache type", 90),
                    Column("block_size", "Block", 60, unit=AS_TEXT),
                    Column("Value #B", "KV tokens", 95, unit="locale"),
                ],
                hidden=(*SERVER, "Value #A"),
                size=(12, 6),
            ),
        ],
    )


def _native_latency() -> Row:
    def latency(title: str, text: str, reading: str) -> Json:
        buckets = native(reading, rate, "_bucket")
        return graph(
            title,
            text,
            Query(named(quantile(0.5, buckets, ENGINE)), f"{WHO} median"),
            Query(named(quantile(0.95, buckets, ENGINE)), f"{WHO} 95 %"),
            unit="s",
            overrides=[by_query("A", custom__lineWidth=1, custom__fillOpacity=0)],
        )

    return Row(
        "User impact from vLLM's own histograms (if Prometheus also scrapes vLLM)",
        [
            latency(
                "Time to first token",
                "Median and 95th percentile of the time to the first token. Should be steady; it grows with"
                " every kind of queue.",
                "first_token_seconds",
            ),
            latency(
                "Inter-token latency, median and 95 %",
                "Median and 95th percentile of the time between two tokens. Should be steady; a widening "
                "gap between the lines is the stall of preempted requests.",
                "inter_token_seconds",
            ),
            latency(
                "Time in the queue",
                "Time that requests waited before they first ran. Should be near 0; it never includes the "
                "wait of a preempted request.",
                "queue_seconds",
            ),
        ],
        collapsed=True,
    )


def _exporter() -> Row:
    return Row(
        "The exporter",
        [
            graph(
                "Successful polls",
                "1 if the last poll succeeded, otherwise 0. Should always be 1.",
                Query(named(ours("up")), WHERE),
                defaults={"max": 1, "decimals": 0},
                size=(8, 6),
            )
            | runbook("unreachable"),
            graph(
                "Age of the last successful poll",
                "Seconds since the last successful poll. Should be near the poll interval; after five "
                "seconds measured values disappear.",
                Query(named(f"time() - {ours('last_success_timestamp_seconds')}"), WHERE),
                unit="s",
                size=(8, 6),
            ),
            graph(
                "Restarts of vLLM",
                "New server processes in each step. Should be 0; one after a change is normal, several are "
                "a crash loop.",
                Query(named(f"increase({ours('restarts')}[$__rate_interval])"), WHERE),
                overrides=[FROM_ONE],
                size=(8, 6),
            ),
        ],
        collapsed=True,
    )


def build() -> Json:
    """Build the dashboard."""
    return assembled(
        "engine",
        "One vLLM server: what is wrong, is work lost, what is short, who feels it, what to change.",
        _now(),
        _preemption(),
        _kv_and_queue(),
        _impact(),
        _fix(),
        _native_latency(),
        _exporter(),
        time="now-1h",
    )
