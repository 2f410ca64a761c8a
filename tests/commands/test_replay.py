"""``replay``: the lines and objects that it prints, and files that are cut off, broken or no recordings."""

import contextlib
import gzip
import io
import json
import re
from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import bodies, real_recordings
from support.real_recordings import write_recording
from support.scenes import Stage

from exporter import cli
from exporter.analysis.signals import NAMES
from exporter.commands._history import History
from exporter.simulation import worker
from exporter.vllm.recording import Header, Poll

RECORDINGS = sorted(real_recordings.RECORDINGS.glob("*.jsonl.gz"))

pytestmark = pytest.mark.usefixtures("own_logging")


def objects(text: str) -> list[dict]:
    """JSON Lines."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def replayed() -> dict[str, list[dict]]:
    """The objects of each recording, printed once; without forecasts, which take a second each."""
    printed = {}
    for path in RECORDINGS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "answer", lambda *_, **__: {"error": "none here"})
            assert cli.main(["replay", str(path), "--format", "json"]) == 0
        printed[path.name.partition(".jsonl")[0]] = objects(out.getvalue())
    return printed


def faults(one: dict, poll: Poll) -> set[str]:
    """The promises that the object of a poll breaks: others read its keys and types."""
    target = one["target"]
    broken = {
        "keys": one.keys() != {"t", "target", "engines", "models"},
        "t": one["t"] != round(poll.t, 3),
        "target": not {"up", "verdict", "severity", "findings"} <= target.keys(),
        "up": target["up"] is not (poll.body is not None),
        "severity": not isinstance(target["severity"], str),
        "findings": not isinstance(target["findings"], list),
        "models": not isinstance(one["models"], dict),
    }
    for key, engine in one["engines"].items():
        broken |= {
            f"{key} key": not re.fullmatch(r"\d+", key),
            f"{key} keys": not {"model", "verdict", "severity", "findings", "fixes", "signals"}
            <= engine.keys(),
            f"{key} model": engine["model"] != "tiny-llama",
            f"{key} findings": not isinstance(engine["findings"], list),
            f"{key} fixes": not isinstance(engine["fixes"], list),
            f"{key} signals": not engine["signals"].keys() <= {*NAMES},
            # An unknown signal is left out: it is never null, and never a word.
            f"{key} values": not {type(value) for value in engine["signals"].values()} <= {int, float},
        }
    return {name for name, failed in broken.items() if failed}


def test_a_replayed_poll_is_an_object_of_the_promised_form(replayed):
    """Keys and types, at every poll of every recording."""
    failures = []
    for name, printed in replayed.items():
        for one, poll in zip(printed, real_recordings.polls(name), strict=True):
            failures += [f"{name} at {poll.t} s: {fault}" for fault in faults(one, poll)]
    assert not failures


def test_a_replay_has_the_right_values(replayed):
    """Of a storm: what vLLM's own counter gained, and the full cache."""
    last = replayed[real_recordings.EXHAUSTION][-1]["engines"]["0"]["signals"]
    assert last["preemptions_total"] == 531
    assert (
        max(one["engines"]["0"]["signals"]["kv_usage_ratio"] for one in replayed[real_recordings.EXHAUSTION])
        == 1.0
    )
    assert replayed[real_recordings.TWO_ENGINES][-1]["engines"].keys() == {"0", "1"}


def test_unknown_signals_are_left_out(replayed):
    """A server that is refused at first has no engine; a rate needs two polls."""
    first = replayed[real_recordings.RESTART][0]
    assert first["engines"] == {}
    assert first["target"]["up"] is False
    assert "preemptions_per_second" not in replayed[real_recordings.CALM][0]["engines"]["0"]["signals"]


def test_replicas_have_different_keys(run, tmp_path):
    """As `REPLICA/0`."""
    body = bodies.body(bodies.engine(replica="r1", kv=0.1), bodies.engine(replica="r2", kv=0.2))
    path = write_recording(tmp_path / "f.jsonl", Poll(0.0, body))
    (one,) = objects(run("replay", path, "--format", "json")[1])
    assert one["engines"].keys() == {"r1/0", "r2/0"}


def test_probes_in_the_header_are_used(run, tmp_path):
    """`max_model_len` of `/v1/models` limits the requests that fit; the configuration goes before it."""
    body = bodies.body(bodies.engine(kv=0.1, cache={"num_gpu_blocks": 101, "block_size": 16}))
    probed = {"/v1/models": {"max_model_len": 400}}
    for config, expected in (({}, 4.0), ({"max_model_len": 800}, 2.0)):
        path = write_recording(tmp_path / "f.jsonl", Poll(0.0, body), header=Header("f", 1.0, config, probed))
        (one,) = objects(run("replay", path, "--format", "json")[1])
        assert one["engines"]["0"]["signals"]["kv_max_concurrency"] == expected
        path.unlink()


def text_of(run, name: str) -> tuple[list[str], list[str]]:
    """The lines of changes, and those of the report, of a recording."""
    status, out, err = run("replay", real_recordings.RECORDINGS / f"{name}.jsonl.gz")
    assert (status, err) == (0, "")
    changes, _, report = out.partition("\n\n")
    return changes.splitlines(), report.splitlines()


def test_the_text_has_the_changes_of_verdict(run, replayed):
    """Each with its time, severity, first fix and numbers, at the polls where the JSON changes."""
    lines, _ = text_of(run, real_recordings.RESTART)
    assert lines[0] == "      0.0s  down (connection_refused): starting (none)"
    told = [match.groups() for line in lines if (match := re.match(r" +([\d.]+)s  engine 0: (.*?)\)", line))]
    expected, last = [], None
    for one in replayed[real_recordings.RESTART]:
        for engine in one["engines"].values():
            now = f"{engine['verdict'].replace('_', ' ')} ({engine['severity']}"
            if now != last:
                expected.append((f"{one['t']:.1f}", now))
            last = now
    assert told == expected
    storm = next(place for place, line in enumerate(lines) if "preemption thrash (warning)" in line)
    first = replayed[real_recordings.RESTART][33]["engines"]["0"]["fixes"][0]
    assert lines[storm].endswith(f"({first['flag']})")
    assert re.match(r" {12}\d+ running  \d+ waiting  KV usage \d+%", lines[storm + 1])


def test_the_report_sums_up_times_and_incidents(run, replayed):
    """Seconds in each verdict, and what was preempted and finished while it was bad."""
    _, report = text_of(run, real_recordings.RESTART)
    polls = replayed[real_recordings.RESTART]
    failed = sum(not one["target"]["up"] for one in polls)
    assert report[0] == f"{polls[-1]['t']:.0f} s, {len(polls)} polls, {failed} failed"
    assert report[1] == "tiny-llama engine 0: KV usage peak 100%"
    assert "max_num_seqs 32 (configuration)" in report[2]
    spent = {
        match[1]: int(match[2]) for line in report if (match := re.match(r"  (\w[\w ]+?) +(\d+) s ", line))
    }
    assert spent == {"unreachable": 35, "preemption thrash": 71, "healthy": 5}
    assert report[-3] == "  2 incidents (a warning or worse)"
    form = r" +33\.0s  for 73 s  preemption thrash, unreachable \(critical\)  192 preempted, 74 finished, .*"
    assert re.fullmatch(form, report[-2])
    assert re.match(r" +108\.0s  for 33 s  preemption thrash \(critical\)  144 preempted, 62 fin", report[-1])


@pytest.mark.parametrize(
    ("absent", "told"), [((), "114 preempted, 29 finished"), (("preemptions",), "30 fin")]
)
def test_an_incident_counts_what_happened_in_it_only(absent, told):
    """A counter that was unknown before it would count the server's whole life."""
    stage = Stage(cache={"kv_cache_size_tokens": 10_000}, absent=absent)
    stage.players["0"].counted |= {"preemptions": 9000.0, "finished": 5000.0}
    readings = stage.play(60, running=5, kv=0.3, tokens=300, finished=1)
    stage.players["0"].absent = frozenset()
    storm = {"running": 20, "waiting": 12, "kv": 0.98, "tokens": 100, "finished": 0.5, "preemptions": 2}
    readings += stage.play(60, **storm)
    history = History()
    for reading in readings:
        deque(history.note(reading.t, reading), maxlen=0)
    assert re.search(rf"\)  {told}", list(history.report())[-1])


def test_a_calm_recording_has_no_incident(run):
    """Its report says so."""
    changes, report = text_of(run, real_recordings.CALM)
    assert len(changes) == 3
    assert report[-1] == "  no incidents (a warning or worse)"


def test_the_text_of_several_engines_has_lines_for_each(run):
    """Changes and a part of the report."""
    changes, report = text_of(run, real_recordings.TWO_ENGINES)
    for engine in ("0", "1"):
        assert any(f"s  engine {engine}: preemption thrash" in line for line in changes)
        assert any(line.startswith(f"tiny-llama engine {engine}: ") for line in report)


def test_control_characters_are_escaped(run, tmp_path):
    """A terminal would interpret them."""
    body = b'vllm:num_requests_running{engine="\x1b[2J\xd0\xb6",model_name="m"} 3.0\n'
    path = write_recording(tmp_path / "f.jsonl", Poll(0.0, body), Poll(1.0, None, "\x1b]0;x\x07"))
    status, out, _ = run("replay", path)
    assert status == 0
    assert "\x1b" not in out
    # Control characters end where series are read; what marks the change keeps two names apart.
    assert "engine \ufffd[2J\u0436~" in out


def calm_lines() -> bytes:
    """The first polls of a recording, as plain text."""
    lines = gzip.decompress(
        (real_recordings.RECORDINGS / f"{real_recordings.CALM}.jsonl.gz").read_bytes()
    ).splitlines(True)
    return b"".join(lines[:6])


def test_a_truncated_file_is_read_to_its_end(run, tmp_path):
    """Then the line at which it ended is reported; status 1."""
    path = tmp_path / "f.jsonl.gz"
    path.write_bytes(gzip.compress(calm_lines())[:-3000])
    status, out, err = run("replay", path, "--format", "json")
    assert status == 1
    (line,) = err.splitlines()
    number = int(re.search(r"line (\d+): expected the rest of the gzip file", line)[1])
    assert line.startswith(f"vllm-preemption-exporter: {path}: line ")
    assert len(out.splitlines()) == number - 2
    assert f", {number - 2} polls, 0 failed\n" in run("replay", path)[1]


def test_a_broken_line_is_reported_after_all_polls_before_it(run, tmp_path):
    """With its number, and what was expected."""
    path = tmp_path / "f.jsonl"
    path.write_bytes(calm_lines() + b'{"t": "noon"}\n')
    status, out, err = run("replay", path)
    assert status == 1
    assert ", 5 polls, 0 failed\n" in out
    assert err == f"vllm-preemption-exporter: {path}: line 7: expected a number as t, got 'noon'\n"


NO_RECORDINGS = {
    b"": "line 1: expected a recording's header, got an empty file",
    b"\x1f\x8b": "line 1: expected the rest of the gzip file",
    b"# HELP vllm:x y\n": "line 1: expected a JSON object",
    b"\xff\xfe\x00": "line 1: expected a JSON object",
    b'{"t": 0}\n': "line 1: expected a recording's header with a case",
    b'{"case": "x", "interval": 0}\n': "line 1: expected an interval above 0 s",
}


def test_a_file_that_is_no_recording_is_an_error(run, tmp_path):
    """Of one line; status 1."""
    path = tmp_path / "f.jsonl"
    failures = []
    for content, expected in NO_RECORDINGS.items():
        path.write_bytes(content)
        status, out, err = run("replay", path)
        if (status, out, len(err.splitlines())) != (1, "", 1) or expected not in err:
            failures.append((content, status, out, err))
    assert not failures


def test_a_file_that_cannot_be_read_is_an_error(run, tmp_path):
    """By its name, in plain words."""
    missing = tmp_path / "missing.jsonl"
    assert run("replay", missing) == (
        1, "", f"vllm-preemption-exporter: {missing}: no such file or directory\n",
    )  # fmt: skip
    assert run("replay", tmp_path) == (1, "", f"vllm-preemption-exporter: {tmp_path}: is a directory\n")


COUNTED = ("preemptions", "finished", "steps", "prompt_tokens", "generation_tokens")
LEAPS = ((0.0, 0), (0.001, 1e308), (0.002, 1.5e308), (70.0, 1.6e308), (1e11, 1.7e308))


def leaping(count: float) -> bodies.Engine:
    """An engine with counters of this size."""
    return bodies.engine(kv=0.5, **dict.fromkeys(COUNTED, count))


def extreme(count: float) -> bodies.Engine:
    """An engine with all numbers of this size."""
    counters = dict.fromkeys(COUNTED, count)
    gauges = dict.fromkeys(("running", "waiting", "capacity", "deferred"), count)
    means = dict.fromkeys(("queue", "inter_token", "first_token"), (count, count / 1e300))
    lengths = dict.fromkeys(
        ("prompt_lengths", "output_lengths"), ({1e300: count, float("inf"): count}, count)
    )
    pool = {"kv_cache_size_tokens": 10**300, "num_gpu_blocks": 10**300, "block_size": 16}
    return bodies.engine(kv=0.5, cache=pool, **counters, **gauges, **means, **lengths)


@pytest.mark.parametrize("engine", [leaping, extreme])
def test_huge_numbers_are_no_error(run, tmp_path, engine):
    """A counter that leaps to 1e308 within a millisecond has a rate that JSON cannot hold."""
    path = write_recording(tmp_path / "f.jsonl", *(Poll(t, bodies.body(engine(count))) for t, count in LEAPS))
    for form in ("json", "text"):
        status, out, err = run("replay", path, "--format", form)
        assert (status, err) == (0, "")
        assert len(out.splitlines()) == len(LEAPS) or f", {len(LEAPS)} polls, 0 failed" in out


CHANGES = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 20), st.binary(max_size=8)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, packed=st.booleans())
def test_a_corrupt_file_never_ends_in_a_traceback(tmp_path, capfd, changes, packed):
    """Status 0 or 1, and at most one line of error."""
    data = small_file(packed=packed)
    for start, length, new in changes:
        place = start % len(data)
        data = data[:place] + new + data[place + length :]
    path = tmp_path / "f.jsonl"
    path.write_bytes(data)
    status = cli.main(["replay", str(path), "--format", "json"])
    out, err = capfd.readouterr()
    assert status == (1 if err else 0)
    assert len(err.splitlines()) <= 1
    objects(out)


def small_file(*, packed: bool) -> bytes:
    """A recording of a few hundred bytes."""
    rows = [
        {"case": "x", "interval": 1.0, "config": {"max_num_seqs": 4}, "probes": {"/v1/models": {"data": []}}}
    ]
    for t in range(6):
        engine = bodies.engine(running=3, kv=0.1 * t, preemptions=t, generation_tokens=100 * t, finished=t)
        rows.append({"t": float(t), "body": bodies.body(engine).decode()})
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    return gzip.compress(text) if packed else text


def test_a_recording_is_replayed_whatever_the_configuration_polls(run, tmp_path):
    """The facts of other servers are not those of the recording's."""
    several = tmp_path / "several.yaml"
    several.write_text("targets: [{url: 'http://a'}, {url: 'http://b'}]\ntargets_dns: [{name: x}]\n")
    path = write_recording(tmp_path / "f.jsonl", Poll(0.0, bodies.body(bodies.engine(kv=0.4))))
    assert run("replay", path, "--config.file", several)[0] == 0
