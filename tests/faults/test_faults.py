"""The fault table: what a server may do to the running program, and what comes of it.

One process of the program goes through those that fail, another through those that mislead. In each: the
outcome that is stated here, health and page stay there, no counter of any scrape falls, polling resumes by
itself, and in the end every preemption that a body showed was counted once. In the end memory and descriptors
of each are as before.

Proven elsewhere, not here: a server that never accepts, TLS handshakes that never end, damaged encodings of
every kind and random bytes in place of HTTP (tests/vllm/test_client.py), HTML in place of metrics
(tests/runtime/test_sidecar_process.py), a full disk byte by byte (tests/vllm/test_recording.py).
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import bodies
from support.process import ANYWHERE, FAST, Command, until
from support.servers import (
    CHUNKED,
    HEAD,
    MIB,
    CountingServer,
    bomb,
    drip,
    endless,
    good,
    reset,
    reset_within,
    sending,
    silent,
    status,
    with_body,
)

# Against the running program, with time-outs to wait for: a minute together.
pytestmark = pytest.mark.long

KEY = '{engine="0",model_name="demo-7b"}'
PREEMPTIONS = "vllm_pressure_preemptions_total" + KEY


def answer(server: CountingServer) -> bytes:
    """A whole good answer."""
    body = server.text()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def cut(server: CountingServer) -> bytes:
    """A body that ends in the middle, as if it were whole."""
    return bodies.cut(server.text(), "num_preemptions")


def telling(values: Mapping[str, str]) -> Callable[[CountingServer], bytes]:
    """A good body in which lines that begin with a name have another value."""

    def told(server: CountingServer) -> bytes:
        body = server.text()
        for name, value in values.items():
            pattern = rb"^(vllm:" + name.encode() + rb".* )\S+$"
            body, found = re.subn(pattern, rb"\g<1>" + value.encode(), body, flags=re.MULTILINE)
            assert found == 1
        return body

    return told


def series(count: int) -> bytes:
    """A body of very many engines, none of them the good one; within the limit of a mebibyte."""
    made = b"".join(
        b'vllm:num_requests_running{engine="%d"} 1\nvllm:num_preemptions_total{engine="%d"} 5\n'
        % (number, number)
        for number in range(1, count + 1)
    )
    assert len(made) < MIB
    return made


# Name -> what the server does, and the error that its polls end in.
FAILING = {
    "connection reset": (reset, "connection_reset"),
    "connection reset within the body": (reset_within, "connection_reset"),
    "black hole": (silent, "timeout"),
    "slow headers": (drip(answer, 20), "timeout"),
    "a body of one byte at a time": (drip(answer, 150), "timeout"),
    "headers without end": (endless(HEAD, b"X-More: x\r\n"), "protocol"),
    "a header line without end": (endless(HEAD + b"X-More: ", b"x" * 4096), "protocol"),
    "a body without end": (endless(HEAD + b"\r\n", b"#" * 65_536), "body_too_large"),
    "chunks without end": (endless(CHUNKED, b"1000\r\n" + b"#" * 4096 + b"\r\n"), "body_too_large"),
    "chunks that drip": (endless(CHUNKED, b"1\r\n#\r\n", 0.05), "timeout"),
    "a body of 100 MB": (
        endless(HEAD + b"Content-Length: %d\r\n\r\n" % (100 * MIB), bytes(65_536)),
        "body_too_large",
    ),
    "a gzip bomb": (with_body(lambda _: bomb(200 * MIB), "Content-Encoding: gzip"), "body_too_large"),
    "half a gzip": (with_body(lambda _: bomb(MIB)[:500], "Content-Encoding: gzip"), "bad_encoding"),
    "an encoding nobody knows": (with_body(b"x", "Content-Encoding: br"), "bad_encoding"),
    "garbage for chunks": (sending(CHUNKED + b"zz\r\nvllm:num_preemptions_total 1e9\r\n"), "bad_encoding"),
    "a length beyond the body": (sending(HEAD + b"Content-Length: 9000\r\n\r\nvllm:x 1\n"), "bad_encoding"),
    "a length short of the body": (
        sending(lambda server: HEAD + b"Content-Length: 200\r\n\r\n" + server.text(), keep=True),
        "protocol",
    ),
    "a length that is no number": (sending(HEAD + b"Content-Length: many\r\n\r\nx"), "protocol"),
    "what is not HTTP": (sending(b"SSH-2.0-OpenSSH_9.2\r\n"), "protocol"),
    "a redirect to itself": (status("301 Moved Permanently", "Location: /metrics"), "redirect"),
    "a redirect to another host": (status("302 Found", "Location: http://192.0.2.1/metrics"), "redirect"),
    "a redirect to a file": (status("302 Found", "Location: file:///etc/passwd"), "redirect"),
    **{
        f"status {code}": (status(f"{code} No"), f"http_{code}")
        for code in (204, 206, 400, 401, 403, 404, 429, 500, 502, 503)
    },
    "binary data": (with_body(b"\0\1\2vllm" * 1000), "unreadable_body"),
    "JSON": (with_body(b'{"detail": "Not Found"}'), "unreadable_body"),
}

UNREADABLE = "vllm_pressure_exporter_unreadable_lines_total"
# What reads as an answer, hostile as it is: polls succeed, and what it says that is wrong counts nowhere.
# Name -> what the server does, how many engines there are then, and how many lines at least are left out.
MISLEADING = {
    "a body cut off": (with_body(cut), 1, 0),
    "nothing": (with_body(b""), 0, 0),
    "series of others only": (with_body(b"up 1\nnode_load1 0.5\n"), 0, 0),
    "lines that cannot be read": (
        with_body(lambda server: server.text() + b"vllm:num_requests_running 1_0\n" * 30_000),
        1,
        30_000,
    ),
    "a name of a third of a megabyte": (
        with_body(
            lambda server: (
                server.text() + b'vllm:num_requests_running{model_name="' + b"x" * (MIB // 3) + b'"} 1\n'
            )
        ),
        2,
        0,
    ),
    "a name of two thirds of a megabyte": (
        with_body(
            lambda server: (
                server.text() + b'vllm:num_requests_running{model_name="' + b"y" * (2 * MIB // 3) + b'"} 1\n'
            )
        ),
        1,
        1,
    ),
    "values that are none": (
        with_body(telling({"num_preemptions_total": "NaN", "kv_cache": "-1e400"})),
        1,
        0,
    ),
    "a counter beyond all bounds": (with_body(telling({"num_preemptions_total": "1e300"})), 1, 0),
    "a counter that is no number": (with_body(telling({"num_preemptions_total": "1_0"})), 1, 1),
    "every series twice": (with_body(lambda server: server.text() * 2), 1, 0),
}


# The program at one pace whatever answers cost: how it slows down is told by tests/runtime/test_poller.py.
PROGRAM = """\
import sys
import exporter.runtime.pace
from exporter.cli import main
exporter.runtime.pace.MOST_SHARE = 1e9
sys.exit(main())
"""
COUNTING = re.compile(r"^(\w+_(?:total|count|sum|bucket)(?:\{.*\})?) (\S+)$", re.MULTILINE)


class Watched:
    """The program and the server that it watches."""

    def __init__(self, server: CountingServer, command: Command) -> None:
        self.server = server
        self.command = command
        self.least = 0.0
        self.counted: dict[str, float] = {}

    def scrape(self) -> str:
        """The program's metrics; nothing that counts has fallen since it was last seen."""
        text = self.command.get("/metrics")
        counted = {series: float(value) for series, value in COUNTING.findall(text)}
        assert counted
        fallen = {
            one: (self.counted[one], now) for one, now in counted.items() if now < self.counted.get(one, 0.0)
        }
        assert not fallen
        self.counted |= counted
        return text

    def metric(self, series: str) -> float | None:
        """One value of a scrape."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.scrape(), re.MULTILINE)
        return None if found is None else float(found[1])

    def errors(self, reason: str) -> float:
        """Polls that have ended in an error."""
        return self.metric(f'vllm_pressure_exporter_poll_errors_total{{reason="{reason}"}}') or 0.0

    def all_errors(self) -> float:
        """Polls that have ended in any error."""
        return sum(now for one, now in self.counted.items() if "_poll_errors_total" in one)

    def settled(self) -> None:
        """The server is good again: polling has resumed, and each preemption was counted once."""
        self.server.mode = good
        before = len(self.server.polls)
        until(lambda: self.metric("vllm_pressure_up") == 1.0, "polls that succeed again")
        until(lambda: len(self.server.polls) > before + 1, "polls go on")
        self.server.still = True
        counted = until(
            lambda: self.metric(PREEMPTIONS) == self.server.preempted or None,
            f"{self.server.preempted} preemptions",
        )
        self.server.still = False
        assert counted
        assert self.server.preempted >= self.least
        self.least = self.server.preempted
        assert self.command.get("/-/healthy")
        assert self.command.get("/-/ready")

    def memory(self) -> float:
        """Resident memory in MiB."""
        text = Path(f"/proc/{self.command.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024

    def descriptors(self) -> int:
        """Files and sockets that are open."""
        return len(os.listdir(f"/proc/{self.command.process.pid}/fd"))  # noqa: PTH208 (Path would build them all)


@contextmanager
def watching(folder: Path, *more: str) -> Iterator[Watched]:
    """The program, polling fast, that takes no body beyond a mebibyte."""
    arguments = (*ANYWHERE, *FAST, "--poll.max-body-bytes", "1MiB", *more)
    with (
        CountingServer() as server,
        Command(folder, "--target.url", server.url, *arguments, script=PROGRAM) as command,
    ):
        made = Watched(server, command)
        until(lambda: made.metric("vllm_pressure_up") == 1.0, "the first poll")
        made.start = made.memory(), made.descriptors()
        server.still = False
        yield made
        assert command.stop()[0] == 0
        assert "Traceback" not in command.err


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """One program for all faults that polls end in."""
    with watching(tmp_path_factory.mktemp("program"), "--poll.timeout", "1500ms") as made:
        yield made


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """One program for all that misleads: no poll fails because the machine is busy."""
    with watching(tmp_path_factory.mktemp("patient"), "--poll.timeout", "20s") as made:
        yield made


@pytest.mark.parametrize(("mode", "reason"), FAILING.values(), ids=FAILING)
def test_what_fails_has_a_name_and_passes(watched, mode, reason):
    """Polls end in the error that is stated; then all is as before."""
    before = watched.errors(reason)
    watched.server.mode = mode
    until(lambda: watched.errors(reason) > before, f"{reason}, got\n{watched.command.err[-500:]}")
    assert watched.metric("vllm_pressure_up") == 0.0
    watched.settled()


def test_nobody_listening_passes(watched):
    """As while vLLM starts anew."""
    watched.server.close()
    until(lambda: watched.errors("connection_refused"), "connection_refused")
    watched.server.open()
    watched.settled()


@pytest.mark.parametrize(("mode", "engines", "left_out"), MISLEADING.values(), ids=MISLEADING)
def test_what_misleads_succeeds_and_counts_nowhere(patient, mode, engines, left_out):
    """Whatever is said in between: no counter falls, and no preemption is lost or counted twice."""
    unreadable, errors = patient.metric(UNREADABLE), patient.all_errors()
    asked, patient.server.mode = len(patient.server.polls), mode
    until(lambda: len(patient.server.polls) > asked + 2, "some polls")
    until(lambda: patient.metric("vllm_pressure_engines") == engines, f"{engines} engines")
    until(lambda: patient.metric(UNREADABLE) >= unreadable + left_out, f"{left_out} lines left out")
    text = patient.scrape()
    assert "\nvllm_pressure_up 1.0\n" in text
    assert patient.all_errors() == errors
    assert left_out > 0 or patient.metric(UNREADABLE) == unreadable
    assert len(text) < 4 * MIB
    assert max(map(len, text.splitlines())) < 1000
    patient.settled()


def test_of_ten_thousand_engines_as_many_as_fit_are_shown_and_the_live_one_returns(tmp_path):
    """Those that are gone make room, the true one as well: it begins again."""
    with watching(tmp_path, "--poll.timeout", "20s") as made:
        made.server.mode = with_body(series(10_000))
        until(lambda: made.metric("vllm_pressure_engines") == 256, "256 engines")
        until(lambda: (made.metric(UNREADABLE) or 0.0) >= 9000, "lines left out")
        assert len(made.scrape()) < 4 * MIB
        made.counted.clear()
        made.server.mode = good
        until(lambda: made.metric("vllm_pressure_engines") == 1, "the true engine alone")
        assert made.command.get("/-/healthy")


@pytest.mark.parametrize("which", ["watched", "patient"])
def test_in_the_end_nothing_is_left(request, which):
    """Neither memory nor descriptors, and no metric failed."""
    program = request.getfixturevalue(which)
    memory, descriptors = program.start
    # What 256 engines took may stay with the allocator: they are remembered for an hour.
    assert program.memory() < memory + 60
    assert program.descriptors() <= descriptors + 2
    assert program.metric("vllm_pressure_exporter_collect_errors_total") is None
