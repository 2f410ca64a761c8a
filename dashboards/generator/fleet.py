"""All servers: who is in trouble, how time is spent, what is left."""

from functools import partial
from typing import Any, Final

from exporter.analysis.catalogue import Severity
from generator.panels import Column, Query, Row, bars, graph, stat, table, thresholds
from generator.queries import ENGINE, MODEL, OF_MODEL, WHO, by, held, named, or_none, ours, rate
from generator.shared import assembled, verdict_table
from generator.words import LIMITS, VERDICT_FIELDS, runbook

__all__ = ["build"]

Json = dict[str, Any]

lines: Final = partial(graph, fill=0)


def _count_of(severity: Severity) -> str:
    return or_none(f"count({held(severity)})")


def _now() -> Row:
    return Row(
        "Now: who is in trouble",
        [
            stat(
                "Engines",
                "Engines that exporters know, also those that do not answer at the moment. As many as were"
                " deployed is good.",
                Query(by([], ours("verdict"))),
                size=(3, 5),
            ),
            stat(
                "Critical",
                "Engines that lose work or stand still. 0 is good; anything else pages.",
                Query(_count_of(Severity.CRITICAL)),
                limits=thresholds((1, "red")),
                background=True,
                size=(3, 5),
            ),
            stat(
                "Warning",
                "Engines with a queue that stays, or under pressure. 0 is good; for today, not for tonight.",
                Query(_count_of(Severity.WARNING)),
                limits=thresholds((1, "orange")),
                background=True,
                size=(3, 5),
            ),
            stat(
                "No answer",
                "Servers whose last poll failed. 0 is good.",
                Query(or_none(f"count({ours('up')} == 0)")),
                limits=thresholds((1, "red")),
                background=True,
                size=(3, 5),
            )
            | runbook("unreachable"),
            stat(
                "Preemptions / s",
                "All engines together. 0 is good; the table below says whose they are.",
                Query(by([], rate(ours("preemptions")))),
                defaults={"decimals": 2},
                size=(4, 5),
            ),
            stat(
                "Waiting",
                "All queues together. Short ones that come and go are normal.",
                Query(by([], ours("requests_waiting"))),
                size=(4, 5),
            ),
            stat(
                "Tokens / s",
                "What all users get together. It follows the load of the day; a fall under load is a storm.",
                Query(by([], ours("generation_tokens_per_second"))),
                defaults={"decimals": 0},
                size=(4, 5),
            ),
            verdict_table(
                "Engines, worst first",
                "Every engine with its verdict, the numbers that go with it and the fix that stands first."
                " A click on a server opens its dashboard.",
                (24, 12),
                Column(ours("kv_usage_max_ratio"), "KV highest", 90, (), "percentunit", _gauge_cell(1)),
                Column(ours("preemptions_per_second"), "Preempt./s", 90, (), "short", {"decimals": 2}),
                Column(ours("requests_waiting"), "Waiting", 65, (), "short", {"decimals": 0}),
                Column(ours("generation_tokens_per_second"), "Tokens/s", 70, (), "short", {"decimals": 0}),
            ),
            lines(
                "Engines by verdict",
                "How many engines were in which verdict. All green is a good day; red is lost work, orange"
                " a queue or pressure.",
                Query(f"{by(['verdict'], ours('verdict'))} > 0", "{{verdict}}"),
                size=(24, 7),
                stacked="normal",
                defaults={"decimals": 0},
                overrides=VERDICT_FIELDS,
            ),
        ],
    )


def _gauge_cell(most: float) -> Json:
    return {
        "custom.cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
        "max": most,
        "thresholds": thresholds((LIMITS.kv_full, "orange")),
    }


def _worst() -> Row:
    def worst(title: str, text: str, expr: str, **look: Any) -> Json:
        return bars(title, text, Query(named(f"topk(8, {expr})"), WHO, instant=True), **look)

    return Row(
        "Worst engines",
        [
            worst(
                "Most preemptions / finished",
                "The engines that throw away the most work per answer. Below the yellow mark all is well;"
                " from red on it is a storm.",
                ours("preemptions_per_finished_request"),
                limits=thresholds((LIMITS.light_ratio, "yellow"), (LIMITS.thrash_ratio, "red")),
                defaults={"decimals": 2},
            ),
            worst(
                "Most work done twice",
                "The engines that repeat the largest share of their work, an estimate. A few per cent are"
                " harmless.",
                ours("recomputed_ratio"),
                unit="percentunit",
                defaults={"max": 1},
            ),
            worst(
                "Longest queues",
                "Waiting requests. A queue that stays has a reason; the table above says which.",
                ours("requests_waiting"),
            ),
            worst(
                "Highest demand",
                "What running and waiting requests would take of KV or seats, whichever is shorter; 1 is"
                " full. Below 1 is room.",
                by(ENGINE, ours("saturation_ratio"), "max"),
                limits=thresholds((1, "red")),
                defaults={"decimals": 2},
            ),
        ],
    )


def _share() -> Row:
    spent = ours("verdict_seconds")
    whole, whole_now = by([], f"increase({spent}[$__range])"), by([], rate(spent))
    parts = by(["verdict"], f"increase({spent}[$__range])")
    return Row(
        "Share of time by verdict",
        [
            bars(
                "Share of time, the range shown",
                "How the time of all chosen engines was spent. Healthy should stand first by far; red and"
                " orange shares are what a change of capacity can win back.",
                Query(
                    f"sort_desc({parts} / scalar({whole}) > 0.0005)",
                    "{{verdict}}",
                    instant=True,
                ),
                unit="percentunit",
                defaults={"max": 1},
                overrides=VERDICT_FIELDS,
                size=(8, 9),
            ),
            lines(
                "Share of time, course",
                "The same over time. A band of red or orange that returns every day is a capacity"
                " question, not an accident.",
                Query(f"{by(['verdict'], rate(spent))} / scalar({whole_now}) > 0", "{{verdict}}"),
                unit="percentunit",
                stacked="normal",
                defaults={"max": 1},
                overrides=VERDICT_FIELDS,
                size=(16, 9),
            ),
        ],
    )


def _capacity() -> Row:
    used = f"{ours('kv_capacity_tokens')} * {ours('kv_usage_mean_ratio')}"
    return Row(
        "Capacity left",
        [
            lines(
                "Free KV tokens by model",
                "Tokens that would still fit into the caches of all engines of a model. It should not come"
                " near 0 at the daily peak.",
                Query(f"{by(MODEL, ours('kv_capacity_tokens'))} - {by(MODEL, used)}", OF_MODEL),
                size=(7, 8),
            ),
            lines(
                "Demand by model",
                "Mean over a model's engines of what all requests would take of KV or of seats, whichever"
                " is shorter; 1 is full. Scale out before the line, not at it.",
                Query(by(MODEL, by((*MODEL, "resource"), ours("saturation_ratio"), "avg"), "max"), OF_MODEL),
                limits=thresholds((1, "red")),
                size=(7, 8),
            )
            | runbook("kv_bound", "seat_bound"),
            table(
                "Models",
                "What each model has and how much of it is taken now. Free KV above the longest prompts"
                " and no queue is room.",
                Query(by(MODEL, ours("kv_capacity_tokens"), "count"), instant=True, form="table"),
                Query(by(MODEL, ours("kv_capacity_tokens")), instant=True, form="table"),
                Query(
                    f"1 - {by(MODEL, used)} / ({by(MODEL, ours('kv_capacity_tokens'))} > 0)",
                    instant=True,
                    form="table",
                ),
                Query(by(MODEL, ours("requests_waiting")), instant=True, form="table"),
                columns=[
                    Column("cluster", "Cluster", 70),
                    Column("namespace", "Namespace", 95),
                    Column("model_name", "Model", None),
                    Column("Value #A", "Engines", 75),
                    Column("Value #B", "KV tokens", 90),
                    Column("Value #C", "KV free", 75, unit="percentunit", look={"decimals": 0}),
                    Column("Value #D", "Waiting", 75),
                ],
                sort=("Waiting", True),
                size=(10, 8),
            ),
        ],
    )


def _imbalance() -> Row:
    load = f"({ours('requests_running')} + {ours('requests_waiting')})"
    return Row(
        "Imbalance",
        [
            lines(
                "Fullest engine against the mean of its model",
                "Requests of the busiest engine by the mean of all engines of the model. 1 is even; beyond"
                " the line the router is the problem, not the capacity.",
                Query(f"{by(MODEL, load, 'max')} / ({by(MODEL, load, 'avg')} > 0)", OF_MODEL),
                limits=thresholds((LIMITS.imbalance_factor, "orange")),
                size=(8, 8),
            )
            | runbook("dp_imbalance"),
            lines(
                "Requests by engine",
                "Running and waiting requests of each engine. Lines of one model should lie together.",
                Query(named(load), WHO),
                size=(8, 8),
            ),
            stat(
                "Unbalanced",
                "Models of which one engine carries far more than its share, as the exporters judge it. 0"
                " is good.",
                Query(or_none(f"count({ours('model_finding', finding='dp_imbalance')})")),
                limits=thresholds((1, "orange")),
                size=(4, 8),
            )
            | runbook("dp_imbalance"),
            stat(
                "Engines missing",
                "Engines that were on a metrics page within the hour and are gone from it. 0 is good.",
                Query(by([], ours("engines_missing"))),
                limits=thresholds((1, "orange")),
                size=(4, 8),
            )
            | runbook("engine_missing"),
        ],
    )


def build() -> Json:
    """The dashboard."""
    return assembled(
        "fleet",
        "All vLLM servers: who is in trouble, the worst engines, how time is spent, capacity left,"
        " imbalance.",
        _now(),
        _worst(),
        _share(),
        _capacity(),
        _imbalance(),
        time="now-6h",
    )
