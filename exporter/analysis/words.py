"""The words of every number that people read: one table for all surfaces.

`SIGNALS` has the names, units, digits and help of the signals, and of evidence and inputs of fixes. Metrics,
alerts, rules, the page, the terminal and dashboards take their words from here. Pure.

    >>> WORDS["requests_waiting"].phrase(6)
    '6 waiting'
    >>> WORDS["kv_usage_max_ratio"].phrase(0.97)
    'KV usage peak 97%'
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["SIGNALS", "WORDS", "Signal", "label", "number"]

_UNITS: Final = {"ratio": "%", "seconds": " s"}
_COARSE_SECONDS: Final = 10.0  # from here on whole seconds are enough
Unit = Literal["ratio", "seconds", "requests", "tokens", "per_second", "number"]


@dataclass(frozen=True, slots=True)
class Signal:
    """One number: a field of `Signals`, or evidence or an input that is no field."""

    name: str  # of the field, metric, evidence or input
    title: str  # as the title of a chart or a panel
    short: str  # as a column head, or beside the number in a sentence
    unit: Unit  # of the value; a ``ratio`` is shown in per cent
    digits: int = 0  # digits after the decimal point, as shown
    help: str = ""  # a sentence with window and source, which is also the metric's HELP

    def format(self, value: float) -> str:
        """Format a value with its unit: ``97%``, ``0.032 s``, ``14``; small values keep two digits."""
        shown = 100 * value if self.unit == "ratio" else value
        digits = 0 if self.unit == "seconds" and value >= _COARSE_SECONDS else self.digits
        text = f"{shown:.{digits}f}"
        if value and not float(text):
            text = f"{shown:.2g}"
        return text + _UNITS.get(self.unit, "")

    def phrase(self, value: float | str) -> str:
        """Put a value, or text that stands for one, beside its words: ``KV usage peak 97%``, ``6 waiting``."""
        text = value if isinstance(value, str) else self.format(value)
        return f"{self.short} {text}" if self.unit in {"ratio", "seconds"} else f"{text} {self.short}"


def label(name: str) -> str:
    """Return the title of a number; a name without a row, such as a setting of the server, stays as it is."""
    return WORDS[name].title if name in WORDS else name


def number(name: str, value: float | None) -> str:
    """Format the value of any name: by its row in the table, else as a plain number."""
    if value is None:
        return "unknown"
    if name in WORDS:
        return WORDS[name].format(value)
    if float(value).is_integer() or abs(value) >= 100:  # noqa: PLR2004 (three digits are enough)
        return f"{value:.0f}"
    return f"{value:.3g}"


SIGNALS: Final = (
    # Preemption.
    Signal("preemptions_total", "Preemptions", "preempted", "number", 0, "Preemptions since the exporter first saw the engine; survives restarts of vLLM. From num_preemptions."),
    Signal("preemptions_per_second", "Preemptions per second", "preemptions/s", "per_second", 2, "Preemptions per second over analysis.window (60 s). From num_preemptions, which lags by a step or more."),
    Signal("preemptions_per_finished_request", "Preemptions per finished request", "preemptions per finished request", "number", 2, "Preemptions per finished request over analysis.long_window (300 s). Absent while no request finishes."),
    Signal("preemptions_inferred_per_second", "Inferred preemptions per second", "inferred preemptions/s", "per_second", 2, "Preemptions per second over analysis.window (60 s) that only the gauges show so far: an estimate."),
    Signal("recomputed_ratio", "Recomputed tokens", "recomputed", "ratio", 0, "Tokens computed again after a preemption / all computed tokens over analysis.window (60 s), 0-1: an estimate. With prefix caching a victim loses what is generated until the next request ends, else all it held."),
    # KV cache.
    Signal("kv_usage_ratio", "KV cache usage", "KV usage", "ratio", 0, "KV cache usage at the last poll, 0-1. From kv_cache_usage_perc."),
    Signal("kv_usage_max_ratio", "Peak KV cache usage", "KV usage peak", "ratio", 0, "Highest polled KV cache usage over analysis.window (60 s), 0-1."),
    Signal("kv_usage_mean_ratio", "Mean KV cache usage", "KV usage mean", "ratio", 0, "Mean polled KV cache usage over analysis.window (60 s), 0-1."),
    Signal("kv_seconds_to_full", "Time until the KV cache is full", "KV full in", "seconds", 0, "Seconds until the KV cache is full at the slope of analysis.window (60 s). Absent unless usage grows steadily."),
    Signal("kv_capacity_tokens", "KV cache capacity", "tokens of KV capacity", "tokens", 0, "Tokens that the engine's KV cache holds. From cache_config_info: kv_cache_size_tokens, else an estimate from blocks and block size."),
    Signal("kv_max_concurrency", "Longest requests that fit", "longest requests fit", "requests", 2, "Requests of the maximum length that fit into the KV cache. From cache_config_info."),
    # Requests and work.
    Signal("requests_running", "Running requests", "running", "requests", 0, "Running requests at the last poll. From num_requests_running."),
    Signal("requests_waiting", "Waiting requests", "waiting", "requests", 0, "Waiting requests at the last poll, including preempted ones. From num_requests_waiting."),
    Signal("requests_deferred", "Deferred requests", "deferred", "requests", 0, "Waiting requests at the last poll that wait for something other than capacity. From num_requests_waiting_by_reason (0.20)."),
    Signal("requests_finished_total", "Finished requests", "finished", "requests", 0, "Requests finished since the exporter first saw the engine; survives restarts of vLLM. From request_success."),
    Signal("requests_finished_per_second", "Finished requests per second", "finished/s", "per_second", 2, "Requests finished per second over analysis.window (60 s). From request_success."),
    Signal("requests_refused_per_second", "Refused requests per second", "refused/s", "per_second", 2, "Requests per second that the server refused over analysis.window (60 s), divided by its engines. From admission_rejections (0.32)."),
    Signal("generation_tokens_per_second", "Tokens per second", "tokens/s", "per_second", 0, "Tokens generated per second over analysis.window (60 s). From generation_tokens."),
    Signal("generation_tokens_per_second_recent", "Usual tokens per second", "tokens/s usually", "per_second", 0, "Tokens generated per second by this engine in recent calm times."),
    Signal("prompt_tokens_per_second", "Prompt tokens per second", "prompt tokens/s", "per_second", 0, "Prompt tokens computed per second over analysis.window (60 s). From prompt_tokens."),
    Signal("engine_steps_per_second", "Engine steps per second", "steps/s", "per_second", 1, "Engine steps per second that generated a token, over analysis.window (60 s). From iteration_tokens_total."),
    Signal("queue_time_mean_seconds", "Mean queue time", "queue time", "seconds", 2, "Mean time from arrival to the first scheduling over analysis.window (60 s), longer where no request was scheduled. From request_queue_time_seconds."),
    Signal("inter_token_latency_mean_seconds", "Mean inter-token latency", "inter-token latency", "seconds", 3, "Mean time between two tokens of a request over analysis.window (60 s), including the stall of a preempted request. From inter_token_latency_seconds."),
    Signal("time_to_first_token_mean_seconds", "Mean time to first token", "time to first token", "seconds", 2, "Mean time from arrival to the first token over analysis.window (60 s). From time_to_first_token_seconds."),
    Signal("prefix_cache_hit_ratio", "Prefix cache hit ratio", "prefix cache hits", "ratio", 0, "Prefix cache hits / queries over analysis.window (60 s), longer where there were no queries, 0-1."),
    Signal("progress_idle_seconds", "Time without progress", "no progress for", "seconds", 0, "Seconds since engine steps, tokens or KV usage last changed."),
    # Evidence of verdicts that is no signal.
    Signal("kv_usage", "KV cache usage", "KV usage", "ratio"),
    Signal("preemptions_in_burst", "Preemptions in the last seconds", "preempted lately", "requests"),
    Signal("preemptions_per_finished_lately", "Preemptions per finished request lately", "preemptions per finished request lately", "number", 2),
    Signal("preemptions_inferred", "Inferred preemptions in the last seconds", "inferred preemptions", "requests"),
    Signal("requests_finished_in_burst", "Finished requests in the last seconds", "finished lately", "requests"),
    Signal("generation_tokens_in_burst_per_second", "Tokens per second in the last seconds", "tokens/s lately", "per_second"),
    Signal("generation_tokens", "Generated tokens", "tokens generated", "tokens"),
    Signal("kv_free_tokens", "Free KV tokens", "free KV tokens", "tokens"),
    Signal("tokens_per_step", "Tokens per engine step", "tokens per step", "tokens"),
    Signal("tokens_per_running_request", "Tokens per running request", "tokens per running request", "tokens"),
    Signal("overhead_tokens_per_request", "KV overhead per request in tokens", "tokens of KV overhead per request", "tokens"),
    Signal("kv_falls_from_full", "Falls of KV usage from full", "falls from full", "number"),
    Signal("step_time_factor", "Step time / expected at this load", "times the expected step time", "number", 2),
    Signal("sleep_weights_offloaded", "Asleep, weights offloaded (1 = yes)", "asleep, weights offloaded", "number"),
    Signal("sleep_discard_all", "Asleep, weights discarded (1 = yes)", "asleep, weights discarded", "number"),
    Signal("sources_by_turns", "Several servers answer in turn (1 = yes)", "several servers in turn", "number"),
    Signal("waiting_share", "Share of polls with a queue", "polls with a queue", "ratio"),
    Signal("kv_usage_growth", "Growth of KV cache usage", "KV growth", "ratio", 1),
    Signal("seconds_without_requests", "Time without requests", "without requests for", "seconds"),
    Signal("seconds_since_preemption", "Time since the last preemption", "last preemption before", "seconds"),
    Signal("need_ratio", "KV demand / capacity", "times the KV capacity", "number", 2),
    # Inputs of fixes that are neither signals nor settings of the server.
    Signal("held_tokens", "KV tokens per running request", "KV tokens per running request", "tokens"),
    Signal("kv_capacity_ratio", "KV capacity after the change / now", "times the KV capacity of now", "number", 2),
    Signal("held_from", "from", "from", "number"),
    Signal("output_tokens_mean", "Mean tokens per answer", "tokens per answer", "tokens"),
    Signal("adapters_waiting", "Waiting LoRA adapters", "waiting adapters", "requests"),
)  # fmt: skip
WORDS: Final[Mapping[str, Signal]] = {signal.name: signal for signal in SIGNALS}
