"""The order of verdicts, and the condition of each: one function per verdict, with its evidence.

Pure. A condition gets the situation and whether its verdict is the current one (`current`); then the
threshold for leaving applies instead of the one for entering. It returns the evidence, or None where the
verdict does not apply or too little is known.
"""

from typing import Final

from exporter.analysis.conditions import data, preemption, pressure, progress, queue
from exporter.analysis.conditions.evidence import Condition, Evidence, VerdictRule

__all__ = ["HEALTHY", "ORDER", "Condition", "Evidence", "VerdictRule"]

HEALTHY: Final = "healthy"
"""The verdict where no condition applies."""

ORDER: Final = (
    VerdictRule("sleeping", data.sleeping),
    VerdictRule("metrics_missing", data.metrics_missing),
    VerdictRule("data_untrusted", data.data_untrusted),
    VerdictRule("engine_stalled", progress.engine_stalled),
    VerdictRule("unfittable_request", progress.unfittable_request),
    VerdictRule("unfittable_request", progress.evicts_itself),
    VerdictRule("scheduler_deadlock", progress.scheduler_deadlock),
    VerdictRule("decode_slow", pressure.decode_much_slower, pressure.decode_slow_is_critical),
    VerdictRule("preemption_thrash", preemption.preemption_thrash, preemption.thrash_is_critical),
    VerdictRule("preemption_not_kv", preemption.preemption_not_kv),
    VerdictRule("preemption_light", preemption.preemption_light, is_warning=preemption.light_is_warning),
    VerdictRule("deferred_wait", queue.deferred_wait, queue.deferred_wait_is_critical),
    VerdictRule("kv_bound", queue.kv_bound, queue.nothing_finishes),
    VerdictRule("seat_bound", queue.seat_bound, queue.nothing_finishes),
    VerdictRule("prefill_bound", queue.prefill_bound, queue.nothing_finishes),
    VerdictRule("queue_not_kv", queue.queue_not_kv, queue.nothing_finishes),
    VerdictRule("preemption_light", preemption.preemption_rare, is_warning=preemption.light_is_warning),
    VerdictRule("kv_pressure_rising", pressure.kv_pressure_rising),
    VerdictRule("kv_held_no_requests", pressure.kv_held_no_requests),
    VerdictRule("decode_slow", pressure.decode_slow, pressure.decode_slow_is_critical),
    VerdictRule("runaway_generation", pressure.runaway_generation),
    VerdictRule("kv_full_ok", pressure.kv_full_ok),
)
"""An engine has the first verdict whose condition applies, `HEALTHY` where none does.

A verdict may stand in several places, each with its own condition. The documentation prints this order.
"""
