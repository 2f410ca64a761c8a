"""PromQL on the sidecar's series, with the names of the metric table and the installation's matchers."""

import json
import textwrap
from dataclasses import dataclass
from typing import Final

from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS

__all__ = ["Series", "aggregated", "block", "equals"]

_NAMES: Final = {row.name: row.series for row in (*METRICS, *EXPORTER_METRICS)}
# How far back a gauge is looked up: four scrapes of 15 s, of which three may be missed.
LOOK_BACK: Final = "1m"
# Longer aggregations are written on several lines.
_SHORT: Final = 100


@dataclass(frozen=True, slots=True)
class Series:
    """The sidecar's series as an installation has them.

    Attributes:
        selector: matchers for all of them, empty for none.
    """

    selector: str = ""

    def of(self, name: str, more: str = "", *, printed: bool = False) -> str:
        """Return one series by its row in the table of metrics.

        Args:
            name: of the row.
            more: further matchers.
            printed: for a format of ``printf``: per cent signs of the selector are doubled.
        """
        selector = self.selector.replace("%", "%%") if printed else self.selector
        inside = ",".join(filter(None, (selector, more)))
        return f"{_NAMES[name]}{{{inside}}}" if inside else _NAMES[name]

    def last(self, name: str, more: str = "", *, printed: bool = False) -> str:
        """Return the last value of a gauge, also if the last scrapes were missed."""
        return f"last_over_time({self.of(name, more, printed=printed)}[{LOOK_BACK}])"

    def most(self, name: str, more: str = "", *, printed: bool = False) -> str:
        """Return the largest value of a gauge within the last scrapes."""
        return f"max_over_time({self.of(name, more, printed=printed)}[{LOOK_BACK}])"

    def scrape(self, more: str = "") -> str:
        """Return Prometheus' own series of scrapes."""
        inside = ",".join(filter(None, (self.selector, more)))
        return f"up{{{inside}}}" if inside else "up"


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
