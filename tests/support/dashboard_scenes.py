"""A fleet under load, as Prometheus would have scraped it: the data of the dashboards' tests and pictures.

Half an hour of a storm in a large pool, a pool that fills up, a queue for seats, two engines with unequal
load, a server that restarts, calm ones, two recordings of real servers, and servers that never answer; one
exporter watches two of them. Bodies go through the whole pipeline; every ten seconds the exporter's text and
vLLM's own body are saved with a time and the labels that a scrape adds. ``promtool`` creates blocks from
them.

    python tests/support/dashboard_scenes.py FILE     writes the text, up to now
"""

import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TESTS = Path(__file__).parent.parent
if str(TESTS) not in sys.path:  # as a script; under pytest conftest.py does this
    sys.path.insert(0, str(TESTS))

from prometheus_client import disable_created_metrics  # noqa: E402

from exporter.analysis.forecast import EngineForecast, FixForecast, Ratio  # noqa: E402
from exporter.analysis.pipeline import Pipeline, TargetReading  # noqa: E402
from exporter.config import AnalysisConfig  # noqa: E402
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts  # noqa: E402
from exporter.publish.metrics.table import ReadingCollector  # noqa: E402
from exporter.standin.recording_loop import RecordingLoop  # noqa: E402
from support import real_recordings  # noqa: E402
from support.metrics_text import text_of  # noqa: E402
from support.scenes import Stage  # noqa: E402

SECONDS = 1800
SCRAPE = 10
# The values of a dashboard's variables that select the server in the storm.
STORM = {"cluster": "eu", "namespace": "prod", "pod": "llama-0"}
NOTIFIED = 1200  # when the first server's alert is pushed
CACHE = {
    "kv_cache_size_tokens": 400_000,
    "kv_cache_max_concurrency": 12.2,
    "block_size": 16,
    "cache_dtype": "auto",
    "enable_prefix_caching": "True",
}
LENGTHS = ({256.0: 5.0, 1024.0: 60.0, 4096.0: 96.0, 16384.0: 100.0}, 150_000.0)
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# The distribution of a step's observations around their mean: (bound / mean, share).
SPREAD = ((0.25, 0.05), (0.5, 0.25), (1.0, 0.62), (2.0, 0.91), (4.0, 0.97), (10.0, 1.0))
LAST_BUCKET = re.compile(r'(vllm:\w+_seconds)_bucket\{(.*),le="\+Inf"\} (\S+)')
FINISHED = re.compile(
    r"^vllm:request_queue_time_seconds_count\{(.*)\} (\S+)\nvllm:request_queue_time_seconds_sum\{.*\} (\S+)$",
    re.MULTILINE,
)
SUM = re.compile(r"^(vllm:\w+_seconds_sum\{.*\}) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Server:
    """One vLLM with its exporter, second by second.

    Attributes:
        labels: what a scrape of either adds.
        bodies: None without an answer.
        readings: of the exporter at each second.
        native: whether Prometheus scrapes vLLM too.
    """

    labels: Mapping[str, str]
    bodies: Sequence[bytes | None]
    readings: Sequence[TargetReading]
    native: bool = True


@dataclass(frozen=True)
class Central:
    """One exporter that watches several servers, which have the label ``target`` and no pod.

    Attributes:
        labels: what a scrape of the exporter adds.
        targets: the servers by their targets' labels.
    """

    labels: Mapping[str, str]
    targets: Sequence[Server]


class Staged:
    """A stage that keeps its bodies, with realistic histograms."""

    def __init__(self, **known: object) -> None:
        self.bodies: list[bytes | None] = []
        self._counts: dict[str, dict[float, float]] = defaultdict(lambda: dict.fromkeys(BOUNDS, 0.0))
        self._before: dict[str, tuple[float, float]] = {}
        given = {"cache": CACHE, "max_num_seqs": 256, "max_model_len": 32_768, **known}
        self.stage = Stage(spell=self._keep, **given)

    def play(
        self, seconds: float, parts: Mapping[str, Mapping[str, object]] | None = None, **part: object
    ) -> None:
        """Play a scene, as `Stage.play` does."""
        lengths = {"prompt_lengths": LENGTHS, "output_lengths": LENGTHS}
        if parts is None:
            self.stage.play(seconds, **lengths, **part)
        else:
            self.stage.play(seconds, {name: {**lengths, **one} for name, one in parts.items()})

    def restart(self, seconds: int) -> None:
        """Answer nothing for some time, then as a new process."""
        self.stage.fail(seconds)
        self.bodies += [None] * seconds
        self.stage.restart()
        self._counts.clear()
        self._before.clear()

    def server(self, **labels: str) -> Server:
        """Return the server after the scenes."""
        return Server(labels, self.bodies, self.stage.readings)

    def _keep(self, body: bytes) -> bytes:
        """Insert buckets before the last one, the only one of a latency that the stage prints."""
        text = body.decode()
        text += "".join(self._more(*found) for found in FINISHED.findall(text))
        sums = {series: float(value) for series, value in SUM.findall(text)}
        lines = []
        for line in text.splitlines():
            match = LAST_BUCKET.fullmatch(line)
            if match:
                name, labels, count = match.groups()
                lines += self._buckets(name, labels, float(count), sums[f"{name}_sum{{{labels}}}"])
            lines.append(line)
        self.bodies.append(("\n".join(lines) + "\n").encode())
        return self.bodies[-1]

    @staticmethod
    def _more(labels: str, finished: str, waited: str) -> str:
        """Return values that the stage does not play: time to first token, and prefix cache hits."""
        count, first, prompts = float(finished), float(waited) + 0.35 * float(finished), 900 * float(finished)
        name = "vllm:time_to_first_token_seconds"
        return (
            f'{name}_bucket{{{labels},le="+Inf"}} {count}\n{name}_count{{{labels}}} {count}\n'
            f"{name}_sum{{{labels}}} {first!r}\n"
            f"vllm:prefix_cache_queries_total{{{labels}}} {prompts}\n"
            f"vllm:prefix_cache_hits_total{{{labels}}} {prompts // 3}\n"
        )

    def _buckets(self, name: str, labels: str, count: float, total: float) -> Iterator[str]:
        counts = self._counts[name + labels]
        count_before, total_before = self._before.get(name + labels, (0.0, 0.0))
        self._before[name + labels] = (count, total)
        new = count - count_before
        for bound in BOUNDS:
            if new:
                times = bound * new / (total - total_before)
                counts[bound] += new * max(
                    (share for factor, share in SPREAD if factor <= times), default=0.0
                )
            yield f'{name}_bucket{{{labels},le="{bound}"}} {counts[bound]}'


def wave(period: float, depth: float, mean: float) -> Callable[[float], float]:
    """Return a load that varies around a mean."""
    return lambda t: (
        mean
        * (
            1
            + depth * math.sin(2 * math.pi * t / period)
            + depth / 3 * math.sin(1.7 * t) * math.cos(0.31 * t)
        )
    )


def _whole(part: Callable[[float], float]) -> Callable[[float], float]:
    return lambda t: round(part(t))


CALM = {
    "running": _whole(wave(400, 0.15, 60)),
    "kv": wave(400, 0.15, 0.55),
    "tokens": wave(400, 0.12, 1900),
    "finished": wave(300, 0.2, 3.2),
    "prompts": wave(300, 0.2, 2600),
    "inter_token": wave(400, 0.1, 0.031),
    "queue": 0.02,
    "deferred": 0,
}


def storm() -> Staged:
    """Play a storm in a large pool: KV usage stays near 1, and the throughput falls."""
    staged = Staged()
    staged.play(900, **CALM)
    staged.play(
        180,
        **CALM
        | {
            "running": lambda t: round(60 + 0.4 * t),
            "kv": lambda t: min(0.99, 0.56 + 0.0024 * t + 0.01 * math.sin(t)),
            "tokens": wave(100, 0.05, 2200),
        },
    )
    key = next(iter(staged.stage.readings[-1].engines))
    helps = FixForecast("fp8_kv_cache", "helps", None, Ratio(1.3, 1.4, 1.5), Ratio(0.6, 0.7, 0.8), score=2.0)
    staged.stage.pipeline.set_forecast(key, EngineForecast(staged.stage.now, True, "they match", (helps,)))
    staged.play(
        SECONDS - 1080,
        running=_whole(wave(90, 0.12, 118)),
        waiting=_whole(wave(90, -0.35, 26)),
        deferred=0,
        kv=lambda t: 0.985 + 0.012 * math.sin(t * 1.3) * math.cos(t / 7),
        tokens=wave(120, 0.25, 720),
        finished=wave(160, 0.3, 0.7),
        prompts=2600,
        preemptions=wave(140, 0.45, 2.6),
        inter_token=wave(140, 0.3, 0.14),
        queue=wave(140, 0.3, 6.0),
    )
    return staged


def calm(seconds: int = SECONDS) -> Staged:
    """Play a calm server."""
    staged = Staged()
    staged.play(seconds, **CALM)
    return staged


def rising() -> Staged:
    """Play a calm server whose cache fills up in the last minutes."""
    staged = Staged()
    staged.play(SECONDS - 140, **CALM)
    staged.play(
        140,
        **CALM | {"running": lambda t: round(60 + 0.2 * t), "kv": lambda t: 0.6 + 0.0021 * t},
    )
    return staged


def seats() -> Staged:
    """Play a server with all seats taken and room in the cache."""
    staged = Staged(max_num_seqs=64)
    staged.play(700, **CALM | {"running": _whole(wave(400, 0.15, 48))})
    staged.play(
        SECONDS - 700,
        **CALM
        | {
            "running": 64,
            "waiting": _whole(wave(200, 0.3, 34)),
            "kv": wave(300, 0.05, 0.62),
            "queue": wave(200, 0.3, 9.0),
        },
    )
    return staged


def imbalance() -> Staged:
    """Play two engines of one server, one of which gets nearly all requests."""
    staged = Staged(engines=("0", "1"))
    staged.play(600, {"0": CALM, "1": CALM})
    busy = CALM | {"running": _whole(wave(300, 0.1, 96)), "kv": wave(300, 0.04, 0.86), "waiting": 3}
    idle = CALM | {"running": _whole(wave(300, 0.2, 9)), "kv": wave(300, 0.2, 0.1), "tokens": 300}
    staged.play(SECONDS - 600, {"0": busy, "1": idle})
    return staged


def restarted() -> Staged:
    """Play a server that is down for two minutes, then has a cache that is full at times."""
    staged = Staged()
    staged.play(1000, **CALM)
    staged.restart(120)
    staged.play(
        SECONDS - 1120,
        **CALM | {"kv": wave(200, 0.03, 0.96), "preemptions": 0.2, "running": _whole(wave(300, 0.1, 104))},
    )
    return staged


def dead() -> Server:
    """Play a server that never answers: it may be starting for half of the time, then it is unreachable."""
    staged = Staged()
    staged.stage.fail(SECONDS)
    staged.bodies += [None] * SECONDS
    return staged.server()


def real(name: str, seconds: int = SECONDS, **labels: str) -> Server:
    """Repeat a recorded server."""
    loop = RecordingLoop(real_recordings.polls(name))
    pipeline = Pipeline(AnalysisConfig(), real_recordings.header(name).config, 2.0)
    bodies: list[bytes | None] = []
    readings: list[TargetReading] = []
    for t in range(0, seconds, 2):
        body = loop.at(float(t))
        bodies += [body, body]
        reading = pipeline.feed(float(t), body)
        readings += [reading, reading]
    return Server(labels, bodies, readings)


def fleet() -> tuple[Server | Central, ...]:
    """Return all servers and their exporters, each for the same time."""
    eu, us = {"cluster": "eu", "namespace": "prod"}, {"cluster": "us", "namespace": "prod"}
    llama, qwen, mixtral = {"model_name": "llama-70b"}, {"model_name": "qwen-32b"}, {"model_name": "mixtral"}
    return (
        storm().server(**STORM, **llama),
        calm().server(**eu, pod="llama-1", **llama),
        rising().server(**eu, pod="llama-2", **llama),
        seats().server(**eu, pod="qwen-0", **qwen),
        imbalance().server(**us, pod="mixtral-0", **mixtral),
        restarted().server(**us, pod="qwen-0", **qwen),
        real(real_recordings.EXHAUSTION, cluster="eu", namespace="lab", pod="tiny-0"),
        real("0.32.0-exhaustion", cluster="us", namespace="lab", pod="tiny-1"),
        replace(calm().server(instance="10.9.9.9"), native=False),
        replace(dead(), labels={**us, "pod": "llama-9"}),
        Central(
            {"namespace": "watch", "pod": "central-0"},
            [
                replace(calm().server(target="far-0:8000", model_name="far"), native=False),
                replace(dead(), labels={"target": "far-1:8000"}),
            ],
        ),
    )


# As Prometheus stores it.


def openmetrics(servers: Sequence[Server | Central], begin: float) -> Iterator[str]:
    """Return the scrapes of all servers and their exporters, as text for promtool.

    Args:
        servers: the scraped ones.
        begin: unix seconds of the first poll.
    """
    disable_created_metrics()
    for number, server in enumerate(servers):
        if isinstance(server, Central):
            yield from _central_scrapes(server, number, begin)
        else:
            yield from _scrapes(server, number, begin)
    yield from _alerts(begin)
    yield "# EOF\n"


def _scrapes(server: Server, number: int, begin: float) -> Iterator[str]:
    host = server.labels.get("instance", f"10.0.0.{number + 1}")
    place = {name: value for name, value in server.labels.items() if name in ("cluster", "namespace", "pod")}
    model = server.labels.get("model_name")
    exporter = {**place, "job": "pressure", "instance": f"{host}:21900"}
    vllm = {**place, "job": "vllm", "instance": f"{host}:8000"}
    own, count = ExporterMetrics(), PollCounts()
    own.reloaded(begin)
    for second, (body, reading) in enumerate(zip(server.bodies, server.readings, strict=True)):
        _poll(count, body, reading, second)
        if number == 0 and second == NOTIFIED:
            own.notified("sent", 1)
        if second % SCRAPE:
            continue
        now = begin + second
        text = _text(reading, own, count, now) + _process(second, number)
        yield from _stamped(_modelled(text, model), exporter, now)
        if server.native and body is not None:
            yield from _stamped(_modelled(body.decode(), model), vllm, now)


def _central_scrapes(central: Central, number: int, begin: float) -> Iterator[str]:
    place = {**central.labels, "job": "pressure", "instance": f"10.0.0.{number + 1}:21900"}
    own = ExporterMetrics()
    own.reloaded(begin)
    own.targets = {"file": len(central.targets)}
    labels = [[("target", server.labels["target"])] for server in central.targets]
    counts = [PollCounts(label) for label in labels]
    for second in range(SECONDS):
        shown = [server.readings[second] for server in central.targets]
        for server, count, reading in zip(central.targets, counts, shown, strict=True):
            _poll(count, server.bodies[second], reading, second)
        if second % SCRAPE:
            continue
        now = begin + second
        yield from _stamped(text_of(own), place, now)
        for server, label, count, reading in zip(central.targets, labels, counts, shown, strict=True):
            text = text_of(
                ReadingCollector(lambda r=reading: r, lambda r=reading: r.t, lambda n=now: n, labels=label)
            )
            yield from _stamped(_modelled(text + text_of(count), server.labels.get("model_name")), place, now)


def _poll(count: PollCounts, body: bytes | None, reading: TargetReading, second: int) -> None:
    seconds = 0.006 + 0.004 * (second % 7) + (0.12 if second % 97 == 0 else 0)
    size = None if body is None else len(body)
    count.poll(
        seconds,
        size,
        reading.error,
        interval=1.0,
        skipped=int(second % 600 == 599),
        unreadable=reading.unreadable,
    )


def _text(reading: TargetReading, own: ExporterMetrics, count: PollCounts, now: float) -> str:
    shown = ReadingCollector(lambda: reading, lambda: reading.t, lambda: now)
    return text_of(shown, own, count)


def _process(second: int, number: int) -> str:
    """Return the metrics of the exporter's process, as prometheus-client prints them."""
    memory = 41e6 + 2e6 * (1 - math.exp(-second / 200)) + 3e5 * number
    return (
        f"process_cpu_seconds_total {1.2 + 0.0045 * second * (1 + 0.06 * number)!r}\n"
        f"process_resident_memory_bytes {memory!r}\nprocess_open_fds {14.0 + number % 3}\n"
    )


def _modelled(text: str, model: str | None) -> str:
    return text if model is None else text.replace('model_name="demo-7b"', f'model_name="{model}"')


def _stamped(text: str, labels: Mapping[str, str], now: float) -> Iterator[str]:
    added = ",".join(f'{name}="{value}"' for name, value in labels.items())
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        series, _, value = line.rpartition(" ")
        name, brace, rest = series.partition("{")
        old = rest.removesuffix("}")
        yield f"{name}{{{old}{',' if brace and old else ''}{added}}} {value} {now:.3f}\n"


def _alerts(begin: float) -> Iterator[str]:
    labels = (
        'alertname="VllmPreemptionThrash",alertstate="firing",severity="warning",cluster="eu",'
        'namespace="prod",pod="llama-0",model_name="llama-70b",engine="0"'
    )
    for second in range(NOTIFIED, SECONDS, SCRAPE):
        yield f"ALERTS{{{labels}}} 1 {begin + second:.3f}\n"


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        file.writelines(openmetrics(fleet(), time.time() - SECONDS))
