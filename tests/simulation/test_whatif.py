"""What each change would do: loads, candidates, the comparison and its words, and how it is shown."""

import concurrent.futures
import dataclasses
import json
import math
from dataclasses import replace

import pytest

from exporter.config import WhatIfConfig
from exporter.simulation import whatif
from exporter.simulation.calibration import Observed, calibrate
from exporter.simulation.candidates import (
    ASSUMED_POOLS,
    NOW,
    Candidate,
    parse_candidate,
    scaled_pool,
    seats_at,
    singles,
    watermark_at,
)
from exporter.simulation.figures import Figure
from exporter.simulation.load import Load, fitting_seats, held_tokens, moments
from exporter.simulation.report import render, to_dict
from exporter.simulation.settings import Engine
from exporter.simulation.timing import NANOSECONDS, StepTime, nanoseconds
from exporter.simulation.whatif import HELPS, NO_HELP, PRESENT, SUFFICES, WORSE, _verdict, forecast
from exporter.simulation.workload import Lengths, Request

# The step time of a small model on a CPU, as fitted to real runs.
CPU = StepTime(2_800_000, 75_000, 95_000)
STORM = Engine(num_gpu_blocks=300, block_size=32, max_num_seqs=32, step_time=CPU)
LOOP = Load(Lengths.between(50, 400), Lengths.between(200, 800), clients=64)
CALM = Load(Lengths.between(50, 400), Lengths.between(200, 800), rate=1.0)
SHORT = (30.0, 120.0)


def candidates(load, engine):
    """The present, and a change of every kind."""
    fitting = fitting_seats(load, engine)
    counts = (fitting, engine.max_num_seqs * 3 // 4, 7, 2 * engine.max_num_seqs)
    changes = [seats_at(engine, seats) for seats in counts]
    shares = [watermark_at(engine, share) for share in (0.01, 0.05, 0.1)]
    return [Candidate(NOW, engine), *singles(engine, ASSUMED_POOLS), *changes, *shares]


@pytest.fixture(scope="module")
def storm():
    """The forecast for a storm, with every candidate and a combination."""
    changes = [*candidates(LOOP, STORM), parse_candidate("seats=16+watermark=0.05", STORM)]
    return forecast(LOOP, changes, span=SHORT)


def row(result, label):
    """The row of a change."""
    return next(r for r in result.rows if r.candidate.label == label)


def test_moments_are_those_of_the_distribution():
    """Of whole numbers, by their sums."""
    lengths = Lengths(((1, 3, 2), (10, 10, 1)))
    values = [1, 2, 3, 1, 2, 3, 10, 10, 10]
    for power, moment in enumerate(moments(lengths), 1):
        assert moment == pytest.approx(sum(v**power for v in values) / len(values))


def test_a_running_request_holds_more_than_the_mean_of_all():
    """Long outputs run longer: with outputs of 100 or 300, E[O^2]/(2 E[O]) is 125, not 100."""
    load = Load(Lengths.between(50, 50), Lengths(((100, 100, 1), (300, 300, 1))), rate=1.0)
    held, deviation = held_tokens(load)
    assert held == pytest.approx(50 + 125)
    assert deviation == pytest.approx(math.sqrt(50**2 + 50 * 250 + 14e6 / 600 - 175**2))


def test_fitting_seats_leave_room_for_two_deviations():
    """The largest N with N (h + block/2) + 2 s sqrt(N) <= capacity."""
    seats = fitting_seats(LOOP, STORM)
    held, deviation = held_tokens(LOOP)

    def wanted(n):
        return n * (held + 16) + 2 * deviation * math.sqrt(n)

    assert wanted(seats) <= 299 * 32 < wanted(seats + 1)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rate": 1.0, "clients": 3},
        {"rate": 0.0},
        {"clients": 0},
        {"rate": 1.0, "prompts": None},
    ],
)
def test_a_load_wants_one_way_of_arriving(given):
    """Rate, clients or trace, and lengths for the first two."""
    with pytest.raises(ValueError, match="expect"):
        Load(**{"prompts": Lengths.between(1, 9), "outputs": Lengths.between(1, 9), **given})


def test_a_trace_is_repeated_without_a_gap():
    """Three requests over four seconds: the next round begins one mean gap after the last."""
    trace = tuple(Request(i, 10, 10, arrival=nanoseconds(2 * i)) for i in range(3))
    load = Load(trace=trace)
    arrivals = load.arrivals(1, nanoseconds(13))
    times = []
    while (at := arrivals.next_at()) is not None:
        times.append((at // NANOSECONDS, arrivals.take().id))
    assert times == [(0, 0), (2, 1), (4, 2), (6, 3), (8, 4), (10, 5), (12, 6)]
    assert load.requests_per_second() == 0.5


def test_replicas_share_a_trace():
    """Each of two gets every other request."""
    trace = tuple(Request(i, 10, 10, arrival=nanoseconds(i)) for i in range(4))
    arrivals = Load(trace=trace).arrivals(1, nanoseconds(4), replicas=2)
    assert [arrivals.take().id for _ in range(2)] == [1, 3]
    assert arrivals.next_at() is None


def test_candidates_cover_every_kind_of_change():
    """The present first; what is already so is not proposed."""
    found = candidates(LOOP, STORM)
    assert found[0] == Candidate(NOW, STORM)
    fixes = {fix for change in found for fix in change.fixes}
    assert {"raise_gpu_memory_utilization", "fp8_kv_cache", "raise_tensor_parallel"} <= fixes
    assert {"lower_max_num_seqs", "raise_max_num_seqs", "set_watermark", "add_replicas"} <= fixes
    assert "enable_prefix_caching" not in fixes
    bare = Engine(num_gpu_blocks=300, enable_prefix_caching=False, reserve_full_prompt=False)
    fixes = {fix for change in candidates(LOOP, bare) for fix in change.fixes}
    assert {"enable_prefix_caching", "reserve_full_prompt"} <= fixes


def test_a_pool_is_scaled_without_its_null_block():
    """Twice 299 usable blocks, and one null block."""
    assert scaled_pool(STORM, 2).num_gpu_blocks == 599


def test_a_combination_is_read():
    """Every part of it changes the engine or the number of servers."""
    change = parse_candidate(
        "pool=x1.5+seats=64+watermark=0.05+batched-tokens=4096+prefix-caching=off"
        "+full-prompt-reservation=off+replicas=x3",
        STORM,
    )
    engine = change.engine
    assert (engine.usable_blocks, engine.max_num_seqs, engine.watermark) == (448, 64, 0.05)
    assert (engine.max_num_batched_tokens, change.replicas) == (4096, 3)
    assert not engine.enable_prefix_caching
    assert not engine.reserve_full_prompt
    assert parse_candidate("pool=1000", STORM).engine.num_gpu_blocks == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=x2", "expected pool, seats"),
        ("seats=many", "'seats=many'"),
        ("prefix-caching=maybe", "expected on or off, got 'maybe'"),
        ("replicas=x0", "at least x1"),
        ("seats=99999", "at least max_num_seqs"),
    ],
)
def test_a_broken_combination_says_what_is_wrong(text, message):
    """The part, and what was wanted."""
    with pytest.raises(ValueError, match=message):
        parse_candidate(text, STORM)


@pytest.mark.long
def test_fewer_seats_help_in_a_storm(storm):
    """They end the preemptions and cost no throughput, but the queue stays: they do not suffice."""
    fewer = row(storm, f"max_num_seqs {fitting_seats(LOOP, STORM)}")
    assert fewer.verdict == HELPS
    assert fewer.figures["preemptions_per_request"].mean < 0.1
    assert fewer.figures["output_tokens_per_second"].ratio >= 0.97


@pytest.mark.long
def test_far_too_few_seats_make_it_worse(storm):
    """No preemption at all, and a third less work done."""
    fewest = row(storm, "max_num_seqs 7")
    assert fewest.verdict == WORSE
    assert fewest.figures["preemptions_per_minute"].mean == 0
    assert fewest.figures["output_tokens_per_second"].ratio < 0.8


@pytest.mark.long
def test_a_change_that_changes_nothing_does_not_help(storm):
    """More seats when blocks are short."""
    more = row(storm, "max_num_seqs 64")
    assert more.verdict == NO_HELP
    assert more.score == pytest.approx(1.0, abs=0.03)


@pytest.mark.long
def test_half_a_cure_helps(storm):
    """A watermark: far fewer preemptions, a little more throughput."""
    kept = row(storm, "watermark 0.05")
    assert kept.verdict == HELPS
    assert kept.figures["preemptions_per_request"].ratio < 0.6


@pytest.mark.long
def test_changes_are_ranked_by_throughput_and_latency(storm):
    """Best first; the change with the fewest preemptions is the last of all."""
    scores = [r.score for r in storm.rows]
    assert scores == sorted(scores, reverse=True)
    assert storm.rows[-1].figures["preemptions_per_minute"].mean == 0


@pytest.mark.long
def test_twice_the_pool_can_leave_the_count_where_it_was():
    """And still help: 100 to 200 blocks gave a real server 60 % more tokens/s, and as many preemptions."""
    engine = Engine(num_gpu_blocks=100, block_size=32, max_num_seqs=32, step_time=CPU)
    load = Load(Lengths.between(50, 400), Lengths.between(200, 800), clients=32)
    result = forecast(load, [Candidate(NOW, engine), parse_candidate("pool=x2", engine)], span=SHORT)
    (doubled,) = result.rows
    assert doubled.figures["preemptions_per_request"].ratio == pytest.approx(1.0, abs=0.15)
    assert doubled.figures["output_tokens_per_second"].ratio > 1.4
    assert doubled.verdict == HELPS


@pytest.mark.long
def test_a_queue_is_cured_by_what_ends_it():
    """A healthy engine with all seats taken: more of them suffice, more memory does not help."""
    engine = Engine(num_gpu_blocks=4000, block_size=32, max_num_seqs=8, step_time=CPU)
    load = Load(Lengths.between(50, 200), Lengths.between(100, 300), clients=30)
    result = forecast(
        load,
        [Candidate(NOW, engine), parse_candidate("seats=64", engine), parse_candidate("pool=x2", engine)],
        span=SHORT,
    )
    assert [(r.candidate.label, r.verdict) for r in result.rows] == [
        ("seats=64", SUFFICES),
        ("pool=x2", NO_HELP),
    ]


def test_a_deadlock_makes_it_worse_and_is_named():
    """A pool that cannot hold the longest request stops for good."""
    small = parse_candidate("pool=20", STORM)
    result = forecast(LOOP, [Candidate(NOW, STORM), small], thresholds=WhatIfConfig(seeds=1), span=SHORT)
    (stuck,) = result.rows
    assert stuck.verdict == WORSE
    assert "can never be scheduled" in stuck.stuck
    assert "pool=20: the engine stops for good: request" in render(result)


def test_nothing_is_cured_where_nothing_is_wrong():
    """A calm server: no change suffices for anything."""
    engine = Engine(num_gpu_blocks=2000, block_size=32, max_num_seqs=32, step_time=CPU)
    result = forecast(CALM, candidates(CALM, engine), thresholds=WhatIfConfig(seeds=1), span=SHORT)
    assert {r.verdict for r in result.rows} <= {NO_HELP, HELPS, WORSE}


@pytest.mark.parametrize(
    ("preempted", "tokens", "gap", "verdict"),
    [
        (0.5, 1.0, 0.8, HELPS),
        (0.9, 1.0, 0.8, NO_HELP),  # as many preemptions
        (0.5, 1.0, 1.0, NO_HELP),  # answers stall as long
        (0.5, 0.9, 0.8, WORSE),  # throughput pays for it
    ],
)
def test_fewer_preemptions_help_where_they_cost_nothing(preempted, tokens, gap, verdict):
    """A third of them ended at the same throughput and latency, and tokens that follow each other faster."""

    def figure(mean, ratio=None):
        return Figure(mean, mean, mean, ratio, ratio, ratio)

    now = {"preemptions_per_request": figure(2.0), "output_tokens_per_second": figure(1000.0)}
    then = {
        "preemptions_per_request": figure(2.0 * preempted, preempted),
        "output_tokens_per_second": figure(1000.0 * tokens, tokens),
        "inter_token_seconds": figure(0.01 * gap, gap),
    }
    assert _verdict(then, now, WhatIfConfig()) == verdict


REAL = {
    "preemptions_per_request": 1.1,
    "output_tokens_per_second": 3500.0,
    "running": 14.0,
    "waiting": 50.0,
    "inter_token_seconds": 0.0055,
}


@pytest.fixture(scope="module")
def matching(storm):
    """What a server would show that does exactly what the simulation does."""
    return {name: storm.present.figures[name].mean for name in REAL}


@pytest.mark.long
def test_a_forecast_is_trusted_when_all_figures_match(storm, matching):
    """Each within its band, over a full window."""
    result = calibrate(Observed(matching, 60.0, 100.0), storm.present.figures, WhatIfConfig())
    assert result.trusted is True
    assert [each.name for each in result.comparisons] == list(REAL)
    assert result.sentence.startswith("the simulated present matches the server: preemptions per finished")


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_one_figure_that_does_not_match_is_enough(storm, matching, name, factor):
    """The sentence names it. A longer queue is no other one."""
    if name == "waiting" and factor > 1:
        return
    shifted = {**matching, name: matching[name] * factor}
    result = calibrate(Observed(shifted, 60.0, 100.0), storm.present.figures, WhatIfConfig())
    assert result.trusted is False
    assert [each.name for each in result.comparisons if not each.matches] == [name]
    (failed,) = (each for each in result.comparisons if not each.matches)
    assert result.sentence == failed.sentence


@pytest.mark.parametrize(
    ("observed", "simulated", "trusted"),
    [
        (2370.0, 50.0, True),
        (50.0, 2370.0, True),
        (2370.0, 27.0, False),  # 1.9 for each that runs: now and then none may be there
        (27.0, 50.0, False),
    ],
)
def test_two_long_queues_match(observed, simulated, trusted):
    """There is always a next request; how long they are depends on how long the overload has lasted."""
    present = {name: Figure(value, value, value) for name, value in {**REAL, "waiting": simulated}.items()}
    seen = Observed({**REAL, "waiting": observed}, 60.0, 100.0)
    assert calibrate(seen, present, WhatIfConfig()).trusted is trusted


@pytest.mark.long
@pytest.mark.parametrize(
    ("seconds", "finished", "guessed", "words"),
    [
        (20.0, 100.0, "", "20 s with 100 finished requests were observed, 30 s with 30 are needed"),
        (60.0, 12.0, "", "60 s with 12 finished requests were observed"),
        (60.0, 100.0, "the step time", "the step time is a guess"),
    ],
)
def test_a_match_that_proves_nothing_is_not_trusted(storm, matching, seconds, finished, guessed, words):
    """Over too short a window, or with a guessed step time."""
    observed = Observed(matching, seconds, finished, guessed)
    result = calibrate(observed, storm.present.figures, WhatIfConfig())
    assert result.trusted is False
    assert words in result.sentence


@pytest.mark.long
def test_a_figure_that_the_server_does_not_show_is_not_trusted(storm, matching):
    """Unknown is not a match."""
    del matching["inter_token_seconds"]
    result = calibrate(Observed(matching, 60.0, 100.0), storm.present.figures, WhatIfConfig())
    assert (result.trusted, result.sentence) == (
        False,
        "seconds between tokens are unknown",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("observed", "trusted", "words"),
    [
        (None, None, "cannot be compared"),
        (500.0, True, "matches the server"),
        (100.0, False, "preemptions per minute 100.0, simulated"),
        (2000.0, False, "preemptions per minute 2000.0, simulated"),
    ],
)
def test_a_number_of_preemptions_alone_can_be_compared(storm, observed, trusted, words):
    """The one of a flag, without a window."""
    given = None if observed is None else Observed({"preemptions_per_minute": observed})
    calibration = calibrate(given, storm.present.figures, WhatIfConfig())
    assert calibration.trusted is trusted
    assert words in calibration.sentence


def test_every_step_time_of_a_set_is_simulated():
    """The figures are those of the best; the ratios span all of them."""
    fixed, even = StepTime(20_000_000, 0, 0), StepTime(2_000_000, 1_000, 900_000)
    change = parse_candidate("seats=8", STORM)
    span = (10.0, 60.0)
    pair = forecast(LOOP, [Candidate(NOW, STORM), change], step_times=[fixed, even], span=span)
    alone = [
        forecast(LOOP, [Candidate(NOW, replace(STORM, step_time=each)), change], step_times=[each], span=span)
        for each in (fixed, even)
    ]
    tokens = [run.rows[0].figures["output_tokens_per_second"] for run in (pair, *alone)]
    assert pair.step_times == (fixed, even)
    assert (tokens[0].mean, tokens[0].ratio) == (tokens[1].mean, tokens[1].ratio)
    assert tokens[0].ratio_least <= tokens[1].ratio < 0.7
    assert tokens[0].ratio_most > 0.85 > tokens[1].ratio_most


@pytest.mark.parametrize(
    ("name", "blocks", "clients", "caching", "finished", "observed"),
    [
        ("0.26.0", 200, 32, True, 219, 531),
        ("0.26.0 without prefix cache", 200, 32, False, 208, 507),
        ("0.32.0", 200, 32, True, 290, 706),
    ],
)
def test_recorded_storms_are_predicted(name, blocks, clients, caching, finished, observed):
    """Preemptions per request of real servers under a closed loop, from lengths and limits alone: to 10 %."""
    load = Load(Lengths.between(50, 300), Lengths.between(400, 1000), clients=clients)
    engine = Engine(
        num_gpu_blocks=blocks, block_size=32, max_num_seqs=32, enable_prefix_caching=caching, step_time=CPU
    )
    present = forecast(load, [Candidate(NOW, engine)], span=(30.0, 300.0)).present
    assert present.figures["preemptions_per_request"].mean == pytest.approx(observed / finished, rel=0.1)


def test_equal_changes_are_run_once():
    """FP8 and tensor parallelism are the same run under two labels."""
    jobs = []

    def counting(work, todo):
        jobs.extend(todo)
        return map(work, jobs)

    double = scaled_pool(STORM, 2)
    changes = [Candidate(NOW, STORM), Candidate("fp8", double), Candidate("tp", double)]
    result = forecast(LOOP, changes, thresholds=WhatIfConfig(seeds=2), span=(5.0, 20.0), mapper=counting)
    assert len(jobs) == 4
    assert row(result, "fp8").figures == row(result, "tp").figures


def test_progress_is_told_after_each_run():
    """How many of how many."""
    told = []
    forecast(
        LOOP,
        [Candidate(NOW, STORM)],
        thresholds=WhatIfConfig(seeds=3),
        span=(1.0, 5.0),
        progress=lambda *done: told.append(done),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_runs_can_be_spread_over_processes():
    """With the same result."""
    changes = candidates(LOOP, STORM)[:3]
    alone = forecast(LOOP, changes, span=(5.0, 20.0))
    with concurrent.futures.ProcessPoolExecutor(2) as processes:
        spread = forecast(LOOP, changes, span=(5.0, 20.0), mapper=processes.map)
    assert to_dict(spread) == to_dict(alone)


def test_the_horizon_covers_long_outputs():
    """Answers that take ten minutes are warmed up for half an hour."""
    engine = Engine(num_gpu_blocks=99_000)
    slow = Load(Lengths.between(100, 100), Lengths.between(30_000, 30_000), clients=64)
    warm_up, measured = whatif.horizon(slow, engine)
    assert 1200 <= warm_up <= 3600
    assert measured > 1600
    assert 20 < whatif.horizon(LOOP, STORM)[0] < whatif.horizon(LOOP, STORM)[1] < 100
    rare = Load(Lengths.between(100, 100), Lengths.between(100, 100), rate=0.1)
    assert whatif.horizon(rare, engine)[1] == pytest.approx(1600.0)


@pytest.mark.long
def test_the_table_shows_every_figure_with_its_ratio(storm):
    """One line per change, the present first, and what each takes for granted."""
    lines = render(storm).splitlines()
    assert lines[0].startswith("the simulated present cannot be compared")
    assert lines[2].split()[:3] == ["change", "preempt/min", "per"]
    assert lines[3].startswith(NOW)
    assert lines[3].endswith(PRESENT)
    assert len(
        [line for line in lines if line.endswith((SUFFICES, HELPS, "does not help", "makes it worse"))]
    ) == len(storm.rows)
    assert any(" x0." in line for line in lines)
    assert any(line.endswith("needs vLLM 0.24 or newer") for line in lines)
    assert len({len(line) - len(line.split("  ")[-1]) for line in lines[3 : 4 + len(storm.rows)]}) == 1


@pytest.mark.long
def test_the_json_has_what_the_table_has(storm):
    """And survives being written and read."""
    document = json.loads(json.dumps(to_dict(storm)))
    assert document["now"]["change"] == NOW
    assert [c["change"] for c in document["candidates"]] == [r.candidate.label for r in storm.rows]
    assert set(document["now"]["figures"]) == set(whatif.FIGURES)
    assert document["simulated"] == {
        "seeds": 3,
        "warm_up_seconds": 30.0,
        "seconds": 120.0,
        "step_times": [dataclasses.asdict(CPU)],
    }
