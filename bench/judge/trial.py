"""One scenario through the real pipeline, and what is right or wrong about its verdicts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from bench.judge.draw import Scenario, draw
from bench.judge.machine import Machine, Said, Sample
from bench.judge.recovery import Recovery, recovery_of, with_recovery
from bench.judge.truth import Truth, page_is_justified, truth_of
from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.config import AnalysisConfig
from exporter.simulation.settings import Engine
from exporter.standin.metrics_page import EngineFigures, MetricsPage

__all__ = ["Trial", "play", "played", "trial"]

_PAGE_VERSION: Final = "0.32.0"
_MODEL: Final = "drawn"
_ORIGIN: Final = 1.7e9
# An alert goes out when a critical verdict has lasted this long.
HOLD: Final = 30.0


@dataclass(frozen=True, slots=True)
class Trial:
    """How a scenario was judged.

    Attributes:
        seed, kind: Of the scenario.
        truth: See `bench.judge.truth.Truth`.
        verdict: At the end of the trouble phase.
        right: Whether it is acceptable.
        false_page: Whether a critical verdict lasted long enough to page where no page is justified.
        blinked: Whether a critical verdict was there for a shorter time where no page is justified.
        missed_page: Whether a page was due and did not come.
        seconds: From the onset of the trouble to the first right verdict; None without trouble, or never.
        flaps: Changes of the verdict in the trouble phase after the first one.
        warned: A verdict of at least a warning that lasted half a minute before the trouble, or nothing.
        recovery: How the alarms of the first engine ended; None where nobody looked, or it did not recover.
        others: Verdicts at the end of the engines that are not in trouble.
        pages: Engine, begin and end of each critical time that is not justified.
        said: All that was said of the first engine, after the trouble too.
        samples: Its state at each second.
    """

    seed: int
    kind: str
    truth: Truth
    verdict: str
    right: bool
    false_page: bool
    blinked: bool
    missed_page: bool
    seconds: float | None
    flaps: int
    warned: str
    recovery: Recovery | None
    others: tuple[str, ...]
    pages: tuple[tuple[int, float, float], ...]
    said: tuple[Said, ...]
    samples: tuple[Sample, ...]


class _Server:
    """The machines of a scenario behind one metrics page."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._page = self._new_page(_ORIGIN)
        self.machines = [
            Machine(
                scenario.engine,
                traffic,
                None if number else scenario.fault,
                figures=figures,
                new_process=self._restart,
            )
            for number, (traffic, figures) in enumerate(
                zip(scenario.traffic, self._page.engines, strict=True)
            )
        ]

    def _new_page(self, started: float) -> MetricsPage:
        engine, engines = self._scenario.engine, len(self._scenario.traffic)
        return MetricsPage(
            _PAGE_VERSION,
            _MODEL,
            started,
            max_model_len=engine.max_model_len or 0,
            cache=_labels(engine, engines),
            engines=engines,
        )

    def _restart(self) -> EngineFigures:
        fault = self._scenario.fault
        self._page = self._new_page(_ORIGIN + fault.over)
        return self._page.engines[0]

    def body(self, t: float) -> bytes:
        view = self._scenario.view
        return view.dialect.translate(self._page.body(_ORIGIN + t), api_servers=view.api_servers)


def _labels(engine: Engine, engines: int) -> dict[str, str]:
    longest = engine.max_model_len or 1
    concurrency = engine.usable_blocks / (-(-longest // engine.block_size) + engine.blocks_per_request)
    return {
        "block_size": str(engine.block_size),
        "effective_attention_block_size": str(engine.block_size),
        "enable_prefix_caching": str(engine.enable_prefix_caching),
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(int(concurrency * longest)),
        "kv_cache_max_concurrency": str(round(concurrency, 3)),
        "num_gpu_blocks": str(engine.num_gpu_blocks * engines),
        "num_gpu_blocks_override": "None",
        "user_specified_block_size": "False",
    }


def play(scenario: Scenario) -> tuple[list[list[Said]], list[list[Sample]]]:
    """Play a scenario; return what is said of each engine, and its samples at each poll."""
    said, samples, _, _ = _play(scenario)
    return said, samples


def played(scenario: Scenario) -> tuple[Pipeline, TargetReading]:
    """Play a scenario; return the pipeline that watched it, and its last reading."""
    return _play(scenario)[2:]


def _play(scenario: Scenario) -> tuple[list[list[Said]], list[list[Sample]], Pipeline, TargetReading]:
    server, view = _Server(scenario), scenario.view
    pipeline = Pipeline(AnalysisConfig(), view.facts, view.interval)
    dice = random.Random(scenario.seed)
    said: list[list[Said]] = [[] for _ in scenario.traffic]
    samples: list[list[Sample]] = [[] for _ in scenario.traffic]
    t = 0.0
    while t <= scenario.end:
        late = t + dice.random() * view.jitter
        for machine, states in zip(server.machines, samples, strict=True):
            states.append(machine.until(late))
        if t >= view.since:
            out = view.outage is not None and view.outage[0] <= t <= view.outage[1]
            reading = _poll(pipeline, server, late, missed=dice.random() < view.missed or out)
            for number, lines in enumerate(said):
                lines.append(_said(reading, number))
        t += view.interval
    return said, samples, pipeline, reading


def _poll(pipeline: Pipeline, server: _Server, t: float, *, missed: bool) -> TargetReading:
    if not server.machines[0].up:
        return pipeline.feed(t, None, "connection_refused")
    return pipeline.feed(t, None, "timeout") if missed else pipeline.feed(t, server.body(t))


def _said(reading: TargetReading, number: int) -> Said:
    for key, engine in reading.engines.items():
        if key.engine == str(number):
            judgement = engine.judgement
            return Said(reading.t, judgement.verdict, judgement.severity.value, tuple(engine.findings))
    return Said(reading.t, reading.judgement.verdict, reading.judgement.severity.value, ())


def trial(seed: int, kind: str | None = None) -> Trial:
    """Draw, play and judge one scenario; every second one goes on after its trouble."""
    scenario = draw(seed, kind)
    whole = scenario if seed % 2 else with_recovery(scenario)
    all_said, all_samples = play(whole)
    polls = int(scenario.end / scenario.view.interval) + 1
    every = [states[:polls] for states in all_samples]
    said = [[each for each in lines if each.t <= every[0][-1].t] for lines in all_said]
    samples = every[0]
    truth = truth_of(scenario, samples)
    first = said[0]
    verdict = first[-1].verdict
    # Adapters are short from the start: no time was calm.
    calm = min(scenario.calm, scenario.fault.at) if scenario.fault is not None else scenario.calm
    lead = [s for s in first if s.t < calm]
    trouble = [s for s in first if s.t >= scenario.calm]
    pages = _false_criticals(scenario, truth, said, every)
    others = tuple(lines[-1].verdict for lines in said[1:])
    return Trial(
        seed,
        scenario.kind,
        truth,
        verdict,
        verdict in truth.acceptable and all(_is_calm(each) for each in others),
        any(end - begin >= HOLD for _, begin, end in pages),
        any(end - begin < HOLD for _, begin, end in pages),
        truth.page == "due" and trouble[-1].severity != "critical",
        _seconds(truth, trouble),
        _flaps(truth, trouble),
        _warned(lead),
        None if whole is scenario else recovery_of(scenario.end, all_said[0], all_samples[0]),
        others,
        tuple(pages),
        tuple(all_said[0]),
        tuple(all_samples[0]),
    )


def _is_calm(verdict: str) -> bool:
    return verdict in ("healthy", "kv_full_ok", "preemption_light")


def _false_criticals(
    scenario: Scenario, truth: Truth, said: Sequence[Sequence[Said]], samples: Sequence[Sequence[Sample]]
) -> list[tuple[int, float, float]]:
    """Return engine, begin and end of each critical time that is not justified."""
    found = []
    for number, lines in enumerate(said):
        alone = replace(scenario, traffic=(scenario.traffic[number],), fault=None)
        for begin, end in _critical_times(lines):
            if number:
                justified = page_is_justified(alone, samples[number], begin, end)
            else:
                justified = _may_page(scenario, truth, samples[0], begin, end)
            if not justified:
                found.append((number, begin, end))
    return found


def _may_page(scenario: Scenario, truth: Truth, samples: Sequence[Sample], begin: float, end: float) -> bool:
    """Whether a critical verdict in a time is justified."""
    if begin >= scenario.calm and (truth.page != "false" or scenario.kind == "restart"):
        return True
    return page_is_justified(scenario, samples, begin, end)


def _critical_times(said: Sequence[Said]) -> list[tuple[float, float]]:
    """Return when each critical time began and ended."""
    times, since = [], None
    for now in said:
        if now.severity == "critical":
            since = now.t if since is None else since
        elif since is not None:
            times.append((since, now.t))
            since = None
    if since is not None:
        times.append((since, said[-1].t))
    return times


def _warned(lead: Sequence[Said]) -> str:
    """Return the first verdict of at least a warning that lasted half a minute, or nothing."""
    since: Said | None = None
    for now in lead:
        if now.severity not in ("warning", "critical"):
            since = None
        elif since is None or since.verdict != now.verdict:
            since = now
        elif now.t - since.t >= HOLD:
            return now.verdict
    return ""


def _seconds(truth: Truth, trouble: Sequence[Said]) -> float | None:
    if truth.onset is None:
        return None
    return next(
        (s.t - truth.onset for s in trouble if s.t >= truth.onset and s.verdict in truth.acceptable), None
    )


def _flaps(truth: Truth, trouble: Sequence[Said]) -> int:
    onset = truth.onset or trouble[0].t
    verdicts = [s.verdict for s in trouble if s.t >= onset]
    return max(0, sum(a != b for a, b in pairwise(verdicts)) - 1)
