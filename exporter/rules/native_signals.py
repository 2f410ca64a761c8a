"""The recording rules without the sidecar: one name per reading over all versions of vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from exporter.rules.promql import equals, selected
from exporter.vllm.names import NAMES, PREFIXES, spellings

__all__ = ["DERIVED", "RECORDED", "Recorded", "any_name", "recorded"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recording rule."""

    reading: str  # its name in the table of vLLM's names
    name: str  # of the rule, after the level and ``vllm_``
    function: str  # of a series in its window; ``{}`` stands for the series
    over: str  # the aggregation over the series of one engine: several processes may print it


_LOW: Final = "quantile_over_time(0.25, {}[3m])"
RECORDED: Final[Mapping[str, Recorded]] = {
    "kv_max": Recorded("kv_usage", "kv_cache_usage_perc:max2m", "max_over_time({}[2m])", "max"),
    "kv_changes": Recorded("kv_usage", "kv_cache_usage_perc:changes3m", "changes({}[3m])", "max"),
    "running": Recorded("requests_running", "num_requests_running:avg2m", "avg_over_time({}[2m])", "max"),
    "running_min": Recorded("requests_running", "num_requests_running:min3m", "min_over_time({}[3m])", "max"),
    "running_max": Recorded("requests_running", "num_requests_running:max3m", "max_over_time({}[3m])", "max"),
    # A busy server shows 0 now and then, so a queue is judged by three quarters of the readings.
    "running_low": Recorded("requests_running", "num_requests_running:p25_3m", _LOW, "max"),
    "waiting_low": Recorded("requests_waiting", "num_requests_waiting:p25_3m", _LOW, "max"),
    "deferred_low": Recorded("requests_deferred", "num_requests_deferred:p25_3m", _LOW, "max"),
    "preempting": Recorded("preemptions", "num_preemptions:rate2m", "rate({}[2m])", "sum"),
    "preempted": Recorded("preemptions", "num_preemptions:increase2m", "increase({}[2m])", "sum"),
    "finished": Recorded("requests_finished", "request_success:increase2m", "increase({}[2m])", "sum"),
    # What preemptions cost, over the time in which they are counted.
    "generated": Recorded("generation_tokens", "generation_tokens:increase2m", "increase({}[2m])", "sum"),
    "prompted": Recorded("prompt_tokens", "prompt_tokens:increase2m", "increase({}[2m])", "sum"),
    "computed": Recorded(
        "prompt_tokens_computed", "prompt_tokens_computed:increase2m", "increase({}[2m])", "sum"
    ),
    "hits": Recorded("prefix_hits", "prefix_cache_hits:increase2m", "increase({}[2m])", "sum"),
    "tokens": Recorded("generation_tokens", "generation_tokens:rate3m", "rate({}[3m])", "sum"),
    "prompts": Recorded("prompt_tokens", "prompt_tokens:rate3m", "rate({}[3m])", "sum"),
    "steps": Recorded("engine_steps", "iteration_tokens:rate3m", "rate({}[3m])", "sum"),
    "between": Recorded("inter_token_seconds", "inter_token_seconds_sum:rate3m", "rate({}[3m])", "sum"),
    "between_count": Recorded("inter_token_count", "inter_token_seconds_count:rate3m", "rate({}[3m])", "sum"),
    "finished_long": Recorded("requests_finished", "request_success:increase10m", "increase({}[10m])", "sum"),
    "resets": Recorded("generation_tokens", "generation_tokens:resets15m", "resets({}[15m])", "max"),
}


# What is computed from those, in this order: the name and its PromQL, where words stand for names. A level is
# that of calm times (no preemption) in the last three hours, if they are three minutes or more, and unknown
# after a restart: windows reach across it, and the settings may be others. Latencies grow with the load, so
# theirs is one of the higher ones.
_CALM: Final = "{%s} > 0\nunless max_over_time({preempted}[1m]) > 0\nunless {running} == 0"
_LEVEL: Final = "quantile_over_time(%s, {%s}[3h])\nand count_over_time({%s}[3h]) >= 12\nunless {resets} > 0"
DERIVED: Final[Mapping[str, tuple[str, str]]] = {
    "inter_token": ("inter_token_seconds:mean3m", "{between} / ({between_count} > 0)"),
    "requests": ("requests:avg2m", "{running} + ({waiting_low} or 0 * {running})"),
    # By Little's law: what is in the server, by what leaves it.
    "latency": ("request_seconds:mean2m", "{requests} * 120 / ({finished} > 0)"),
    # At least what the tokens that are generated until the next request ends take of a victim's blocks; see
    # `exporter.analysis.signals`. More where no prefix cache keeps the rest.
    "again": (
        "recomputed_tokens:least2m",
        "{generated} * {preempted}\n/ ({preempted} + ({finished} or 0 * {preempted}) > 0)",
    ),
    "prompts_computed": (
        "prompts_computed:increase2m",
        "{computed}\nor clamp_min({prompted} - {hits}, 0)\nor {prompted}",
    ),
    "again_ratio": (
        "recomputed:ratio2m",
        "{again}\n/ ({again} + {generated} + {prompts_computed} > 0)",
    ),
    "tokens_calm": ("generation_tokens:calm", _CALM % "tokens"),
    "inter_token_calm": ("inter_token_seconds:calm", _CALM % "inter_token"),
    "latency_calm": ("request_seconds:calm", _CALM % "latency"),
    "requests_calm": ("requests:calm", _CALM % "requests"),
    "tokens_level": ("generation_tokens:level3h", _LEVEL % ("0.5", "tokens_calm", "tokens_calm")),
    "inter_token_level": (
        "inter_token_seconds:level3h", _LEVEL % ("0.75", "inter_token_calm", "inter_token_calm"),
    ),
    "latency_level": ("request_seconds:level3h", _LEVEL % ("0.75", "latency_calm", "latency_calm")),
    "requests_level": ("requests:level3h", _LEVEL % ("0.5", "requests_calm", "requests_calm")),
    "requests_most": ("requests:most3h", _LEVEL % ("1", "requests_calm", "requests_calm")),
}  # fmt: skip


def recorded(word: str) -> str:
    """Return the name of a recording rule; the colon of vLLM's names becomes an underscore."""
    return f"engine:vllm_{RECORDED[word].name if word in RECORDED else DERIVED[word][0]}"


def any_name(reading: str, function: str, selector: str) -> str:
    """Return a function of a reading under any of its names; of several the newest counts.

    Impossible values are left out: shares above 1 or below 0.
    """
    return "\nor ".join(
        function.format(selected(prefix + name, selector, row.label and equals(row.label, row.value)))
        + (" >= 0 <= 1" if row.most == 1 and function.startswith("max_over_time") else "")
        for row in NAMES
        if row.reading == reading
        for prefix in PREFIXES
        for name in spellings(row)
    )
