"""``simulate``: one workload on one engine, real runs against simulated ones, a fake server."""

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from exporter.simulation.arrivals import Arrivals, Burst, Closed, Poisson, Timed
from exporter.simulation.rng import Dice
from exporter.simulation.run import Result, simulate
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime, nanoseconds
from exporter.simulation.workload import Request, WorkloadError, parse_trace, parse_workload

__all__ = [
    "add_arguments",
    "add_engine_arguments",
    "add_workload_arguments",
    "engine_changes",
    "read_workload",
    "run",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``simulate`` takes."""
    commands = parser.add_subparsers(
        dest="simulate_command", required=True, metavar="run|compare|serve", prog=parser.prog
    )
    run_parser = commands.add_parser(
        "run",
        help="simulate one workload on one engine and print what came of it",
        description="Simulate vLLM V1's scheduler on a paged KV pool, step by step, for one workload.",
    )
    add_workload_arguments(run_parser)
    add_engine_arguments(run_parser)
    shape = run_parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument(
        "--show",
        type=_fields,
        metavar="FIELD[,FIELD]",
        help="print only these fields of the JSON object, a line each",
    )
    _add_compare(commands.add_parser("compare", help="hold the simulation against runs of real servers"))
    _add_serve(commands.add_parser("serve", help="serve simulated vLLMs: /metrics and what goes with it"))


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Simulate every run of a CSV with the columns mode (burst, or closed: 32 at a time), num_gpu_blocks, "
        "block_size, max_num_seqs, watermark, preemptions, engine_steps, output_tokens, peak_kv_usage, and "
        "print what was counted beside what is simulated, as a Markdown table."
    )
    parser.add_argument("runs", metavar="RUNS.csv", help="one real run a row")
    parser.add_argument("--workload", required=True, metavar="FILE", help="the requests of all of them")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from exporter.standin.scenarios import SCENARIOS  # noqa: PLC0415 -- `run` needs none

    parser.description = "Serve simulated vLLMs in real time, for dashboards, rules and load tests."
    parser.add_argument("--list", action="store_true", help="only tell which scenarios there are")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="servers, on N ports in a row")
    parser.add_argument(
        "--port", type=int, default=8000, help="of the first one (default: 8000; 0: any free ones)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--scenario",
        choices=tuple(SCENARIOS),
        default="day",
        metavar="NAME",
        help=f"{', '.join(SCENARIOS)} (default: day)",
    )
    parser.add_argument(
        "--vllm-version",
        choices=("0.26.0", "0.32.0"),
        default="0.32.0",
        help="whose metrics page it looks like (default: 0.32.0)",
    )
    parser.add_argument("--model", default="simulated-8b", help="its model's name (default: simulated-8b)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals; each server has its own")


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is asked of the engine, and when."""
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
        help="all at once; a closed loop of --clients; at random, --rate a second; or at the times in the "
        "file (default: burst)",
    )
    group.add_argument("--clients", type=int, default=32, help="clients of the closed loop (default: 32)")
    group.add_argument("--rate", type=float, help="requests per second of the Poisson arrivals")
    group.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="closed loop: time from an answer to the client's next request (default: 0)",
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="SECONDS",
        help="go through the file's requests again and again, for closed and Poisson arrivals, for so long",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of the Poisson arrivals (default: 0)")


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag for a field of `Engine`; a flag with a `value` takes none."""

    flag: str
    field: str
    help: str
    kind: type[int] | type[float] = int
    choices: tuple[str, ...] = ()
    value: bool | None = None


# Named as vLLM's own where vLLM has them.
_ENGINE: Final = (
    _Flag("--num-gpu-blocks", "num_gpu_blocks", "blocks of the pool, null block included"),
    _Flag("--block-size", "block_size", "tokens a block holds"),
    _Flag("--max-num-seqs", "max_num_seqs", "seats"),
    _Flag("--max-num-batched-tokens", "max_num_batched_tokens", "tokens of a step at most"),
    _Flag("--max-model-len", "max_model_len", "longest sequence in tokens"),
    _Flag("--watermark", "watermark", "share of the pool kept free at admission", float),
    _Flag("--no-prefix-caching", "enable_prefix_caching", "freed blocks are forgotten at once", value=False),
    _Flag(
        "--no-full-prompt-reservation",
        "reserve_full_prompt",
        "admit a request as soon as its first chunk fits (vLLM before 0.19)",
        value=False,
    ),
    _Flag("--no-chunked-prefill", "enable_chunked_prefill", "compute a prompt in one step", value=False),
    _Flag("--policy", "policy", "who waits, and who is preempted", choices=("fcfs", "priority")),
    _Flag(
        "--async-scheduling",
        "async_scheduling",
        "schedule each step before the last one's output is known (vLLM's default on GPUs since 0.14)",
        value=True,
    ),
    _Flag(
        "--recovery",
        "recovery",
        "what becomes of a victim: computed again (V1), or copied to host memory and back",
        choices=("recompute", "swap"),
    ),
    _Flag("--swap-blocks", "swap_blocks", "size of the swap space (default: as large as the pool)"),
)
# Flag, field of `StepTime`, nanoseconds of its unit.
_TIMES: Final = (
    ("--step-fixed-ms", "fixed", 1e6, "time of any step"),
    ("--step-token-us", "per_token", 1e3, "time per scheduled token"),
    ("--step-sequence-us", "per_sequence", 1e3, "time per scheduled request"),
    ("--swap-block-us", "per_swapped_block", 1e3, "time to copy one block over PCIe, one way"),
)
_DEFAULTS: Final = {each.name: each.default for each in fields(Engine)}


def add_engine_arguments(parser: argparse.ArgumentParser, *, known: bool = False) -> None:
    """Add the flags that describe the engine.

    Args:
        parser: gets them.
        known: whether another source knows the engine, so that flags only say what it has wrong.
    """
    group = parser.add_argument_group(
        "engine", "What is given here counts before what the server tells." if known else None
    )
    for row in _ENGINE:
        default = _DEFAULTS[row.field]
        shown = "" if known or row.value is not None or "default" in row.help else f" (default: {default})"
        more: dict[str, Any] = {"dest": row.field, "default": argparse.SUPPRESS}
        if row.value is not None:
            group.add_argument(row.flag, action="store_const", const=row.value, help=row.help, **more)
        elif row.field == "num_gpu_blocks":
            group.add_argument(row.flag, type=int, required=not known, help=row.help, **more)
        elif row.choices:
            group.add_argument(row.flag, choices=row.choices, help=row.help + shown, **more)
        else:
            group.add_argument(row.flag, type=row.kind, help=row.help + shown.replace("None", "none"), **more)
    shape = StepTime()
    for flag, name, unit, text in _TIMES:
        shown = "" if known else f" (default: {getattr(shape, name) / unit:g})"
        group.add_argument(flag, type=float, dest=name, default=argparse.SUPPRESS, help=text + shown)


def engine_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Engine` that flags were given for.

    Raises:
        ValueError: a time is no time.
    """
    given = vars(args)
    changes = {row.field: given[row.field] for row in _ENGINE if row.field in given}
    times = {}
    for flag, name, unit, _ in _TIMES:
        if name in given:
            times[name] = given[name] * unit
            if not 0 <= times[name] < 1e15:  # noqa: PLR2004 -- also refuses NaN and infinity
                raise ValueError(f"{flag}: wanted a time of at least 0, got {times[name]}")
    if times:
        changes["step_time"] = replace(StepTime(), **{name: round(value) for name, value in times.items()})
    if changes.get("recovery") == "swap" and "num_gpu_blocks" in changes:
        changes.setdefault("swap_blocks", changes["num_gpu_blocks"])
    return changes


def run(args: argparse.Namespace) -> int:
    """Carry out a command; returns the exit code (2: the arguments or a file are no good)."""
    what = _COMMANDS[args.simulate_command]
    try:
        return what(args)
    except ValueError as error:
        sys.stderr.write(f"simulate {args.simulate_command}: {error}\n")
        return 2


def _run(args: argparse.Namespace) -> int:
    engine = Engine(**engine_changes(args))
    arrivals = arrivals_of(args, read_workload(args.workload))
    result = simulate(engine, arrivals)
    if args.json:
        json.dump(result.as_dict(), sys.stdout)
        sys.stdout.write("\n")
    elif args.show:
        _write_fields(args.show, result, sys.stdout)
    else:
        write_text(result, sys.stdout)
    if result.stuck:
        sys.stderr.write(f"simulate run: the engine is stuck: {result.stuck}\n")
    return 0


def _fields(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    known = [each.name for each in fields(Result)]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"wanted some of {', '.join(known)}; got {unknown[0]!r}")
    return names


def _write_fields(names: Sequence[str], result: Result, out: TextIO) -> None:
    width = max(map(len, names)) + 2
    for name in names:
        value = getattr(result, name)
        out.write(f"{name:<{width}}{f'{value:.2f}' if isinstance(value, float) else value}\n")


def _compare(args: argparse.Namespace) -> int:
    workload = read_workload(args.workload)
    rows = list(csv.DictReader(_text(args.runs).splitlines()))
    missing = [name for name in _RUN if not rows or rows[0].get(name) is None]
    if missing:
        raise WorkloadError(
            f"{args.runs}: wanted a row with the columns {', '.join(_RUN)}; {missing[0]} is missing"
        )
    for line in comparison(workload, rows):
        sys.stdout.write(f"{line}\n")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from exporter.runtime import loop  # noqa: PLC0415 -- the other commands need no server
    from exporter.standin import server  # noqa: PLC0415 -- the other commands need no server
    from exporter.standin.scenarios import SCENARIOS  # noqa: PLC0415

    if args.list:
        lines = ["| scenario | shows | verdicts |", "|---|---|---|"]
        for name, story in SCENARIOS.items():
            verdicts = dict.fromkeys([*story.verdict.values(), *filter(None, [story.finding])])
            lines.append(f"| `{name}` | {story.about} | {', '.join(f'`{word}`' for word in verdicts)} |")
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    if args.replicas < 1:
        raise ValueError(f"--replicas: wanted at least 1, got {args.replicas}")
    loop.run(
        server.run(
            args.scenario,
            host=args.host,
            port=args.port,
            replicas=args.replicas,
            version=args.vllm_version,
            model=args.model,
            seed=args.seed,
            say=partial(print, flush=True),
        )
    )
    return 0


_COMMANDS: Final = {"run": _run, "compare": _compare, "serve": _serve}
_RUN: Final = (
    *("mode", "num_gpu_blocks", "block_size", "max_num_seqs", "watermark"),
    *("preemptions", "engine_steps", "output_tokens", "peak_kv_usage"),
)
_CLIENTS: Final = 32


def comparison(workload: Sequence[Request], rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield a Markdown table of real runs, and the same runs simulated."""
    titles = ("arrivals", "blocks", "seats", "watermark")
    counted = ("preemptions", "steps", "KV peak")
    cells: tuple[object, ...] = (*titles, *(cell for title in counted for cell in (title, "simulated")))
    yield f"| {' | '.join(map(str, cells))} |"
    yield "|---" * len(cells) + "|"
    for row in rows:
        result = simulated(workload, row)
        steps = int(row["engine_steps"])
        cells = (
            row["mode"],
            row["num_gpu_blocks"],
            row["max_num_seqs"],
            f"{float(row['watermark']):g}",
            row["preemptions"],
            result.preemptions,
            steps,
            f"{result.engine_steps} ({result.engine_steps / steps - 1:+.1%})",
            f"{float(row['peak_kv_usage']):.3f}",
            f"{result.kv_peak_ratio:.3f}",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def simulated(
    workload: Sequence[Request], row: Mapping[str, str], step_time: StepTime | None = None
) -> Result:
    """Simulate a real run of a table.

    Args:
        workload: its requests.
        row: its settings; see ``simulate compare --help``.
        step_time: what a step costs; counts hardly depend on it.
    """
    engine = Engine(
        num_gpu_blocks=int(row["num_gpu_blocks"]),
        block_size=int(row["block_size"]),
        max_num_seqs=int(row["max_num_seqs"]),
        watermark=float(row["watermark"]),
        step_time=step_time or StepTime(),
    )
    return simulate(engine, Burst(workload) if row["mode"] == "burst" else Closed(workload, _CLIENTS))


def read_workload(path: str) -> tuple[Request, ...]:
    """Read a workload file, JSON or (by its name) CSV; errors name the file."""
    text = _text(path)
    try:
        if path.endswith(".csv"):
            return parse_trace(text.splitlines())
        return parse_workload(json.loads(text))
    except (WorkloadError, json.JSONDecodeError) as error:
        raise WorkloadError(f"{path}: {error}") from error


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: {error}") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error


def arrivals_of(args: argparse.Namespace, requests: Sequence[Request]) -> Arrivals:
    """Build the arrivals from the flags."""
    end = None if args.duration is None else nanoseconds(args.duration)
    source: Iterable[Request] = requests if end is None else repeated(requests)
    if args.arrivals == "closed":
        return Closed(source, args.clients, end, nanoseconds(args.pause))
    if args.arrivals == "poisson":
        if args.rate is None:
            raise ValueError("--arrivals poisson wants --rate, requests per second")
        return Poisson(source, args.rate, Dice(args.seed), end)
    if end is not None:
        raise ValueError(f"--duration wants arrivals closed or poisson, got {args.arrivals}")
    if args.arrivals == "burst":
        return Burst(requests)
    late = [request.id for request in requests if request.arrival is None]
    if late:
        raise ValueError(
            f"--arrivals trace wants an arrival time for every request; request {late[0]} has none"
        )
    return Timed(sorted(requests, key=lambda request: (request.arrival or 0, request.id)))


def repeated(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield the requests again and again, each under a number of its own."""
    for number, request in enumerate(itertools.cycle(requests)):
        yield replace(request, id=number)


_TEXT = (
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


def write_text(result: Result, out: TextIO) -> None:
    """Write a result for a person; what did not happen (0 of a kind of trouble) is left out."""
    always = ("preemptions", "finished")
    for label, name, form in _TEXT:
        value = getattr(result, name)
        if value is not None and (value or name in always):
            out.write(f"{label:<36}{form.format(value)}\n")
