"""The status page and its history, rendered once for everybody who looks.

An answer is kept for a second, and longer where it was dear to make: however many pages are open, and
however many engines they show, rendering takes about a hundredth of a core at most.
"""

import gzip
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from string import Template
from typing import Final, TypeAlias

from prometheus_client.metrics_core import Metric

from exporter import __version__
from exporter.publish.metrics.self_metrics import PollCounts
from exporter.publish.page.fragments import clock_time, esc
from exporter.publish.page.markup import TargetView, View, body, headline, shown_engines, shown_targets
from exporter.publish.page.timeline import COLUMNS, SECONDS
from exporter.publish.status import engine_names

__all__ = ["ASSETS", "Answer", "Page", "assets", "own_lines"]

# Open pages ask this often; the page itself tells them.
EVERY_SECONDS: Final = 2.0
_KEEP_SECONDS: Final = 1.0
_DEAREST: Final = 100.0  # an answer is kept this many times as long as it took to make
_MOST_KEPT: Final = 16
_MIB: Final = 1 << 20
# Name -> content type of what the page consists of beside itself.
ASSETS: Final[Mapping[str, str]] = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.svg": "image/svg+xml",
}


# Names of the engine and of the target that somebody wants to see.
Chosen: TypeAlias = tuple[str | None, str | None]


class Answer:
    """A body and its compressed form, which is made when somebody first asks for it."""

    def __init__(self, body: bytes, content_type: str) -> None:
        self.body = body
        self.content_type = content_type

    @cached_property
    def packed(self) -> bytes:
        """The body, gzipped."""
        return gzip.compress(self.body, compresslevel=4, mtime=0)


class Page:
    """Renders what a function shows of the world; both answers are for everybody."""

    def __init__(self, view: Callable[[], View], clock: Callable[[], float]) -> None:
        """Prepare.

        Args:
            view: what to show now; called once per rendering.
            clock: monotonic seconds, to tell how dear a rendering was.
        """
        self._view = view
        self._clock = clock
        self._run = secrets.token_hex(4)
        self._kept: dict[tuple[str, Chosen], tuple[float, Answer]] = {}
        self._every = EVERY_SECONDS

    def html(self, engine: str | None = None, target: str | None = None) -> Answer:
        """The page.

        Args:
            engine: the name of the one engine to show in full; the worst ones where none has that name.
            target: the name of the one target to show, where there are several; the worst ones as above.
        """
        return self._cached("html", (engine, target), self._html)

    def history(self, engine: str | None = None, target: str | None = None) -> Answer:
        """The last ten minutes as JSON of the engines that the page shows in full."""
        return self._cached("history", (engine, target), _history)

    def _cached(self, kind: str, chosen: Chosen, make: Callable[[View, Chosen], Answer]) -> Answer:
        start = self._clock()
        view = None
        if chosen != (None, None):
            view = self._view()
            chosen = _known(view, chosen)  # made-up names do not fill the cache
        until, answer = self._kept.get((kind, chosen), (start, None))
        if answer is not None and start < until:
            return answer
        answer = make(view or self._view(), chosen)
        end = self._clock()
        dear = _DEAREST * (end - start)
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[kind, chosen] = (end + max(_KEEP_SECONDS, dear), answer)
        if kind == "html":
            self._every = max(EVERY_SECONDS, dear)
        return answer

    def _html(self, view: View, chosen: Chosen) -> Answer:
        said, main = headline(view), body(view, *chosen)
        text = _template().substitute(
            title=esc(said),
            headline=esc(said),
            first=_first_card(main),
            assets=assets()[1],
            run=self._run,
            version=esc(__version__),
            asof=clock_time(view.wall),
            now=" ".join(f"{view.now - _start(view, target):.1f}" for target in view.targets),
            clock=f"{view.wall:.1f}",
            every=f"{self._every:g}",
            main=main,
        )
        return Answer(text.encode("utf-8", "replace"), "text/html; charset=utf-8")


def _first_card(main: str) -> str:
    """The id of the first card, for whoever skips all that stands before it."""
    return main.partition('<article id="')[2].partition('"')[0] or "main"


def _known(view: View, chosen: Chosen) -> Chosen:
    """The names that there are; None in place of others."""
    engine, target = chosen
    if target not in {one.name for one in view.targets if one.name}:
        target = None
    engines = {
        name
        for one in view.targets
        if one.reading is not None and target in (None, one.name)
        for name in engine_names(one.reading)
    }
    return (engine if engine in engines else None), target


def _history(view: View, chosen: Chosen) -> Answer:
    """Columns by engine; times in seconds since ``start``, which is in unix seconds.

    What the page does not show in full has no columns: of hundreds that would be seconds' work.
    """
    engine, name = chosen
    full = shown_targets(view, name)
    targets = [
        {
            "url": target.url,
            "start": round(view.wall - view.now + _start(view, target), 3),
            "now": round(view.now - _start(view, target), 3),
            "engines": target.timeline.as_object(shown_engines(target, engine) if index in full else ()),
        }
        for index, target in enumerate(view.targets)
    ]
    document = {"seconds": SECONDS, "columns": ["t", *COLUMNS], "targets": targets}
    text = json.dumps(document, separators=(",", ":"))
    return Answer(text.encode(), "application/json; charset=utf-8")


def _start(view: View, target: TargetView) -> float:
    return view.now if target.timeline.start is None else target.timeline.start


@cache
def _template() -> Template:
    return Template(_file("index.html").decode())


@cache
def assets() -> tuple[Mapping[str, Answer], str]:
    """What the page consists of beside itself, by name; and a word that changes whenever any of it does."""
    files = {name: Answer(_file(name), content_type) for name, content_type in ASSETS.items()}
    return files, hashlib.sha256(b"\0".join(one.body for one in files.values())).hexdigest()[:12]


def _file(name: str) -> bytes:
    return Path(__file__).parent.joinpath(name).read_bytes()


def own_lines(own: PollCounts, process: Iterable[Metric], wall: float) -> Mapping[str, str]:
    """What the exporter costs, in words.

    Args:
        own: its polls of all targets together.
        process: what the operating system counts of it, as prometheus-client tells it; may be empty.
        wall: unix seconds now.
    """
    counted = {sample.name: sample.value for family in process for sample in family.samples}
    failed, answered = sum(own.errors.values()), sum(own.durations)
    lines = {"Polls": f"{own.polls}, {failed} failed, {own.skipped} left out"}
    if own.errors:
        lines["Why they failed"] = ", ".join(f"{reason} {n}" for reason, n in own.errors.most_common(4))
    if answered:
        lines["A poll takes"] = f"{1000 * own.duration_sum / answered:.1f} ms on average"
        lines["Last body"] = f"{own.body_bytes / 1024:.0f} KiB"
    if not math.isnan(own.interval):
        lines["Time between polls"] = f"{own.interval:g} s"
    alive = wall - counted.get("process_start_time_seconds", wall)
    if alive > 0 and "process_cpu_seconds_total" in counted:
        lines["Processor"] = (
            f"{100 * counted['process_cpu_seconds_total'] / alive:.1f} % of a core since its start"
        )
    if memory := counted.get("process_resident_memory_bytes"):
        lines["Memory"] = f"{memory / _MIB:.0f} MiB"
    if own.unreadable:
        lines["Lines that could not be read"] = str(own.unreadable)
    return lines
