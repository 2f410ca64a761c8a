"""Recording rules over all engines, by cluster, namespace and model."""

from collections.abc import Iterator, Mapping
from typing import Final

from exporter.rules.form import Rule
from exporter.rules.promql import Series, aggregated, block

__all__ = ["fleet"]

_LEVEL: Final = "cluster_namespace_model"


def fleet(series: Series, labels: Mapping[str, tuple[str, ...]]) -> Iterator[Rule]:
    """Yield all recording rules."""
    engine, model = labels["engine"], labels["model"]
    preempted, finished = (
        aggregated("sum", model, f"rate({series.of(name)}[5m])")
        for name in ("preemptions", "requests_finished")
    )
    yield Rule(f"{_LEVEL}:vllm_pressure_preemptions:rate5m", preempted, "Preemptions per second.")
    yield Rule(f"{_LEVEL}:vllm_pressure_requests_finished:rate5m", finished, "Finished requests per second.")
    yield Rule(
        f"{_LEVEL}:vllm_pressure_preemptions_per_finished_request:ratio_rate5m",
        f"{preempted}\n/\n({finished} > 0)",
        "Preemptions per finished request; absent while nothing finishes.",
    )
    by_verdict = (*model, "verdict")
    spent = f"rate({series.of('verdict_seconds')}[5m])"
    yield Rule(
        f"{_LEVEL}_verdict:vllm_pressure_verdict_seconds:share_rate5m",
        f"{aggregated('sum', by_verdict, spent)}\n/ ignoring (verdict) group_left ()\n"
        f"{aggregated('sum', model, spent)}",
        "Share of the engines' time in each verdict, 0-1; all verdicts of a model add up to 1.",
    )
    yield Rule(
        f"{_LEVEL}_verdict:vllm_pressure_engines:sum",
        aggregated("sum", by_verdict, aggregated("max", (*engine, "verdict"), series.last("verdict"))),
        "Engines in each verdict.",
    )
    peak = block(aggregated("max", engine, series.most("kv_usage_max_ratio")))
    comment = "Quantiles over the engines of their peak KV usage within a minute: median, 90 %, maximum."
    for quantile, name in (("0.5", "p50"), ("0.9", "p90"), ("1", "max")):
        expr = f"quantile by ({', '.join(model)}) (\n  {quantile},\n{peak}\n)"
        yield Rule(f"{_LEVEL}:vllm_pressure_kv_usage_max_ratio:{name}", expr, comment)
        comment = ""
