"""Whether the first advised change helps: it is simulated with the true parameters, beside the other changes.

``python -m bench.judge.advice --seeds 1..300`` prints the figures, and a line for each server.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean, median, quantiles
from typing import Final, NamedTuple

from bench.judge.draw import Scenario, draw
from bench.judge.machine import Machine
from bench.judge.trial import played
from exporter.analysis import catalogue
from exporter.analysis.catalogue import COSTS
from exporter.analysis.fixes import FixAdvice
from exporter.analysis.forecast import FORECAST_VERDICTS, EngineForecast
from exporter.config import WhatIfConfig
from exporter.publish.status import question
from exporter.simulation import worker
from exporter.simulation.candidates import ASSUMED_POOLS, Candidate, seats_at, singles, watermark_at
from exporter.simulation.settings import Engine

__all__ = ["Advised", "advised"]

# A change that costs more of the throughput, or makes requests slower by this factor, makes it worse.
_LEAST_TOKENS: Final = 0.95
_MOST_LATENCY: Final = 1.1


class Goodput(NamedTuple):
    """What clients get in the trouble phase."""

    tokens: float  # generated per second; with an open load per request that arrived
    latency: float  # seconds in the server, by Little's law


class Advised(NamedTuple):
    """The first advised change of one server, and what it does there."""

    seed: int
    kind: str
    verdict: str
    trusted: bool | None  # whether a forecast ranked it; None without one
    advice: str  # the change; empty if nothing that can be simulated is advised
    tokens: float = 1.0  # after the change / now
    latency: float = 1.0
    best: str = ""  # the best change that is no dearer
    regret: float = 0.0  # share of the best change's gain in tokens per second that is left

    @property
    def worse(self) -> bool:
        """Whether the change makes it worse."""
        slower = self.latency > _MOST_LATENCY and self.tokens < 1 / _LEAST_TOKENS
        return self.tokens < _LEAST_TOKENS or slower


def advised(seed: int) -> Advised | None:
    """Judge the advice for one server; None where a shortage of capacity is not the trouble."""
    scenario = draw(seed)
    if scenario.fault is not None or len(scenario.traffic) > 1:
        return None
    pipeline, reading = played(scenario)
    (key, engine), *_ = reading.engines.items()
    verdict = engine.judgement.verdict
    load = pipeline.load(key)
    if verdict not in FORECAST_VERDICTS or verdict == "kv_pressure_rising" or load is None:
        return None
    document = worker.answer("", question(engine, load), WhatIfConfig())
    pipeline.set_forecast(key, EngineForecast.from_dict(document, reading.t))
    engine = pipeline.reconsidered(reading).engines[key]
    trusted = engine.forecast.trusted if engine.forecast else None
    changes = {fix.fix: _change(scenario.engine, fix) for fix in engine.advice.fixes}
    first = next((fix for fix in engine.advice.fixes if changes[fix.fix] is not None), None)
    if first is None:
        return Advised(seed, scenario.kind, verdict, trusted, "")
    now = _goodput(scenario, Candidate("", scenario.engine))
    chosen = changes[first.fix]
    then = _goodput(scenario, chosen)
    every = {each.label: each for each in _all(scenario.engine, _cost(first.fix))}
    gains = {label: _goodput(scenario, each).tokens for label, each in every.items()} | {"": now.tokens}
    best = max(gains, key=lambda label: gains[label])
    left = max(0.0, gains[best] - then.tokens) / max(gains[best], 1e-9)
    return Advised(
        seed, scenario.kind, verdict, trusted, chosen.label,
        then.tokens / max(now.tokens, 1e-9), then.latency / max(now.latency, 1e-9), best, left,
    )  # fmt: skip


def _cost(fix: str) -> int:
    return COSTS.index(catalogue.load().fixes[fix].cost)


def _change(engine: Engine, fix: FixAdvice) -> Candidate | None:
    """Return an advised fix as a change of the true engine; None if it is none or has no value."""
    if fix.fix in ("lower_max_num_seqs", "raise_max_num_seqs") and fix.value:
        return seats_at(engine, int(fix.value))
    if fix.fix == "set_watermark" and fix.value:
        return watermark_at(engine, float(fix.value))
    replicas = int(fix.value or 1) if fix.fix == "add_replicas" else 1
    return next((each for each in singles(engine, ASSUMED_POOLS, replicas) if fix.fix in each.fixes), None)


def _all(engine: Engine, most: int) -> Iterator[Candidate]:
    """Yield the changes that cost no more than `most`."""
    now = engine.max_num_seqs
    seats = sorted({max(1, round(now * part)) for part in (0.12, 0.25, 0.5, 0.75, 2.0, 4.0)} - {now})
    every = [*(seats_at(engine, each) for each in seats), *(watermark_at(engine, x) for x in (0.05, 0.1))]
    for each in (*every, *singles(engine, ASSUMED_POOLS)):
        if min(_cost(fix) for fix in each.fixes) <= most:
            yield each


def _goodput(scenario: Scenario, change: Candidate) -> Goodput:
    """Simulate the true load with a change."""
    (traffic,) = scenario.traffic
    share = 1 / change.replicas
    phases = [
        replace(
            phase,
            rate=(phase.rate[0] * share, phase.rate[1] * share),
            clients=phase.clients and max(1, round(phase.clients * share)),
            burst=round(phase.burst * share),
        )
        for phase in traffic.phases
    ]
    machine = Machine(change.engine, replace(traffic, phases=tuple(phases)))
    begin, end = scenario.calm, scenario.end
    samples = [machine.until(begin + second) for second in range(int(end - begin) + 1)]
    first, last = samples[0], samples[-1]
    finished = (last.finished - first.finished) / (last.t - first.t)
    here = fmean(each.running + each.waiting for each in samples)
    latency = here / finished if finished else float("inf")
    tokens = last.output_tokens - first.output_tokens
    if traffic.closed:
        return Goodput(tokens * change.replicas / (last.t - first.t), latency)
    # Each of several servers gets other requests than one alone: some more, or longer ones.
    arrived, before = (each.finished + each.aborted + each.running + each.waiting for each in (last, first))
    return Goodput(tokens / max(1, arrived - before), latency)


def summary(found: Sequence[Advised]) -> list[str]:
    """Return the figures."""
    lines = [f"{len(found)} servers short of capacity"]
    for title, some in (
        ("ranked by a trusted forecast", [each for each in found if each.trusted]),
        ("ranked by cost", [each for each in found if not each.trusted]),
        ("all", list(found)),
    ):
        simulated = [each for each in some if each.advice]
        if len(simulated) < 2:
            continue
        worse, regrets = [each for each in simulated if each.worse], [each.regret for each in simulated]
        lines.append(
            f"{title}: {len(simulated)} first changes; {len(worse) / len(simulated):.1%} make it worse; "
            f"regret {median(regrets):.1%} (median), {quantiles(regrets, n=10)[-1]:.1%} (90th percentile)"
        )
    return lines


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.judge.advice", description=__doc__)
    parser.add_argument("--seeds", default="1..300", help="first and last seed: A..B (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    first, _, last = options.seeds.partition("..")
    found = []
    with ProcessPoolExecutor(options.processes) as pool:
        for each in pool.map(advised, range(int(first), int(last or first) + 1), chunksize=4):
            if each is not None:
                found.append(each)
                mark = "WORSE" if each.worse else ""
                print(
                    f"{each.seed} {each.kind} {each.verdict} trusted={each.trusted} {each.advice or '-'}: "
                    f"tokens x{each.tokens:.2f}, latency x{each.latency:.2f}; best {each.best or 'nothing'}, "
                    f"regret {each.regret:.0%} {mark}",
                    flush=True,
                )
    print("\n".join(summary(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
