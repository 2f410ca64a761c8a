"""Measures how soon recorded storms are detected: by the verdict, its page, rules, and public-style rules.

Seconds count from the first preemption in the server's own counter, polled every second. The rules run in
promtool with scrapes every 15 s and 30 s. Peaks: the share of the times with a full KV cache that a scrape at
a longer interval sees at all, compared with the recordings' interval of one second.
"""

import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench import Row
from exporter.config import AlertmanagerConfig

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS)]

from support import promtool_series as series  # noqa: E402
from support.promtool import RULES, check  # noqa: E402

# Recording -> its part with the storm, repeated for five minutes so that rules can fire.
STORMS: Final = {
    "0.26.0-exhaustion": (0, 95),
    "0.26.0-exhaustion-no-prefix-cache": (0, 63),
    "0.26.0-ramp": (75, 148),
    "0.28.0-exhaustion-short": (8, 40),
    "0.32.0-exhaustion": (0, 90),
}
LASTS: Final = 600
PAGE: Final = {"sidecar": "VllmModelPreemptionThrash", "native": "VllmNativeModelPreemptionThrash"}
FULL: Final = 0.9
PEAK: Final = 0.98
PUBLIC_FOR: Final = 120.0


def first_preemption(story: series.Story) -> float:
    """Return when the server's counter first rose."""
    before = None
    for t, reading in series.readings(story):
        for engine in reading.engines.values():
            counted = engine.signals.preemptions_total
            if before is not None and counted is not None and counted > before:
                return t
            before = counted if before is None else before
    return float("nan")


def verdict_at(story: series.Story) -> float:
    """Return when the sidecar first had the verdict."""
    return next(
        t
        for t, reading in series.readings(story)
        if any(one.judgement.verdict == "preemption_thrash" for one in reading.engines.values())
    )


def paged_at(kind: str, story: series.Story, every: int) -> float:
    """Return when rules first paged, by promtool; NaN if never."""
    before, series.SCRAPE = series.SCRAPE, every
    try:
        scraped = {"sidecar": series.scraped_sidecar, "native": series.scraped_vllm}[kind](story)
    finally:
        series.SCRAPE = before
    fires = f'ALERTS{{alertname="{PAGE[kind]}",alertstate="firing"}}'
    question = {
        "expr": f"min(min_over_time(({fires} * 0 + time())[{LASTS}s:5s]))",
        "eval_time": f"{LASTS}s",
        "exp_samples": [{"labels": '{impossible="1"}', "value": 0}],
    }
    case = {"interval": f"{every}s", "input_series": scraped.series(), "promql_expr_test": [question]}
    with tempfile.TemporaryDirectory() as folder:
        _, said = check(Path(folder), [case], RULES[kind])
    found = re.search(r"got:\D*\{\} ([\d.eE+]+)", said)
    return float(found[1]) if found else float("nan")


def usage(story: series.Story) -> list[tuple[float, float]]:
    """Return KV usage by second."""
    return [
        (t, engine.signals.kv_usage_ratio)
        for t, reading in series.readings(story)
        for engine in reading.engines.values()
        if engine.signals.kv_usage_ratio is not None
    ]


def public_at(story: series.Story, every: int) -> float:
    """Return when ``kv_cache_usage_perc > 0.9 for 2m`` first fires; NaN if never."""
    since, due = None, 0.0
    for t, value in usage(story):
        if t < due:
            continue
        due += every
        since = (since if since is not None else t) if value > FULL else None
        if since is not None and t - since >= PUBLIC_FOR:
            return t
    return float("nan")


def peaks_seen(every: int) -> float:
    """Return the share of times with a full cache that contain a scrape, over all storms and all offsets."""
    seen = spells = 0
    for name, (begin, end) in STORMS.items():
        values = [value for _, value in usage(series.story(name, begin, end))]
        runs, start = [], None
        for at, value in enumerate([*values, 0.0]):
            if value >= PEAK and start is None:
                start = at
            elif value < PEAK and start is not None:
                runs.append(range(start, at))
                start = None
        for offset in range(every):
            spells += len(runs)
            seen += sum(any((at - offset) % every == 0 for at in run) for run in runs)
    return seen / spells if spells else float("nan")


def _row(what: str, seconds: Callable[[series.Story], float]) -> list[Row]:
    """Build a row: median and worst over the storms, and how many were detected if not all were."""
    found = []
    for name, (begin, end) in STORMS.items():
        story = series.story(name, begin, end, seconds=LASTS)
        found.append(seconds(story) - first_preemption(story))
    good = [value for value in found if value == value]  # noqa: PLR0124 (NaN is not itself)
    rows = [Row(f"{what}: storms detected", len(good), f"of {len(found)}")]
    if good:
        rows.append(Row(f"{what}: median", statistics.median(good), "s"))
        rows.append(Row(f"{what}: slowest", max(good), "s"))
    return rows


def run() -> list[Row]:
    """Measure the verdict, its push, rules if promtool is installed, a public-style rule, and peaks."""
    hold = AlertmanagerConfig().hold
    rows = _row("verdict", verdict_at)
    rows += _row("direct push, with its hold", lambda story: verdict_at(story) + hold)
    if shutil.which("promtool"):
        for kind in ("sidecar", "native"):
            for every in (15, 30):
                rows += _row(
                    f"{kind} rules, scraped every {every} s",
                    lambda story, kind=kind, every=every: paged_at(kind, story, every),
                )
    for every in (15, 30):
        rows += _row(
            f"KV > 0.9 for 2m, scraped every {every} s", lambda story, every=every: public_at(story, every)
        )
    rows += [
        Row(f"times of a full cache seen at {every} s", 100 * peaks_seen(every), "%") for every in (1, 15, 30)
    ]
    return rows
