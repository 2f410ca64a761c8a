"""One server: now, preemption, KV and queue, user impact, fix."""

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
)

__all__ = ["build"]

Json = dict[str, Any]

# A target has a verdict of its own where no engine can be read.
_OF_ENGINES: Final = by(["verdict"], f"{ours('verdict')} == 1")
_OF_TARGETS: Final = by(["verdict"], narrowed(ours("target_verdict"), 'verdict!="healthy"') + " == 1")
_VERDICT_NOW: Final = f"{_OF_ENGINES} or {_OF_TARGETS}"


def _now() -> Row:
    return Row(
        "Now: what is the matter, and what to do first",
        [
            stat(
                "Verdict",
                "The verdict of the chosen engines, one tile for each that holds. Green is well; the"
                " sentence and the first fix stand to the right.",
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
                "What the verdict of each engine means, and the fix that stands first. Nothing red or"
                " orange here is a good day.",
                (19, 6),
            ),
            stat(
                "KV highest, 1 minute",
                "The fullest moment of the chosen engines. A full cache alone harms nobody; look at"
                " preemptions and tokens per second next.",
                Query(by([], f"max_over_time({ours('kv_usage_max_ratio')}[$__rate_interval])", "max")),
                unit="percentunit",
                defaults={"max": 1},
                limits=thresholds((LIMITS.kv_full, "orange")),
            ),
            stat(
                "Preemptions / s",
                "Requests pushed out of the cache, all chosen engines together. 0 is good, a few are"
                " harmless.",
                Query(by([], rate(ours("preemptions")))),
                defaults={"decimals": 2},
                limits=thresholds((LIMITS.light_ratio, "yellow")),
            ),
            stat(
                "Preempt. / finished",
                "The worst of the chosen engines, over five minutes. Far below 1 is healthy; at about 1"
                " the engine works for nothing.",
                Query(by([], ours("preemptions_per_finished_request"), "max")),
                none="nothing finishes",
                defaults={"decimals": 2},
                limits=thresholds((LIMITS.light_ratio, "yellow"), (LIMITS.thrash_ratio, "red")),
            ),
            stat(
                "Running",
                "Requests that are computed now. Following the load is good; a line that lies flat at the"
                " top is a limit: seats or KV.",
                Query(by([], ours("requests_running"))),
            ),
            stat(
                "Waiting",
                "Requests in the queue, preempted ones included. 0 is good; a queue that stays has a"
                " reason, and the verdict says which.",
                Query(by([], ours("requests_waiting"))),
                limits=thresholds((1, "orange")),
            ),
            stat(
                "Tokens / s",
                "What users get from the chosen engines. Following the load is good; in a storm it falls"
                " although the GPU is busy.",
                Query(by([], ours("generation_tokens_per_second"))),
                defaults={"decimals": 0},
            ),
            graph(
                "Verdict over time",
                "How many of the chosen engines were in which verdict. One colour from left to right is"
                " calm; red is lost work, orange a queue or pressure, green is well.",
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
                "Preemptions per second",
                "Requests pushed out of the KV cache, as the exporter counted them and as vLLM's own"
                " counter has it. 0 is good; a burst now and then is harmless, a plateau is a storm.",
                Query(named(rate(ours("preemptions"))), WHO),
                Query(named(by(ENGINE, native("preemptions", rate))), NATIVE),
                overrides=[_NATIVE_LINE],
            )
            | runbook("preemption_thrash"),
            graph(
                "Preemptions per finished request",
                "How often work is thrown away for each answer that is completed, over five minutes."
                " Healthy is well below the dashed line; a gap means that nothing finished.",
                Query(named(ours("preemptions_per_finished_request")), WHO),
                limits=thresholds((LIMITS.thrash_ratio, "red")),
            )
            | runbook("preemption_thrash"),
            graph(
                "Work done twice",
                "Estimated share of computed tokens that repeat what a preemption threw away; with prefix"
                " caching less is really repeated. Below a few per cent nobody notices.",
                Query(named(ours("recomputed_ratio")), WHO),
                unit="percentunit",
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
                "KV cache usage",
                "Usage as the exporter polled it last, the highest of each minute, and vLLM's own gauge as"
                " Prometheus caught it. High is good use of the memory as long as nothing is preempted and"
                " nothing waits.",
                Query(named(ours("kv_usage_ratio")), WHO),
                Query(named(by(ENGINE, native("kv_usage"), "max")), NATIVE),
                Query(
                    named(f"max_over_time({ours('kv_usage_max_ratio')}[$__rate_interval])"), f"{WHO} highest"
                ),
                unit="percentunit",
                defaults={"max": 1},
                overrides=[_NATIVE_LINE, by_query("C", custom__lineWidth=1, custom__fillOpacity=0)],
                size=(12, 8),
            ),
            heatmap(
                "Polls by KV usage",
                "Every poll of the chosen engines by how full the cache was, also those between two"
                " scrapes. Most of them at the top beside preemptions is a shortage; at the top without them"
                " is good use.",
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
                "Requests that run, that wait, and that wait for something else than seats or KV. Healthy"
                " is no queue; in a storm running falls while waiting rises by as many.",
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
                "What all running and waiting requests would take of the KV cache and of the seats; 1 is"
                " full. Below the line there is room; which of the two passes it first is what is short.",
                Query(named(ours("saturation_ratio")), f"{WHO} {{{{resource}}}}"),
                limits=thresholds((1, "red")),
                size=(12, 8),
            ),
            graph(
                f"Time with the KV cache above {float(full):.0%}",
                "Share of polls above that usage, so that short peaks count too. It may be high on a"
                " well-used server; with preemptions it says that the pool is too small.",
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
                "Prefix cache hits",
                "Share of prompt tokens found in the cache. The higher, the less KV and time each request"
                " costs; it falls when a full cache drops blocks early.",
                Query(named(ours("prefix_cache_hit_ratio")), WHO),
                unit="percentunit",
                defaults={"max": 1},
                size=(8, 7),
            ),
            stat(
                "KV full in",
                "At the present rise, of the engine that is full first. Not rising is good; minutes are a"
                " warning.",
                Query(by([], ours("kv_seconds_to_full"), "min"), instant=True),
                unit="s",
                none="not rising",
                limits=thresholds((0, "orange"), (LIMITS.pressure_horizon, "text"), base="text"),
                course=False,
                size=(4, 7),
            ),
            stat(
                "Longest that fit",
                "Requests of the maximum length that the cache holds at once, of the smallest engine."
                " Below 2 one long request pushes out all others; below 1 it never runs.",
                Query(by([], ours("kv_max_concurrency"), "min")),
                none="not told",
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
                "Tokens per second",
                "What users get, beside this engine's mean of the last hour. Well is at or above that"
                " mean; half of it with the same load is harm.",
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
                "Time between tokens",
                "Mean over a minute of the time between two tokens of an answer; the stall of a preempted"
                " request shows here. Steady is good, at whatever level the model has.",
                Query(named(ours("inter_token_latency_mean_seconds")), WHO),
                unit="s",
            )
            | runbook("decode_slow"),
            graph(
                "Finished requests per second",
                "Answers completed. It should follow the traffic; at 0 while requests run, answers are"
                " very long or the engine is stuck.",
                Query(named(rate(ours("requests_finished"))), WHO),
                unit="reqps",
            )
            | runbook("engine_stalled", "scheduler_deadlock"),
        ],
    )


def _fix() -> Row:
    return Row(
        "Fix: what to change",
        [
            table(
                "Advised changes, best first",
                "What cures the verdict, in order of rank for each engine. The numbers for the flags, and"
                " what will not help, stand on the exporter's page and in the output of its command check;"
                " the risks in the runbook.",
                Query(
                    or_else(
                        by(
                            (*ENGINE, "server", "fix", "flag", "effect"),
                            copied(named(ours("fix_rank")), "fix", "flag", "effect"),
                        ),
                        copied(nothing("fix"), "fix", "flag", "effect"),
                    ),
                    instant=True,
                    form="table",
                ),
                columns=[
                    Column("Value", "Rank", 60, look={"decimals": 0}),
                    Column("server", "Server", 115),
                    Column("engine", "Engine", 65, unit=AS_TEXT),
                    Column("fix", "Change", 250, [FIXES], look=WRAPPED),
                    Column("flag", "Flag of vLLM", 240, [FLAGS], look=WRAPPED),
                    Column("effect", "What it does to the KV cache", None, [EFFECTS], look=WRAPPED),
                ],
                sort=("Rank", False),
                hidden=(*SERVER, "model_name"),
                tall=True,
                size=(24, 9),
            ),
            table(
                "Facts beside the verdict",
                "What else holds of these engines: known limits, restarts, estimates. None of them is a"
                " verdict; nothing to add is good.",
                Query(
                    or_else(by((*ENGINE, "server", "finding"), named(ours("finding"))), nothing("finding")),
                    instant=True,
                    form="table",
                ),
                columns=[
                    Column("server", "Server", 170),
                    Column("model_name", "Model", 150),
                    Column("engine", "Engine", 70, unit=AS_TEXT),
                    Column("finding", "Fact", None, [FINDINGS], look=WRAPPED),
                ],
                hidden=(*SERVER, "Value"),
                size=(12, 6),
            ),
            table(
                "What runs",
                "The engines with their KV cache. The version is the oldest release that prints such"
                " metrics; all engines of a model should agree.",
                Query(
                    by(
                        (*ENGINE, "server", "vllm_version", "cache_dtype", "block_size"),
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
                    Column("vllm_version", "vLLM since", 85, unit=AS_TEXT),
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
        "User impact by vLLM's own histograms (where Prometheus scrapes vLLM too)",
        [
            latency(
                "Time to first token",
                "Half and 95 of 100 requests got their first token within this time. Steady is good; it"
                " grows with every kind of queue.",
                "first_token_seconds",
            ),
            latency(
                "Time between tokens, distribution",
                "Half and 95 of 100 tokens came within this time after the one before. A gap between the"
                " two lines that widens is what preempted requests feel.",
                "inter_token_seconds",
            ),
            latency(
                "Time in the queue",
                "How long requests waited before they first ran. Near 0 is good; the wait of a preempted"
                " request is never part of it.",
                "queue_seconds",
            ),
        ],
        collapsed=True,
    )


def _beside() -> Row:
    return Row(
        "The exporter beside it",
        [
            graph(
                "Polls that succeed",
                "1 while the exporter reads vLLM's metrics, 0 while it cannot. Always 1 is good.",
                Query(named(ours("up")), WHERE),
                defaults={"max": 1, "decimals": 0},
                size=(8, 6),
            )
            | runbook("unreachable"),
            graph(
                "Age of the last good poll",
                "How old what is shown here is. About the poll interval is good; above five seconds"
                " measured values are left out.",
                Query(named(f"time() - {ours('last_success_timestamp_seconds')}"), WHERE),
                unit="s",
                size=(8, 6),
            ),
            graph(
                "Restarts of vLLM",
                "New server processes within each step. None is good, one after a change is normal,"
                " several are a crash loop.",
                Query(named(f"increase({ours('restarts')}[$__rate_interval])"), WHERE),
                overrides=[FROM_ONE],
                size=(8, 6),
            ),
        ],
        collapsed=True,
    )


def build() -> Json:
    """The dashboard."""
    return assembled(
        "engine",
        "One vLLM server: what is the matter, is work lost, what is short, who feels it, what to change.",
        _now(),
        _preemption(),
        _kv_and_queue(),
        _impact(),
        _fix(),
        _native_latency(),
        _beside(),
        time="now-1h",
    )
