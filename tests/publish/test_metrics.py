"""The exported metrics: the table, the collector, and the whole text for recorded bodies."""

import dataclasses
import logging
import math
import re
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from support import bodies, real_recordings
from support.metrics_text import text_of
from support.scenes import Stage

from exporter.analysis.forecast import EngineForecast, FixForecast, Ratio
from exporter.analysis.pipeline import Pipeline
from exporter.analysis.signals import Signals
from exporter.config import AnalysisConfig
from exporter.publish.metrics import self_metrics
from exporter.publish.metrics.table import (
    EXPORTER_METRICS,
    METRICS,
    PREFIX,
    SERIES_PER_ENGINE,
    ReadingCollector,
)
from exporter.vllm.answers import ServerAnswers
from exporter.vllm.series import bounded

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
WALL = 1_700_000_000.0
ROWS = (*METRICS, *EXPORTER_METRICS)
BODY = bodies.body(
    bodies.engine(running=3, waiting=1, kv=0.4, preemptions=2, finished=5, generation_tokens=100)
)
UNITS = {"seconds", "bytes", "ratio", "tokens"}
# A quotient names both of its units, and "seconds to full" is one.
UNIT_INSIDE = {"generation_tokens_per_second", "kv_seconds_to_full", "recomputed_tokens_per_second"}
# Signals that are not exported, each with the reason.
NOT_EXPORTED = {
    "kv_capacity_is_estimate": "a flag; the API shows it",
    "requests_finished_per_second": "rate() of requests_finished_total",
    "prompt_tokens_per_second": "vLLM's own counter tells it",
    "engine_steps_per_second": "vLLM's own counter tells it",
    "time_to_first_token_mean_seconds": "vLLM's own histogram tells it better",
    "generation_tokens_per_second_recent": "an input of verdicts",
    "progress_idle_seconds": "an input of verdicts",
    "preemptions_inferred_per_second": "an input of verdicts; an estimate",
    "queue_time_mean_seconds": "vLLM's own histogram tells it better",
}


def collector(reading, now=None, failures=None) -> ReadingCollector:
    """A collector of one reading, at the reading's own time unless another is given."""
    clock = (lambda: reading.t) if now is None else (lambda: now)
    return ReadingCollector(
        lambda: reading, clock, lambda: WALL, (lambda _: None) if failures is None else failures.append
    )


def scrape(reading, now=None) -> str:
    """The metrics text of a reading."""
    return text_of(collector(reading, now))


def series(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a text by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read_text(text)
        for sample in family.samples
    }


def names(text: str) -> set[str]:
    """The names of all samples, without the prefix."""
    return {name.removeprefix(PREFIX) for name, _ in series(text)}


def fed(*given: bytes | str, pipeline: Pipeline | None = None):
    """The reading after some polls, one a second, of a fresh pipeline."""
    pipeline = pipeline or Pipeline(AnalysisConfig(), {}, 1.0)
    for t, answer in enumerate(given):
        body, error = (answer, None) if isinstance(answer, bytes) else (None, answer)
        reading = pipeline.feed(float(t), body, error)
    return reading


# The table


def wrong_spelling(row) -> bool:
    """Whether a name has more than its type allows, or a unit that is not last."""
    *words, _last = row.name.split("_")
    return (
        not re.fullmatch(r"[a-z]+(_[a-z]+)*", row.name)
        or bool(re.search(r"_(total|info|count|sum|bucket|created)$", row.name))
        or (row.name not in UNIT_INSIDE and bool(UNITS & {*words}))
        or row.series.endswith("_total") != (row.type == "counter")
    )


def test_every_name_is_spelled_as_prometheus_wants_it():
    """Lower case, no colons, no ending that its type adds anyway, the unit last."""
    assert [row.name for row in ROWS if wrong_spelling(row)] == []


def test_every_help_is_sentences():
    """One line that begins with a capital, or with the value 1, and ends with a full stop."""
    assert [row.name for row in ROWS if not re.fullmatch(r"[A-Z1][^\n]*\.", row.help)] == []


def test_every_gauge_over_time_has_its_window_in_its_help():
    """A rate, a mean and a maximum are over some seconds."""
    over_time = re.compile(r"per_second|_mean_|_max_ratio|per_finished|hit_ratio")
    gauges = [row for row in ROWS if row.type == "gauge" and over_time.search(row.name)]
    assert gauges
    assert [row.name for row in gauges if not re.search(r"\d+ s\b", row.help)] == []


def test_names_and_signals_stand_once():
    """One row per metric, one metric per signal."""
    assert len({row.series for row in ROWS}) == len(ROWS)
    shown = [row.signal for row in METRICS if row.signal]
    assert len(set(shown)) == len(shown)


def test_every_signal_is_exported_or_left_out_for_a_reason():
    """A new signal cannot be forgotten."""
    signals = {field.name for field in dataclasses.fields(Signals)}
    shown = {row.signal for row in METRICS if row.signal}
    assert shown <= signals
    assert signals - shown <= NOT_EXPORTED.keys()


def test_every_row_is_shown_and_everything_shown_has_a_row():
    """By one storm or another; the name, the type and the help are the table's."""
    text = "".join(
        scrape(reading)
        for name in (real_recordings.EXHAUSTION, "0.32.0-exhaustion", real_recordings.CALM)
        for reading in real_recordings.replayed(name)[5::20]
    )
    shown = {family.name: family for family in read_text(text)}
    rows = {PREFIX + row.name: row for row in METRICS}
    missing = {name for name in rows if f"{name}{'_info' if rows[name].type == 'info' else ''}" not in shown}
    assert missing <= {PREFIX + "kv_seconds_to_full"}  # no recorded cache fills in a straight line
    for name, family in shown.items():
        row = rows[name.removesuffix("_info")]
        assert family.documentation == row.help
        assert family.type == ("gauge" if row.type == "info" else row.type)
        assert all(set(row.labels) >= {*sample.labels} - {"le"} for sample in family.samples)


def test_a_cache_that_fills_evenly_says_when_it_is_full():
    """One per cent a second, from 10 %."""
    reading = fed(*(bodies.body(bodies.engine(running=3, kv=0.1 + t / 100)) for t in range(30)))
    assert "kv_seconds_to_full" in names(scrape(reading))


# The collector


def test_nothing_is_shown_of_the_target_before_the_first_poll_has_ended():
    """Not even `up`: nothing is known, and 0 would fire alerts at each start."""
    assert text_of(ReadingCollector(lambda: None, lambda: 0.0, lambda: 0.0)) == ""


def test_values_are_those_of_the_reading():
    """Label for label."""
    reading = fed(BODY, BODY.replace(b"preemptions_total{", b"preemptions_total{"), BODY)
    labels = (("engine", "0"), ("model_name", "demo-7b"))
    shown = series(scrape(reading))
    assert shown[PREFIX + "up", ()] == 1.0
    assert shown[PREFIX + "engines", ()] == 1.0
    assert shown[PREFIX + "kv_usage_ratio", labels] == 0.4
    assert shown[PREFIX + "requests_running", labels] == 3.0
    assert shown[PREFIX + "preemptions_total", labels] == 0.0
    assert shown[PREFIX + "last_success_timestamp_seconds", ()] == WALL


def test_the_polled_histogram_counts_every_good_poll():
    """Cumulative, with +Inf and sum as a histogram has them."""
    reading = fed(*(bodies.body(bodies.engine(kv=usage)) for usage in (0.3, 0.7, 0.96, 1.0)), "timeout")
    shown = series(scrape(reading))
    counts = {
        dict(labels)["le"]: value
        for (name, labels), value in shown.items()
        if name == PREFIX + "kv_usage_polled_ratio_bucket"
    }
    assert counts["0.5"] == 1
    assert counts["0.7"] == 2
    assert counts["0.98"] == 3
    assert counts["1.0"] == counts["+Inf"] == 4
    total = next(v for (name, _), v in shown.items() if name == PREFIX + "kv_usage_polled_ratio_sum")
    assert total == pytest.approx(2.96)


def test_two_scrapes_of_one_reading_are_equal():
    """Nothing of the first stays in the second."""
    one = collector(fed(BODY))
    assert text_of(one) == text_of(one)


def test_an_engine_that_is_unknown_in_part_shows_what_is_known():
    """Unknown is absent, never 0."""
    shown = names(scrape(fed(bodies.body(bodies.engine(running=3)))))
    assert "requests_running" in shown
    assert not {"kv_usage_ratio", "requests_waiting", "preemptions_total"} & shown


def test_a_metric_that_cannot_be_built_costs_itself_only(caplog):
    """It is counted at each scrape and logged at the first; all others are there."""
    reading = fed(BODY)
    good = names(scrape(reading))
    (key,) = reading.engines
    broken = dataclasses.replace(
        reading, engines={key: dataclasses.replace(reading.engines[key], kv_polls=(1, 2))}
    )
    failures: list[str] = []
    one = collector(broken, failures=failures)
    with caplog.at_level(logging.ERROR):
        texts = [text_of(one) for _ in range(3)]
    gone = {f"kv_usage_polled_ratio_{part}" for part in ("bucket", "count", "sum")}
    assert [good - names(text) for text in texts] == [gone] * 3
    assert failures == ["kv_usage_polled_ratio"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "cannot build a metric name=kv_usage_polled_ratio"
    ]


def test_a_metric_that_failed_is_logged_again_after_it_was_good():
    """Once per change of state."""
    good = fed(BODY)
    (key,) = good.engines
    bad = dataclasses.replace(good, engines={key: dataclasses.replace(good.engines[key], kv_polls=(1, 2))})
    current = [bad]
    one = ReadingCollector(lambda: current[0], lambda: 0.0, lambda: WALL)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("exporter.publish.metrics.table")
    logger.addHandler(handler)
    try:
        for current[0] in (bad, bad, good, bad, bad):
            text_of(one)
    finally:
        logger.removeHandler(handler)
    assert len(messages) == 2


GAUGES = {"kv_usage_ratio", "requests_running", "requests_waiting", "kv_usage_max_ratio"}
KEPT = {"preemptions_total", "requests_finished_total", "restarts_total", "kv_usage_polled_ratio_count"}


def test_measured_gauges_outlive_failed_polls_until_they_are_too_old():
    """One that vanished at the first failed poll would restart every `for:`."""
    text = scrape(fed(BODY, BODY, "timeout", "timeout"))
    assert names(text) >= GAUGES | KEPT
    assert series(text)[PREFIX + "up", ()] == 0.0


def test_measured_gauges_vanish_once_they_are_too_old():
    """What the exporter has counted itself stays."""
    shown = names(scrape(fed(BODY, *["timeout"] * 6)))
    assert not GAUGES & shown
    assert shown >= KEPT


@pytest.mark.parametrize(("age", "there"), [(4.9, True), (5.1, False)])
def test_measured_gauges_of_a_poller_that_is_stuck_vanish_too(age, there):
    """Then no new reading says that the last one is old."""
    reading = fed(BODY)
    shown = names(scrape(reading, now=reading.t + age))
    assert (shown >= GAUGES) == there
    assert shown >= KEPT


@pytest.mark.parametrize(("age", "up"), [(4.9, 1.0), (5.1, 0.0)])
def test_up_of_a_poller_that_is_stuck_becomes_0(age, up):
    """What it last said is not true for ever."""
    reading = fed(BODY)
    assert series(scrape(reading, now=reading.t + age))[PREFIX + "up", ()] == up


def test_the_time_of_the_last_success_does_not_move_with_the_scrapes():
    """Neither by failed polls nor by the time of day at which it is asked for."""
    reading = fed(BODY, "timeout", "timeout")
    one = ReadingCollector(lambda: reading, lambda: 10.0, lambda: WALL + 10.0)
    assert series(text_of(one))[PREFIX + "last_success_timestamp_seconds", ()] == WALL


def test_a_server_that_never_answered_has_no_time_of_success():
    """And no number of engines: 0 would be a claim."""
    shown = names(scrape(fed("connection_refused")))
    assert "up" in shown
    assert not {"engines", "engines_missing", "last_success_timestamp_seconds"} & shown


def test_an_engine_that_is_missing_is_counted_and_keeps_its_counters():
    """Its gauges are gone: the last good body says that they no longer hold."""
    both = bodies.body(bodies.engine("0", kv=0.1, preemptions=1), bodies.engine("1", kv=0.2, preemptions=1))
    text = scrape(fed(both, bodies.body(bodies.engine("0", kv=0.1, preemptions=1))))
    shown = series(text)
    assert shown[PREFIX + "engines", ()] == 1.0
    assert shown[PREFIX + "engines_missing", ()] == 1.0
    of_the_missing = {name.removeprefix(PREFIX) for name, labels in shown if ("engine", "1") in labels}
    assert "kv_usage_ratio" not in of_the_missing
    assert of_the_missing >= {"preemptions_total", "kv_usage_polled_ratio_count"}


def recorded_names() -> list[str]:
    """All recordings of polls."""
    return sorted(path.name.partition(".jsonl")[0] for path in real_recordings.RECORDINGS.glob("*.jsonl.gz"))


@pytest.mark.parametrize("name", recorded_names())
def test_no_engine_has_more_series_than_promised(name):
    """At no poll of any recording."""
    for reading in real_recordings.replayed(name):
        per_engine: dict[tuple[str, str], int] = {}
        for _, pairs in series(scrape(reading)):
            labels = dict(pairs)
            if "engine" in labels:
                key = (labels["model_name"], labels["engine"])
                per_engine[key] = per_engine.get(key, 0) + 1
        assert max(per_engine.values(), default=0) <= SERIES_PER_ENGINE


def test_no_version_of_vllm_has_more_series_than_promised():
    """With every metric of that release in its body."""
    counts = {}
    for path in real_recordings.EXPOSITIONS:
        reading = fed(*[real_recordings.exposition(path)] * 6)
        counts[path.name] = sum(("engine", "0") in labels for _, labels in series(scrape(reading)))
    assert {name: count for name, count in counts.items() if not 20 < count <= SERIES_PER_ENGINE} == {}


def test_there_are_no_timestamps_and_no_created_series():
    """Of neither format."""
    reading = real_recordings.replayed(real_recordings.EXHAUSTION)[100]
    collectors = collector(reading), self_metrics.ExporterMetrics()
    for text in (text_of(*collectors), text_of(*collectors, accept=OPENMETRICS)):
        assert "_created" not in text
        for line in text.splitlines():
            assert line.startswith("#") or len(re.sub(r"\{.*\}", "", line).split(" ")) == 2


def test_both_formats_say_the_same():
    """Sample for sample, as prometheus-client's own parsers read them."""
    reading = real_recordings.replayed(real_recordings.TWO_ENGINES)[20]
    said = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read_openmetrics(text_of(collector(reading), accept=OPENMETRICS))
        for sample in family.samples
    }
    assert said == series(scrape(reading))


HOSTILE = ['a"} 1\nvllm_pressure_up 7', "back\\slash", "a\\nb", "ключ-模型", "{}", "#", " ", "x" * 3000]


@pytest.mark.parametrize("model", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_label_value_stays_a_label_value(model):
    """Nothing in a model's name begins a line or ends a label; what is too long leaves a hash behind."""
    escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    body = f'vllm:num_requests_running{{engine="0",model_name="{escaped}"}} 3.0\n'.encode()
    text = scrape(fed(body))
    shown = series(text)
    assert shown[PREFIX + "up", ()] == 1.0
    assert shown[PREFIX + "requests_running", (("engine", "0"), ("model_name", bounded(model)))] == 3.0


def test_a_label_value_that_is_not_utf_8_does_not_break_a_scrape():
    """It is shown with replacement characters."""
    body = b'vllm:num_requests_running{engine="0",model_name="a\xff\xed\xa0\x80"} 3.0\n'
    assert "requests_running" in names(scrape(fed(body)))


# About itself


def test_the_exporter_counts_its_polls():
    """By reason where they failed, and how long they took where they did not."""
    one = self_metrics.PollCounts()
    for reason in ("connection_refused", "connection_reset", "timeout"):  # `rate()` sees the first error
        assert series(text_of(one))[PREFIX + "exporter_poll_errors_total", (("reason", reason),)] == 0
    one.poll(0.02, 1000, None, interval=1.0)
    one.poll(0.3, 1000, None, skipped=2, interval=5.0)
    one.poll(3.0, None, "timeout", interval=5.0)
    shown = {
        name.removeprefix(PREFIX): value
        for (name, labels), value in series(text_of(one)).items()
        if not labels
    }
    assert shown["exporter_polls_total"] == 3
    assert shown["exporter_polls_skipped_total"] == 2
    assert shown["exporter_poll_duration_seconds_count"] == 2
    assert shown["exporter_poll_duration_seconds_sum"] == pytest.approx(0.32)
    assert shown["exporter_poll_interval_seconds"] == 5.0
    assert shown["exporter_body_bytes"] == 1000
    assert series(text_of(one))[PREFIX + "exporter_poll_errors_total", (("reason", "timeout"),)] == 1


def test_the_version_is_what_the_server_answered_and_no_guess_stands_in_its_place():
    """The oldest release with the same names has a label of its own."""
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    text = bodies.body(bodies.engine(running=1, kv=0.5))
    reading = pipeline.feed(1.0, text, None)
    told = pipeline.feed(2.0, text, None, ServerAnswers(version="0.32.0"))
    for one, version in ((reading, None), (told, "0.32.0")):
        labels = next(
            dict(labels) for (name, labels) in series(scrape(one)) if name == PREFIX + "engine_info"
        )
        assert labels.get("vllm_version") == version
        assert labels["names_since"]


def test_a_page_in_place_of_metrics_is_an_error_with_a_reason():
    """It was answered, so it has a duration too."""
    one = self_metrics.PollCounts()
    one.poll(0.02, 13, fed(b"<html></html>").error, interval=1.0)
    shown = series(text_of(one))
    assert shown[PREFIX + "exporter_poll_errors_total", (("reason", "unreadable_body"),)] == 1
    assert shown[PREFIX + "exporter_poll_duration_seconds_count", ()] == 1


def test_a_server_that_counts_up_its_status_makes_few_series():
    """Statuses that HTTP has stand by themselves, of all others only the class."""
    one = self_metrics.PollCounts()
    for status in range(100, 1000):
        one.poll(0.02, None, f"http_{status}", interval=1.0)
    reasons = {
        dict(labels)["reason"]: n for (name, labels), n in series(text_of(one)).items() if "errors" in name
    }
    assert (reasons["http_404"], reasons["http_503"], reasons["http_7xx"]) == (1, 1, 100)
    assert len(reasons) <= 80
    assert sum(reasons.values()) == 900


def test_what_was_never_measured_is_absent():
    """Before the first poll there is no interval and no size; counters begin at 0."""
    shown = names(text_of(self_metrics.PollCounts()))
    assert "exporter_polls_total" in shown
    assert not {"exporter_poll_interval_seconds", "exporter_body_bytes"} & shown


def test_a_reload_that_failed_keeps_the_time_of_the_last_good_one():
    """Two gauges, as Prometheus has them; neither before the configuration was read at all."""
    one = self_metrics.ExporterMetrics()
    assert not {name for name in names(text_of(one)) if "reload" in name}
    one.reloaded(WALL)
    one.reloaded(None)
    shown = series(text_of(one))
    assert shown[PREFIX + "exporter_config_last_reload_successful", ()] == 0
    assert shown[PREFIX + "exporter_config_last_reload_success_timestamp_seconds", ()] == WALL


def test_polls_are_counted_by_target_where_there_are_several():
    """What is of the exporter as a whole stays without a target."""
    whole, one = self_metrics.ExporterMetrics(), self_metrics.PollCounts([("target", "h:1")])
    one.poll(0.02, 1000, None, interval=1.0)
    shown = series(text_of(whole, one))
    assert shown[PREFIX + "exporter_polls_total", (("target", "h:1"),)] == 1
    assert (PREFIX + "exporter_polls_total", ()) not in shown
    assert any(name == PREFIX + "exporter_build_info" for name, _ in shown)


def test_every_row_about_the_exporter_is_shown():
    """Name, type and help as in the table."""
    one, polls = self_metrics.ExporterMetrics(), self_metrics.PollCounts()
    polls.poll(0.02, 1000, None, interval=1.0)
    polls.poll(0.02, None, "timeout", interval=1.0)
    one.collect_error("up")
    one.notified("sent", 1)
    one.reloaded(WALL)
    one.targets, one.discovery_failures = {"dns": 3}, {"dns": 0}
    rows = {PREFIX + row.name: row for row in EXPORTER_METRICS}
    shown = {family.name.removesuffix("_info"): family for family in read_text(text_of(one, polls))}
    assert shown.keys() == rows.keys()
    for name, family in shown.items():
        assert family.documentation == rows[name].help


# Golden files


def later(name: str, t: float):
    """The reading of a recording at a time."""
    return real_recordings.at(real_recordings.replayed(name), t)


GOLDEN = {
    "0.26.0-exhaustion.txt": lambda: later(real_recordings.EXHAUSTION, 60.0),
    "0.26.0-two-engines.txt": lambda: later(real_recordings.TWO_ENGINES, math.inf),
    "0.26.0-two-api-servers.txt": lambda: later(real_recordings.TWO_API_SERVERS, 40.0),
    "0.26.0-restart-down.txt": lambda: later(real_recordings.RESTART, 90.0),
    "0.26.0-restart-after.txt": lambda: later(real_recordings.RESTART, 125.0),
    "0.26.0-stats-disabled.txt": lambda: fed(real_recordings.idle("0.26.0", "stats-disabled")),
    "0.32.0-idle.txt": lambda: fed(real_recordings.idle("0.32.0")),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_whole_text_is_as_it_was(name, golden, monkeypatch):
    """A change of any exported name, help or value is a difference; `pytest --rewrite-golden` writes anew."""
    monkeypatch.setattr(self_metrics, "__version__", "0.0.0")
    monkeypatch.setattr(self_metrics, "platform", SimpleNamespace(python_version=lambda: "3.0.0"))
    reading = GOLDEN[name]()
    about, polls = self_metrics.ExporterMetrics(), self_metrics.PollCounts()
    polls.poll(0.02, 1000 if reading.error is None else None, reading.error, interval=1.0)
    golden(name, text_of(collector(reading), about, polls))


def of_fixes(reading, names):
    """Series with these names, by name and fix."""
    found = series(scrape(reading)).items()
    return {(name, dict(labels)["fix"]): value for (name, labels), value in found if name in names}


def test_the_first_fixes_have_their_value_and_a_gain_only_by_a_forecast():
    """A flag without a number has none, and neither has a fix that was not simulated."""
    stage = Stage(cache={"kv_cache_size_tokens": 9568, "block_size": 32, "cache_dtype": "auto"})
    storm = {"running": 20, "waiting": 12, "kv": 0.98, "tokens": 300, "finished": 0.5, "preemptions": 2}
    reading = stage.play(60, **storm)[-1]
    names = [PREFIX + name for name in ("fix_value", "fix_gain_ratio")]
    assert of_fixes(reading, names) == {(names[0], "set_watermark"): 0.05}
    helped = FixForecast("set_watermark", "helps", 0.08, Ratio(1.1, 1.2, 1.3))
    key = next(iter(reading.engines))
    stage.pipeline.set_forecast(key, EngineForecast(60.0, True, "they match", (helped,)))
    reading = stage.play(1, **storm)[-1]
    assert of_fixes(reading, names) == {(names[0], "set_watermark"): 0.08, (names[1], "set_watermark"): 1.2}
