"""The dashboard of all servers: trouble, share of time by verdict, capacity left, imbalance."""

from functools import partial
from typing import Any, Final

from exporter.analysis.catalogue import Severity
from generator.panels import Column, Query, Row, bars, graph, stat, table, thresholds
from generator.queries import ENGINE, MODEL, OF_MODEL, WHO, by, held, named, or_none, ours, rate
from generator.shared import assembled, verdict_table
from generator.words import LIMITS, VERDICT_FIELDS, runbook, short, unit

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
                "Known engines, including those that do not answer now. Should equal the number deployed.",
                Query(by([], ours("verdict"))),
                size=(3, 5),
            ),
            stat(
                "Critical",
                "Engines that lose work or make no progress. Should be 0; anything else pages.",
                Query(_count_of(Severity.CRITICAL)),
                limits=thresholds((1, "red")),
                background=True,
                size=(3, 5),
            ),
            stat(
                "Warning",
                "Engines with a lasting queue or under pressure. Should be 0; act today, not tonight.",
                Query(_count_of(Severity.WARNING)),
                limits=thresholds((1, "orange")),
                background=True,
                size=(3, 5),
            ),
            stat(
                "No answer",
                "Servers whose last poll failed. Should be 0.",
                Query(or_none(f"count({ours('up')} == 0)")),
                limits=thresholds((1, "red")),
                background=True,
                size=(3, 5),
            )
            | runbook("unreachable"),
            stat(
                short("preemptions_per_second"),
                "Preemptions per second, sum of all engines. Should be 0; the table below shows them per "
                "engine.",
                Query(by([], rate(ours("preemptions")))),
                defaults={"decimals": 2},
                size=(4, 5),
            ),
            stat(
                short("requests_waiting"),
                "Waiting requests, sum of all engines. Short queues that drain are normal.",
                Query(by([], ours("requests_waiting"))),
                size=(4, 5),
            ),
            stat(
                short("generation_tokens_per_second"),
                "Tokens generated per second, sum of all engines. Should follow the load; a fall under load"
                " is a storm.",
                Query(by([], ours("generation_tokens_per_second"))),
                defaults={"decimals": 0},
                size=(4, 5),
            ),
            verdict_table(
                "Engines, worst first",
                "Every engine with its verdict, its numbers and its first fix; there should be no red or "
                "orange row. Click a server to open its dashboard.",
                (24, 12),
                _column("kv_usage_max_ratio", 115, _gauge_cell(1)),
                _column("preemptions_per_second", 112, {"decimals": 2}),
                _column("requests_waiting", 65, {"decimals": 0}),
                _column("generation_tokens_per_second", 70, {"decimals": 0}),
            ),
            lines(
                "Engines by verdict",
                "Number of engines in each verdict. Should be green throughout; red means lost work, orange"
                " a queue or pressure.",
                Query(f"{by(['verdict'], ours('verdict'))} > 0", "{{verdict}}"),
                size=(24, 7),
                stacked="normal",
                defaults={"decimals": 0},
                overrides=VERDICT_FIELDS,
            ),
        ],
    )


def _column(signal: str, width: int, look: Json) -> Column:
    return Column(ours(signal), short(signal), width, (), unit(signal), look)


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
                "Engines with the most preemptions per finished request. Should stay below yellow; red is a"
                " storm.",
                ours("preemptions_per_finished_request"),
                limits=thresholds((LIMITS.light_ratio, "yellow"), (LIMITS.thrash_ratio, "red")),
                defaults={"decimals": 2},
            ),
            worst(
                "Most recomputed tokens",
                "Engines with the largest estimated share of tokens computed again. A few per cent are "
                "harmless.",
                ours("recomputed_ratio"),
                unit="percentunit",
                defaults={"max": 1},
            ),
            worst(
                "Longest queues",
                "Engines with the most waiting requests. The table above shows the cause of a lasting queue.",
                ours("requests_waiting"),
            ),
            worst(
                "Highest demand",
                "Demand of running and waiting requests divided by capacity, for KV or seats, whichever is "
                "shorter; 1 is full. Should be below 1.",
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
                "Share of time, selected range",
                "Share of the selected engines' time in each verdict. Healthy should be first by far; a "
                "capacity change can win back red and orange shares.",
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
                "Share of time, trend",
                "The same over time. Should be green throughout; a red or orange band at the same time "
                "every day is a capacity problem.",
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
                "Tokens that still fit into the caches of a model's engines. Should not come near 0 at the "
                "daily peak.",
                Query(f"{by(MODEL, ours('kv_capacity_tokens'))} - {by(MODEL, used)}", OF_MODEL),
                size=(7, 8),
            ),
            lines(
                "Demand by model",
                "Demand divided by capacity, for KV or seats, whichever is shorter, mean of a model's "
                "engines; 1 is full. Scale out before the line, not at it.",
                Query(by(MODEL, by((*MODEL, "resource"), ours("saturation_ratio"), "avg"), "max"), OF_MODEL),
                limits=thresholds((1, "red")),
                size=(7, 8),
            )
            | runbook("kv_bound", "seat_bound"),
            table(
                "Models",
                "Capacity of each model and how much of it is free. Free KV should exceed the longest "
                "prompts, and there should be no queue.",
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
                    Column("Value #D", short("requests_waiting"), 75),
                ],
                sort=(short("requests_waiting"), True),
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
                "Busiest engine / mean of its model",
                "Requests of the busiest engine divided by the mean of the model's engines. Should be near "
                "1; above the line the router is the problem, not the capacity.",
                Query(f"{by(MODEL, load, 'max')} / ({by(MODEL, load, 'avg')} > 0)", OF_MODEL),
                limits=thresholds((LIMITS.imbalance_factor, "orange")),
                size=(8, 8),
            )
            | runbook("dp_imbalance"),
            lines(
                "Requests by engine",
                "Running and waiting requests of each engine. The lines of one model should stay close "
                "together.",
                Query(named(load), WHO),
                size=(8, 8),
            ),
            stat(
                "Unbalanced",
                "Models in which one engine carries far more than its share, according to the exporters. "
                "Should be 0.",
                Query(or_none(f"count({ours('model_finding', finding='dp_imbalance')})")),
                limits=thresholds((1, "orange")),
                size=(4, 8),
            )
            | runbook("dp_imbalance"),
            stat(
                "Engines missing",
                "Engines that disappeared from a metrics page within the last hour. Should be 0.",
                Query(by([], ours("engines_missing"))),
                limits=thresholds((1, "orange")),
                size=(4, 8),
            )
            | runbook("engine_missing"),
        ],
    )


def build() -> Json:
    """Build the dashboard."""
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
