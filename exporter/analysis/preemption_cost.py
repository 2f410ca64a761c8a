"""What preemptions cost by a forecast: tokens computed twice, time of the GPU, and money. Pure."""

from dataclasses import dataclass

from exporter.analysis.forecast import FORECAST_VERDICTS, EngineForecast
from exporter.analysis.server_facts import ServerFacts

__all__ = ["PreemptionCost", "preemption_cost"]


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """What the tokens that are computed again cost; None is unknown. Time and money are lower bounds."""

    tokens_per_second: float | None = None
    time_ratio: float | None = None  # share of the GPU's time: only what these tokens add to steps
    gpus: float = 1.0  # of the engine
    price: float | None = None  # of a GPU per hour

    @property
    def per_hour(self) -> float | None:
        """Money per hour, in the currency of the price."""
        if self.time_ratio is None or self.price is None:
            return None
        return self.time_ratio * self.gpus * self.price

    @property
    def sentence(self) -> str:
        """The cost in words; empty if there is none."""
        if not self.tokens_per_second:
            return ""
        bounds = [] if self.time_ratio is None else [f"at least {self.time_ratio:.1%} of the GPU's time"]
        if self.per_hour is not None:
            count = f"{self.gpus:.0f} GPU{'' if self.gpus == 1 else 's'}"
            bounds.append(f"at least {self.per_hour:.2f} per hour ({count} at {self.price:g} per hour)")
        told = "".join(f", {bound}" for bound in bounds)
        return (
            f"By the forecast, preemptions make it compute {self.tokens_per_second:.0f} tokens/s again{told}."
        )


def preemption_cost(verdict: str, forecast: EngineForecast | None, facts: ServerFacts) -> PreemptionCost:
    """Return what preemptions cost an engine; unknown without a trusted forecast of a verdict about capacity.

    The time of the recomputed tokens is their number times the time that a further prompt token adds to a
    step, with the fastest step time that the observations allow. GPUs that are not known count as one.
    """
    if forecast is None or not forecast.trusted or verdict not in FORECAST_VERDICTS:
        return PreemptionCost()
    tokens, seconds = forecast.recomputed_per_second, forecast.seconds_per_token
    if tokens is None:
        return PreemptionCost()
    sizes = (facts.number(f"{way}_parallel_size") or 1 for way in ("tensor", "pipeline"))
    gpus = facts.number("gpus_per_replica") or next(sizes) * next(sizes)
    time = min(1.0, tokens * seconds) if seconds or not tokens else None
    return PreemptionCost(tokens, time, gpus, facts.number("gpu_hourly_price"))
