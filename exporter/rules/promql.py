"""PromQL on the sidecar's series, with the names of the metric table and the installation's matchers."""

import json
import textwrap
from dataclasses import dataclass
from typing import Final

from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS

__all__ = ["Series", "aggregated", "block", "equals", "selected"]

_NAMES: Final = {row.name: row.series for row in (*METRICS, *EXPORTER_METRICS)}
# How far back a gauge is looked up: four scrapes of 15 s, of which three may be missed.
LOOK_BACK: Final = "1m"
# Longer aggregations are written on several lines.
_SHORT: Final = 100


@dataclass(frozen=True, slots=True)
class Series:
    """The sidecar's series as an installation has them; `selector` has matchers for all of them."""

    selector: str = ""

    def of(self, name: str, more: str = "") -> str:
        """Return one series by its row in the table of metrics, with further matchers."""
        return selected(_NAMES[name], self.selector, more)

    def last(self, name: str, more: str = "") -> str:
        """Return the last value of a gauge, also if the last scrapes were missed."""
        return f"last_over_time({self.of(name, more)}[{LOOK_BACK}])"

    def most(self, name: str, more: str = "") -> str:
        """Return the largest value of a gauge within the last scrapes."""
        return f"max_over_time({self.of(name, more)}[{LOOK_BACK}])"

    def scrape(self, more: str = "") -> str:
        """Return Prometheus' own series of scrapes."""
        return selected("up", self.selector, more)


def selected(name: str, *matchers: str) -> str:
    """Return a series with its matchers; empty ones are left out."""
    inside = ",".join(filter(None, matchers))
    return f"{name}{{{inside}}}" if inside else name


def equals(label: str, value: str) -> str:
    """Return a matcher."""
    return f"{label}={json.dumps(value, ensure_ascii=False)}"


def aggregated(function: str, labels: tuple[str, ...], inner: str) -> str:
    """Return an aggregation, on one line if it is short."""
    head = f"{function} by ({', '.join(labels)})"
    flat = f"{head} ({inner})"
    return flat if "\n" not in inner and len(flat) <= _SHORT else f"{head} (\n{block(inner)}\n)"


def block(inner: str) -> str:
    """Indent lines by one step."""
    return textwrap.indent(inner, "  ")
