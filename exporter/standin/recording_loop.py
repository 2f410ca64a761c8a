"""A recording that is served as if it were live, in an endless loop, with counters that keep rising."""

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

from aiohttp import web

from exporter.config import Fact
from exporter.standin.site import Site
from exporter.vllm.recording import Poll, read

__all__ = ["BUNDLED_FACTS", "RecordedServer", "RecordingLoop", "bundled_polls"]

_BUNDLED: Final = "exhaustion.jsonl.gz"
# Settings of the bundled recording's server, which its metrics do not expose.
BUNDLED_FACTS: Final[Mapping[str, Fact]] = {"max_num_seqs": 32, "max_model_len": 2048}


def bundled_polls() -> Sequence[Poll]:
    """Read the bundled recording: a real vLLM 0.28 whose KV cache is too small for its load."""
    with resources.as_file(resources.files("exporter") / "data" / _BUNDLED) as path:
        return [item for item in read(Path(path)) if isinstance(item, Poll)]


class RecordingLoop:
    """The bodies of a recording at any time, round after round."""

    def __init__(self, polls: Sequence[Poll]) -> None:
        """Take polls in time order; those that failed are skipped."""
        bodies = [(poll.t - polls[0].t, poll.body) for poll in polls if poll.body is not None]
        self._times = [t for t, _ in bodies]
        self._bodies = [body for _, body in bodies]
        self._gains = _gains(self._bodies[0], self._bodies[-1])
        self.seconds = self._times[-1]  # the length of one round

    def at(self, seconds: float) -> bytes:
        """Return the body at a time since the start."""
        rounds, within = divmod(seconds, self.seconds)
        body = self._bodies[bisect_right(self._times, within) - 1]
        return self._raise_counters(body, int(rounds)) if rounds else body

    def _raise_counters(self, body: bytes, rounds: int) -> bytes:
        """Add to each counter its gain of all earlier rounds."""
        lines = body.split(b"\n")
        for index, line in enumerate(lines):
            series, _, value = line.rpartition(b" ")
            gain = self._gains.get(series)
            if gain:
                lines[index] = b"%s %r" % (series, float(value) + rounds * gain)
        return b"\n".join(lines)


class RecordedServer:
    """Serves the bundled recording in a loop, on any free port."""

    def __init__(self) -> None:
        """Read the recording."""
        self.loop = RecordingLoop(bundled_polls())
        self._start = time.monotonic()
        site = Site({"/metrics": self._metrics})
        self.start, self.stop = site.open, site.close

    def _metrics(self) -> web.Response:
        body = self.loop.at(time.monotonic() - self._start)
        return web.Response(body=body, headers={"Content-Type": "text/plain"})


def _gains(first: bytes, last: bytes) -> Mapping[bytes, float]:
    """Return by series what each counter, bucket, count and sum gained from the first body to the last."""
    counting = set()
    for line in first.split(b"\n"):
        if line.startswith(b"# TYPE "):
            _, _, name, kind = line.split(b" ")
            if kind == b"counter":
                counting.add(name)
            elif kind in (b"histogram", b"summary"):
                counting |= {name + end for end in (b"_bucket", b"_count", b"_sum")}
    before, after = _values(first, counting), _values(last, counting)
    return {series: value - before.get(series, 0.0) for series, value in after.items()}


def _values(body: bytes, names: set[bytes]) -> dict[bytes, float]:
    values = {}
    for line in body.split(b"\n"):
        series, _, value = line.rpartition(b" ")
        if not line.startswith(b"#") and series.partition(b"{")[0] in names:
            values[series] = float(value)
    return values
