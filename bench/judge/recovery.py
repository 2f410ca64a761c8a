"""What the exporter says once the trouble of a scenario is over: the load is light again, the fault gone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

from bench.judge.draw import Scenario
from bench.judge.machine import Said, Sample

__all__ = ["Recovery", "recovery_of", "with_recovery"]

_SECONDS: Final = 300.0
_LIGHTER: Final = 0.6  # than before the trouble
# Seconds of calm that are looked at, at the least.
_LEAST: Final = 100.0
# Faults of the network around the engine are there from the start; a request that never fits stays.
_ENDLESS: Final = ("adapters", "connector", "unfittable")


class Recovery(NamedTuple):
    """How long alarms outlasted the trouble: the last moment with a queue, a preemption or the fault."""

    warned: float  # seconds until the last verdict of a warning or more
    paged: float  # seconds until the last critical one
    flaps: int  # changes of the verdict after the first one


def with_recovery(scenario: Scenario) -> Scenario:
    """Return the scenario with some minutes of light load after it; the same one where none can follow."""
    fault, traffic = scenario.fault, []
    if scenario.kind in _ENDLESS:
        return scenario
    for each in scenario.traffic:
        calm = each.phases[0]
        rate = (calm.rate[0] * _LIGHTER, calm.rate[1] * _LIGHTER)
        clients = calm.clients and max(1, round(calm.clients * _LIGHTER))
        light = replace(calm, seconds=_SECONDS, rate=rate, clients=clients)
        traffic.append(replace(each, phases=(*each.phases, light)))
    if fault is not None and fault.over is None:
        fault = replace(fault, until=scenario.end)
    return replace(scenario, traffic=tuple(traffic), trouble=scenario.trouble + _SECONDS, fault=fault)


def recovery_of(end: float, said: Sequence[Said], samples: Sequence[Sample]) -> Recovery | None:
    """Return what is said after the trouble that ends at some second; None where the queue outlasts it."""
    over, preemptions = end, 0
    for now in samples:
        if now.t > end and (now.waiting or now.preemptions > preemptions):
            over = now.t
        preemptions = now.preemptions
    after = [each for each in said if each.t > over]
    if not after or after[-1].t - over < _LEAST:
        return None
    warned = max((each.t for each in after if each.severity in ("warning", "critical")), default=over)
    paged = max((each.t for each in after if each.severity == "critical"), default=over)
    changes = sum(one.verdict != other.verdict for one, other in pairwise(after))
    return Recovery(warned - over, paged - over, max(0, changes - 1))
