"""``whatif``: what each fix would do to a load, wherever that is known from."""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO
from urllib.parse import urlsplit

from exporter.commands import replay
from exporter.commands.simulate import add_engine_arguments, engine_changes, read_workload
from exporter.config import Config
from exporter.net.urls import shown_url
from exporter.publish.status import choose_engine, status_object
from exporter.simulation.from_status import Present, PresentError, asked, present_of, settings
from exporter.simulation.load import Load
from exporter.simulation.settings import Engine
from exporter.simulation.whatif import horizon
from exporter.simulation.worker import as_object, as_text, foretell
from exporter.simulation.workload import Lengths, Request

__all__ = ["add_arguments", "progress_bar", "run"]

_HERE: Final = "http://127.0.0.1:21900"
_STATUS: Final = "api/v1/status"
_SECONDS: Final = 10.0
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``whatif`` takes beside the options of all commands."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="a running exporter's URL, a recording, a trace (.csv) or workload (.json); without it, and "
        f"without --rate or --clients, {_HERE}",
    )
    parser.add_argument("--engine", metavar="NAME", help="which engine (default: the one that preempts most)")
    parser.add_argument(
        "--at", type=float, metavar="SECONDS", help="moment of a recording (default: the worst one)"
    )
    parser.add_argument(
        "--try",
        dest="tried",
        action="append",
        default=[],
        metavar="COMBINATION",
        help="a combination to try too, such as seats=64+watermark=0.05 or pool=x1.5+replicas=x2",
    )
    parser.add_argument("--duration", type=float, metavar="SECONDS", help="simulated time that is measured")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    group = parser.add_argument_group("load", "For a load that no server shows; lengths are N or LEAST-MOST.")
    group.add_argument("--rate", type=float, metavar="R", help="requests per second, at random times")
    group.add_argument("--clients", type=int, metavar="N", help="requests in flight, the next when one ends")
    group.add_argument("--prompt-tokens", type=_lengths, metavar="RANGE", help="lengths of the prompts")
    group.add_argument("--output-tokens", type=_lengths, metavar="RANGE", help="lengths of the answers")
    group.add_argument(
        "--prefix-tokens", type=int, default=0, metavar="N", help="tokens that all prompts share"
    )
    group.add_argument(
        "--observed",
        type=float,
        metavar="N",
        help="preemptions per minute of the real server: shows whether to trust the forecast",
    )
    add_engine_arguments(parser, known=True)


def _lengths(text: str) -> Lengths:
    found = _RANGE.fullmatch(text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"wanted N or LEAST-MOST tokens, got {text!r}")
    return Lengths.between(least, most)


def run(options: argparse.Namespace, config: Config, *, out: TextIO, err: TextIO) -> None:
    """Print the forecast.

    Raises:
        ValueError: the source is not there, or does not tell enough; the message says what is missing.
    """
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs: wanted at least 1, got {options.jobs}")
    name, present = _present(options, config)
    if options.observed is not None:
        present = replace(present, per_minute=options.observed)
    span = None
    if options.duration is not None:
        if not options.duration > 0:
            raise ValueError(f"--duration: wanted seconds above 0, got {options.duration:g}")
        span = horizon(present.load, present.engine)[0], options.duration
    with progress_bar(err) as progress:
        result = foretell(
            present, config.whatif, tried=options.tried, span=span, jobs=options.jobs, progress=progress
        )
    if options.json:
        json.dump(as_object(name, present, result), out, indent=2, allow_nan=False)
        out.write("\n")
    else:
        out.write(as_text(name, present, result))


def _present(options: argparse.Namespace, config: Config) -> tuple[str, Present]:
    source = options.source
    if source is None and (options.rate is not None or options.clients is not None):
        return "", _described(options, ())
    if source is None or source.startswith(("http://", "https://")):
        return _of_exporter(source or _HERE, options)
    if source.endswith((".csv", ".json")):
        return "", _described(options, read_workload(source))
    return _read(_of_recording(Path(source), options, config), options)


def _read(target: Mapping[str, Any], options: argparse.Namespace) -> tuple[str, Present]:
    try:
        name, engine = choose_engine(target, options.engine)
    except LookupError as problem:
        raise PresentError(problem.args[0]) from problem
    told = engine_changes(options)
    present = present_of(engine, told)
    if told.get("recovery") == "swap" and "swap_blocks" not in told:
        present = replace(present, engine=replace(present.engine, swap_blocks=present.engine.num_gpu_blocks))
    return name, present


def _of_exporter(url: str, options: argparse.Namespace) -> tuple[str, Present]:
    import requests  # noqa: PLC0415 -- the other sources need none

    parts = urlsplit(url)
    path = parts.path if parts.path.endswith(_STATUS) else f"{parts.path.rstrip('/')}/{_STATUS}"
    where = parts._replace(path=path, fragment="").geturl()
    shown = shown_url(where)
    try:
        answer = requests.get(where, timeout=_SECONDS)
        answer.raise_for_status()
        targets = answer.json()["targets"]
        target = targets[0]
    except (requests.RequestException, ValueError, LookupError, TypeError) as problem:
        why = "refused" if isinstance(problem, requests.ConnectionError) else "no answer of an exporter"
        raise PresentError(
            f"{shown}: {why}; wanted a running exporter (for a vLLM server use check --what-if)"
        ) from problem
    if len(targets) > 1:
        raise PresentError(
            f"{shown}: watches {len(targets)} servers; expected one of them, ?target=HOST:PORT"
        )
    return _read(target, options)


def _of_recording(path: Path, options: argparse.Namespace, config: Config) -> Mapping[str, Any]:
    """The target's status at the moment that was asked for, or when most was preempted."""
    worst: tuple[float, float] = (-1.0, -1.0)
    status: Mapping[str, Any] | None = None
    for t, reading, pipeline in replay.feeds(path, config):
        if options.at is not None:
            if t > options.at and status is not None:
                break
            weight = (0.0, t)
        else:
            signals = [engine.signals for engine in reading.engines.values()]
            weight = (
                max((each.preemptions_per_second or 0.0 for each in signals), default=0.0),
                sum((each.requests_running or 0.0) + (each.requests_waiting or 0.0) for each in signals),
            )
        if reading.up and weight >= worst:
            loads = pipeline.loads()
            if loads:
                worst, status = weight, status_object(str(path), reading, reading.t, loads)
    if status is None:
        raise PresentError(f"{path}: no engine at work in it")
    return status


def _described(options: argparse.Namespace, requests_told: tuple[Request, ...]) -> Present:
    """A load and an engine by flags, or by a file of requests."""
    if "num_gpu_blocks" not in vars(options):
        raise PresentError("wanted --num-gpu-blocks: no server tells how large the pool is")
    engine = Engine(**engine_changes(options))
    load = _load_of(options, requests_told)
    return Present(load, engine, None, (), f"{asked(load)}; {settings(engine)}")


def _load_of(options: argparse.Namespace, told: tuple[Request, ...]) -> Load:
    if told and options.rate is None and options.clients is None:
        if any(each.arrival is None for each in told):
            raise PresentError("the requests have no arrival times: wanted --rate or --clients")
        return Load(trace=told)
    if told:
        prompts = Lengths(tuple((each.prompt_tokens, each.prompt_tokens, 1) for each in told))
        outputs = Lengths(tuple((each.output_tokens, each.output_tokens, 1) for each in told))
    elif options.prompt_tokens is None or options.output_tokens is None:
        raise PresentError("wanted --prompt-tokens and --output-tokens, such as 50-400")
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


@contextmanager
def progress_bar(stream: TextIO) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, by tqdm where it is installed; silence elsewhere."""
    if not stream.isatty():
        yield None
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 -- an optional extra
    except ImportError:

        def line(done: int, total: int) -> None:
            print(f"\r\x1b[K{done} of {total} runs", end="", file=stream, flush=True)

        yield line
        print("\r\x1b[K", end="", file=stream, flush=True)
        return
    with tqdm(desc="simulating", unit="run", file=stream, leave=False, dynamic_ncols=True) as bar:

        def note(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield note
