"""``python -m bench.judge``: judge the verdicts on servers drawn at random; status 1 if a bar is missed."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.judge.explain import explain
from bench.judge.summary import BARS, Outcome, document, summarize
from bench.judge.trial import trial

_DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "judgement.md"
_CHUNK = 8


def outcome(seed: int, kind: str | None = None) -> Outcome:
    """Judge one seed."""
    start = time.process_time()
    judged = trial(seed, kind)
    return Outcome(
        judged.seed,
        judged.kind,
        judged.truth.family,
        judged.verdict,
        judged.right,
        judged.false_page,
        judged.blinked,
        judged.missed_page,
        judged.seconds,
        judged.flaps,
        judged.warned,
        time.process_time() - start,
        judged.recovery,
    )


def outcomes(seeds: range, processes: int, kind: str | None, limit: float) -> Iterator[Outcome]:
    """Judge seeds in several processes, in order, until a time limit in seconds."""
    end = time.monotonic() + limit
    if processes == 1:
        for seed in seeds:
            yield outcome(seed, kind)
            if time.monotonic() > end:
                return
        return
    with ProcessPoolExecutor(processes) as pool:
        for result in pool.map(outcome, seeds, [kind] * len(seeds), chunksize=_CHUNK):
            yield result
            if time.monotonic() > end:
                pool.shutdown(wait=False, cancel_futures=True)
                return


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.judge", description=__doc__)
    parser.add_argument("--seeds", default="1..2000", help="first and last seed: A..B (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--time", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--kind", help="draw only this kind of scenario")
    parser.add_argument("--explain", type=int, metavar="SEED", help="explain one scenario")
    parser.add_argument(
        "--lines", metavar="FILE", help="write one JSON line per scenario, - for standard output"
    )
    parser.add_argument("--write", action="store_true", help="write docs/judgement.md")
    options = parser.parse_args()
    if options.explain is not None:
        print(explain(options.explain, options.kind))
        return 0
    first, _, last = options.seeds.partition("..")
    seeds = range(int(first), int(last or first) + 1)
    found = _judge(seeds, options)
    text = document(found, f"{found[0].seed} to {found[-1].seed}")
    print(text)
    if options.write:
        _DOCUMENT.write_text(text, encoding="utf-8")
    return _missed(found)


def _judge(seeds: range, options: argparse.Namespace) -> list[Outcome]:
    start, found = time.monotonic(), []
    lines = None
    if options.lines:
        lines = sys.stdout if options.lines == "-" else Path(options.lines).open("w", encoding="utf-8")  # noqa: SIM115 -- closed below
    for result in outcomes(seeds, options.processes, options.kind, options.time):
        found.append(result)
        if lines is not None:
            print(json.dumps(result._asdict()), file=lines, flush=True)
        if len(found) % 50 == 0:
            right = sum(o.right for o in found) / len(found)
            print(
                f"{len(found)}/{len(seeds)} {time.monotonic() - start:.0f} s, {right:.1%} right",
                file=sys.stderr,
            )
    if lines not in (None, sys.stdout):
        lines.close()
    return found


def _missed(found: list[Outcome]) -> int:
    """Print the bars that are missed, and return the exit status."""
    status = 0
    summary = summarize(found)._asdict()
    for name, (bar, side) in BARS.items():
        value = summary[name]
        if value is not None and (value < bar if side == "least" else value > bar):
            print(f"{name}: {value:.3f}, expected at {side} {bar:g}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
