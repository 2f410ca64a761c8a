"""The clocks of the process, for code that takes the time as a parameter."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["SYSTEM", "Clocks"]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Functions that return the time: monotonic seconds, and unix seconds."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


SYSTEM: Final = Clocks(time.monotonic, time.time)
