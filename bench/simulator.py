"""Measures the simulated scheduler: speed of a busy hour, and accuracy compared with real servers."""

import csv
import json
import time
from pathlib import Path

from bench import Row
from exporter.commands.simulate_compare import simulate_run
from exporter.simulation.arrivals import Poisson
from exporter.simulation.rng import Rng
from exporter.simulation.run import simulate
from exporter.simulation.settings import Engine
from exporter.simulation.timing import nanoseconds
from exporter.simulation.workload import Lengths, parse_workload, random_requests

TRUTH = Path(__file__).parent.parent / "tests" / "simulation" / "truth"
HOUR = 3600
# (seats, blocks): seats are short in the first, blocks in the second.
BUSY = {"seats short": (256, 20_000), "blocks short": (256, 8_000)}
SMALL = 200  # blocks of a pool that is always full


def hour(seats: int, blocks: int) -> tuple[float, int]:
    """Return the CPU seconds that one busy hour takes, and the requests that finished in it."""
    engine = Engine(num_gpu_blocks=blocks, max_num_seqs=seats)
    dice = Rng(1)
    requests = random_requests(Lengths.between(100, 1500), Lengths.between(100, 900), dice.fork())
    end = nanoseconds(HOUR)
    start = time.process_time()
    result = simulate(engine, Poisson(requests, 10.0, dice.fork(), end), end=end)
    return time.process_time() - start, result.finished


def faithfulness() -> list[Row]:
    """Return the worst deviation of preemptions and of steps, in full pools and in larger ones."""
    workload = parse_workload(json.loads((TRUTH / "workload.json").read_text()))
    worst: dict[tuple[str, bool], float] = {}
    for row in csv.DictReader((TRUTH / "runs.csv").read_text().splitlines()):
        if (row["mode"], row["num_gpu_blocks"]) == ("closed", "500"):
            continue  # its arrival times were not recorded
        result, small = simulate_run(workload, row), int(row["num_gpu_blocks"]) <= SMALL
        steps = 100 * abs(result.engine_steps / int(row["engine_steps"]) - 1)
        off = abs(result.preemptions - int(row["preemptions"]))
        worst["preemptions", small] = max(worst.get(("preemptions", small), 0.0), off)
        worst["steps", small] = max(worst.get(("steps", small), 0.0), steps)
    return [
        Row("largest error of preemptions, full pools", worst["preemptions", True], "", 2, "at most"),
        Row("largest error of steps, full pools", worst["steps", True], "%", 1, "at most"),
        Row("largest error of preemptions, larger pools", worst["preemptions", False], "", 4, "at most"),
        Row("largest error of steps, larger pools", worst["steps", False], "%", 2, "at most"),
    ]


def run() -> list[Row]:
    """Measure a busy hour of 10 requests per second, the best of three; then the real runs."""
    rows = []
    for what, (seats, blocks) in BUSY.items():
        times, finished = zip(*(hour(seats, blocks) for _ in range(3)), strict=True)
        name = f"a busy hour, {what} ({finished[0]:,} requests)"
        rows.append(Row(name, min(times), "s", 3, "at most"))
    return [*rows, *faithfulness()]
