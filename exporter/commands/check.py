"""``check``: poll one server for some seconds, then report what is wrong and what to change."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from exporter.analysis.catalogue import Severity
from exporter.analysis.load_profile import LoadProfile
from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.commands._options import ACCESS_LOG, add_url, duration, only_target
from exporter.commands._outcome import ExitStatus
from exporter.commands._progress import StatusLine, progress_bar
from exporter.config import AnalysisConfig, Config, add_flags
from exporter.net.urls import shown_url
from exporter.publish.status import choose_engine, status_object
from exporter.publish.terminal import Paint, coloured, headline, plain, report
from exporter.runtime import process
from exporter.runtime.pace import Pace
from exporter.runtime.poller import PollOutcome, Watcher
from exporter.simulation import worker
from exporter.simulation.from_status import Present, PresentError, present_from_status
from exporter.simulation.whatif import Forecast
from exporter.vllm.client import MetricsClient
from exporter.vllm.exposition import EngineKey
from exporter.vllm.prober import Prober

__all__ = ["CheckResult", "add_arguments", "exit_status", "run", "shrink_windows"]

_STATUS: Final = {Severity.NONE: 0, Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
_UNKNOWN_VERDICTS: Final = frozenset({"metrics_missing", "data_untrusted", "starting"})
# Conditions that must last for some time get this share of the time that is watched.
_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The end of a check.

    Attributes:
        reading: the last one, None when no poll ended.
        loads: the load of each engine.
    """

    reading: TargetReading | None = None
    loads: Mapping[EngineKey, LoadProfile] = field(default_factory=dict)


# The engine's name, the engine and its forecast; or why there is none.
WhatIf = tuple[str, Present, Forecast] | str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [URL] [--for 15s] [--json] [OPTION ...]"
    parser.epilog = f"exit status: 0 good, 1 warning, 2 critical, 3 unknown or bad usage\n{ACCESS_LOG}"
    add_url(parser)
    parser.add_argument(
        "--for",
        dest="seconds",
        type=duration,
        default="15s",
        metavar="DURATION",
        help="how long to watch; with less time, conditions that normally need a minute are judged earlier",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a report")
    parser.add_argument(
        "--what-if", action="store_true", help="simulate what each fix would do (see the command whatif)"
    )
    add_flags(parser)


def run(options: argparse.Namespace, config: Config) -> int:
    """Watch, print the report, and return the exit status for monitoring.

    Raises:
        UsageError: the configuration names several servers.
    """
    only_target(config, "check")
    logging.getLogger().setLevel(logging.ERROR)  # the report has all of it
    progress = StatusLine()
    result = process.run(_watch(config, options.seconds, progress))
    progress.end()
    forecast = _forecast(config, result) if options.what_if else None
    if options.json:
        print(_to_json(config, result, options.seconds, forecast))
    else:
        paint = coloured if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else plain
        print("\n".join(_report(config, result, options.seconds, paint, forecast)))
    return exit_status(result.reading)


def shrink_windows(analysis: AnalysisConfig, seconds: float) -> AnalysisConfig:
    """Return windows that fit into the time that is watched, so that every condition can be judged."""
    longest = max(1.0, _SHARE * seconds)
    return replace(
        analysis,
        hold=0.0,
        queue_window=min(analysis.queue_window, longest),
        stall_after=min(analysis.stall_after, longest),
        deadlock_after=min(analysis.deadlock_after, longest),
        held_after=min(analysis.held_after, longest),
    )


async def _watch(config: Config, seconds: float, progress: Callable[[str], None]) -> CheckResult:
    """Poll the target for some seconds; `progress` gets a line after every poll."""
    target = config.targets[0]
    last: list[TargetReading] = []
    start = process.SYSTEM.monotonic()
    pipeline = Pipeline(
        shrink_windows(config.analysis, seconds), target.facts, config.poll.interval, config.engine.args
    )
    prober = Prober.for_target(target, config.poll)

    def note(outcome: PollOutcome) -> None:
        last[:] = [outcome.reading]
        progress(f"{process.SYSTEM.monotonic() - start:5.1f}s of {seconds:g}s  {headline(outcome.reading)}")

    client = MetricsClient(target, config.poll)
    watcher = Watcher(client, pipeline, Pace(config.poll.interval), note, prober=prober)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(watcher.run(), prober.run())
    await client.close()
    await prober.close()
    return CheckResult(last[0], pipeline.loads()) if last else CheckResult()


def _forecast(config: Config, result: CheckResult) -> WhatIf:
    """Simulate what each fix would do to the engine that preempts most."""
    try:
        name, engine = choose_engine(_status(config, result), None)
        present = present_from_status(engine)
    except (LookupError, PresentError) as problem:
        return str(problem.args[0])
    with progress_bar(sys.stderr) as progress:
        return name, present, worker.forecast_engine(present, config.whatif, progress=progress)


def _status(config: Config, result: CheckResult) -> Mapping[str, Any]:
    now = result.reading.t if result.reading is not None else 0.0
    return status_object(shown_url(config.targets[0].url), result.reading, now, result.loads)


def exit_status(reading: TargetReading | None) -> int:
    """Return 0 for good, 1 for a warning, 2 for critical, 3 for unknown."""
    if reading is None or reading.good_at is None:
        return ExitStatus.UNKNOWN
    judgements = [(reading.judgement.severity, reading.judgement.verdict)]
    judgements += [(each.judgement.severity, each.judgement.verdict) for each in reading.engines.values()]
    severities = [severity for severity, _ in judgements]
    worst = max([*severities, *(model.severity for model in reading.models.values())])
    if worst < Severity.CRITICAL and _UNKNOWN_VERDICTS & {verdict for _, verdict in judgements}:
        return ExitStatus.UNKNOWN
    return _STATUS[worst]


def _to_json(config: Config, result: CheckResult, seconds: float, forecast: WhatIf | None) -> str:
    document = {"seconds": seconds, "exit_status": exit_status(result.reading), **_status(config, result)}
    if isinstance(forecast, str):
        document["what_if"] = {"error": forecast}
    elif forecast is not None:
        document["what_if"] = worker.to_dict(*forecast)
    return json.dumps(document, indent=2, allow_nan=False)


def _report(
    config: Config, result: CheckResult, seconds: float, paint: Paint, forecast: WhatIf | None
) -> list[str]:
    lines = [f"{shown_url(config.targets[0].url)}, watched for {seconds:g} s"]
    if seconds < config.analysis.window:
        usual, here = config.analysis.stall_after, shrink_windows(config.analysis, seconds).stall_after
        lines.append(
            f"Rates cover that time, and conditions that normally need {usual:g} s were judged after"
            f" {here:g} s. Use --for 2m for a more reliable answer."
        )
    if result.reading is None:
        lines.append("No poll ended in that time.")
    else:
        lines += report(result.reading, paint)
    if forecast is not None:
        lines += ["", "What each fix would do, simulated"]
        lines += [f"  {forecast}"] if isinstance(forecast, str) else worker.to_text(*forecast).splitlines()
    return [*lines, "", ACCESS_LOG]
