"""``record``: the file that it writes, also when the server or the disk fails."""

import json
import re
import signal
from contextlib import suppress

import pytest
from support import bodies
from support.process import FAST, Command, until
from support.servers import Server, recorded, silent, status

from exporter.vllm import prober
from exporter.vllm.exposition import Reader
from exporter.vllm.recording import Header, Poll, RecordingError, read

HIDDEN = "hunter2-is-not-shown"
BODY = bodies.body(bodies.engine(running=3, waiting=1, kv=0.4, preemptions=2, finished=5))

pytestmark = pytest.mark.usefixtures("own_logging")


def recorded_file(path) -> tuple[Header, list[Poll]]:
    """What a recording holds."""
    header, *polls = read(path)
    return header, polls


def test_a_recording_holds_the_responses(tmp_path):
    """Byte for byte, with times and errors; Ctrl-C keeps it."""
    path = tmp_path / "run.jsonl.gz"
    with (
        Server(recorded()) as upstream,
        Command(tmp_path, "record", upstream.url, "-o", str(path), *FAST) as command,
    ):
        until(lambda: len(upstream.requests) >= 5, "two polls")
        upstream.mode = status("500 No")
        until(lambda: len(upstream.requests) >= 7, "a failed poll")
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
    assert [json.loads(line)["target"]["up"] for line in out.splitlines()] == [True] * polls


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


def test_without_a_url_the_configured_target_is_recorded(run, tmp_path):
    """With its token; its configured facts are in the header."""
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
    """And the server is not polled in vain; `--force` overwrites."""
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
    ("path", "reason"),
    [("/dev/full", "no space left on device"), ("/nowhere/run.jsonl", "no such file or directory")],
)
def test_a_file_that_cannot_be_created_is_an_error(run, path, reason):
    """In one line; status 1."""
    status, out, err = run("record", "http://127.0.0.1:9", "-o", path, "--force", *FAST)
    assert (status, out) == (1, "")
    assert err == f"vllm-preemption-exporter: cannot write {path}: {reason}\n"


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
        pytest.fail("expected the limit to be reached")


def test_a_server_that_never_responds_is_status_1(run, tmp_path):
    """Its errors are recorded."""
    path = tmp_path / "run.jsonl"
    status, _, err = run("record", "http://127.0.0.1:9", "-o", path, "--for", "500ms", *FAST)
    assert status == 1
    assert recorded_file(path)[1][0].error == "connection_refused"
    assert re.search(r"polls, (\d) failed$", err, re.MULTILINE)


def test_a_recording_stopped_while_the_server_hangs_ends_at_once(tmp_path):
    """Even before the first poll, during the probes for the header."""
    path = tmp_path / "run.jsonl"
    with Server(recorded()) as upstream:
        upstream.mode = silent
        arguments = ("record", upstream.url, "-o", str(path), "--poll.timeout", "10s")
        with Command(tmp_path, *arguments) as command:
            until(lambda: upstream.requests, "the first probe")
            status, seconds = command.stop()
    assert status == 1
    assert seconds < 2.0
    assert recorded_file(path)[1] == []


def test_a_recordings_header_holds_the_probes(run, tmp_path, monkeypatch):
    """So that a replay has them too."""

    async def probes(_client, _patient):
        return {"/version": {"version": "0.26.0"}}

    monkeypatch.setattr(prober, "header_of", probes)
    path = tmp_path / "run.jsonl"
    with Server(BODY) as upstream:
        run("record", upstream.url, "-o", path, "--for", "500ms", *FAST)
    assert recorded_file(path)[0].probes == {"/version": {"version": "0.26.0"}}


def test_the_argument_line_is_recorded_without_keys_and_used_again(run, tmp_path):
    """Replay and whatif know the seats, and say from where; the key and the model's name are nowhere."""
    path = tmp_path / "run.jsonl"
    line = f"serve acme/secret-model --api-key {HIDDEN} --max-num-seqs 48 --served-model-name secret-name"
    with Server(BODY) as upstream:
        done = run("record", upstream.url, "-o", path, "--for", "500ms", "--engine.args", line, *FAST)
    assert done[0] == 0
    assert recorded_file(path)[0].arguments == {"max_num_seqs": 48}
    assert not re.search(f"{HIDDEN}|secret", path.read_text())
    assert "max_num_seqs 48 (argument line)" in run("replay", path)[1]


def test_a_url_selects_one_of_several_servers(run, tmp_path):
    """With the file's facts about it."""
    path, several = tmp_path / "run.jsonl", tmp_path / "several.yaml"
    with Server(BODY) as upstream:
        several.write_text(
            f"targets: [{{url: '{upstream.url}', config: {{max_num_seqs: 64}}}}, {{url: 'http://b'}}]\n"
        )
        arguments = ("record", upstream.url, "-o", path, "--for", "300ms", "--config.file", several, *FAST)
        assert run(*arguments)[0] == 0
    assert recorded_file(path)[0].config == {"max_num_seqs": 64}
