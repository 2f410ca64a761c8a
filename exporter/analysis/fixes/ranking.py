"""Merges a forecast into the advised fixes and orders them; without a forecast the order is by cost. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from exporter.analysis import catalogue
from exporter.analysis.catalogue import COSTS
from exporter.analysis.fixes.case import FixAdvice
from exporter.analysis.forecast import FORECAST_VERDICTS, REJECTED, EngineForecast, FixForecast

__all__ = ["by_cost", "by_forecast", "explain", "merge", "pair_up"]

# Gains that differ by less than this share are similar: then the cheaper fix comes first.
_SIMILAR: Final = 0.1
# Settings whose value the simulation chooses; rules of thumb about them yield to it.
_SIMULATED: Final = frozenset({"lower_max_num_seqs", "raise_max_num_seqs", "set_watermark"})


def merge(advised: dict[str, FixAdvice], rejected: dict[str, str], forecasts: Iterable[FixForecast]) -> None:
    """Add the effects to the advised fixes, and move fixes that do not help to the rejected ones.

    A setting that the simulation chooses, and that was rejected before, is advised if it helps.
    """
    for one in forecasts:
        before = advised.get(one.fix)
        if one.outcome in REJECTED:
            if before is not None or (one.fix in rejected and one.fix in _SIMULATED):
                rejected[one.fix] = one.sentence
            advised.pop(one.fix, None)
        elif before is not None or (one.helps and one.fix in _SIMULATED and one.fix in rejected):
            before = before or FixAdvice(one.fix)
            rejected.pop(one.fix, None)
            advised[one.fix] = _with(before, one)


def _with(advice: FixAdvice, one: FixForecast) -> FixAdvice:
    notes = [advice.note, one.sentence]
    if not one.helps:
        notes.append("Whether it helps is uncertain: it depends on a step time that the data leave open.")
    return replace(
        advice,
        value=advice.value if one.value is None else one.value,
        gain=one.tokens.mean if one.helps else None,
        suffices=one.outcome == "suffices" if one.helps else None,
        note=" ".join(filter(None, notes)),
        missing="",
        forecast=one,
    )


def pair_up(advised: dict[str, FixAdvice], pairs: Iterable[tuple[FixForecast, FixForecast]]) -> None:
    """Let two advised fixes say that they suffice together, where none does alone: the cheapest such two."""
    known = [each for each in pairs if all(one.fix in advised for one in each)]
    if not known or any(advice.suffices for advice in advised.values()):
        return
    one, other = min(known, key=lambda each: sorted((by_cost(advised[x.fix]) for x in each), reverse=True))
    for own, partner in ((one, other), (other, one)):
        advice, title = advised[own.fix], catalogue.load().fixes[partner.fix].title
        note = f'{advice.note} Together with "{title}" it suffices. {own.sentence}'.strip()
        value = advice.value if own.value is None else own.value
        advised[own.fix] = replace(advice, value=value, note=note, together=partner)


def by_cost(advice: FixAdvice) -> tuple[int, ...]:
    """Return the sort key of a fix without a forecast: what may do harm last, then the cheapest first."""
    fix = catalogue.load().fixes[advice.fix]
    return int(fix.may_harm), COSTS.index(fix.cost)


def by_forecast(advised: Iterable[FixAdvice]) -> dict[str, tuple[float, ...]]:
    """Return a sort key of each fix: the larger gain first, the cheaper one of similar gains.

    A pair that suffices precedes what does not. Fixes without a forecast follow those that help; uncertain
    ones are last.
    """
    keys: dict[str, tuple[float, ...]] = {}
    tier, best = 0, None
    helping = [one for one in advised if one.forecast and one.forecast.helps]
    for one in sorted(helping, key=_score, reverse=True):
        score = _score(one)
        if best is not None and score < best * (1 - _SIMILAR):
            tier, best = tier + 1, score
        best = best or score
        cost = COSTS.index(catalogue.load().fixes[one.fix].cost)
        keys[one.fix] = (0, tier, cost, -score)
    keys |= {one.fix: (-1, -_score(one)) for one in advised if one.together}
    for one in advised:
        keys.setdefault(one.fix, (1 if one.forecast is None else 2, *by_cost(one)))
    return keys


def _score(one: FixAdvice) -> float:
    return one.forecast.score if one.forecast else 0.0


def explain(verdict: str, forecast: EngineForecast | None, ranked: Iterable[FixAdvice]) -> str:
    """Return a sentence that says where the order comes from; empty where no simulation could give one."""
    if verdict not in FORECAST_VERDICTS:
        return ""
    if forecast is None:
        return "Ordered by cost, without gains: the load has not been simulated yet."
    if not forecast.trusted:
        return f"Ordered by cost, without gains: {forecast.sentence}."
    costs = {catalogue.load().fixes[one.fix].cost for one in ranked if one.forecast and one.forecast.helps}
    ends = {
        frozenset(): " No change that was simulated helps.",
        frozenset({COSTS[-1]}): " Of the simulated changes only more hardware helps.",
    }
    return f"Ranked by a simulation of this load, which matches the server.{ends.get(frozenset(costs), '')}"
