"""When a verdict holds: one function per verdict, each with its evidence.

Pure. A function gets the situation and whether its verdict is the present one (`held`), for which the
threshold of leaving counts instead of that of entering. It returns the evidence, or None where the
verdict does not hold or cannot be known to.
"""

from collections.abc import Mapping
from typing import Final

from exporter.analysis.conditions import data, preemption, pressure, progress, queue
from exporter.analysis.conditions.evidence import Condition, Evidence
from exporter.analysis.conditions.preemption import preemption_rare

__all__ = ["CONDITIONS", "Condition", "Evidence", "preemption_rare"]

CONDITIONS: Final[Mapping[str, Condition]] = {
    "sleeping": data.sleeping,
    "metrics_missing": data.metrics_missing,
    "data_untrusted": data.data_untrusted,
    "unfittable_request": progress.unfittable_request,
    "engine_stalled": progress.engine_stalled,
    "scheduler_deadlock": progress.scheduler_deadlock,
    "preemption_thrash": preemption.preemption_thrash,
    "preemption_not_kv": preemption.preemption_not_kv,
    "preemption_light": preemption.preemption_light,
    "deferred_wait": queue.deferred_wait,
    "kv_bound": queue.kv_bound,
    "seat_bound": queue.seat_bound,
    "prefill_bound": queue.prefill_bound,
    "queue_not_kv": queue.queue_not_kv,
    "kv_pressure_rising": pressure.kv_pressure_rising,
    "kv_held_no_requests": pressure.kv_held_no_requests,
    "decode_slow": pressure.decode_slow,
    "runaway_generation": pressure.runaway_generation,
    "kv_full_ok": pressure.kv_full_ok,
}
