"""Renders the status page and its history; responses are cached and shared by all clients.

A response is kept for a second, and longer if rendering it was slow: rendering takes at most about a
hundredth of a core, for any number of open pages and engines.
"""

import gzip
import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from prometheus_client.metrics_core import Metric

from exporter import __version__
from exporter.analysis import catalogue
from exporter.analysis.relief import NOW
from exporter.analysis.words import WORDS, label, number
from exporter.publish.inert import inert
from exporter.publish.json_text import json_text
from exporter.publish.metrics.self_metrics import PollCounts
from exporter.publish.page.target import target_section, target_table
from exporter.publish.page.text import SEVERITY_WORDS, clock_time, counted, short, span, title
from exporter.publish.page.timeline import COLUMNS, SECONDS
from exporter.publish.page.view import TargetView, View, headline, shown_engines, shown_targets
from exporter.publish.status import engine_names

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["ASSETS", "Answer", "Page", "assets", "own_lines"]

# Seconds between two requests of an open page; the page itself has the number.
EVERY_SECONDS: Final = 2.0
_KEEP_SECONDS: Final = 1.0
_KEEP_FACTOR: Final = 100.0  # a response is kept this many times as long as it took to render
_MOST_KEPT: Final = 16
_MIB: Final = 1 << 20
_FOLDER: Final = Path(__file__).parent
# Name -> content type of the page's other files.
ASSETS: Final[Mapping[str, str]] = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.svg": "image/svg+xml",
}
# Title, short name and unit of the charts' signals, for page.js.
_WORDS: Final = json.dumps(
    {name: [WORDS[name].title, WORDS[name].short, WORDS[name].unit] for name in COLUMNS},
    separators=(",", ":"),
)
# Names of the chosen engine and target; None is no choice.
Chosen: TypeAlias = tuple[str | None, str | None]


@dataclass
class Answer:
    """A body and its compressed form, which is made at its first use."""

    body: bytes
    content_type: str

    @cached_property
    def packed(self) -> bytes:
        """The gzipped body."""
        return gzip.compress(self.body, compresslevel=4, mtime=0)


class Page:
    """Renders the page and its history from the views that a function returns."""

    def __init__(self, view: Callable[[], View], clock: Callable[[], float]) -> None:
        """Prepare; `view` is called once per rendering, `clock` (in seconds) measures how long it takes."""
        self._view = view
        self._clock = clock
        self._run = secrets.token_hex(4)
        self._kept: dict[tuple[str, Chosen], tuple[float, Answer]] = {}
        self._every = EVERY_SECONDS

    def html(self, engine: str | None = None, target: str | None = None) -> Answer:
        """Render the page with the engine and target of these names in full, else the worst ones."""
        page_template()  # compiled once, which is no part of the time that a rendering takes
        return self._cached("html", (engine, target), self._html)

    def history(self, engine: str | None = None, target: str | None = None) -> Answer:
        """Return the last ten minutes of the engines that the page shows in full, as JSON."""
        return self._cached("history", (engine, target), _history)

    def _cached(self, kind: str, chosen: Chosen, make: Callable[[View, Chosen], Answer]) -> Answer:
        start = self._clock()
        view = None
        if chosen != (None, None):
            view = self._view()
            chosen = _known(view, chosen)  # unknown names must not fill the cache
        until, answer = self._kept.get((kind, chosen), (start, None))
        if answer is not None and start < until:
            return answer
        answer = make(view or self._view(), chosen)
        end = self._clock()
        slow = _KEEP_FACTOR * (end - start)
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[kind, chosen] = (end + max(_KEEP_SECONDS, slow), answer)
        if kind == "html":
            self._every = max(EVERY_SECONDS, slow)
        return answer

    def _html(self, view: View, chosen: Chosen) -> Answer:
        engine, target = chosen
        shown = shown_targets(view, target)
        several = len(view.targets) != 1 or view.targets[0].name
        sections = [target_section(view, index, engine) for index in shown]
        text = page_template().render(
            headline=headline(view),
            first=next((card["id"] for section in sections for card in section["cards"]), "main"),
            assets=assets()[1],
            run=self._run,
            version=__version__,
            asof=clock_time(view.wall),
            now=" ".join(f"{view.now - _start(view, target):.1f}" for target in view.targets),
            clock=f"{view.wall:.1f}",
            every=f"{self._every:g}",
            words=_WORDS,
            targets=target_table(view, shown) if several else None,
            sections=sections,
            own=view.own,
        )
        return Answer(text.encode("utf-8", "replace"), "text/html; charset=utf-8")


@cache
def page_template() -> "Template":
    """Load the page's template, with all that it includes, when somebody first opens the page."""
    import jinja2  # noqa: PLC0415 (1.5 MiB that an exporter whose page nobody opens does not need)

    def source(name: str) -> str:
        """Read a template without its indentation: it would be a quarter of the page."""
        text = (_FOLDER / "templates" / name).read_text(encoding="utf-8")
        return re.sub(r"^[ ]+", "", text, flags=re.MULTILINE)

    def finalize(value: object) -> object:
        """Leave markup of the templates alone; everything else is text that must be printable."""
        return value if hasattr(value, "__html__") else inert(str(value))

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=finalize,
        auto_reload=False,
    )
    functions: tuple[Any, ...] = (clock_time, counted, label, number, short, span, title)
    filters = {function.__name__: function for function in functions}
    environment.filters |= filters | {"word": SEVERITY_WORDS.__getitem__}
    environment.globals["placeholder"] = catalogue.UNKNOWN_VALUE
    environment.globals["now"] = NOW
    return environment.get_template("page.html")


def _known(view: View, chosen: Chosen) -> Chosen:
    """Replace unknown names by None."""
    engine, target = chosen
    if target not in {one.name for one in view.targets if one.name}:
        target = None
    readings = [one.reading for one in view.targets if one.reading and target in (None, one.name)]
    return (engine if any(engine in engine_names(one) for one in readings) else None), target


def _history(view: View, chosen: Chosen) -> Answer:
    """Return columns by engine; times are in seconds since ``start``, which is in unix seconds.

    Engines that the page does not show in full have no columns: for hundreds that would take seconds.
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
    text = json_text(document, separators=(",", ":"))
    return Answer(text.encode(), "application/json; charset=utf-8")


def _start(view: View, target: TargetView) -> float:
    return view.now if target.timeline.start is None else target.timeline.start


@cache
def assets() -> tuple[Mapping[str, Answer], str]:
    """Return the page's other files by name, and a version that changes with each of them."""
    files = {name: Answer((_FOLDER / name).read_bytes(), form) for name, form in ASSETS.items()}
    return files, hashlib.sha256(b"\0".join(one.body for one in files.values())).hexdigest()[:12]


def own_lines(own: PollCounts, process: Iterable[Metric], wall: float) -> Mapping[str, str]:
    """Return the exporter's overhead in words; `own` counts its polls of all targets together."""
    usage = {sample.name: sample.value for family in process for sample in family.samples}
    failed, answered = sum(own.errors.values()), sum(own.durations)
    lines = {"Polls": f"{own.polls}, {failed} failed, {own.skipped} skipped"}
    if failed:
        lines["Failures"] = ", ".join(f"{reason} {n}" for reason, n in own.errors.most_common(4) if n)
    if answered:
        lines["Poll duration"] = f"{1000 * own.duration_sum / answered:.1f} ms on average"
        lines["Last response"] = f"{own.body_bytes / 1024:.0f} KiB"
    if not math.isnan(own.interval):
        lines["Poll interval"] = f"{own.interval:g} s"
    alive = wall - usage.get("process_start_time_seconds", wall)
    if alive > 0 and "process_cpu_seconds_total" in usage:
        lines["CPU"] = f"{100 * usage['process_cpu_seconds_total'] / alive:.1f} % of a core since the start"
    if memory := usage.get("process_resident_memory_bytes"):
        lines["Memory"] = f"{memory / _MIB:.0f} MiB"
    if own.unreadable:
        lines["Unreadable lines"] = str(own.unreadable)
    return lines
