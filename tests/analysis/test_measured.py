"""What the texts claim of an engine is what the numbers beside it say, in every recording."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from support import real_recordings

from exporter.analysis.catalogue import load
from exporter.analysis.conditions import Evidence
from exporter.analysis.engine import EngineReading
from exporter.analysis.measured import measured
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.signals import Signals
from exporter.commands._timeline import feed_recording
from exporter.config import Config

WORDS = {
    0.05: "One preemption for every 20 finished requests.",
    0.1: "One preemption for every ten finished requests.",
    0.2: "One preemption for every five finished requests.",
    0.4: "Four preemptions for every ten finished requests.",
    0.472: "One preemption for every two finished requests.",
    0.5: "One preemption for every two finished requests.",
    0.8: "Eight preemptions for every ten finished requests.",
    1.0: "About one preemption for each finished request.",
    2.5: "2.5 preemptions for each finished request.",
    31.0: "31.0 preemptions for each finished request.",
}


@pytest.mark.parametrize(("ratio", "sentence"), WORDS.items())
def test_the_ratio_is_told_in_words(ratio, sentence):
    """Of a storm and of a trifle alike."""
    signals = Signals(preemptions_per_finished_request=ratio)
    assert measured("preemption_thrash", signals) == measured("preemption_light", signals) == (sentence,)
    assert measured("kv_bound", signals) == ()


NUMBER = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}


def ratio_of(sentence: str) -> float | None:
    """The ratio that a sentence tells; None for another sentence."""
    if match := re.fullmatch(r"(\w+) preemptions? for every (\w+) finished requests\.", sentence):
        few, many = (
            NUMBER.get(word.lower()) or (1 if word == "One" else int(word)) for word in match.groups()
        )
        return few / many
    match = re.fullmatch(r"([\d.]+|About one) preemptions? for each finished request\.", sentence)
    return (1.0 if match[1] == "About one" else float(match[1])) if match else None


def near(told: float, ratio: float) -> bool:
    """Whether a ratio in words is within a sixth of the number."""
    return abs(told - ratio) <= ratio / 6 + 1e-9


def test_every_ratio_is_told_within_a_sixth():
    """From one in two hundred to thirty for each."""
    wrong = []
    for step in range(500):
        ratio = 0.005 * 1.0175**step
        (sentence,) = measured("preemption_thrash", Signals(preemptions_per_finished_request=ratio))
        told = ratio_of(sentence)
        if told is None or not near(told, ratio):
            wrong.append((ratio, sentence))
    assert wrong == []


@pytest.mark.parametrize(
    ("now", "usual", "sentences"),
    [
        (1278, 405, ("Tokens per second have not fallen: 316% of this engine's usual 405.",)),
        (1255, 1286, ("Tokens per second have not fallen: 98% of this engine's usual 1286.",)),
        (620, 1000, ("Tokens per second fell to 62% of this engine's usual 1000.",)),
        (620, None, ()),
        (None, 1000, ()),
    ],
)
def test_tokens_fell_only_where_they_did(now, usual, sentences):
    """And nothing is said where no usual rate is known."""
    signals = Signals(generation_tokens_per_second=now, generation_tokens_per_second_recent=usual)
    assert measured("preemption_thrash", signals) == sentences


def test_work_done_twice_is_told_from_a_twentieth_on():
    """It is an estimate, and an upper bound with prefix caching."""
    assert measured("preemption_thrash", Signals(recomputed_ratio=0.04)) == ()
    told = ("Up to 31% of the computed tokens are work done twice.",)
    assert measured("preemption_thrash", Signals(recomputed_ratio=0.31)) == told


# A sentence about a verdict with one of these words tells a change or an amount.
AMOUNTS = re.compile(
    r"\b(fall|falls|fell|fallen|rises?|grow(s|n|ing)?|climbs?|few|fewer|many|most|hardly|nearly|faster|slower"
    r"|full speed|as usual|usual|holds|now and then|none|nothing)\b"
)
Proof = Callable[[EngineReading], bool] | None
ALWAYS: Proof = None  # it tells how vLLM works, or what may come, whatever the readings are


def crossed(engine: EngineReading) -> bool:
    """Whether a number of the evidence is beyond its threshold."""
    return any(beyond(each, each.threshold) for each in engine.judgement.evidence if each.ends is not None)


def beyond(each: Evidence, limit: float | None) -> bool:
    """Whether a number is on the side of a limit where the verdict holds."""
    assert each.value is not None
    assert limit is not None
    assert each.threshold is not None
    above = each.ends is None or each.ends <= each.threshold
    return each.value >= limit if above else each.value <= limit


def signal(name: str, proof: Callable[[float], bool]) -> Proof:
    """Prove a sentence by one signal, which is known."""

    def proven(engine: EngineReading) -> bool:
        value = getattr(engine.signals, name)
        return value is not None and proof(value)

    return proven


def idle(engine: EngineReading) -> bool:
    """Whether nothing runs or waits."""
    return not engine.signals.requests_running and not engine.signals.requests_waiting


NONE_RUNS = signal("requests_running", lambda running: running == 0)
PROOFS: dict[str, Proof] = {
    "Clients most likely get no answer": ALWAYS,
    "its pool holds less than that": ALWAYS,
    "The usual cause is a reset of the prefix cache": ALWAYS,
    "Loading a large model takes many minutes": ALWAYS,
    "usage falls from nearly full, and no token comes of it": ALWAYS,
    "Requests wait, none runs, and the engine takes no step": NONE_RUNS,
    "Tokens flow, but the time between two tokens has grown by more than the load explains": crossed,
    "When a running request needs a block and none is free": ALWAYS,
    "in time to first token for a request that had none yet": ALWAYS,
    "hardly any finishes in it, and that alone proves nothing": ALWAYS,
    "As many requests run as max_num_seqs allows, in most polls": crossed,
    "a plateau of running requests alone would prove nothing": ALWAYS,
    "Requests arrive faster than the engine computes them": signal("requests_waiting", lambda n: n > 0),
    "KV usage climbs steadily": signal("kv_seconds_to_full", lambda seconds: seconds > 0),
    "Answers that run are growing": ALWAYS,
    "When the pool is full, preemptions begin, and throughput can fall": ALWAYS,
    "KV blocks stay in use although nothing runs or waits": idle,
    "until the decode side has fetched them": ALWAYS,
    "When the pool is full, nothing is admitted": ALWAYS,
    "Answers grow very long, and none has finished for a while": signal(
        "requests_finished_per_second", lambda rate: rate == 0
    ),
    "KV usage rises with it": ALWAYS,
    "It holds a seat and a growing share of the pool": ALWAYS,
    "The pool is nearly full, and work gets done": signal("kv_usage_mean_ratio", lambda mean: mean > 0.9),
}


def claims(name: str) -> list[str]:
    """The sentences of a verdict that tell a change or an amount."""
    verdict = load().verdicts[name]
    text = f"{verdict.summary} {verdict.meaning} {verdict.impact}"
    return [sentence for sentence in re.split(r"(?<=[.:;]) ", text) if AMOUNTS.search(sentence)]


def test_no_verdict_tells_more_than_is_listed():
    """A new sentence of that kind needs its proof, and a listed one is still said."""
    told = [sentence for name in load().verdicts for sentence in claims(name)]
    assert [one for one in told if not any(listed in one for listed in PROOFS)] == []
    assert [listed for listed in PROOFS if not any(listed in one for one in told)] == []


def contradictions(readings: Iterable[TargetReading]) -> Iterator[str]:
    """What the texts claim although the numbers beside them say otherwise."""
    for reading in readings:
        for engine in reading.engines.values():
            judgement = engine.judgement
            wrong = [
                one for one in measured(judgement.verdict, engine.signals) if not holds(one, engine.signals)
            ]
            wrong += [
                f"{each.signal} {each.value}, {each.limits}"
                for each in judgement.evidence
                if each.ends is not None and not beyond(each, each.ends)
            ]
            if judgement.since == reading.t:  # later a verdict may be held for a while
                wrong += unproven(engine)
            yield from (f"{reading.t:.0f} s {judgement.verdict}: {one}" for one in wrong)


def holds(sentence: str, signals: Signals) -> bool:
    """Whether a measured sentence is what the signals say."""
    told, ratio = ratio_of(sentence), signals.preemptions_per_finished_request
    if told is not None:
        return ratio is not None and near(told, ratio)
    if match := re.search(r"(fell to|fallen:) (\d+)%", sentence):
        return (match[1] == "fell to") is (int(match[2]) < 90)
    return "done twice" in sentence


def unproven(engine: EngineReading) -> list[str]:
    """The sentences of the engine's verdict that its reading does not prove."""
    told = claims(engine.judgement.verdict)
    return [
        listed
        for listed, proof in PROOFS.items()
        if proof is not None and any(listed in sentence for sentence in told) and not proof(engine)
    ]


RECORDINGS = sorted(
    path.name.partition(".jsonl")[0] for path in real_recordings.RECORDINGS.glob("*.jsonl.gz")
)


@pytest.mark.parametrize("name", RECORDINGS)
def test_no_recording_contradicts_its_texts(name):
    """At every poll."""
    assert list(contradictions(real_recordings.replayed(name))) == []


@pytest.mark.long
def test_no_field_case_contradicts_its_texts():
    """At every poll of every case."""
    wrong = []
    for path in sorted((Path(__file__).parents[1] / "cases").glob("*.jsonl.gz")):
        polls = feed_recording(path, Config())
        wrong += [f"{path.name}: {one}" for one in contradictions(reading for _, reading, _ in polls)]
    assert wrong == []
