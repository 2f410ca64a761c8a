"""Compares the simulated present with the server, to tell whether a forecast can be trusted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from exporter.analysis.load_profile import too_little_seen
from exporter.config import WhatIfConfig
from exporter.simulation.figures import Figure

__all__ = ["Calibration", "Comparison", "Observed", "calibrate"]

# Relative and absolute band of each compared figure (None: the configured ones), its title and its format.
_COMPARED: Final[Mapping[str, tuple[float | None, float | None, str, str]]] = {
    "preemptions_per_minute": (None, 0.0, "preemptions per minute", "{:.1f}"),
    "preemptions_per_request": (None, None, "preemptions per finished request", "{:.2f}"),
    "output_tokens_per_second": (0.15, 0.0, "tokens/s", "{:.0f}"),
    "running": (0.2, 1.0, "running requests", "{:.1f}"),
    "waiting": (0.2, 2.0, "waiting requests", "{:.1f}"),
    "inter_token_seconds": (0.25, 0.0, "seconds between tokens", "{:.4f}"),
}
_NEEDED: Final = tuple(_COMPARED)[1:]
# From this many waiting requests per running one on, a longer queue changes nothing: there is always a next.
_LONG_QUEUE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Observed:
    """What the server did in a window, as far as it is known."""

    figures: Mapping[str, float] = field(default_factory=dict)  # by the names in `FIGURES`
    seconds: float | None = None  # of the window; None: not from a window
    finished: float | None = None  # requests that finished in it
    guessed: str = ""  # the unknown value that the simulation guesses and that decides its result


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of the server beside the simulated present."""

    name: str  # as in `FIGURES`
    title: str  # for a person
    observed: float
    simulated: Figure
    band: tuple[float, float]  # least and most observed values that match
    matches: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Whether the simulated present is the server."""

    observed: float | None  # preemptions per minute
    simulated: Figure  # the same
    trusted: bool | None  # whether all comparisons match; None if there is nothing to compare
    sentence: str
    comparisons: tuple[Comparison, ...] = ()


def calibrate(
    observed: Observed | None, present: Mapping[str, Figure], thresholds: WhatIfConfig
) -> Calibration:
    """Compare the figures of the simulated present with those of the server; two long queues match."""
    simulated = present.get("preemptions_per_minute") or Figure(0.0, 0.0, 0.0)
    observed = observed or Observed()
    names = [name for name in _COMPARED if name in observed.figures]
    if "preemptions_per_request" in names:  # a better one of the same
        names = [name for name in names if name != "preemptions_per_minute"]
    comparisons = tuple(
        _compare(name, observed.figures[name], present.get(name) or Figure(0.0, 0.0, 0.0), thresholds)
        for name in names
    )
    running = observed.figures.get("running", math.inf)
    comparisons = tuple(
        replace(each, matches=True)
        if each.name == "waiting" and min(each.observed, each.simulated.mean) >= _LONG_QUEUE * running
        else each
        for each in comparisons
    )
    trusted, sentence = _judge(observed, comparisons)
    return Calibration(
        observed.figures.get("preemptions_per_minute"), simulated, trusted, sentence, comparisons
    )


def _judge(observed: Observed, comparisons: tuple[Comparison, ...]) -> tuple[bool | None, str]:
    """Return whether a forecast can be trusted, and why."""
    if not comparisons:
        return None, "the simulated present cannot be compared: no figures of the server are known"
    doubts = [each.sentence for each in comparisons if not each.matches]
    if observed.guessed:
        doubts.insert(0, f"{observed.guessed} is a guess")
    if observed.seconds is not None:
        doubts[:0] = filter(None, [too_little_seen(observed.seconds, observed.finished or 0.0)])
        doubts += [f"{_COMPARED[name][2]} are unknown" for name in _NEEDED if name not in observed.figures]
    if doubts:
        return False, "; ".join(doubts)
    return True, f"the simulated present matches the server: {', '.join(e.sentence for e in comparisons)}"


def _compare(name: str, observed: float, simulated: Figure, thresholds: WhatIfConfig) -> Comparison:
    share, slack, title, form = _COMPARED[name]
    width = max(
        (thresholds.match if share is None else share) * observed,
        thresholds.match_per_request if slack is None else slack,
    )
    band = simulated.mean - width, simulated.mean + width
    sentence = f"{title} {form.format(observed)}, simulated {form.format(simulated.mean)}"
    return Comparison(name, title, observed, simulated, band, band[0] <= observed <= band[1], sentence)
