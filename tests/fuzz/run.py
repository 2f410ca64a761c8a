"""One run of mutants through one target."""

import random
import time
import traceback
from dataclasses import dataclass, field

from fuzz.targets import TARGETS

# One input may take this long; reading is linear, and a fault that is not would show.
SLOW_SECONDS = 5.0
MOST_FOUND = 20


@dataclass
class Found:
    """An input that broke something."""

    target: str
    problem: str
    input: bytes


@dataclass
class Outcome:
    """What came of a run."""

    inputs: int = 0
    seconds: float = 0.0
    found: list[Found] = field(default_factory=list)


def run(name: str, seed: int, *, inputs: int = 1 << 60, seconds: float = float("inf")) -> Outcome:
    """Feed mutants until there were so many, or for so long."""
    random_ = random.Random(f"{name} {seed}")
    target = TARGETS[name][0]()
    outcome = Outcome()
    start = time.monotonic()
    while outcome.inputs < inputs and outcome.seconds < seconds and len(outcome.found) < MOST_FOUND:
        text = target.mutant(random_)
        before = time.monotonic()
        try:
            target(text)
        except Exception:  # noqa: BLE001 (that is what is looked for)
            outcome.found.append(Found(name, traceback.format_exc(limit=-3), text))
        now = time.monotonic()
        if now - before > SLOW_SECONDS:
            outcome.found.append(Found(name, f"took {now - before:.1f} s", text))
        outcome.inputs += 1
        outcome.seconds = now - start
    return outcome
