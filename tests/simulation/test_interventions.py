"""Forecasts against real servers on which one setting was changed.

``truth/LOAD.jsonl.gz`` is a recording of the server as it was (a calm lead, then the load), and
``truth/LOAD.csv`` has one row per change: ratios to the server as it was, and ``tolerance``, how far apart
two runs of the same setting were seen. vLLM 0.32.0 on two CPU cores.

* storm: a small model, a step is mostly overhead; 200 blocks, 32 seats, 32 clients, long answers
* prompts: a larger model, a step is mostly computing; 200 blocks, 32 seats, 24 clients, long prompts
* seats: a small model; 1500 blocks, 8 seats, 32 clients
"""

import csv
import functools
from pathlib import Path

import pytest

from exporter.commands import whatif
from exporter.config import Config
from exporter.publish.status import choose_engine
from exporter.simulation.candidates import NOW, Candidate, parse_candidate
from exporter.simulation.from_status import present_from_status
from exporter.simulation.whatif import WORSE, forecast

TRUTH = Path(__file__).parent / "truth"
LOADS = ["storm", "prompts", "seats"]
PARTS = {"seats": "seats=", "wm": "watermark=", "pool": "pool=x"}
# A change that moved tokens/s by more than its tolerance moved it clearly.
COMPARED = {"tokens_ratio": "output_tokens_per_second", "e2e_mean_ratio": "e2e_mean_seconds"}


def change(name):
    """A row's change as `parse_candidate` reads it: ``seats12`` is ``seats=12``."""
    word = name.rstrip("0123456789.")
    return PARTS[word] + name.removeprefix(word)


@functools.cache
def compared(load):
    """The forecast of a load, and pairs of a real row and the forecast's, by the name of the change."""
    status = whatif._status_of_recording(TRUTH / f"{load}.jsonl.gz", None, Config())
    present = present_from_status(choose_engine(status, None)[1])
    real = [
        row
        for row in csv.DictReader((TRUTH / f"{load}.csv").read_text().splitlines())
        if row["change"] != "base"
    ]
    changes = [Candidate(NOW, present.engine)]
    changes += [parse_candidate(change(row["change"]), present.engine) for row in real]
    result = forecast(present.load, changes, step_times=present.step_times, observed=present.observed)
    rows = {row.candidate.label: row for row in result.rows}
    return result, {row["change"]: (row, rows[change(row["change"])]) for row in real}


@pytest.mark.parametrize("load", LOADS)
def test_the_present_of_each_is_reproduced(load):
    """Preemptions, tokens/s, running, waiting and the gaps between tokens."""
    result, _ = compared(load)
    assert result.calibration.trusted is True, result.calibration.sentence
    assert len(result.calibration.comparisons) == 5


def test_nine_in_ten_changes_do_what_was_forecast():
    """Throughput and latency within what two runs of the same setting differ by."""
    misses, rows = [], 0
    for load in LOADS:
        for name, (real, row) in compared(load)[1].items():
            rows += 1
            for column, figure in COMPARED.items():
                if abs(row.figures[figure].ratio - float(real[column])) > float(real["tolerance"]):
                    misses.append((load, name, column, real[column], row.figures[figure].ratio))
    assert rows == 10
    assert len({miss[:2] for miss in misses}) <= 1, misses


def test_what_clearly_moved_a_server_moves_the_forecast_the_same_way():
    """Up or down, for the best step time and for all of them."""
    moved = 0
    for load in LOADS:
        for real, row in compared(load)[1].values():
            ratio, tokens = float(real["tokens_ratio"]), row.figures["output_tokens_per_second"]
            if abs(ratio - 1) > float(real["tolerance"]):
                moved += 1
                assert (
                    (tokens.ratio > 1) == (tokens.ratio_least > 1) == (tokens.ratio_most > 1) == (ratio > 1)
                )
    assert moved >= 3


def test_twice_the_pool_is_not_promised_to_double_the_throughput():
    """It gave 1.39 and 1.15; a fit that blames the fixed part promised 1.86 and 1.84."""
    pools = [
        compared(load)[1]["pool2"][1].figures["output_tokens_per_second"] for load in ("storm", "prompts")
    ]
    assert 1.2 < pools[0].ratio < 1.64
    assert 1.05 < pools[1].ratio < 1.25
    for pool in pools:
        assert pool.ratio_least <= pool.ratio <= pool.ratio_most


def test_six_seats_that_helped_are_not_called_worse():
    """Where a step is computing, a smaller batch loses nothing; where it is overhead, it does."""
    assert compared("prompts")[1]["seats6"][1].verdict != WORSE
    assert compared("storm")[1]["seats8"][1].verdict == WORSE
