"""``python -m fuzz [--inputs N] [--seed S]``: a long run; exit status 1 when anything was found."""

# ruff: noqa: T201 - a command prints

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from fuzz.run import Found, run
from fuzz.targets import TARGETS


def main() -> int:
    """All targets, each in a process of its own."""
    parser = argparse.ArgumentParser(description="feed mutants to every reader")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=1, help="another one makes other mutants")
    options = parser.parse_args()
    start = time.monotonic()
    found: list[Found] = []
    done = 0
    with ProcessPoolExecutor(2) as pool:
        shares = {name: round(share * options.inputs) for name, (_, share) in TARGETS.items()}
        runs = {name: pool.submit(run, name, options.seed, inputs=inputs) for name, inputs in shares.items()}
        for name, future in runs.items():
            outcome = future.result()
            done += outcome.inputs
            found += outcome.found
            print(
                f"{name:<14} {outcome.inputs:>9} inputs {outcome.seconds:>7.1f} s  {len(outcome.found)} found"
            )
    for one in found:
        print(f"\n{one.target}: {one.problem}\n{one.input!r}", file=sys.stderr)
    print(f"{'all':<14} {done:>9} inputs {time.monotonic() - start:>7.1f} s  {len(found)} found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
