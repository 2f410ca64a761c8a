"""What the exporter says once the trouble of a scenario is over: the load is light again, the fault gone."""

from dataclasses import replace
from typing import Final, NamedTuple

from bench.judge.draw import Scenario, draw
from bench.judge.trial import play

__all__ = ["Recovery", "recovery"]

_SECONDS: Final = 300.0
_LIGHTER: Final = 0.6  # than before the trouble
# Faults of the network around the engine are there from the start.
_ENDLESS: Final = ("adapters", "connector")


class Recovery(NamedTuple):
    """How long alarms outlasted the trouble: the last moment with a queue, a preemption or the fault."""

    warned: float  # seconds until the last verdict of a warning or more
    paged: float  # seconds until the last critical one


def recovery(seed: int) -> Recovery | None:
    """Play a scenario and what comes after it; None where the engine does not recover in five minutes."""
    scenario = draw(seed)
    if scenario.fault is not None and scenario.fault.kind in _ENDLESS:
        return None
    said, samples = play(_with_an_end(scenario))
    over, preemptions = scenario.end, 0
    for now in samples[0]:
        if now.t > scenario.end and (now.waiting or now.preemptions > preemptions):
            over = now.t
        preemptions = now.preemptions
    if over > scenario.end + _SECONDS - 100:
        return None
    after = [each for each in said[0] if each.t > over]
    warned = max((each.t for each in after if each.severity in ("warning", "critical")), default=over)
    paged = max((each.t for each in after if each.severity == "critical"), default=over)
    return Recovery(warned - over, paged - over)


def _with_an_end(scenario: Scenario) -> Scenario:
    fault, traffic = scenario.fault, []
    for each in scenario.traffic:
        calm = each.phases[0]
        rate = (calm.rate[0] * _LIGHTER, calm.rate[1] * _LIGHTER)
        clients = calm.clients and max(1, round(calm.clients * _LIGHTER))
        light = replace(calm, seconds=_SECONDS, rate=rate, clients=clients)
        traffic.append(replace(each, phases=(*each.phases, light)))
    if fault is not None and fault.kind != "restart" and fault.until is None:
        fault = replace(fault, until=scenario.end)
    return replace(scenario, traffic=tuple(traffic), trouble=scenario.trouble + _SECONDS, fault=fault)
