"""``simulate compare``: runs of real servers, and the same runs simulated."""

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from exporter.commands._outcome import ExitStatus, UsageError
from exporter.commands._simulation import read_workload
from exporter.config import Config
from exporter.simulation.arrivals import Burst, ClosedLoop
from exporter.simulation.run import Result, simulate
from exporter.simulation.settings import Engine
from exporter.simulation.timing import StepTime
from exporter.simulation.workload import Request

__all__ = ["add_arguments", "run", "simulate_run"]

_COLUMNS: Final = (
    *("mode", "num_gpu_blocks", "block_size", "max_num_seqs", "watermark"),
    *("preemptions", "engine_steps", "output_tokens", "peak_kv_usage"),
)
_CLIENTS: Final = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s RUNS.csv --workload FILE"
    parser.description = (
        f"Simulate every run of a CSV with the columns {', '.join(_COLUMNS)}, and print a Markdown table of "
        f"the real and the simulated counts. The mode is burst, or closed: {_CLIENTS} requests at a time."
    )
    parser.add_argument("runs", metavar="RUNS.csv", help="one real run per row")
    parser.add_argument("--workload", required=True, metavar="FILE", help="the requests of all runs")


def run(options: argparse.Namespace, _config: Config) -> int:
    """Print the table."""
    try:
        workload = read_workload(options.workload)
        rows = list(csv.DictReader(Path(options.runs).read_text(encoding="utf-8").splitlines()))
        missing = [name for name in _COLUMNS if not rows or rows[0].get(name) is None]
        if missing:
            wanted = f"expected a row with the columns {', '.join(_COLUMNS)}"
            raise UsageError(f"{options.runs}: {wanted}; {missing[0]} is missing")
        for line in _table(workload, rows):
            print(line)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
    return ExitStatus.OK


def _table(workload: Sequence[Request], rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    yield (
        "| arrivals | blocks | seats | watermark | preemptions | simulated | steps | simulated | KV peak "
        "| simulated |"
    )
    yield "|---" * 10 + "|"
    for row in rows:
        result = simulate_run(workload, row)
        steps = int(row["engine_steps"])
        cells: tuple[object, ...] = (
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


def simulate_run(
    workload: Sequence[Request], row: Mapping[str, str], step_time: StepTime | None = None
) -> Result:
    """Simulate a real run: its settings by column, see ``simulate compare --help``."""
    engine = Engine(
        num_gpu_blocks=int(row["num_gpu_blocks"]),
        block_size=int(row["block_size"]),
        max_num_seqs=int(row["max_num_seqs"]),
        watermark=float(row["watermark"]),
        step_time=step_time or StepTime(),
    )
    return simulate(engine, Burst(workload) if row["mode"] == "burst" else ClosedLoop(workload, _CLIENTS))
