"""What a scenario's server is short of, found by simulating the same arrivals with more of one resource."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from bench.judge.draw import Scenario
from bench.judge.machine import Machine, Sample
from exporter.simulation.settings import Engine

__all__ = ["Figures", "Truth", "enlarged", "page_is_justified", "truth_of"]

# The truth is that of the last seconds of the trouble phase, at whose end the verdict is read.
WINDOW: Final = 60.0
# A changed server begins this long before the trouble, empty.
LEAD: Final = 20.0
FACTOR: Final = 4
# Fewer waiting requests than this, on average, and less throughput lost than this share are no shortage.
_QUEUE: Final = 0.5
_LOST: Final = 0.1
# A resource that removes this much less than the best one removes nearly the same.
_NEAR: Final = 0.15
# A resource that removes less than this is not short alone.
_ALONE: Final = 0.6
HARM: Final = 0.2
_STORM: Final = 0.4
# So much work done twice makes a storm of preemptions.
_AGAIN: Final = 0.25
# Less work than this share of what could be done is a standstill.
_STANDSTILL: Final = 0.02
# A queue that was not there for this many seconds at the end is over.
_OVER: Final = 10.0
# A queue that is there in fewer of the samples comes and goes; without lost work it is no trouble.
_LASTS: Final = 0.6


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the last seconds of the trouble phase.

    Attributes:
        waiting, running: Requests.
        work: Seconds of engine time per second that the tokens done are worth; lost throughput shows in it.
        finished: Requests per second.
        preempted: Preemptions per finished request.
        again: Share of the tokens computed that were computed a second time.
        kv_peak: Highest usage.
        waits: Share of the samples with a queue.
    """

    waiting: float
    running: float
    work: float
    finished: float
    preempted: float
    again: float
    kv_peak: float
    waits: float


@dataclass(frozen=True, slots=True)
class Truth:
    """What is wrong, as far as it is known.

    Attributes:
        family: The bottleneck that counts: ``none``, ``pool``, ``seats``, ``compute``, ``fault``, or a kind
            of fault that needs no counterfactual.
        scores: By resource, the share of the excess waiting and lost throughput that more of it removes.
        harm: Share of the work lost against a server without any shortage.
        acceptable: The verdicts that are right at the end.
        page: Whether a page is ``due``, ``allowed`` or ``false``.
        onset: Second at which the trouble began, None where there is none.
        base, ample: Figures of the server as it is, and without any shortage.
    """

    family: str
    scores: dict[str, float]
    harm: float
    acceptable: frozenset[str]
    page: str
    onset: float | None
    base: Figures
    ample: Figures


def enlarged(engine: Engine, resource: str) -> Engine:
    """Return an engine with four times as much of a resource.

    ``compute`` makes prompt tokens cheaper and steps larger; decoding costs what it did.
    """
    if resource == "pool":
        return replace(engine, num_gpu_blocks=engine.usable_blocks * FACTOR + 1)
    if resource == "seats":
        seats = engine.max_num_seqs * FACTOR
        return replace(
            engine, max_num_seqs=seats, max_num_batched_tokens=max(seats, engine.max_num_batched_tokens)
        )
    if resource == "compute":
        step = engine.step_time
        cheap = step.per_token // FACTOR
        step = replace(step, per_token=cheap, per_sequence=step.per_sequence + step.per_token - cheap)
        budget = engine.max_num_batched_tokens * FACTOR
        return replace(engine, step_time=step, max_num_batched_tokens=budget)
    raise ValueError(f"expected pool, seats or compute, got {resource}")


def figures(samples: Sequence[Sample], engine: Engine, since: float) -> Figures:
    """Sum up the samples from a second on."""
    seen = [s for s in samples if s.t >= since]
    first, last = seen[0], seen[-1]
    span = max(1e-9, last.t - first.t)
    finished = last.finished - first.finished
    step = engine.step_time
    answer = step.per_token + step.per_sequence + step.fixed / min(engine.max_num_seqs, 16)
    outputs, prompts = last.output_tokens - first.output_tokens, last.prompt_tokens - first.prompt_tokens
    again = last.recomputed - first.recomputed
    return Figures(
        waiting=fmean(s.waiting for s in seen),
        running=fmean(s.running for s in seen),
        work=(outputs * answer + prompts * max(step.per_token, 1)) / span / 1e9,
        finished=finished / span,
        preempted=(last.preemptions - first.preemptions) / max(1, finished),
        again=again / max(1, again + outputs + prompts),
        kv_peak=max(s.kv_usage for s in seen),
        waits=fmean(s.waiting > 0 for s in seen),
    )


# Faults whose effect is certain: what is acceptable at the end, and whether a page is due.
_CERTAIN: Final = {
    "stall": ({"engine_stalled"}, "due"),
    "door": ({"scheduler_deadlock", "unfittable_request"}, "due"),
    "unfittable": ({"unfittable_request", "scheduler_deadlock"}, "due"),
    "down": ({"unreachable"}, "due"),
}
# A standstill younger than this may still be a pause, as after a mass preemption.
_YOUNG: Final = 60.0
_BEFORE_A_STANDSTILL: Final = {"healthy", "kv_bound", "prefill_bound", "queue_not_kv", "preemption_light"}
_CALM: Final = {"healthy", "kv_full_ok", "runaway_generation"}


def truth_of(scenario: Scenario, samples: Sequence[Sample]) -> Truth:
    """Return the truth about the first engine, whose samples at each second are given."""
    engine = scenario.engine
    since = scenario.end - WINDOW
    base = figures(samples, engine, since)
    trouble = [s for s in samples if s.t >= scenario.calm]
    if scenario.kind in _CERTAIN:
        acceptable, page = _CERTAIN[scenario.kind]
        onset = _standstill(scenario, trouble)
        if scenario.end - onset < _YOUNG:
            acceptable, page = acceptable | _BEFORE_A_STANDSTILL, "allowed"
        return Truth(scenario.kind, {}, 1.0, frozenset(acceptable), page, onset, base, base)
    changed = _counterfactuals(scenario, base, trouble)
    ample = changed.pop("everything", base)
    scores = {name: _removed(base, each, changed, ample) for name, each in changed.items()}
    harm = _harm(base, ample)
    if scores and max(scores.values()) < _ALONE and base.waiting >= _QUEUE:
        needed = _needed(scenario, base, changed, ample)
        scores = {name: max(score, _ALONE * min(1.0, needed[name])) for name, score in scores.items()}
    family = _family(scenario, base, ample, changed, scores)
    causes = _causes(family, scores)
    drained = not any(s.waiting for s in trouble if s.t > scenario.end - _OVER)
    now_and_then = base.waits < _LASTS and harm < _LOST
    if (drained or now_and_then) and not (family == "fault" and scenario.kind == "slow"):
        causes.add("none")
    return Truth(
        family,
        scores,
        harm,
        frozenset().union(*(_verdicts(cause, scenario, base, ample, trouble) for cause in causes)),
        _page(family, base, ample),
        None if family == "none" else _onset(scenario, trouble),
        base,
        ample,
    )


def _counterfactuals(scenario: Scenario, base: Figures, trouble: Sequence[Sample]) -> dict[str, Figures]:
    """Simulate with more of each resource that may matter, and with more of all."""
    fault = scenario.fault
    if scenario.kind in ("restart", "pause"):
        fault = None  # over by now
    if fault is None and base.waiting < _QUEUE and base.preempted < _STORM:
        return {}
    resources = ["compute"]
    if max(s.kv_usage for s in trouble) > 0.3:
        resources.append("pool")
    if max(s.running for s in trouble) >= scenario.engine.max_num_seqs - 1:
        resources.append("seats")
    changed = {name: _rerun(scenario, enlarged(scenario.engine, name)) for name in resources}
    ample = scenario.engine
    for name in resources:
        ample = enlarged(ample, name)
    if fault is not None:
        changed["fault"] = _rerun(scenario, scenario.engine, faulty=False)
    changed["everything"] = _rerun(scenario, ample, faulty=False)
    return changed


def _needed(
    scenario: Scenario, base: Figures, changed: dict[str, Figures], ample: Figures
) -> dict[str, float]:
    """Return by resource the share of the excess that comes back when all others have been enlarged.

    Asked where no single resource removes much: then two are short together.
    """
    needed = {}
    for left_out in changed:
        engine = scenario.engine
        for name in changed:
            if name not in ("fault", left_out):
                engine = enlarged(engine, name)
        without = _rerun(scenario, engine, faulty=left_out == "fault")
        needed[left_out] = 1 - _removed(base, without, {}, ample)
    return needed


def _rerun(scenario: Scenario, engine: Engine, *, faulty: bool = True) -> Figures:
    since = max(0.0, scenario.calm - LEAD)
    machine = Machine(engine, scenario.traffic[0], scenario.fault if faulty else None, since=since)
    first = int(scenario.end - WINDOW)
    samples = [machine.until(float(t)) for t in range(first, int(scenario.end) + 1)]
    return figures(samples, scenario.engine, scenario.end - WINDOW)


def _removed(base: Figures, changed: Figures, all_changed: dict[str, Figures], ample: Figures) -> float:
    """Return the share of the excess waiting and of the lost work that a change removes."""
    most = max([ample.work, *(each.work for each in all_changed.values())])
    least = min([ample.waiting, *(each.waiting for each in all_changed.values())])
    in_system = max(1.0, base.waiting + base.running)
    queue = (base.waiting - least) / in_system
    lost = (most - base.work) / most if most > 0 else 0.0
    parts = [(0.0, 0.0)]
    if queue > 0.01:
        parts.append((queue, (base.waiting - changed.waiting) / (base.waiting - least)))
    if lost > 0.01:
        parts.append((lost, (changed.work - base.work) / (most - base.work)))
    weight = sum(w for w, _ in parts)
    return sum(w * max(0.0, share) for w, share in parts) / weight if weight else 0.0


def _family(
    scenario: Scenario, base: Figures, ample: Figures, changed: dict[str, Figures], scores: dict[str, float]
) -> str:
    if not changed:
        return "none"
    if scenario.fault is not None and scenario.fault.kind == "slow" and _slows(base, changed["fault"]):
        return "fault"
    if base.finished <= 0 and base.running >= _QUEUE and ample.finished > 0:
        return max(scores, key=scores.__getitem__)
    waits = base.waiting >= _QUEUE and base.waiting - ample.waiting >= _LOST * max(1.0, base.running)
    lost = base.waiting >= max(_QUEUE, _LOST * base.running) and _harm(base, ample) >= _LOST
    if not waits and not lost:
        return "none"
    return max(scores, key=scores.__getitem__)


def _slows(base: Figures, repaired: Figures) -> bool:
    """Whether slow steps matter: less gets done, or requests stay clearly longer."""
    longer = base.running + base.waiting > 1.4 * (repaired.running + repaired.waiting)
    return longer or repaired.work > (1 + _LOST) * base.work


def _causes(family: str, scores: dict[str, float]) -> set[str]:
    """All causes that count as right: the best, and those that remove nearly the same."""
    if family == "none":
        return {"none"}
    best = scores.get(family, 0.0)
    near = max(_NEAR, best / 3)
    return {family, *(name for name, score in scores.items() if score >= best - near and score > 0.05)}


def _verdicts(
    cause: str, scenario: Scenario, base: Figures, ample: Figures, trouble: Sequence[Sample]
) -> set[str]:
    """Return the verdicts that name a cause."""
    facts, version = scenario.view.facts, scenario.view.dialect.number
    preempts = trouble[-1].preemptions > trouble[0].preemptions
    light = {"preemption_light"} if preempts else set()
    if cause == "none":
        rising = {"kv_pressure_rising"} if base.kv_peak > 0.93 else set()
        return _CALM | light | rising
    if cause == "seats":
        return {"seat_bound"} if "max_num_seqs" in facts else {"queue_not_kv"}
    if cause == "compute":
        return {"prefill_bound", "queue_not_kv"}
    if cause == "pool":
        found = {"kv_bound"}
        if base.preempted >= _STORM / 2:
            found.add("preemption_thrash")
        if base.waiting < 2 or (_harm(base, ample) <= HARM and not _slower(base, ample)):
            found |= light
            found.add("kv_full_ok")
        return found
    kind = scenario.fault.kind if scenario.fault is not None else ""
    if kind == "slow":
        return {"decode_slow"} if base.finished else {"decode_slow", "engine_stalled"}
    if kind == "connector" and base.kv_peak > 0.9:
        return {"deferred_wait", "kv_bound", *({"scheduler_deadlock"} if base.running < 1 else ())}
    if kind == "leak":
        still = {"engine_stalled"} if base.finished <= 0 else set()
        return still | {"kv_bound", "scheduler_deadlock", "unfittable_request", "preemption_thrash"}
    return {"deferred_wait"} if version >= (0, 20) else {"queue_not_kv"}


def page_is_justified(scenario: Scenario, samples: Sequence[Sample], begin: float, end: float) -> bool:
    """Whether work was lost, or requests stayed long, in a time around a page.

    Args:
        scenario: The scenario.
        samples: The first engine's, as it was.
        begin: Second at which a verdict became critical.
        end: Second at which it was critical last.
    """
    begin = max(0.0, begin - LEAD)
    base = figures([s for s in samples if s.t <= end], scenario.engine, begin)
    if base.finished <= 0 and base.running < 0.5 and base.waiting < 0.5:
        return False
    ample = scenario.engine
    for name in ("pool", "seats", "compute"):
        ample = enlarged(ample, name)
    machine = Machine(ample, scenario.traffic[0])
    unhindered = [machine.until(s.t) for s in samples if s.t <= end]
    return _page("any", base, figures(unhindered, scenario.engine, begin)) != "false"


def _page(family: str, base: Figures, ample: Figures) -> str:
    """Return whether a page is due, allowed or false."""
    if family == "none":
        return "false"
    nothing = base.finished <= 0 and ample.finished > 0
    harmed = _harm(base, ample) > HARM
    storm = family == "pool" and base.preempted >= 2 * _STORM and base.again >= _AGAIN
    if (nothing and base.work < _STANDSTILL * ample.work) or (storm and harmed):
        return "due"
    return "allowed" if nothing or harmed or _slower(base, ample) else "false"


def _slower(base: Figures, ample: Figures) -> bool:
    """Whether requests stay at least twice as long as on a server without any shortage."""
    return base.waiting + base.running > 2 * (ample.waiting + ample.running)


def _harm(base: Figures, ample: Figures) -> float:
    """Return the share of the work lost against a server without any shortage."""
    return max(0.0, 1 - base.work / ample.work) if ample.work > 0 else 0.0


def _standstill(scenario: Scenario, trouble: Sequence[Sample]) -> float:
    """The second of the last progress of a scenario that ends in a standstill."""
    last = (trouble[-1].output_tokens, trouble[-1].prompt_tokens)
    return next((s.t for s in trouble if (s.output_tokens, s.prompt_tokens) == last), scenario.calm)


def _onset(scenario: Scenario, trouble: Sequence[Sample]) -> float:
    """Return the second at which a lasting queue or a preemption came, or at which a sudden fault came.

    It is not earlier than the first poll.
    """
    return max(scenario.view.since, _began(scenario, trouble))


def _began(scenario: Scenario, trouble: Sequence[Sample]) -> float:
    if scenario.fault is not None and scenario.fault.kind in ("slow", "connector"):
        return scenario.fault.at
    for index, sample in enumerate(trouble):
        ahead = trouble[index : index + 10]
        if sum(s.waiting > 0 for s in ahead) >= 0.8 * len(ahead):
            return sample.t
        if index and sample.preemptions > trouble[index - 1].preemptions:
            return sample.t
    return scenario.calm
