"""Field cases: what operators met, each recording with the right answer, through the whole pipeline.

An expectation says what must be known right after some polls, and what must never be said. Its words are
checked against the catalogue, so that a slip of the pen does not pass for a right answer.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from exporter.analysis import catalogue
from exporter.analysis.signals import NAMES
from exporter.commands._timeline import feed_recording
from exporter.config import Config
from exporter.publish.status import poll_object

CASES = Path(__file__).parent / "cases"
TABLE = catalogue.load()
SEVERITIES = [severity.value for severity in catalogue.Severity]
VERDICTS, FIXES = {*TABLE.verdicts}, {*TABLE.fixes}
FINDINGS = VERDICTS | {*TABLE.findings}
ABSENT = "absent"
AT_POLL = 0.05  # a check is about the poll at its time, to this many seconds

# The keys of a check about one engine, the target or a model, with the words that each may hold.
ASKS = {
    "verdict": VERDICTS,
    "findings_include": FINDINGS,
    "findings_exclude": FINDINGS,
    "fixes_include": FIXES,
    "fixes_any": FIXES,
    "fixes_exclude": FIXES,
    "fixes_first_exclude": FIXES,
    "signals": {*NAMES},
}
NEVERS = {"never_verdicts": VERDICTS, "never_findings": FINDINGS, "never_fixes": FIXES}
KEYS = {"case", "source", "checks", "never_from", "max_severity", "min_severity_by", *NEVERS}


def words(given: object) -> list[str]:
    """A word or a list of words, as a list."""
    return [given] if isinstance(given, str) else list(given)


def parts(poll: Mapping) -> Iterator[tuple[str, Mapping]]:
    """The target, each engine and each model of one poll, with a name for messages."""
    yield "target", poll["target"]
    yield from ((f"engine {name}", engine) for name, engine in poll["engines"].items())
    yield from ((f"model {name}", model) for name, model in poll["models"].items())


def fixes_of(part: Mapping) -> list[str]:
    """The ids of the fixes of a part, in order of rank."""
    return [fix if isinstance(fix, str) else fix["fix"] for fix in part.get("fixes", ())]


def judge(expect: Mapping, polls: list[Mapping]) -> Iterator[str]:
    """Everything in which the polls differ from what was expected, as sentences."""
    yield from judge_words(expect)
    for check in expect.get("checks", ()):
        poll = next((one for one in polls if abs(one["t"] - check["at"]) <= AT_POLL), None)
        if poll is None:
            yield f"t={check['at']}: no poll is there"
        else:
            yield from (f"t={check['at']} {wrong}" for wrong in judge_poll(check, poll))
    yield from judge_all(expect, polls)


def judge_words(expect: Mapping) -> Iterator[str]:
    """Words and keys of the expectation that do not exist."""
    yield from (f"unknown key {key}" for key in expect.keys() - KEYS)
    asked = [(key, words(expect[key]), known) for key, known in NEVERS.items() if key in expect]
    for check in expect.get("checks", ()):
        yield from (f"unknown key {key}" for key in check.keys() - {"at", "engines", "target", "model"})
        for ask in asks_of(check):
            yield from (f"unknown key {key}" for key in ask.keys() - ASKS.keys())
            asked += [(key, words(ask[key]), known) for key, known in ASKS.items() if key in ask]
    if expect.get("max_severity", "none") not in SEVERITIES:
        yield f"unknown severity {expect['max_severity']}"
    for key, given, known in asked:
        yield from (f"unknown word {word} in {key}" for word in given if word not in known)


def asks_of(check: Mapping) -> list[Mapping]:
    """All questions of one check."""
    target = [check["target"]] if "target" in check else []
    return [*check.get("engines", {}).values(), *target, *check.get("model", {}).values()]


def judge_poll(check: Mapping, poll: Mapping) -> Iterator[str]:
    """What is wrong in the one poll that a check is about."""
    for name, ask in check.get("engines", {}).items():
        if name in poll["engines"]:
            yield from (f"engine {name}: {wrong}" for wrong in judge_part(ask, poll["engines"][name]))
        elif ask.keys() != {"signals"} or {*map(str, ask["signals"].values())} != {ABSENT}:
            yield f"engine {name}: is not there"
    if "target" in check:
        # What is missing from a target may be stated at whatever it is missing from.
        everywhere = {finding for _, part in parts(poll) for finding in part["findings"]}
        told = poll["target"] | {"findings": [*poll["target"]["findings"], *everywhere & {"engine_missing"}]}
        yield from (f"target: {wrong}" for wrong in judge_part(check["target"], told))
    for name, ask in check.get("model", {}).items():
        part = poll["models"].get(name, {"findings": [], "fixes": []})
        yield from (f"model {name}: {wrong}" for wrong in judge_part(ask, part))


def judge_part(ask: Mapping, part: Mapping) -> Iterator[str]:
    """What is wrong about one engine, the target or a model."""
    findings, fixes = part["findings"], fixes_of(part)
    part = {**part, "verdict": "healthy"} if part.get("verdict") == "reachable" else part  # of a target
    if "verdict" in ask and part["verdict"] not in words(ask["verdict"]):
        yield f"verdict {part['verdict']}, not {' or '.join(words(ask['verdict']))}"
    for word in ask.get("findings_include", ()):
        if word not in [*findings, part.get("verdict")]:
            yield f"no finding {word}"
    yield from (f"finding {word}" for word in ask.get("findings_exclude", ()) if word in findings)
    yield from (f"no fix {word}" for word in ask.get("fixes_include", ()) if word not in fixes)
    yield from (f"fix {word}" for word in ask.get("fixes_exclude", ()) if word in fixes)
    if "fixes_any" in ask and not {*ask["fixes_any"]} & {*fixes}:
        yield f"none of the fixes {', '.join(ask['fixes_any'])}"
    if fixes and fixes[0] in ask.get("fixes_first_exclude", ()):
        yield f"first fix {fixes[0]}"
    for name, wanted in ask.get("signals", {}).items():
        value = part["signals"].get(name)
        if not is_right(value, wanted):
            yield f"{name} is {value}, not {wanted}"


def is_right(value: float | None, wanted: object) -> bool:
    """Whether a signal is what was asked for: absent, or near a number (relative; absolute near 0)."""
    if wanted == ABSENT or value is None:
        return wanted == ABSENT and value is None
    margin = wanted["within"] * (abs(wanted["is"]) or 1.0)
    return abs(value - wanted["is"]) <= margin + 1e-9


def judge_all(expect: Mapping, polls: list[Mapping]) -> Iterator[str]:
    """What is wrong over all polls: words that must never be said, and how bad it may and must get."""
    since = expect.get("never_from", 0)
    most = SEVERITIES.index(expect.get("max_severity", SEVERITIES[-1]))
    for poll in polls:
        for name, part in parts(poll):
            said = {
                "never_verdicts": [part["verdict"]] if name.startswith("engine") else [],
                "never_findings": part["findings"],
                "never_fixes": fixes_of(part),
            }
            for key, given in said.items():
                if key == "never_fixes" or poll["t"] >= since:
                    yield from (
                        f"t={poll['t']} {name}: {word}" for word in given if word in expect.get(key, ())
                    )
            if SEVERITIES.index(part["severity"]) > most:
                yield f"t={poll['t']} {name}: severity {part['severity']}"
    if "min_severity_by" in expect:
        least, at = expect["min_severity_by"]["severity"], expect["min_severity_by"]["at"]
        reached = [part["severity"] for poll in polls if poll["t"] <= at + AT_POLL for _, part in parts(poll)]
        if max(map(SEVERITIES.index, reached)) < SEVERITIES.index(least):
            yield f"severity {least} is not reached by t={at}"


def load(case: str) -> Mapping:
    """The expectation of a case."""
    return yaml.safe_load((CASES / f"{case}.expect.yaml").read_text(encoding="utf-8"))


NAMES_OF_CASES = sorted(path.name.removesuffix(".jsonl.gz") for path in CASES.glob("*.jsonl.gz"))


@pytest.mark.parametrize("case", NAMES_OF_CASES)
def test_the_right_answer_is_given(case):
    """A whole recording: what was wrong is said in time, and nothing that is not true."""
    polls = [
        poll_object(t, reading) for t, reading, _ in feed_recording(CASES / f"{case}.jsonl.gz", Config())
    ]
    assert load(case)["case"] == case
    assert list(judge(load(case), polls)) == []


def test_every_recording_has_an_expectation_that_asks_for_something():
    """And none is left without its recording."""
    assert len(NAMES_OF_CASES) >= 44
    assert {f"{name}.expect.yaml" for name in NAMES_OF_CASES} == {path.name for path in CASES.glob("*.yaml")}
    assert all(load(case).keys() & {"checks", *NEVERS} for case in NAMES_OF_CASES)


# The judge itself must be able to say no.

ENGINE = {"verdict": "preemption_thrash", "severity": "critical", "findings": ["kv_too_small"]}
GOOD = {
    "t": 2.0,
    "target": {"verdict": "healthy", "severity": "none", "findings": ["engine_missing"]},
    "engines": {
        "0": ENGINE | {"fixes": [{"fix": "fp8_kv_cache"}, "add_replicas"], "signals": {"kv_usage_ratio": 0.9}}
    },
    "models": {"m": {"severity": "warning", "findings": ["dp_imbalance"], "fixes": ["balance_routing"]}},
}


def asked(**ask: object) -> dict:
    """An expectation with one question about the engine."""
    return {"checks": [{"at": 2, "engines": {"0": ask}}]}


@pytest.mark.parametrize(
    ("expect", "wrong"),
    [
        (asked(verdict=["healthy", "preemption_thrash"]), ""),
        (asked(verdict="healthy"), "verdict preemption_thrash"),
        (asked(findings_include=["kv_too_small", "preemption_thrash"]), ""),
        (asked(findings_include=["restarted"]), "no finding restarted"),
        (asked(findings_exclude=["kv_too_small"]), "finding kv_too_small"),
        (asked(fixes_include=["set_watermark"]), "no fix set_watermark"),
        (asked(fixes_any=["set_watermark", "add_replicas"]), ""),
        (asked(fixes_any=["set_watermark"]), "none of the fixes"),
        (asked(fixes_exclude=["add_replicas"]), "fix add_replicas"),
        (asked(fixes_first_exclude=["add_replicas"]), ""),
        (asked(fixes_first_exclude=["fp8_kv_cache"]), "first fix"),
        (asked(signals={"kv_usage_ratio": {"is": 0.8, "within": 0.2}, "requests_running": "absent"}), ""),
        (asked(signals={"kv_usage_ratio": {"is": 0.8, "within": 0.1}}), "kv_usage_ratio is 0.9"),
        (asked(signals={"kv_usage_ratio": "absent"}), "kv_usage_ratio is 0.9"),
        (asked(signals={"requests_running": {"is": 0, "within": 1}}), "requests_running is None"),
        (asked(verdict="fine"), "unknown word fine"),
        (asked(verdicts="healthy"), "unknown key verdicts"),
        ({"nonsense": 1}, "unknown key nonsense"),
        ({"checks": [{"at": 3, "engines": {}}]}, "no poll"),
        ({"checks": [{"at": 2, "engines": {"1": {"verdict": "healthy"}}}]}, "is not there"),
        ({"checks": [{"at": 2, "engines": {"1": {"signals": {"kv_usage_ratio": "absent"}}}}]}, ""),
        ({"checks": [{"at": 2, "target": {"findings_include": ["engine_missing"]}}]}, ""),
        ({"checks": [{"at": 2, "target": {"verdict": "unreachable"}}]}, "target: verdict healthy"),
        ({"checks": [{"at": 2, "model": {"m": {"findings_exclude": ["dp_imbalance"]}}}]}, "model m: finding"),
        ({"never_verdicts": ["preemption_thrash"]}, "engine 0: preemption_thrash"),
        ({"never_verdicts": ["preemption_thrash"], "never_from": 3}, ""),
        ({"never_findings": ["engine_missing"]}, "target: engine_missing"),
        ({"never_fixes": ["balance_routing"], "never_from": 3}, "model m: balance_routing"),
        ({"max_severity": "warning"}, "severity critical"),
        ({"min_severity_by": {"severity": "critical", "at": 2}}, ""),
    ],
)
def test_the_judge_sees_what_is_wrong(expect, wrong):
    """One good answer, and a question that it meets or does not."""
    found = list(judge(expect, [GOOD]))
    assert bool(found) == bool(wrong)
    assert not wrong or any(wrong in one for one in found)


def test_the_judge_sees_that_a_severity_is_not_reached():
    """A warning at the most, where it should be critical."""
    calm = GOOD | {"engines": {}}
    assert list(judge({"min_severity_by": {"severity": "critical", "at": 2}}, [calm]))
