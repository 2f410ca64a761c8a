"""``simulate run``: one workload on one engine."""

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Final

from exporter.commands._outcome import ExitStatus, UsageError, complain
from exporter.commands._simulation import add_engine_arguments, engine_changes, read_workload
from exporter.config import Config
from exporter.publish.json_text import json_text
from exporter.simulation.arrivals import Arrivals, Burst, ClosedLoop, Poisson, Trace
from exporter.simulation.rng import Rng
from exporter.simulation.run import Result, simulate
from exporter.simulation.settings import Engine
from exporter.simulation.timing import nanoseconds
from exporter.simulation.workload import Request

__all__ = ["add_arguments", "run"]

# Label, field of `Result`, format.
_LINES: Final = (
    ("preemptions", "preemptions", "{}"),
    ("requests preempted at least once", "preempted_requests", "{}"),
    ("requests finished", "finished", "{}"),
    ("requests given up by clients", "aborted", "{}"),
    ("requests refused for their length", "refused", "{}"),
    ("requests left over", "unfinished", "{}"),
    ("requests that can never fit", "unfittable", "{}"),
    ("engine steps with output", "engine_steps", "{}"),
    ("output tokens", "output_tokens", "{}"),
    ("recomputed tokens", "recomputed_tokens", "{}"),
    ("blocks swapped out", "swapped_out", "{}"),
    ("KV peak", "kv_peak_ratio", "{:.1%}"),
    ("KV mean", "kv_mean_ratio", "{:.1%}"),
    ("simulated seconds", "seconds", "{:.2f}"),
    ("output tokens per second", "output_tokens_per_second", "{:.1f}"),
    ("requests running, mean", "running_mean", "{:.2f}"),
    ("requests waiting, mean", "waiting_mean", "{:.2f}"),
    ("queue time, mean seconds", "queue_mean", "{:.3f}"),
    ("time to first token, mean seconds", "ttft_mean", "{:.3f}"),
    ("end to end, median seconds", "e2e_p50", "{:.3f}"),
    ("end to end, p95 seconds", "e2e_p95", "{:.3f}"),
)
_ALWAYS: Final = ("preemptions", "finished")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s --workload FILE --num-gpu-blocks N [OPTION ...]"
    parser.description = "Simulate vLLM V1's scheduler on a paged KV pool, step by step, for one workload."
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        required=True,
        metavar="FILE",
        help='requests: JSON {"requests": [{"prompt_tokens": .., "output_tokens": ..}, ..]}, or a trace as '
        "CSV with the columns arrival (seconds), prompt_tokens, output_tokens",
    )
    group.add_argument(
        "--arrivals",
        choices=("burst", "closed", "poisson", "trace"),
        default="burst",
        metavar="burst|closed|poisson|trace",
        help="all at once; a closed loop of --clients; at random times, --rate per second; or "
        "at the times in the file",
    )
    group.add_argument("--clients", type=int, default=32, metavar="N", help="clients of the closed loop")
    group.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals: requests per second")
    group.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="closed loop: time from an answer to the client's next request",
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="SECONDS",
        help="closed and Poisson arrivals: repeat the requests of the file for this long",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the Poisson arrivals")
    add_engine_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    shown = "print only these fields of the JSON object, one per line"
    form.add_argument("--show", type=_fields, metavar="FIELD[,FIELD]", help=shown)


def _fields(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    known = [field.name for field in fields(Result)]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}; got {unknown[0]!r}")
    return names


def run(options: argparse.Namespace, _config: Config) -> int:
    """Simulate, and print the result."""
    try:
        engine = Engine(**engine_changes(options))
        result = simulate(engine, _arrivals(options, read_workload(options.workload)))
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
    if options.json:
        print(json_text(asdict(result)))
    else:
        print("\n".join(_chosen(options.show, result) if options.show else _summary(result)))
    if result.stuck:
        complain(f"the engine is stuck: {result.stuck}")
    return ExitStatus.OK


def _arrivals(options: argparse.Namespace, requests: Sequence[Request]) -> Arrivals:
    """Build the arrivals; raises ValueError where flags or requests do not fit their kind."""
    end = None if options.duration is None else nanoseconds(options.duration)
    source: Iterable[Request] = requests
    if end is not None:  # again and again, each with a number of its own
        source = (replace(request, id=number) for number, request in enumerate(itertools.cycle(requests)))
    if options.arrivals == "closed":
        return ClosedLoop(source, options.clients, end, nanoseconds(options.pause))
    if options.arrivals == "poisson":
        if options.rate is None:
            raise ValueError("--arrivals poisson needs --rate, requests per second")
        return Poisson(source, options.rate, Rng(options.seed), end)
    if end is not None:
        raise ValueError(f"--duration needs arrivals closed or poisson, got {options.arrivals}")
    if options.arrivals == "burst":
        return Burst(requests)
    missing = [request.id for request in requests if request.arrival is None]
    if missing:
        raise ValueError(
            f"--arrivals trace needs an arrival time for every request; request {missing[0]} has none"
        )
    return Trace(sorted(requests, key=lambda request: (request.arrival or 0, request.id)))


def _chosen(names: Sequence[str], result: Result) -> Iterator[str]:
    width = max(map(len, names)) + 2
    for name in names:
        value = getattr(result, name)
        yield f"{name:<{width}}{f'{value:.2f}' if isinstance(value, float) else value}"


def _summary(result: Result) -> Iterator[str]:
    """The result for people; a line that would show 0 of some trouble is left out."""
    for label, name, form in _LINES:
        value = getattr(result, name)
        if value is not None and (value or name in _ALWAYS):
            yield f"{label:<36}{form.format(value)}"
