"""``check``: poll one server for some seconds, then report what is wrong and what to change."""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from exporter.analysis.catalogue import Severity
from exporter.analysis.engine import EngineReading
from exporter.analysis.forecast import EngineForecast
from exporter.analysis.forecast_policy import ForecastPolicy, too_little
from exporter.analysis.pipeline import Pipeline, TargetReading
from exporter.commands._diagnosis import explain_error, explain_page
from exporter.commands._forecasts import forecast_due
from exporter.commands._options import ACCESS_LOG, POLLING, add_for, add_url, only_target
from exporter.commands._outcome import ExitStatus
from exporter.commands._progress import StatusLine, progress_bar
from exporter.config import AnalysisConfig, Config, add_flags
from exporter.net.urls import shown_url
from exporter.publish.inert import inert_lines
from exporter.publish.json_text import json_text
from exporter.publish.status import choose_engine, status_object, verdicts
from exporter.publish.terminal import coloured, headline, plain, report
from exporter.runtime import process
from exporter.runtime.pace import Pace
from exporter.runtime.poller import PollOutcome, Watcher
from exporter.simulation import worker
from exporter.simulation.from_status import Present, PresentError, present_from_status
from exporter.simulation.whatif import Forecast
from exporter.vllm.client import MetricsClient
from exporter.vllm.prober import Prober

__all__ = ["add_arguments", "exit_status", "run", "shrink_windows"]

_STATUS: Final = {Severity.NONE: 0, Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
_UNKNOWN_VERDICTS: Final = frozenset({"metrics_missing", "data_untrusted", "starting"})
# Conditions that must last for some time get this share of the time that is watched.
_SHARE: Final = 0.75
# This number of preemptions, and this number per finished request, look like a storm.
_STORM_LEAST: Final = 5
_STORM_RATIO: Final = 0.3

# The engine's name, the engine and its forecast; or why there is none.
WhatIf = tuple[str, Present, Forecast] | str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [URL] [--for 15s] [--json] [OPTION ...]"
    parser.epilog = f"exit status: 0 good, 1 warning, 2 critical, 3 unknown or bad usage\n{ACCESS_LOG}"
    add_url(parser)
    early = "with less time, conditions that normally need a minute are judged earlier"
    add_for(parser, f"how long to watch; {early}", default="15s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a report")
    parser.add_argument(
        "--what-if", action="store_true", help="simulate what each fix would do (see the command whatif)"
    )
    add_flags(parser, POLLING)


def run(options: argparse.Namespace, config: Config) -> int:
    """Watch, print the report, and return the exit status for monitoring."""
    only_target(config, "check")
    logging.getLogger().setLevel(logging.ERROR)  # the report has all of it
    progress = StatusLine()
    last, pipeline = process.run(_watch(config, options.seconds, progress))
    progress.end()
    last = last and _with_forecasts(last, pipeline, config)
    reading, reason = (last.reading, _reason(last)) if last is not None else (None, None)
    grade = exit_status(reading, short=options.seconds < config.analysis.window)
    status = status_object(
        shown_url(config.targets[0].url), reading, reading.t if reading else 0.0, pipeline.loads()
    )
    forecast = _forecast(config, status) if options.what_if else None
    if options.json:
        document = {"seconds": options.seconds, "exit_status": grade, **status}
        if reason is not None:
            document["cause"], document["next_step"] = reason
        if isinstance(forecast, str):
            document["what_if"] = {"error": forecast}
        elif forecast is not None:
            document["what_if"] = worker.to_dict(*forecast)
        print(json_text(document, indent=2))
    else:
        print("\n".join(_report(config, reading, reason, options.seconds, forecast)))
    return grade


def shrink_windows(analysis: AnalysisConfig, seconds: float) -> AnalysisConfig:
    """Return windows that fit into the time that is watched, so that every condition can be judged."""
    longest = max(1.0, _SHARE * seconds)
    lasting = ("queue_window", "stall_after", "deadlock_after", "held_after")
    shorter = {name: min(getattr(analysis, name), longest) for name in lasting}
    return replace(analysis, hold=0.0, startup_grace=0.0, **shorter)  # no grace: the question is what is now


async def _watch(
    config: Config, seconds: float, progress: Callable[[str], None]
) -> tuple[PollOutcome | None, Pipeline]:
    """Return the last poll, None where none ended, and the pipeline; `progress` gets a line a poll."""
    target = config.targets[0]
    last: PollOutcome | None = None
    start = process.SYSTEM.monotonic()
    analysis = shrink_windows(config.analysis, seconds)
    facts = {
        name: value for name, value in config.facts_of(target).items() if name != "startup_grace_seconds"
    }
    pipeline = Pipeline(analysis, facts, config.poll.interval, config.engine.args)
    prober = Prober.for_target(target, config.poll)

    def note(outcome: PollOutcome) -> None:
        nonlocal last
        last = outcome
        progress(f"{process.SYSTEM.monotonic() - start:5.1f}s of {seconds:g}s  {headline(last.reading)}")

    client = MetricsClient(target, config.poll)
    watcher = Watcher(client, pipeline, Pace(config.poll.interval), note, prober=prober)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(watcher.run(), prober.run())
    await client.close()
    await prober.close()
    return last, pipeline


def _with_forecasts(last: PollOutcome, pipeline: Pipeline, config: Config) -> PollOutcome:
    """Simulate the load of each engine in trouble, and rank its fixes by that."""
    with progress_bar(sys.stderr) as progress:
        for key in last.reading.engines:
            if too_little(load := pipeline.load(key)):
                pipeline.set_forecast(key, EngineForecast.none(last.reading.t, too_little(load)))
        forecast_due(last.reading.t, last.reading, pipeline, ForecastPolicy(), config.whatif, progress)
    return replace(last, reading=pipeline.reconsidered(last.reading))


def _reason(last: PollOutcome) -> tuple[str, str] | None:
    """Return why the last poll brought no engine, and the next step."""
    if last.reading.up and last.reading.engines:
        return None
    page = explain_page(last.answer.body)
    if page is not None or last.reading.error is None:
        return page
    return explain_error(last.reading.error)


def _forecast(config: Config, status: Mapping[str, Any]) -> WhatIf:
    """Simulate what each fix would do to the engine that preempts most."""
    try:
        name, engine = choose_engine(status, None)
        present = present_from_status(engine)
    except (LookupError, PresentError) as problem:
        return str(problem.args[0])
    with progress_bar(sys.stderr) as progress:
        return name, present, worker.forecast_engine(present, config.whatif, progress=progress)


def exit_status(reading: TargetReading | None, *, short: bool = False) -> int:
    """Return 0 for good, 1 for a warning, 2 for critical, 3 for unknown.

    Args:
        reading: the last one.
        short: whether it covers less than a full window: then what looks like a storm is a warning.
    """
    if reading is None or reading.good_at is None:
        return ExitStatus.UNKNOWN
    worst = reading.severity
    if worst < Severity.CRITICAL and _UNKNOWN_VERDICTS & {verdict for _, verdict in verdicts(reading)}:
        return ExitStatus.UNKNOWN
    if short and any(map(_like_a_storm, reading.engines.values())):
        worst = max(worst, Severity.WARNING)
    return _STATUS[worst]


def _like_a_storm(engine: EngineReading) -> bool:
    """Whether preemptions are many per finished request, and too few seconds were seen to know their harm."""
    if engine.judgement.verdict not in {"preemption_light", "kv_bound", "preemption_thrash"}:
        return False
    seen = engine.signals
    counted, ratio = seen.preemptions_total or 0.0, seen.preemptions_per_finished_request
    return counted >= _STORM_LEAST and (ratio is None or ratio >= _STORM_RATIO)


def _report(
    config: Config,
    reading: TargetReading | None,
    reason: tuple[str, str] | None,
    seconds: float,
    forecast: WhatIf | None,
) -> list[str]:
    lines = [f"{shown_url(config.targets[0].url)}, watched for {seconds:g} s"]
    if seconds < config.analysis.window:
        usual, here = config.analysis.stall_after, shrink_windows(config.analysis, seconds).stall_after
        lines.append(
            f"Rates cover that time, and conditions that normally need {usual:g} s were judged after"
            f" {here:g} s. Use --for 2m for a more reliable answer."
        )
    if reading is None:
        lines.append("No poll ended in that time.")
    else:
        lines += report(
            reading, coloured if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else plain
        )
        if seconds < config.analysis.window and any(map(_like_a_storm, reading.engines.values())):
            lines.append("This looks like a storm of preemptions. Use --for 2m to see what harm it does.")
    lines += [f"  {line}" for line in reason or ()]
    if forecast is not None:
        lines += ["", "What each fix would do, simulated"]
        text = f"  {forecast}" if isinstance(forecast, str) else worker.to_text(*forecast)
        lines.append(inert_lines(text.rstrip("\n")))
    answered = reading is not None and reading.good_at is not None
    return [*lines, "", ACCESS_LOG] if answered else lines
