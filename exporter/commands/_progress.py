"""Progress on standard error while a command works."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

__all__ = ["StatusLine", "progress_bar"]

_REWRITE: Final = "\r\x1b[K"


class StatusLine:
    """One line that is rewritten on a terminal; elsewhere every tenth is printed."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self._lines = 0

    def __call__(self, line: str) -> None:
        if self.terminal:
            print(f"{_REWRITE}{line}", end="", file=sys.stderr, flush=True)
        elif self._lines % 10 == 0:
            print(line, file=sys.stderr, flush=True)
        self._lines += 1

    def end(self) -> None:
        """Leave the rewritten line."""
        if self.terminal and self._lines:
            print(file=sys.stderr)


@contextmanager
def progress_bar(stream: TextIO) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that shows how many of all runs are done, or None where `stream` is no terminal.

    It draws a bar where tqdm is installed, else a plain line.
    """
    if not stream.isatty():
        yield None
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 (an optional extra)
    except ImportError:

        def line(done: int, total: int) -> None:
            print(f"{_REWRITE}{done} of {total} runs", end="", file=stream, flush=True)

        yield line
        print(_REWRITE, end="", file=stream, flush=True)
        return
    with tqdm(desc="simulating", unit="run", file=stream, leave=False, dynamic_ncols=True) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
