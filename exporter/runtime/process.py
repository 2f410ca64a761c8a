"""Limits of this process: open files, and pauses of the garbage collector."""

import asyncio
import contextlib
import gc
import resource
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from exporter.runtime.fleet import Fleet

__all__ = ["freeze_settled", "raise_file_limit"]

# The connections of one target (for polls and for its configuration), and those of the exporter itself.
_FILES_PER_TARGET: Final = 2
_FILES_BESIDES: Final = 300
# With fewer targets than these the garbage collector's pauses are negligible.
_MANY: Final = 50
_SETTLED_SECONDS: Final = 2.0


def raise_file_limit(targets: int) -> None:
    """Allow as many open files as so many targets need; a limit of 1024 is usual."""
    wanted = _FILES_PER_TARGET * targets + _FILES_BESIDES
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= wanted:
        return
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def freeze_settled(fleet: "Fleet") -> None:
    """Keep long-lived objects out of the garbage collector's sight, until cancelled.

    Hundreds of targets are a quarter of a million remembered objects, and scanning them all pauses every poll
    by 0.2 s. Once no target came or went for a while they are scanned one last time and then set aside, until
    that changes.
    """
    changes, settled = -1, False
    try:
        while True:
            await asyncio.sleep(_SETTLED_SECONDS)
            if fleet.changes != changes:
                changes, settled = fleet.changes, False
                gc.unfreeze()
            elif not settled and len(fleet) >= _MANY:
                settled = True
                gc.collect()
                gc.freeze()
    finally:
        gc.unfreeze()
