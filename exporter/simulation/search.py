"""Finds the values that are worth a forecast: the number of seats, the watermark, and pairs of changes. Pure.

Each value is screened by one run with the same requests as the present, so few runs tell the better of two.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from exporter.simulation.candidates import Candidate, seats_at, singles, watermark_at
from exporter.simulation.load import Load, fitting_seats
from exporter.simulation.settings import Engine

__all__ = ["RUNS", "Screen", "search"]

Screen = Callable[[Sequence[Candidate]], Sequence[float]]
"""Returns the score of each change: throughput divided by latency, relative to the present."""
RUNS: Final = 24
"""About how many runs a search needs."""
_ROUNDS: Final = 2
_SHARES: Final = (0.02, 0.05, 0.1, 0.2)
_PARTS: Final = (0.12, 0.25, 0.5, 0.75, 0.9)
_TIMES: Final = (1.5, 2.0, 3.0, 4.0)
# A pair of changes is worth the trouble if it beats each alone by this factor.
_BETTER: Final = 1.05
# Of numbers of seats that score the same within this share the fewest are chosen: they preempt least.
_SAME: Final = 0.05
_Number = TypeVar("_Number", int, float)


def search(
    load: Load, engine: Engine, pools: Mapping[str, float], screen: Screen, replicas: int = 1
) -> tuple[Candidate, ...]:
    """Return the changes worth a forecast, with the best value of each setting.

    Args:
        load: of the server.
        engine: as it is.
        pools: see `singles`.
        screen: see `Screen`.
        replicas: more servers that share the load.
    """
    plain = singles(engine, pools, replicas)
    fewer = _best(
        _fewer(load, engine), engine.max_num_seqs, lambda n: seats_at(engine, n), screen, _middle, _SAME
    )
    more = _best(_more(load, engine), engine.max_num_seqs, lambda n: seats_at(engine, n), screen, _middle)
    shares = [share for share in _SHARES if share > engine.watermark]
    share = _best(shares, engine.watermark, lambda x: watermark_at(engine, x), screen, _mean)
    chosen = [] if fewer is None else [seats_at(engine, fewer)]
    chosen += [] if more is None else [seats_at(engine, more)]
    chosen += [] if share is None else [watermark_at(engine, share)]
    settings = (*chosen, *(one for one in plain if one.replicas == 1))
    return (*plain, *chosen, *_pairs(settings, screen))


def _best(
    values: Sequence[_Number],
    present: _Number,
    change: Callable[[_Number], Candidate],
    screen: Screen,
    between: Callable[[_Number, _Number], _Number],
    same: float = 0.0,
) -> _Number | None:
    """Return the best of the values and of those around it that changes anything; None without values.

    Of values that score the same within a share the least is chosen.
    """
    scores = {present: 1.0}
    new = sorted({value for value in values if value != present})
    for _ in range(1 + _ROUNDS):
        scores |= zip(new, screen([change(value) for value in new]), strict=True)
        changing, ordered = _changing(scores), sorted(scores)
        at = ordered.index(max(changing, key=lambda value: changing[value]))
        around = ordered[max(0, at - 1) : at + 2]
        new = [between(low, high) for low, high in itertools.pairwise(around)]
        new = [value for value in dict.fromkeys(new) if value not in scores]
        if not new:
            break
    del scores[present]
    if not scores:
        return None
    changing = _changing(scores)
    return min(value for value in changing if changing[value] >= max(changing.values()) * (1 - same))


def _changing(scores: Mapping[_Number, float]) -> Mapping[_Number, float]:
    """Leave out what scores exactly as the present, such as a limit that is never reached."""
    return {value: score for value, score in scores.items() if score != 1.0} or scores


def _middle(low: int, high: int) -> int:
    return (low + high) // 2


def _mean(low: float, high: float) -> float:
    return round((low + high) / 2, 2)


def _fewer(load: Load, engine: Engine) -> list[int]:
    """Return numbers of seats below those that can be taken now: by arithmetic, and parts."""
    fitting = fitting_seats(load, engine)
    most = min(engine.max_num_seqs, load.clients or engine.max_num_seqs, 3 * fitting)
    return [seats for seats in {fitting, *(int(most * part) for part in _PARTS)} if 1 <= seats < most]


def _more(load: Load, engine: Engine) -> list[int]:
    """Return numbers of seats above the present one, at most one for each client and each token of a step."""
    now = engine.max_num_seqs
    most = min(max(2 * now, load.clients or 4 * now), engine.max_num_batched_tokens)
    return sorted({min(most, math.ceil(now * times)) for times in _TIMES})


def _pairs(changes: Sequence[Candidate], screen: Screen) -> Iterator[Candidate]:
    """Yield the best change together with the next one of another setting, if that beats each alone."""
    scores = screen(changes)
    helping = [i for i in sorted(range(len(changes)), key=lambda i: -scores[i]) if scores[i] > _BETTER]
    for other in helping[1:]:
        both = _both(changes[helping[0]], changes[other])
        if both is not None:
            if screen([both])[0] > scores[helping[0]] * _BETTER:
                yield both
            return


def _both(first: Candidate, second: Candidate) -> Candidate | None:
    """Return both changes at once; None where they change the same setting, or one that is not paired."""
    setting = _PAIRED.get(second.label.split()[0])
    if setting is None or setting == _PAIRED.get(first.label.split()[0]):
        return None
    engine = replace(first.engine, **{setting: getattr(second.engine, setting)})
    return Candidate(f"{first.label} + {second.label}", engine, note=first.note, parts=(first, second))


# The setting that each kind of change concerns, by the first word of its label.
_PAIRED: Final = {"max_num_seqs": "max_num_seqs", "watermark": "watermark", "pool": "num_gpu_blocks"}
