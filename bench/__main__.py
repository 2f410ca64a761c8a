"""``python -m bench [NAME ...]``: run all benchmarks, or those named; exit 1 when a figure misses its bar.

Also writes the results to bench/RESULTS.md and bench/results.json.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Final

from bench import (
    Row,
    detection,
    engines,
    page,
    peers,
    poll,
    reader,
    results,
    scale,
    serve,
    server_cost,
    simulator,
)

BENCHMARKS: Final[Mapping[str, Callable[[], list[Row]]]] = {
    "reader": reader.run,
    "poll": poll.run,
    "peers": peers.run,
    "serve": serve.run,
    "server cost": server_cost.run,
    "detection": detection.run,
    "simulator": simulator.run,
    "page": page.run,
    "engines": engines.run,
    "scale": scale.run,
}


def main(chosen: list[str]) -> int:
    """Print the table row by row as the figures come in."""
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        print(f"expected names out of {', '.join(BENCHMARKS)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    missed = 0
    print(f"{'benchmark':<12} {'what':<48} {'figure':>12}  bar")
    for name in chosen or BENCHMARKS:
        rows = BENCHMARKS[name]()
        results.keep(name, rows)
        for row in rows:
            bar = "" if row.bar is None else f"{row.side} {row.bar:g} {row.unit}"
            verdict = "" if row.holds else "  MISSED"
            print(f"{name:<12} {row.what:<48} {row.figure:>9.2f} {row.unit:<2}  {bar}{verdict}")
            missed += not row.holds
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
