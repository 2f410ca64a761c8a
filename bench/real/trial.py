"""One run: a recording by ``record`` of the product, and figures of its last part from the counters."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.real.load import Load, play
from exporter.vllm.recording import Poll, read

__all__ = ["LEAD", "SECONDS", "Figures", "exporter_json", "figures", "run"]

LEAD = 35.0
SECONDS = 65.0
_WARM_UP = 20.0
_EXPORTER = (sys.executable, "-m", "exporter")


@dataclass(frozen=True)
class Figures:
    """Means of a run after its warm-up."""

    tokens_per_second: float
    e2e_seconds: float
    inter_token_seconds: float
    preemptions_per_finished: float


def run(url: str, load: Load, clients: int, path: Path) -> Figures:
    """Play a load on a server while it is recorded, and return the figures."""
    with _recorded(url, load, path):
        play(url, load, clients, LEAD, SECONDS)
    return figures(path)


def figures(path: Path) -> Figures:
    """Return the figures of a recording's last part, after the warm-up."""
    polls = [(each.t, each.body) for each in read(path) if isinstance(each, Poll) and each.body]
    last, body = polls[-1]
    start, earlier = next(each for each in polls if each[0] >= last - (SECONDS - _WARM_UP))
    return _means(_counters(earlier), _counters(body), last - start)


@contextmanager
def _recorded(url: str, load: Load, path: Path) -> Iterator[None]:
    # The operator's knowledge, as on a real server without /server_info.
    arguments = f"--engine.args={' '.join(load.settings.arguments())} --enable-prefix-caching"
    command = [*_EXPORTER, "record", f"{url}/metrics", "-o", str(path), "--force", arguments]
    recorder = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        recorder.send_signal(signal.SIGINT)
        recorder.wait(timeout=30)


def _counters(body: bytes) -> Mapping[str, float]:
    """Return the sums of all counters by name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def _means(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Figures:
    def grown(name: str) -> float:
        return after.get(f"vllm:{name}", 0.0) - before.get(f"vllm:{name}", 0.0)

    def mean(name: str) -> float:
        return grown(f"{name}_sum") / max(1.0, grown(f"{name}_count"))

    return Figures(
        grown("generation_tokens_total") / seconds,
        mean("e2e_request_latency_seconds"),
        mean("inter_token_latency_seconds"),
        grown("num_preemptions_total") / max(1.0, grown("e2e_request_latency_seconds_count")),
    )


def exporter_json(command: str, path: Path, options: Sequence[str] = ()) -> Any:
    """Run ``replay`` or ``whatif`` on a recording and return its last JSON value."""
    form = ("--format", "json") if command == "replay" else ("--json",)
    run_ = subprocess.run(
        [*_EXPORTER, command, str(path), *form, *options], capture_output=True, text=True, check=True
    )
    return json.loads(run_.stdout.splitlines()[-1] if command == "replay" else run_.stdout)
