"""What holds of verdicts and advice whatever a server prints."""

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import body, engine

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.engine import ENGINE_VERDICTS, EngineReading
from exporter.analysis.pipeline import FORGET_SECONDS, Pipeline, TargetReading
from exporter.config import AnalysisConfig
from exporter.publish.status import poll_object, status_object

TABLE = catalogue.load()
LIFE = {"unreachable", "sleeping", "metrics_missing", "data_untrusted"}
HOLD = AnalysisConfig().hold

COUNTERS = ("preemptions", "finished", "tokens", "prompts", "steps")
PARAMETERS = {"tokens": "generation_tokens", "prompts": "prompt_tokens"}


def rarely(strange: st.SearchStrategy, usual: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly something that a server prints."""
    return st.integers(0, 19).flatmap(lambda number: strange if number == 0 else usual)


requests = rarely(st.sampled_from([None, math.nan, -1, 1e300, math.inf]), st.integers(0, 40))
usage = rarely(st.sampled_from([None, math.nan, -0.4, 97.0, math.inf]), st.floats(0, 1))
growth = rarely(
    st.sampled_from([None, -1, 1e17]), st.one_of(st.just(0), st.integers(0, 30), st.integers(0, 5000))
)
scene = st.fixed_dictionaries(
    {
        "seconds": st.sampled_from([0.0, 0.01, 1.0, 1.0, 1.0, 5.0, 30.0, 700.0]),
        "polls": st.integers(1, 40),
        "running": requests,
        "waiting": requests,
        "kv": usage,
        "deferred": st.one_of(st.none(), requests),
        **dict.fromkeys(COUNTERS, growth),
        "error": rarely(st.sampled_from(["timeout", "http_503"]), st.none()),
        "restart": rarely(st.just(True), st.just(False)),
        "engines": rarely(st.just(("0",)), st.just(("0", "1"))),
    }
)
pools = st.fixed_dictionaries(
    {},
    optional={
        "kv_cache_size_tokens": st.sampled_from(["None", 0, 500, 10_000, 1_000_000, "1e400"]),
        "kv_cache_max_concurrency": st.sampled_from([0.5, 3.0, "None"]),
        "num_gpu_blocks": st.sampled_from(["None", 1, 100, 60_000]),
        "block_size": st.sampled_from([16, "None"]),
        "gpu_memory_utilization": st.sampled_from([0.5, 0.9, 0.93, 0.95, 0.97]),
        "cache_dtype": st.sampled_from(["auto", "fp8", "bfloat16"]),
        "enable_prefix_caching": st.sampled_from(["True", "False", "None"]),
    },
)
facts = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.sampled_from([1, 4, 64]),
        "max_model_len": st.sampled_from([100, 32_768, 1_000_000]),
        "max_num_batched_tokens": st.sampled_from([1, 2048]),
        "tensor_parallel_size": st.sampled_from([1, 8]),
        "num_kv_heads": st.sampled_from([1, 8]),
        "kv_cache_gib": st.sampled_from([0.001, 20.0]),
        "gpu_memory_gib": st.just(80.0),
        "weights_gib": st.just(16.0),
        "watermark": st.sampled_from([0.0, 0.05, 1.0]),
        "kv_lease_seconds": st.sampled_from([0.0, 900.0]),
        "kv_cache_memory_bytes": st.just(1 << 34),
        "scheduler_reserve_full_isl": st.booleans(),
    },
)
lengths = st.sampled_from(
    [
        {},
        {"prompt_lengths": ({math.inf: 50}, 45_000), "output_lengths": ({math.inf: 50}, 15_000)},
        {
            "prompt_lengths": ({500: 30, 2000: 60, math.inf: 60}, 45_000),
            "output_lengths": ({200: 30, 1000: 59, math.inf: 60}, 15_000),
        },
        {"prompt_lengths": ({math.inf: 0}, 0), "output_lengths": ({1: 60, math.inf: 60}, 0)},
    ]
)
plays = st.tuples(st.lists(scene, min_size=1, max_size=8), pools, facts, lengths)


def polls_of(play):
    """The polls of a play: times, and a body or an error."""
    scenes, pool, _, long = play
    t, process, counted, polls = 0.0, 1e9, dict.fromkeys(COUNTERS, 1000.0), []
    for part in scenes:
        if part["restart"]:
            process += 1
            counted = dict.fromkeys(COUNTERS, 0.0)
        for _ in range(part["polls"]):
            t += part["seconds"]
            counted = {name: value + (part[name] or 0) for name, value in counted.items()}
            shown = {PARAMETERS.get(name, name): counted[name] for name in COUNTERS if part[name] is not None}
            shown |= {name: part[name] for name in ("running", "waiting", "kv", "deferred")}
            text = body(
                *(engine(name, cache=pool, **shown, **long) for name in part["engines"]), start_time=process
            )
            polls.append((t, None if part["error"] else text, part["error"]))
    return polls


def replay(play) -> list[TargetReading]:
    """All readings of a play."""
    pipeline = Pipeline(AnalysisConfig(), play[2], 1.0)
    return [pipeline.feed(*poll) for poll in polls_of(play)]


def numbers(one: EngineReading):
    """Every number that is said of an engine."""
    yield from one.signals.known().values()
    yield from one.saturation.values()
    for evidence in one.judgement.evidence:
        assert (evidence.value is None) == bool(evidence.note)
        yield from (evidence.value or 0.0, evidence.threshold or 0.0)
    for advice in one.advice.fixes:
        yield from (value for value in (advice.gain, advice.value) if isinstance(value, int | float))
        yield from (value for value in advice.inputs.values() if isinstance(value, int | float))


def check_advice(one: EngineReading) -> None:
    """No advice above its condition, and none that is held back at the same time."""
    known, advised = one.server_facts.facts, {advice.fix: advice for advice in one.advice.fixes}
    assert advised.keys() <= TABLE.fixes.keys()
    assert len(advised) == len(one.advice.fixes)
    assert not advised.keys() & {each.fix for each in one.advice.rejected}
    raised = advised.get("raise_gpu_memory_utilization")
    if raised is not None:
        assert known.get("gpu_memory_utilization", 0) < 0.93
        assert raised.value is None or known["gpu_memory_utilization"] < raised.value <= 0.93
        assert "kv_cache_memory_bytes" not in known
        assert "suspect_out_of_memory" not in one.findings
    if "fp8_kv_cache" in advised:
        assert known.get("kv_cache_dtype") != "fp8"
    if "raise_max_num_seqs" in advised:
        assert advised["raise_max_num_seqs"].value > known["max_num_seqs"]
    lowered = advised.get("lower_max_num_seqs")
    if lowered is not None and lowered.value is not None:
        assert 1 < lowered.value < known.get("max_num_seqs", math.inf)
        assert one.signals.kv_capacity_tokens is not None


def check_unknown(one: EngineReading) -> None:
    """What cannot be computed has no number."""
    if one.signals.kv_capacity_tokens is None:
        assert "kv" not in one.saturation
    if "max_num_seqs" not in one.server_facts.facts:
        assert "seats" not in one.saturation
    assert not any(advice.suffices or advice.gain for advice in one.advice.fixes)  # no forecast was made


def free(before: EngineReading, after: EngineReading) -> bool:
    """Whether a change is one that the hold time does not bind: of the life cycle, or for the worse."""
    verdicts = {before.judgement.verdict, after.judgement.verdict}
    return bool(verdicts & LIFE) or before.judgement.severity < after.judgement.severity


def check_pace(readings: list[TargetReading]) -> None:
    """A verdict falls, or changes at equal severity, at most once per hold time and process of the server.

    It rises at any poll, and a new process is judged afresh.
    """
    changed: dict[object, tuple[float, int]] = {}
    for earlier, later in pairwise(readings):
        for key in earlier.engines.keys() & later.engines.keys():
            before, after = earlier.engines[key], later.engines[key]
            same = before.judgement.verdict == after.judgement.verdict
            if (same and before.judgement.severity == after.judgement.severity) or free(before, after):
                continue
            at, restarts = changed.get(key, (-math.inf, -1))
            assert later.t - at >= HOLD or after.restarts > restarts  # else the verdict is of another process
            changed[key] = later.t, after.restarts


def check_words(readings: list[TargetReading]) -> None:
    """Known words only, finite numbers, no made-up ones."""
    for reading in readings:
        for one in reading.engines.values():
            assert one.judgement.verdict in ENGINE_VERDICTS
            assert one.judgement.severity >= TABLE.verdicts[one.judgement.verdict].severity
            assert {*one.findings} <= TABLE.findings.keys() | TABLE.verdicts.keys()
            assert all(math.isfinite(number) for number in numbers(one))
            check_advice(one)
            check_unknown(one)


def check_time(readings: list[TargetReading]) -> None:
    """The seconds of verdicts add up to the time since an engine was first seen, without the time away."""
    first: dict[object, float] = {}
    shown: dict[object, float] = {}  # seconds between readings that both have the engine
    last: dict[object, float] = {}
    before: TargetReading | None = None
    for reading in readings:
        for key, one in reading.engines.items():
            if key not in first or reading.t - last[key] > FORGET_SECONDS:
                first[key], shown[key] = reading.t, 0.0
            elif before is not None and key in before.engines:
                shown[key] += reading.t - before.t
            last[key] = reading.t
            spent = sum(one.verdict_seconds.values())
            assert shown[key] - 1e-6 <= spent <= reading.t - first[key] + 1e-6
        before = reading


def check_critical(readings: list[TargetReading]) -> None:
    """Every critical verdict is one that the catalogue lets page, with its alert."""
    for reading in readings:
        for one in reading.engines.values():
            if one.judgement.severity is Severity.CRITICAL:
                assert TABLE.verdicts[one.judgement.verdict].model_alert


@settings(deadline=None, max_examples=100)
@given(plays)
def test_whatever_is_printed_verdicts_and_advice_keep_their_conditions(play):
    """However wildly the readings jump: words, numbers, pace, time and severity of one replay."""
    readings = replay(play)
    for check in (check_words, check_pace, check_time, check_critical):
        check(readings)


@settings(deadline=None, max_examples=20)
@given(plays)
def test_the_same_polls_have_the_same_verdicts_in_every_form(play):
    """And what leaves the program can be written, at any time."""
    once, again = replay(play), replay(play)
    assert once == again
    for reading in (*once[::5], once[-1]):
        assert poll_object(reading.t, reading)["engines"].keys() == {key.name for key in reading.engines}
        assert status_object("http://127.0.0.1/metrics", reading, reading.t)
