"""``check``: poll a server for some seconds and say what is the matter, in one shot."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from exporter.analysis.catalogue import Severity
from exporter.analysis.load_profile import Observed
from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.config import AnalysisConfig, Config
from exporter.net.urls import shown_url
from exporter.publish.status import choose_engine, status_object
from exporter.publish.terminal import Paint, headline, report
from exporter.runtime.poller import Pace, PollOutcome, Watcher
from exporter.vllm.client import MetricsClient
from exporter.vllm.exposition import EngineKey
from exporter.vllm.prober import Prober

if TYPE_CHECKING:
    from exporter.simulation.from_status import Present
    from exporter.simulation.whatif import Forecast

__all__ = ["Seen", "as_json", "as_text", "exit_status", "run", "shrunk", "what_if"]

UNKNOWN: Final = 3
_STATUS: Final = {Severity.NONE: 0, Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
_UNKNOWN_VERDICTS: Final = frozenset({"metrics_missing", "data_untrusted", "starting"})
# Windows that wait for something to last take this share of the time there is.
_SHARE: Final = 0.75
_ACCESS_LOG: Final = (
    "Each poll left a line in vLLM's access log, unless it runs with"
    " --disable-access-log-for-endpoints /metrics"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen in the time that there was.

    Attributes:
        reading: the last one, None when no poll ended.
        loads: what was asked of the engines.
    """

    reading: TargetReading | None = None
    loads: Mapping[EngineKey, Observed] = field(default_factory=dict)


# An engine's name, the engine and its forecast; or why there is none.
WhatIf = tuple[str, "Present", "Forecast"] | str


def shrunk(analysis: AnalysisConfig, seconds: float) -> AnalysisConfig:
    """Windows that fit into the time there is; verdicts that need longer are then told from less."""
    most = max(1.0, _SHARE * seconds)
    return replace(
        analysis,
        hold=0.0,
        queue_window=min(analysis.queue_window, most),
        stall_after=min(analysis.stall_after, most),
        deadlock_after=min(analysis.deadlock_after, most),
        held_after=min(analysis.held_after, most),
    )


async def run(config: Config, seconds: float, progress: Callable[[str], None]) -> Seen:
    """Poll for some seconds; returns what was seen.

    Args:
        config: whose target, pace and thresholds count.
        seconds: how long.
        progress: gets a line after every poll.
    """
    target = config.targets[0]
    last: list[TargetReading] = []
    start = time.monotonic()
    pipeline = Pipeline(
        shrunk(config.analysis, seconds), target.facts, config.poll.interval, config.engine.args
    )
    prober = Prober.for_target(target, config.poll)

    def note(outcome: PollOutcome) -> None:
        last[:] = [outcome.reading]
        progress(f"{time.monotonic() - start:5.1f}s of {seconds:g}s  {headline(outcome.reading)}")

    client = MetricsClient(target, config.poll)
    watcher = Watcher(client, pipeline, Pace(config.poll.interval), note, prober=prober)
    tasks = [asyncio.create_task(watcher.run()), asyncio.create_task(prober.run())]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await client.close()
    await prober.close()
    return Seen(last[0], pipeline.loads()) if last else Seen()


def what_if(config: Config, seen: Seen, err: TextIO) -> WhatIf:
    """Simulate what each fix would do to the engine that preempts most; progress goes to a terminal."""
    from exporter.commands.whatif import progress_bar  # noqa: PLC0415
    from exporter.simulation.from_status import PresentError, present_of  # noqa: PLC0415
    from exporter.simulation.worker import foretell  # noqa: PLC0415 (only when it is asked for)

    try:
        name, engine = choose_engine(_status(config, seen), None)
        present = present_of(engine)
    except (LookupError, PresentError) as problem:
        return str(problem.args[0])
    with progress_bar(err) as progress:
        return name, present, foretell(present, config.whatif, progress=progress)


def _status(config: Config, seen: Seen) -> Mapping[str, Any]:
    now = seen.reading.t if seen.reading is not None else 0.0
    return status_object(shown_url(config.targets[0].url), seen.reading, now, seen.loads)


def exit_status(reading: TargetReading | None) -> int:
    """0 good, 1 warning, 2 critical, 3 unknown."""
    if reading is None or reading.good_at is None:
        return UNKNOWN
    judgements = [
        (engine.judgement.severity, engine.judgement.verdict) for engine in reading.engines.values()
    ]
    judgements.append((reading.judgement.severity, reading.judgement.verdict))
    severities = [severity for severity, _ in judgements] + [
        model.severity for model in reading.models.values()
    ]
    worst = max(severities)
    if worst < Severity.CRITICAL and any(verdict in _UNKNOWN_VERDICTS for _, verdict in judgements):
        return UNKNOWN
    return _STATUS[worst]


def as_json(config: Config, seen: Seen, seconds: float, forecast: WhatIf | None = None) -> str:
    """The report as one JSON object."""
    told = {"seconds": seconds, "exit_status": exit_status(seen.reading), **_status(config, seen)}
    if isinstance(forecast, str):
        told["what_if"] = {"error": forecast}
    elif forecast is not None:
        from exporter.simulation.worker import as_object  # noqa: PLC0415 (as above)

        told["what_if"] = as_object(*forecast)
    return json.dumps(told, indent=2, allow_nan=False)


def as_text(config: Config, seen: Seen, seconds: float, paint: Paint, forecast: WhatIf | None = None) -> str:
    """The report for people."""
    reading = seen.reading
    lines = [f"{shown_url(config.targets[0].url)}, watched for {seconds:g} s"]
    if seconds < config.analysis.window:
        sure, here = config.analysis.stall_after, shrunk(config.analysis, seconds).stall_after
        lines.append(
            f"Rates are over what was seen, and what takes {sure:g} s to be told for sure is told after"
            f" {here:g} s here; --for 2m is surer."
        )
    if reading is None:
        lines.append("No poll ended in that time.")
    else:
        lines += report(reading, paint)
    if forecast is not None:
        lines += ["", "What each fix would do, simulated", *_foretold(forecast)]
    return "\n".join([*lines, "", _ACCESS_LOG])


def _foretold(forecast: WhatIf) -> list[str]:
    if isinstance(forecast, str):
        return [f"  {forecast}"]
    from exporter.simulation.worker import as_text as told  # noqa: PLC0415 (as above)

    name, present, result = forecast
    return told(name, present, result).rstrip().splitlines()
