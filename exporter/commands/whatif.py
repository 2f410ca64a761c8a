"""``whatif``: simulate what each fix would do to a load, whatever source describes the load."""

import argparse
import re
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import requests

from exporter.analysis.forecast_policy import too_little
from exporter.commands._options import only_target
from exporter.commands._outcome import CommandError, ExitStatus, UsageError
from exporter.commands._progress import progress_bar
from exporter.commands._simulation import add_engine_arguments, engine_changes, read_workload
from exporter.commands._timeline import feed_recording
from exporter.config import Config, add_flags
from exporter.net.urls import shown_url
from exporter.publish.inert import inert_lines
from exporter.publish.json_text import json_text
from exporter.publish.status import choose_engine, status_object
from exporter.simulation import worker
from exporter.simulation.calibration import Observed
from exporter.simulation.from_status import (
    Present,
    PresentError,
    describe_engine,
    describe_load,
    present_from_status,
)
from exporter.simulation.load import Load
from exporter.simulation.settings import Engine
from exporter.simulation.whatif import horizon
from exporter.simulation.workload import Lengths, Request, WorkloadError
from exporter.vllm.recording import RecordingError

__all__ = ["add_arguments", "run"]

_HERE: Final = "http://127.0.0.1:21900"
_STATUS: Final = "api/v1/status"
_TIMEOUT: Final = 10.0
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [SOURCE] [--json] [OPTION ...]"
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="a running exporter's URL, a recording, a trace (.csv) or a workload (.json); default, without "
        f"--rate or --clients: {_HERE}",
    )
    parser.add_argument("--engine", metavar="NAME", help="engine (default: the one that preempts most)")
    parser.add_argument(
        "--at", type=float, metavar="SECONDS", help="time in a recording (default: the worst moment)"
    )
    parser.add_argument(
        "--try",
        dest="tried",
        action="append",
        default=[],
        metavar="COMBINATION",
        help="also try this combination, such as seats=64+watermark=0.05 or pool=x1.5+replicas=x2; may be "
        "repeated",
    )
    parser.add_argument("--duration", type=float, metavar="SECONDS", help="simulated time to measure")
    parser.add_argument("--jobs", type=int, metavar="N", help="number of processes (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    _add_load(parser)
    add_engine_arguments(parser, known=True)
    add_flags(parser, ("engine.args", "whatif.seeds", "whatif.time_limit"))


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load", "Describes a load without a source; RANGE is N or LEAST-MOST.")
    group.add_argument("--rate", type=float, metavar="R", help="requests per second, at random times")
    group.add_argument(
        "--clients", type=int, metavar="N", help="requests in flight: each client sends one after the other"
    )
    group.add_argument("--prompt-tokens", type=_lengths, metavar="RANGE", help="lengths of the prompts")
    group.add_argument("--output-tokens", type=_lengths, metavar="RANGE", help="lengths of the answers")
    group.add_argument(
        "--prefix-tokens", type=int, default=0, metavar="N", help="tokens that all prompts share"
    )
    group.add_argument(
        "--observed",
        type=float,
        metavar="N",
        help="preemptions per minute of the real server, to check the simulation against",
    )


def _lengths(text: str) -> Lengths:
    match = _RANGE.fullmatch(text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"expected N or LEAST-MOST tokens, got {text!r}")
    return Lengths.between(least, most)


def run(options: argparse.Namespace, config: Config) -> int:
    """Print the forecast."""
    if options.source is None and options.rate is None and options.clients is None:
        only_target(config, "whatif", "http://EXPORTER:21900/?target=HOST:PORT")
    try:
        name, present = _present(options, config)
        print(_forecast(options, config, name, present))
    except (PresentError, RecordingError, WorkloadError) as problem:
        raise CommandError(str(problem)) from problem
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
    return ExitStatus.OK


def _forecast(options: argparse.Namespace, config: Config, name: str, present: Present) -> str:
    """Simulate, and return the table or the JSON."""
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs: expected at least 1, got {options.jobs}")
    if options.observed is not None:
        present = replace(present, observed=Observed({"preemptions_per_minute": options.observed}))
    span = None
    if options.duration is not None:
        if not options.duration > 0:
            raise ValueError(f"--duration: expected seconds above 0, got {options.duration:g}")
        span = horizon(present.load, present.engine)[0], options.duration
    with progress_bar(sys.stderr) as progress:
        result = worker.forecast_engine(
            present,
            config.whatif,
            tried=options.tried,
            span=span,
            jobs=options.jobs,
            progress=progress,
        )
    if options.json:
        return json_text(worker.to_dict(name, present, result), indent=2)
    return inert_lines(worker.to_text(name, present, result).rstrip("\n"))


def _present(options: argparse.Namespace, config: Config) -> tuple[str, Present]:
    """The engine's name, empty where the source has none, and the engine as the source describes it."""
    source = options.source
    if source is None and (options.rate is not None or options.clients is not None):
        return "", _described(options, ())
    if source is None or source.startswith(("http://", "https://")):
        return _read_answer(source or _HERE, options)
    if source.endswith((".csv", ".json")):
        return "", _described(options, read_workload(source))
    return _choose(_status_of_recording(Path(source), options.at, config), options)


def _read_answer(url: str, options: argparse.Namespace) -> tuple[str, Present]:
    """Read the status of a running exporter, or of whatever answers in its place."""
    target = _status_of_exporter(url)
    try:
        return _choose(target, options)
    except PresentError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise PresentError(
            f"{shown_url(url)}: the answer is not the status of an exporter: {problem}"
        ) from problem


def _choose(target: Mapping[str, Any], options: argparse.Namespace) -> tuple[str, Present]:
    """Choose the engine in the status of its target, and change it as the flags say."""
    try:
        name, engine = choose_engine(target, options.engine)
    except LookupError as problem:
        raise PresentError(problem.args[0]) from problem
    changes = engine_changes(options)
    present = present_from_status(engine, changes)
    if changes.get("recovery") == "swap" and "swap_blocks" not in changes:
        present = replace(present, engine=replace(present.engine, swap_blocks=present.engine.num_gpu_blocks))
    return name, present


def _status_of_exporter(url: str) -> Mapping[str, Any]:
    parts = urlsplit(url)
    path = parts.path if parts.path.endswith(_STATUS) else f"{parts.path.rstrip('/')}/{_STATUS}"
    url = parts._replace(path=path, fragment="").geturl()
    shown = shown_url(url)
    try:
        answer = requests.get(url, timeout=_TIMEOUT)
        answer.raise_for_status()
        targets = answer.json()["targets"]
        target: Mapping[str, Any] = targets[0]
    except (requests.RequestException, ValueError, LookupError, TypeError) as problem:
        cause = "refused" if isinstance(problem, requests.ConnectionError) else "not the API of an exporter"
        expected = "expected a running exporter (for a vLLM server use check --what-if)"
        raise PresentError(f"{shown}: {cause}; {expected}") from problem
    if len(targets) > 1:
        raise PresentError(f"{shown}: polls {len(targets)} servers; expected one of them, ?target=HOST:PORT")
    return target


def _status_of_recording(path: Path, at: float | None, config: Config) -> Mapping[str, Any]:
    """Return the target's status at a time in seconds, or (None) when most was preempted.

    A rate over a second or two proves little: the worst moment has a full window before it, or half a window
    in shorter recordings.
    """
    window = config.analysis.window
    worst: tuple[float, ...] = (False,)
    status: Mapping[str, Any] | None = None
    recent: deque[tuple[float, float]] = deque()
    for t, reading, pipeline in feed_recording(path, config):
        if at is not None and t > at and status is not None:
            break
        signals = [engine.signals for engine in reading.engines.values()]
        preemptions = max((each.preemptions_per_second or 0.0 for each in signals), default=0.0)
        recent.append(
            (t, sum((each.requests_running or 0.0) + (each.requests_waiting or 0.0) for each in signals))
        )
        while recent[0][0] < t - window:
            recent.popleft()
        # The last half counts first: the profile leaves out another load before it.
        halves = [[held for at_, held in recent if at_ > t - span] for span in (window / 2, window)]
        in_flight = [sum(half) / len(half) for half in halves]
        weight = (t >= window, min(t, window / 2), preemptions, *in_flight) if at is None else (t,)
        if not reading.up or (weight < worst[1:] and worst[0]) or not (loads := pipeline.loads()):
            continue
        # A load that has just begun is no basis, whatever came before it.
        full = at is not None or any(not too_little(load) for load in loads.values())
        if (full, *weight) >= worst:
            worst, status = (full, *weight), status_object(str(path), reading, reading.t, loads)
    if status is None:
        raise PresentError(f"{path}: no engine at work in it")
    return status


def _described(options: argparse.Namespace, given: tuple[Request, ...]) -> Present:
    """Return the load and the engine that flags describe, or flags and a file of requests."""
    if "num_gpu_blocks" not in vars(options):
        raise PresentError("missing --num-gpu-blocks: without a server the size of the pool is unknown")
    engine, load = Engine(**engine_changes(options)), _load(options, given)
    return Present(load, engine, sentence=f"{describe_load(load)}; {describe_engine(engine)}")


def _load(options: argparse.Namespace, given: tuple[Request, ...]) -> Load:
    if given and options.rate is None and options.clients is None:
        if any(request.arrival is None for request in given):
            raise PresentError("the requests have no arrival times: pass --rate or --clients")
        return Load(trace=given)
    if given:
        prompts = Lengths(tuple((request.prompt_tokens, request.prompt_tokens, 1) for request in given))
        outputs = Lengths(tuple((request.output_tokens, request.output_tokens, 1) for request in given))
    elif options.prompt_tokens is None or options.output_tokens is None:
        raise PresentError("missing --prompt-tokens and --output-tokens, such as 50-400")
    else:
        prompts, outputs = options.prompt_tokens, options.output_tokens
    return Load(
        prompts,
        outputs,
        rate=options.rate,
        clients=options.clients,
        prefixes=1 if options.prefix_tokens else 0,
        prefix_tokens=options.prefix_tokens,
    )
