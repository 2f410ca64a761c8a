"""The commands: what they print, where they print it, and the status they exit with."""

import asyncio
import gzip
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import bodies, real_recordings
from support.process import ANYWHERE, FAST, Command, until
from support.servers import Server, recorded, silent, status

from exporter import __version__, cli
from exporter.analysis.signals import NAMES
from exporter.commands import demo
from exporter.config import OPTIONS, Config
from exporter.vllm import prober
from exporter.vllm.exposition import Reader
from exporter.vllm.names import COUNTERS
from exporter.vllm.recording import Header, Poll, RecordingError, Writer, read

HIDDEN = "hunter2-is-not-shown"
COMMANDS = ("serve", "record", "replay", "demo", "whatif")
RECORDINGS = sorted(real_recordings.RECORDINGS.glob("*.jsonl.gz"))
BODY = bodies.body(bodies.engine(running=3, waiting=1, kv=0.4, preemptions=2, finished=5))

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture
def run(capfd, monkeypatch):
    """A function that runs a command in this process; its status, output and complaints."""
    for name in list(os.environ):
        if name.startswith("VLLM_PRESSURE_"):
            monkeypatch.delenv(name)

    def command(*arguments: object):
        status = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return status, out, err

    return command


# Usage


def test_the_help_says_what_it_is_and_what_there_is(run):
    """With a line to copy for each command."""
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: vllm-preemption-exporter [COMMAND] [OPTION ...]\n")
    assert all(re.search(rf"^    {name} +\w", out, re.MULTILINE) for name in COMMANDS)
    assert "--disable-access-log" not in out
    assert "http://127.0.0.1:8000/metrics" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_a_short_usage_and_all_options(run, command):
    """Sorted by section, each option with its default and variable."""
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    usage, _, rest = out.partition("\n")
    assert len(usage) < 80
    assert "[OPTION ...]" in usage
    for row in OPTIONS:
        assert (f"  {row.flag} " in rest) == row.has_flag
    for section in ("config", "target", "web", "poll", "log", "analysis"):
        assert f"\n{section}:\n" in rest


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_the_help_fits_a_terminal_of_any_width(run, monkeypatch, columns, command):
    """Only what cannot be broken is longer than a line."""
    monkeypatch.setenv("COLUMNS", columns)
    status, out, _ = run(*command, "--help")
    assert status == 0
    if int(columns) >= 80:
        assert max(map(len, out.splitlines())) <= int(columns)


@pytest.mark.parametrize("command", ["serve", "record"])
def test_the_help_of_what_polls_says_what_that_costs_the_server(run, command):
    """A line in the access log per poll, and how to be rid of it."""
    assert "--disable-access-log-for-endpoints /metrics" in " ".join(run(command, "--help")[1].split())


def test_the_version_is_printed(run):
    """With the program's name."""
    assert run("--version") == (0, f"vllm-preemption-exporter {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("fly",), "invalid choice: 'fly'"),
        (("--nope",), "unrecognized arguments: --nope"),
        (("record", "http://h:1"), "required: -o/--output"),
        (("replay",), "required: FILE"),
        (("replay", "x", "--format", "xml"), "invalid choice: 'xml'"),
        (("demo", "--for", "soon"), "expected a duration from 100ms to 168h (such as 500ms, 10s, 2m, 1h)"),
        (("demo", "--for", "-3s"), "--for"),
        (("demo", "--for", "1e400"), "expected a duration"),
        (("serve", "--poll.int", "1s"), "unrecognized arguments: --poll.int"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_slip_of_usage_is_status_2(run, arguments, told):
    """With a usage of a line or two, not a page, and what was wrong."""
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert told in err
    assert err.startswith("usage: vllm-preemption-exporter")
    assert len(err.splitlines()) <= 3


def test_all_that_is_wrong_with_the_configuration_is_listed(run, tmp_path):
    """One line each, with the key; status 2."""
    path = tmp_path / "config.yaml"
    path.write_text("poll: {interval: soon}\nweb: {listen_adress: ':1'}\n")
    status, out, err = run("--config.file", path, "--log.level", "loud")
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        "vllm-preemption-exporter: the configuration is not good:",
        "  --log.level: expected one of debug, info, warning, error, got 'loud'",
        "  web.listen_adress: unknown key (did you mean listen_address?)",
        "  poll.interval: expected a duration from 100ms to 1m (such as 500ms, 10s, 2m, 1h), got 'soon'",
    ]


def test_a_good_configuration_is_shown_with_secrets_masked(run, tmp_path, monkeypatch):
    """As the file that would give it; nothing is opened."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"targets: [{{url: 'http://vllm:8000', headers: {{X-Key: {HIDDEN}}}, bearer_token: {HIDDEN}}}]\n"
    )
    status, out, err = run("--config.check", "--config.file", path)
    assert (status, err) == (0, "")
    assert "url: http://vllm:8000/metrics" in out
    assert out.count("<secret>") == 2
    assert HIDDEN not in out
    again = tmp_path / "again.yaml"
    again.write_text(out.replace("<secret>", HIDDEN))
    assert run("--config.check", "--config.file", again)[1] == out


def test_a_secret_of_the_environment_is_masked_too(run, monkeypatch):
    """`--config.check` is what people paste into reports."""
    monkeypatch.setenv("VLLM_PRESSURE_TARGET_BEARER_TOKEN", HIDDEN)
    status, out, err = run("--config.check")
    assert status == 0
    assert "bearer_token: <secret>" in out
    assert HIDDEN not in out + err


@pytest.mark.parametrize("arguments", [("--config.check",), ("serve", "--config.check")])
def test_without_a_command_it_serves(run, arguments):
    """Options alone are options of `serve`."""
    assert "listen_address" in run(*arguments)[1]


# Replay


@pytest.fixture(scope="module")
def replayed() -> dict[str, list[dict]]:
    """The objects of each recording, printed once."""
    found = {}
    for path in RECORDINGS:
        out = io.StringIO()
        real, sys.stdout = sys.stdout, out
        try:
            assert cli.main(["replay", str(path), "--format", "json"]) == 0
        finally:
            sys.stdout = real
        found[path.name.partition(".jsonl")[0]] = [json.loads(line) for line in out.getvalue().splitlines()]
    return found


def recordings() -> list[str]:
    """The names of all recordings."""
    return [path.name.partition(".jsonl")[0] for path in RECORDINGS]


@pytest.mark.parametrize("name", recordings())
def test_a_replayed_poll_is_an_object_of_the_promised_form(replayed, name):
    """Keys and types, at every poll: others read them."""
    polls = real_recordings.polls(name)
    objects = replayed[name]
    assert [one["t"] for one in objects] == [round(poll.t, 3) for poll in polls]
    for one, poll in zip(objects, polls, strict=True):
        assert one.keys() == {"t", "target", "engines", "models"}
        target = one["target"]
        assert {"up", "verdict", "severity", "findings"} <= target.keys()
        assert target["up"] is (poll.body is not None)
        assert isinstance(target["severity"], str)
        assert isinstance(target["findings"], list)
        assert isinstance(one["models"], dict)
        for key, engine in one["engines"].items():
            assert re.fullmatch(r"\d+", key)
            assert {"model", "verdict", "severity", "findings", "fixes", "signals"} <= engine.keys()
            assert engine["model"] == "tiny-llama"
            assert isinstance(engine["findings"], list)
            assert isinstance(engine["fixes"], list)
            assert engine["signals"].keys() <= {*NAMES}
            # An unknown signal is left out: none is null, and none a word.
            assert {type(value) for value in engine["signals"].values()} <= {int, float}


def test_a_replay_has_the_right_values(replayed):
    """Of a storm: what vLLM's own counter gained, and the full cache."""
    last = replayed[real_recordings.EXHAUSTION][-1]["engines"]["0"]["signals"]
    assert last["preemptions_total"] == 531
    assert (
        max(one["engines"]["0"]["signals"]["kv_usage_ratio"] for one in replayed[real_recordings.EXHAUSTION])
        == 1.0
    )
    assert replayed[real_recordings.TWO_ENGINES][-1]["engines"].keys() == {"0", "1"}


def test_what_is_unknown_is_left_out(replayed):
    """A server that is refused at first has no engine; a rate needs two polls."""
    first = replayed[real_recordings.RESTART][0]
    assert first["engines"] == {}
    assert first["target"]["up"] is False
    assert "preemptions_per_second" not in replayed[real_recordings.CALM][0]["engines"]["0"]["signals"]


def test_replicas_are_told_apart_by_their_key(run, tmp_path):
    """As `REPLICA/0`."""
    body = bodies.body(bodies.engine(replica="r1", kv=0.1), bodies.engine(replica="r2", kv=0.2))
    path = recording(tmp_path / "f.jsonl", Poll(0.0, body))
    (one,) = objects(run("replay", path, "--format", "json")[1])
    assert one["engines"].keys() == {"r1/0", "r2/0"}


def test_the_servers_answers_in_the_header_count(run, tmp_path):
    """The longest request by `/v1/models` says how many fit; what the operator told goes before."""
    body = bodies.body(bodies.engine(kv=0.1, cache={"num_gpu_blocks": 101, "block_size": 16}))
    probed = {"/v1/models": {"max_model_len": 400}}
    for config, expected in (({}, 4.0), ({"max_model_len": 800}, 2.0)):
        path = recording(tmp_path / "f.jsonl", Poll(0.0, body), header=Header("f", 1.0, config, probed))
        (one,) = objects(run("replay", path, "--format", "json")[1])
        assert one["engines"]["0"]["signals"]["kv_max_concurrency"] == expected
        path.unlink()


def recording(path, *polls: Poll, header: Header | None = None):
    """A recording in a file."""
    with Writer(path, header or Header("f")) as writer:
        for poll in polls:
            writer.write(poll)
    return path


def objects(text: str) -> list[dict]:
    """JSON Lines."""
    return [json.loads(line) for line in text.splitlines()]


def test_the_text_is_a_line_per_poll_and_engine(run):
    """With a dash for what is unknown."""
    path = real_recordings.RECORDINGS / f"{real_recordings.RESTART}.jsonl.gz"
    status, out, err = run("replay", path)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert len(lines) == len(real_recordings.polls(real_recordings.RESTART))
    assert lines[0] == "      0.0s  down (connection_refused)"
    number = r"(-|[\d.]+%?)"
    form = (
        rf" +[\d.]+s  (up|down \(\w+\))  engine 0  {number} running  {number} waiting"
        rf"  KV usage {number}  KV usage peak {number}"
    )
    assert all(re.match(form, line) for line in lines[35:])
    assert "KV usage -" in out


def test_the_text_of_several_engines_has_a_line_for_each(run):
    """Under the same time."""
    lines = run("replay", real_recordings.RECORDINGS / f"{real_recordings.TWO_ENGINES}.jsonl.gz")[
        1
    ].splitlines()
    assert re.match(r"(.*s)  up  engine 0 ", lines[-2])[1] == re.match(r"(.*s)  up  engine 1 ", lines[-1])[1]


def test_the_text_obeys_no_escape_sequence_of_a_label(run, tmp_path):
    """A terminal would: a name is shown as what it is."""
    body = b'vllm:num_requests_running{engine="\x1b[2J\xd0\xb6",model_name="m"} 3.0\n'
    path = recording(tmp_path / "f.jsonl", Poll(0.0, body), Poll(1.0, None, "\x1b]0;x\x07"))
    status, out, _ = run("replay", path)
    assert status == 0
    assert "\x1b" not in out
    # Control characters end where series are read; what marks the change keeps two names apart.
    assert r"engine \ufffd[2J\u0436~" in out


def storm_file() -> bytes:
    """The first polls of a recording, as plain text."""
    lines = gzip.decompress(
        (real_recordings.RECORDINGS / f"{real_recordings.CALM}.jsonl.gz").read_bytes()
    ).splitlines(True)
    return b"".join(lines[:6])


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_file_that_is_cut_off_is_read_to_where_it_is(run, tmp_path, form):
    """Then the number of the line at which it ended is told; status 1."""
    path = tmp_path / "f.jsonl.gz"
    path.write_bytes(gzip.compress(storm_file())[:-3000])
    status, out, err = run("replay", path, "--format", form)
    assert status == 1
    (line,) = err.splitlines()
    number = int(re.search(r"line (\d+): wanted the rest of the gzip file", line)[1])
    assert line.startswith(f"vllm-preemption-exporter: {path}: line ")
    assert len(out.splitlines()) == number - 2


def test_a_broken_line_is_told_after_all_that_was_readable(run, tmp_path):
    """With its number, and what was wanted."""
    path = tmp_path / "f.jsonl"
    path.write_bytes(storm_file() + b'{"t": "noon"}\n')
    status, out, err = run("replay", path)
    assert status == 1
    assert len(out.splitlines()) == 5
    assert err == f"vllm-preemption-exporter: {path}: line 7: wanted a number as t, got 'noon'\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "line 1: wanted a recording's header, got an empty file"),
        (b"\x1f\x8b", "line 1: wanted the rest of the gzip file"),
        (b"# HELP vllm:x y\n", "line 1: wanted a JSON object"),
        (b"\xff\xfe\x00", "line 1: wanted a JSON object"),
        (b'{"t": 0}\n', "line 1: wanted a recording's header with a case"),
        (b'{"case": "x", "interval": 0}\n', "line 1: wanted an interval above 0 s"),
    ],
)
def test_a_file_that_is_no_recording_is_told(run, tmp_path, content, told):
    """In one line; status 1."""
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    status, out, err = run("replay", path)
    assert (status, out) == (1, "")
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_file_that_cannot_be_read_is_told(run, tmp_path):
    """By its name, in plain words."""
    missing = tmp_path / "missing.jsonl"
    assert run("replay", missing) == (
        1, "", f"vllm-preemption-exporter: {missing}: no such file or directory\n",
    )  # fmt: skip
    assert run("replay", tmp_path) == (1, "", f"vllm-preemption-exporter: {tmp_path}: is a directory\n")


COUNTED = ("preemptions", "finished", "steps", "prompt_tokens", "generation_tokens")
LEAPS = ((0.0, 0), (0.001, 1e308), (0.002, 1.5e308), (70.0, 1.6e308), (1e11, 1.7e308))


def leaping(count: float) -> bodies.Engine:
    """An engine whose counters are as large as that."""
    return bodies.engine(kv=0.5, **dict.fromkeys(COUNTED, count))


def extreme(count: float) -> bodies.Engine:
    """An engine all of whose numbers are as large as that."""
    counters = dict.fromkeys(COUNTED, count)
    gauges = dict.fromkeys(("running", "waiting", "capacity", "deferred"), count)
    means = dict.fromkeys(("queue", "inter_token", "first_token"), (count, count / 1e300))
    lengths = dict.fromkeys(
        ("prompt_lengths", "output_lengths"), ({1e300: count, float("inf"): count}, count)
    )
    pool = {"kv_cache_size_tokens": 10**300, "num_gpu_blocks": 10**300, "block_size": 16}
    return bodies.engine(kv=0.5, cache=pool, **counters, **gauges, **means, **lengths)


@pytest.mark.parametrize(
    "engine",
    [
        leaping,
        extreme,
    ],
)
def test_numbers_beyond_all_bounds_are_no_error(run, tmp_path, engine):
    """A counter that leaps to 1e308 within a millisecond has a rate that JSON cannot say."""
    path = recording(tmp_path / "f.jsonl", *(Poll(t, bodies.body(engine(count))) for t, count in LEAPS))
    for form in ("json", "text"):
        status, out, err = run("replay", path, "--format", form)
        assert (status, err) == (0, "")
        assert len(out.splitlines()) == len(LEAPS)


CHANGES = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 20), st.binary(max_size=8)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, packed=st.booleans())
def test_a_spoiled_file_never_ends_in_a_traceback(tmp_path, capfd, changes, packed):
    """Status 0 or 1, and at most a line of complaint."""
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


def test_a_reader_who_has_seen_enough_is_no_error():
    """`replay F | head` ends in silence."""
    path = real_recordings.RECORDINGS / f"{real_recordings.EXHAUSTION}.jsonl.gz"
    with subprocess.Popen(
        [sys.executable, "-m", "exporter", "replay", str(path), "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline().startswith(b'{"t":0.0,')
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(10) == 0
        finally:
            process.kill()


def shell(script: str, *arguments: object) -> subprocess.CompletedProcess:
    """A line for the shell; "$@" is the command with its arguments."""
    command = [sys.executable, "-m", "exporter", *map(str, arguments)]
    return subprocess.run(
        ["sh", "-c", script, "sh", *command], capture_output=True, text=True, check=False, timeout=30
    )


@pytest.mark.parametrize(
    ("script", "status", "err"),
    [
        ('"$@" > /dev/full', 1, "vllm-preemption-exporter: no space left on device\n"),
        ('"$@" >&-', 0, ""),
        ('PYTHONIOENCODING=ascii "$@" > /dev/null', 0, ""),
    ],
    ids=["full", "closed", "ascii"],
)
def test_an_output_that_takes_nothing_is_no_traceback(tmp_path, script, status, err):
    """A full disk is told; a closed one was meant."""
    path = recording(tmp_path / "ж.jsonl", Poll(0.0, BODY))
    done = shell(script, "replay", path)
    assert (done.returncode, done.stderr) == (status, err)


# Record


def recorded_file(path) -> tuple[Header, list[Poll]]:
    """What a recording holds."""
    header, *polls = read(path)
    return header, polls


def test_a_recording_holds_what_the_server_answered(tmp_path):
    """Byte for byte, with times and errors; Ctrl-C keeps it."""
    path = tmp_path / "run.jsonl.gz"
    with (
        Server(recorded()) as upstream,
        Command(tmp_path, "record", upstream.url, "-o", str(path), *FAST) as command,
    ):
        until(lambda: len(upstream.requests) >= 4, "two polls")
        upstream.mode = status("500 No")
        until(lambda: len(upstream.requests) >= 6, "a failed poll")
        code, seconds = command.stop(signal.SIGINT)
    header, polls = recorded_file(path)
    assert code == 0
    assert seconds < 2.0
    assert (header.case, header.interval, header.probes) == ("run", 0.2, {})
    assert polls[0].t == 0.0
    assert polls[0].body == upstream.body
    assert polls[0].content_type == "text/plain; version=0.0.4"
    assert polls[-1].error == "http_500"
    failed = sum(poll.body is None for poll in polls)
    assert command.err.splitlines()[-1] == f"{path}: {len(polls)} polls, {failed} failed"
    assert re.search(r"^ +0\.0s  1 polls, 0 failed  last: \d+ bytes, 1 engine$", command.err, re.MULTILINE)
    assert command.out == ""


def test_a_recording_is_replayed(run, tmp_path):
    """By its own reader, through the same pipeline."""
    path = tmp_path / "run.jsonl"
    with Server(recorded()) as upstream:
        status, out, err = run("record", upstream.url, "-o", path, "--for", "500ms", *FAST)
    assert (status, out) == (0, "")
    polls = int(re.search(r"run\.jsonl: (\d) polls, 0 failed$", err, re.MULTILINE)[1])
    status, out, _ = run("replay", path, "--format", "json")
    assert status == 0
    assert [one["target"]["up"] for one in objects(out)] == [True] * polls


def test_a_recording_can_be_anonymous(run, tmp_path):
    """For a bug report: the model's name is nowhere in it, the numbers are."""
    path = tmp_path / "run.jsonl"
    body = bodies.body(bodies.engine(model="acme/secret-model", kv=0.25))
    with Server(body) as upstream:
        assert run("record", upstream.url, "-o", path, "--for", "500ms", "--anonymise", *FAST)[0] == 0
    assert b"secret-model" not in path.read_bytes()
    _, polls = recorded_file(path)
    (snapshot,) = Reader().read(polls[0].body).engines.values()
    assert snapshot.key.model.startswith("model-")
    assert snapshot.values["kv_usage"] == 0.25


def test_the_configured_target_is_recorded_where_no_url_is_given(run, tmp_path):
    """With its token, and with what was told about it in the header."""
    path, config = tmp_path / "run.jsonl", tmp_path / "config.yaml"
    with Server(BODY) as upstream:
        config.write_text(
            f"targets: [{{url: '{upstream.url}', bearer_token: {HIDDEN}, config: {{max_num_seqs: 64}}}}]\n"
        )
        status, _, err = run("record", "-o", path, "--for", "500ms", "--config.file", config, *FAST)
    assert status == 0
    assert upstream.requests[-1].headers["Authorization"] == f"Bearer {HIDDEN}"
    assert recorded_file(path)[0].config == {"max_num_seqs": 64}
    assert HIDDEN not in path.read_text() + err


def test_an_existing_file_is_not_overwritten(run, tmp_path):
    """And nobody is asked anything in vain; `--force` overwrites."""
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with Server(BODY) as upstream:
        arguments = ("record", upstream.url, "-o", path, "--for", "500ms", *FAST)
        status, _, err = run(*arguments)
        assert (status, err) == (
            1, f"vllm-preemption-exporter: {path} exists; choose another file or --force\n",
        )  # fmt: skip
        assert path.read_text() == "precious"
        assert upstream.requests == []
        assert run(*arguments, "--force")[0] == 0
    assert recorded_file(path)[1][0].body == BODY


@pytest.mark.parametrize(
    ("path", "told"),
    [("/dev/full", "no space left on device"), ("/nowhere/run.jsonl", "no such file or directory")],
)
def test_a_file_that_cannot_be_made_is_told(run, path, told):
    """In one line; status 1."""
    status, out, err = run("record", "http://127.0.0.1:9", "-o", path, "--force", *FAST)
    assert (status, out) == (1, "")
    assert err == f"vllm-preemption-exporter: cannot write {path}: {told}\n"


def test_a_disk_that_fills_up_ends_a_recording_and_keeps_it(tmp_path):
    """A limit on the size of files stands in for the disk; what was written before is readable."""
    path = tmp_path / "run.jsonl"
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from exporter.cli import main\n"
        "sys.exit(main())\n"
    )
    with (
        Server(recorded()) as upstream,
        Command(tmp_path, "record", upstream.url, "-o", str(path), *FAST, script=script) as command,
    ):
        assert command.end() == 1
    assert command.err.splitlines()[-1] == f"vllm-preemption-exporter: cannot write {path}: file too large"
    assert "Traceback" not in command.err
    items = read(path)
    with suppress(RecordingError):  # of the line in which the disk was full
        assert isinstance(next(items), Header)
        assert next(items).body == upstream.body
        assert next(items).body == upstream.body
        pytest.fail("wanted the limit to be reached")


def test_a_server_that_never_answered_is_status_1(run, tmp_path):
    """The errors are recorded all the same."""
    path = tmp_path / "run.jsonl"
    status, _, err = run("record", "http://127.0.0.1:9", "-o", path, "--for", "500ms", *FAST)
    assert status == 1
    assert recorded_file(path)[1][0].error == "connection_refused"
    assert re.search(r"polls, (\d) failed$", err, re.MULTILINE)


def test_a_recording_stopped_while_the_server_hangs_ends_at_once(tmp_path):
    """Even before the first poll, in the middle of the questions for the header."""
    path = tmp_path / "run.jsonl"
    with Server(recorded()) as upstream:
        upstream.mode = silent
        arguments = ("record", upstream.url, "-o", str(path), "--poll.timeout", "10s")
        with Command(tmp_path, *arguments) as command:
            until(lambda: upstream.requests, "the first question")
            status, seconds = command.stop()
    assert status == 1
    assert seconds < 2.0
    assert recorded_file(path)[1] == []


def test_a_recordings_header_holds_what_the_server_told(run, tmp_path, monkeypatch):
    """So that a replay knows it too."""

    async def ask(_client):
        return {"/version": {"version": "0.26.0"}}

    monkeypatch.setattr(prober, "header_of", ask)
    path = tmp_path / "run.jsonl"
    with Server(BODY) as upstream:
        run("record", upstream.url, "-o", path, "--for", "500ms", *FAST)
    assert recorded_file(path)[0].probes == {"/version": {"version": "0.26.0"}}


# Demo


@pytest.fixture(scope="module")
def loop() -> demo.Loop:
    """The bundled recording without an end."""
    return demo.Loop(demo.bundled())


def test_counters_of_the_demo_never_fall(loop):
    """Over the end of the recording and the beginning of the next round; a restart would be shown else."""
    reader, before, seconds = Reader(), {}, 0.0
    while seconds < 2.5 * loop.seconds:
        exposition = reader.read(loop.at(seconds))
        (snapshot,) = exposition.engines.values()
        assert exposition.unreadable == 0
        counted = {name: value for name, value in snapshot.values.items() if name in COUNTERS} | {
            f"{name} {bound}": count
            for name, buckets in snapshot.buckets.items()
            for bound, count in buckets.items()
        }
        assert all(value >= before.get(name, 0.0) for name, value in counted.items())
        before = counted
        seconds += 0.7


def test_a_round_of_the_demo_gains_what_the_recording_gained(loop):
    """Neither lost nor doubled at the seam."""
    reader = Reader()
    counts = []
    for rounds in (0, 1, 2):
        (snapshot,) = reader.read(loop.at(rounds * loop.seconds + 0.01)).engines.values()
        counts.append(snapshot.values["preemptions"])
    assert counts[1] - counts[0] == counts[2] - counts[1] > 50


def test_the_demo_says_where_to_look_and_a_line_a_second(tmp_path):
    """Then it ends by itself."""
    arguments = ("demo", "--for", "3s", *ANYWHERE)
    with Command(tmp_path, *arguments) as command:
        base = until(lambda: re.search(r"for Prometheus +(http://\S+)/metrics", command.out), "the address")[
            1
        ]
        with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2]))) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"200 OK" in connection.recv(1000)
        assert command.end() == 0
    status = re.findall(r"^ +(\d)\.\ds  up  engine 0  \d+ running", command.out, re.MULTILINE)
    assert status == ["1", "2", "3"]
    assert f"{base}/api/v1/status" in command.out
    assert command.err == ""


def test_the_demo_takes_another_port_where_the_usual_one_is_taken(tmp_path, monkeypatch):
    """It must run beside an exporter; a port that was asked for is another matter."""
    said: list[str] = []
    starts = []
    real = demo.Sidecar.start

    async def start(self):
        starts.append(self._server._port)
        if len(starts) == 1:
            raise OSError(98, "made up")
        return await real(self)

    monkeypatch.setattr(demo.Sidecar, "start", start)
    asyncio.run(demo.run(Config(), said.append, seconds=0.1))
    assert starts == [21900, 0]
    assert re.search(r"the exporter +http://127\.0\.0\.1:\d+/", "\n".join(said))


def test_the_demo_ends_at_once_on_ctrl_c(tmp_path):
    """With status 0 and without a word."""
    with Command(tmp_path, "demo", *ANYWHERE) as command:
        until(lambda: "Ctrl-C" in command.out, "the introduction")
        status, seconds = command.stop(signal.SIGINT)
    assert (status, command.err) == (0, "")
    assert seconds < 2.0


def test_a_demo_whose_reader_has_left_is_no_error():
    """`demo | head` ends in silence, with everything closed."""
    done = shell('"$@" | head -1', "demo", *ANYWHERE)
    assert done.stdout.startswith("A simulated vLLM")
    assert done.stderr == ""


# Several targets


@pytest.fixture
def several(tmp_path):
    """A configuration that names two servers and a way to find more."""
    path = tmp_path / "several.yaml"
    path.write_text("targets: [{url: 'http://a'}, {url: 'http://b'}]\ntargets_dns: [{name: x}]\n")
    return path


@pytest.mark.parametrize(
    ("command", "status"), [(("check",), 3), (("record", "-o", "x.jsonl"), 2), (("whatif",), 2)]
)
def test_what_is_about_one_server_asks_which(run, several, command, status):
    """Where the configuration names several; nobody is asked anything."""
    told = run(*command, "--config.file", several)
    assert told[:2] == (status, "")
    assert "names 2 targets and 1 ways to find more" in told[2]
    assert f"{command[0]} is about one: expected its URL" in told[2]


def test_a_url_says_which_of_several_servers_is_meant(run, several, tmp_path):
    """With what the file tells of it."""
    path = tmp_path / "run.jsonl"
    with Server(BODY) as upstream:
        several.write_text(
            f"targets: [{{url: '{upstream.url}', config: {{max_num_seqs: 64}}}}, {{url: 'http://b'}}]\n"
        )
        arguments = ("record", upstream.url, "-o", path, "--for", "300ms", "--config.file", several, *FAST)
        assert run(*arguments)[0] == 0
    assert recorded_file(path)[0].config == {"max_num_seqs": 64}


def test_a_recording_is_replayed_whatever_the_configuration_watches(run, several, tmp_path):
    """Facts of some server are not those of the recording's."""
    path = recording(tmp_path / "f.jsonl", Poll(0.0, BODY))
    assert run("replay", path, "--config.file", several)[0] == 0


def test_several_targets_are_checked_and_shown(run, several):
    """As the file that would give them."""
    status, out, _ = run("--config.check", "--config.file", several)
    assert status == 0
    assert re.search(r"^targets_dns:\n- name: x$", out, re.MULTILINE) or "name: x" in out
    assert out.count("url: http") == 2
