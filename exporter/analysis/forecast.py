"""Forecasts of the effect of fixes on an engine: plain data, made by a simulation elsewhere. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal, NamedTuple, get_args

__all__ = ["FORECAST_VERDICTS", "REJECTED", "EngineForecast", "FixForecast", "Outcome", "Ratio"]

Outcome = Literal["suffices", "helps", "uncertain", "no_help", "worse"]
FORECAST_VERDICTS: Final = frozenset({
    "preemption_thrash", "preemption_light", "kv_bound", "seat_bound", "prefill_bound", "kv_pressure_rising",
})  # fmt: skip
"""Verdicts about capacity: a simulation of the load shows which fix helps."""

REJECTED: Final = frozenset({"no_help", "worse"})
"""The outcomes of fixes that are not advised."""

# From the best to the worst.
_RANKS: Final = {outcome: rank for rank, outcome in enumerate(get_args(Outcome))}
# How a reason ends, by outcome.
_ENDS: Final[Mapping[str, str]] = {"no_help": "it changes little.", "worse": "it makes things worse."}


class Ratio(NamedTuple):
    """A figure after a change / now, over all step times and runs that were simulated."""

    least: float
    mean: float
    most: float


SAME: Final = Ratio(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class FixForecast:
    """The simulated effect of one fix."""

    fix: str  # its id in the catalogue
    outcome: Outcome
    value: float | None = None  # for the flag; None where the simulation does not choose it
    tokens: Ratio = SAME  # tokens/s
    latency: Ratio = SAME  # seconds per request, the median
    inter_token: Ratio | None = None  # seconds between two tokens
    score: float = 1.0  # throughput ratio / latency ratio, of the median and the slowest; 1 is no change

    @property
    def helps(self) -> bool:
        """Whether it helps in all step times that were simulated."""
        return self.outcome in {"suffices", "helps"}

    def to_dict(self) -> dict[str, Any]:
        """Return the effect for JSON."""
        ratios = {"tokens": self.tokens, "latency": self.latency, "inter_token": self.inter_token}
        return {"outcome": self.outcome} | {
            f"{name}_ratio": [round(value, 3) for value in ratio]
            for name, ratio in ratios.items()
            if ratio is not None
        }

    @property
    def sentence(self) -> str:
        """The effect in words."""
        figures = [("tokens/s", self.tokens), ("time per request", self.latency)]
        figures += [("time between tokens", self.inter_token)] if self.inter_token else []
        told = ", ".join(f"{name} {_shown(ratio)}" for name, ratio in figures)
        end = _ENDS.get(self.outcome)
        return f"Forecast: {told}: {end}" if end else f"Forecast: {told}."


def _shown(ratio: Ratio) -> str:
    text = f"x{ratio.mean:.2f}"
    least, most = f"{ratio.least:.2f}", f"{ratio.most:.2f}"
    return text if ratio.most - ratio.least < 0.1 * ratio.mean else f"{text} ({least} to {most})"


@dataclass(frozen=True, slots=True)
class EngineForecast:
    """What each fix would do to an engine."""

    at: float  # time of the readings that it was made from
    trusted: bool  # whether the simulated present matches the server
    sentence: str  # how well it matches, or why there is no forecast
    fixes: tuple[FixForecast, ...] = ()  # each fix once, the best value of those that were simulated
    # What preemptions cost now: tokens that are computed again, per second and of all computed ones.
    recomputed_per_second: float | None = None
    recomputed_ratio: float | None = None
    # What a further prompt token adds to a step: the least of the step times that were simulated.
    seconds_per_token: float = 0.0
    # Pairs of fixes that suffice together: both have the effect of the pair, and each its own value.
    pairs: tuple[tuple[FixForecast, FixForecast], ...] = ()

    def of(self, fix: str) -> FixForecast | None:
        """Return the effect of a fix, None if it was not simulated."""
        return next((one for one in self.fixes if one.fix == fix), None)

    @classmethod
    def none(cls, at: float, why: str) -> "EngineForecast":
        """Return a forecast that could not be made."""
        return cls(at, trusted=False, sentence=why)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], at: float) -> "EngineForecast":
        """Read the JSON document of a simulation, or of its error, from readings of a time."""
        if "error" in document:
            return cls.none(at, str(document["error"]))
        calibration, now = document["calibration"], document.get("now", {}).get("figures", {})
        return cls(
            at,
            calibration["trusted"] is True,
            calibration["reason"],
            _best_of(document["candidates"]),
            now.get("recomputed_tokens_per_second", {}).get("mean"),
            now.get("recomputed_ratio", {}).get("mean"),
            min((each["per_token"] for each in document["simulated"]["step_times"]), default=0) / 1e9,
            tuple(pair for row in document["candidates"] for pair in _pairs(row)),
        )


def _best_of(rows: Iterable[Mapping[str, Any]]) -> tuple[FixForecast, ...]:
    """Return the best simulated value of each fix."""
    best: dict[str, FixForecast] = {}
    for row in rows:
        for fix in row["fixes"]:
            one, other = _read(fix, row), best.get(fix)
            if other is None or _goodness(one) > _goodness(other):
                best[fix] = one
    return tuple(best.values())


def _pairs(row: Mapping[str, Any]) -> Iterator[tuple[FixForecast, FixForecast]]:
    """Yield the pairs of fixes that make the two changes of a row, if it suffices."""
    if row["parts"] and row["outcome"] == "suffices":
        first, second = row["parts"]
        for fix, other in product(first["fixes"], second["fixes"]):
            yield _read(fix, {**row, **first}), _read(other, {**row, **second})


def _goodness(one: FixForecast) -> tuple[int, float]:
    return -_RANKS[one.outcome], one.score


def _read(fix: str, row: Mapping[str, Any]) -> FixForecast:
    figures = row["figures"]
    return FixForecast(
        fix,
        row["outcome"],
        row.get("value"),
        _ratio(figures.get("output_tokens_per_second")) or SAME,
        _ratio(figures.get("e2e_p50_seconds")) or SAME,
        _ratio(figures.get("inter_token_seconds")),
        row["score"],
    )


def _ratio(figure: Mapping[str, Any] | None) -> Ratio | None:
    mean = figure.get("ratio_to_now") if figure else None
    if figure is None or mean is None:
        return None
    least, most = figure.get("ratio_least"), figure.get("ratio_most")
    return Ratio(mean if least is None else least, mean, mean if most is None else most)
