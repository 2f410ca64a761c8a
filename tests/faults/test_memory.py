"""What a hostile server can make the program hold, with the limits that it is shipped with."""

import gzip
import re
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.process import ANYWHERE, Command, until
from support.servers import MIB, with_body
from support.servers import CountingServer as Server

# Against the running program: half a minute together.
pytestmark = pytest.mark.long

# The sidecar's, in deploy/kustomize; a forecast that somebody asks for is a process of its own beside it.
LIMIT = 96
POLLS = 12
NAME = b"vllm:num_requests_running"
# Not slowed down by what answers cost: as many of them as can be, with nothing in between.
PROGRAM = """\
import sys
import exporter.runtime.pace
from exporter.cli import main
exporter.runtime.pace.MOST_SHARE = 1e9
sys.exit(main())
"""

# Of just under 8 MiB, the most that is taken; `n` is the number of the poll.
BODIES = {
    "long labels, new at each poll": lambda n: b"".join(
        NAME + b'{engine="%d",x="%d-%d-%s",model_name="m"} 1\n' % (k % 256, n, k, b"y" * 3900)
        for k in range(2050)
    ),
    "short series, new at each poll": lambda n: b"".join(
        NAME + b'{engine="%d",x="%d-%d"} 1\n' % (k % 256, n, k) for k in range(120_000)
    ),
    "very many labels": lambda n: b"".join(
        NAME + b"{" + b",".join(b'a%d="%d"' % (j, n + k) for j in range(2000)) + b"} 1\n" for k in range(300)
    ),
    "one line": lambda n: NAME + b'{x="%d' % n + b"y" * (8 * MIB - 100) + b'"} 1\n' + NAME + b" 1\n",
    "four long lines": lambda n: (NAME + b'{model_name="%d' % n + b"\\n" * (MIB - 100) + b'"} 1\n') * 4,
    "twenty long lines": lambda n: (NAME + b'{model_name="%d' % n + b"\\n" * 199_000 + b'"} 1\n') * 20,
    "no line of ours": lambda n: b"vllm:num_preemptions_tota 1\n" * 290_000 + b"%d 1\n" % n,
}
SAME = NAME + b" 1\n"


def peak(body, *headers: str, folder: Path) -> float:
    """The most memory in MiB that the program ever had while it was answered so."""
    with Server() as server:
        server.mode = with_body(body, *headers)
        arguments = ("--poll.interval", "200ms", "--poll.timeout", "30s", *ANYWHERE)
        with Command(folder, "--target.url", server.url, *arguments, script=PROGRAM) as command:
            until(lambda: len(server.polls) > POLLS, f"{POLLS} polls", 300.0)
            assert command.metric("vllm_pressure_up") == 1.0
            assert command.metric("vllm_pressure_exporter_collect_errors_total") is None
            status = Path(f"/proc/{command.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_hostile_body_keeps_within_the_limit_of_the_sidecar(tmp_path, body):
    """At its highest, whatever is in the body and however often it comes."""
    assert len(body(0)) <= 8 * MIB
    assert peak(lambda server: body(len(server.polls)), folder=tmp_path) < LIMIT


def test_a_packed_body_of_one_line_again_and_again_keeps_within_the_limit(tmp_path):
    """A few kilobytes on the wire, 8 MiB as text."""
    packed = gzip.compress(SAME * (8 * MIB // len(SAME)))
    assert peak(packed, "Content-Encoding: gzip", folder=tmp_path) < LIMIT


def test_a_hundred_readers_that_read_next_to_nothing_keep_within_the_limit(tmp_path):
    """Beside a server of 256 engines, whose metrics are 1.6 MB; somebody who reads is answered meanwhile."""
    text = b"".join(
        NAME
        + b'{engine="%d",model_name="m"} 1\n' % k
        + b'vllm:kv_cache_usage_perc{engine="%d",model_name="m"} 0.5\n' % k
        + b'vllm:num_preemptions_total{engine="%d",model_name="m"} 7\n' % k
        + b'vllm:generation_tokens_total{engine="%d",model_name="m"} 9\n' % k
        for k in range(256)
    )
    with Server() as server, ExitStack() as stack:
        server.mode = with_body(text)
        command = stack.enter_context(
            Command(tmp_path, "--target.url", server.url, *ANYWHERE, script=PROGRAM)
        )
        until(lambda: len(command.get("/metrics")) > MIB, "metrics of 256 engines", 60.0)
        address = urlsplit(command.base())
        for number in range(100):
            reader = stack.enter_context(closing(socket.socket()))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((address.hostname, address.port))
            reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: exporter\r\n\r\n")
            assert reader.recv(64)  # its answer has begun, and is a text of its own
            if number % 20 == 0:
                assert command.get("/-/healthy")
                assert len(command.get("/metrics")) > MIB
        status = Path(f"/proc/{command.process.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024 < LIMIT
