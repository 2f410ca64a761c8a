"""Every recording, with the forecasts of a replay: no surface advises first what the forecast rejects."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import real_recordings
from support.metrics_text import text_of

from exporter.analysis import catalogue
from exporter.analysis.forecast import FORECAST_VERDICTS
from exporter.commands._timeline import FORECASTS, feed_recording
from exporter.config import Config
from exporter.publish.metrics.table import ReadingCollector
from exporter.publish.status import engine_names, poll_object, status_object
from exporter.publish.terminal import report
from exporter.simulation import engine_forecast

TESTS = Path(__file__).parent
PATHS = sorted((*TESTS.glob("cases/*.jsonl.gz"), *real_recordings.RECORDINGS.glob("*.jsonl.gz")))
TITLES = {fix.title: name for name, fix in catalogue.load().fixes.items()}
HELPFUL = {"suffices", "helps", "uncertain"}


def first_of_each_surface(reading, engine) -> Iterator[tuple[str, str | None]]:
    """The fix that each surface names first, None where it names none."""
    name = next(name for name, one in engine_names(reading).items() if one is engine)
    for surface, document in (
        ("replay", poll_object(0.0, reading)),
        ("API", status_object("http://a", reading, reading.t)),
    ):
        yield surface, next((fix["fix"] for fix in document["engines"][name]["fixes"]), None)
    ranked = [line for line in report(reading) if line.startswith("  1. ")]
    titles = [next((fix for title, fix in TITLES.items() if title in line), None) for line in ranked]
    if (
        len(reading.engines) == 1
        and not reading.judgement.fixes
        and not any(model.fixes for model in reading.models.values())
    ):
        yield "terminal", next(iter(titles), None)
    text = text_of(ReadingCollector(lambda: reading, lambda: reading.t, lambda: 0.0))
    ranks = [
        sample.labels["fix"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("_fix_rank") and sample.value == 1
        if (sample.labels["model_name"], sample.labels["engine"]) == (engine.key.model, engine.key.name)
    ]
    yield "metrics", next(iter(ranks), None)


def rejected_first(path: Path) -> Iterator[str]:
    """What is wrong at each poll at which the advice of an engine has changed."""
    before: dict[object, object] = {}
    for t, reading, _ in feed_recording(path, Config(), forecasts=FORECASTS):
        for key, engine in reading.engines.items():
            if before.get(key) is engine.advice:
                continue
            before[key] = engine.advice
            made = engine.forecast
            trusted = made is not None and made.trusted and engine.judgement.verdict in FORECAST_VERDICTS
            outcomes = {one.fix: one.outcome for one in made.fixes} if made is not None and trusted else {}
            for surface, fix in first_of_each_surface(reading, engine) if outcomes else ():
                if fix in outcomes and outcomes[fix] not in HELPFUL:
                    yield f"t={t} {surface}: {fix} is first, and the forecast says {outcomes[fix]}"
            if not trusted:
                gains = [one.fix for one in engine.advice.fixes if one.gain is not None or one.suffices]
                yield from (f"t={t}: {fix} has a gain without a forecast" for fix in gains)


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_no_surface_advises_first_what_the_forecast_rejects(path, monkeypatch):
    """And none shows a gain that no trusted forecast gives; short forecasts are as good for that."""
    monkeypatch.setattr(engine_forecast, "BUDGET", engine_forecast.BUDGET // 5)
    assert list(rejected_first(path)) == []
