"""Which alerts are told after a poll, and how: raised after the hold time, told again, resolved once."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import real_recordings
from support.scenes import Stage, first

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.fixes import FixAdvice
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.relief import limit_words, relief
from exporter.config import AlertmanagerConfig
from exporter.publish.alerts import table
from exporter.publish.alerts.tracker import LIFETIMES, ActiveAlerts, Notice
from exporter.rules import sidecar
from exporter.rules.options import Options

CONFIG = AlertmanagerConfig(
    urls=("http://alertmanager:9093",),
    hold=30.0,
    keep=0.0,
    resend_interval=60.0,
    external_labels={"cluster": "eu", "namespace": "prod", "pod": "vllm-0"},
)
EPOCH = 1_700_000_000.0
QUIET = Stage(engines=("0",)).play(1)[0]
MANY = Stage(engines=tuple(map(str, range(20)))).play(1)[0]


def reading(t: float, *verdicts: str, base: TargetReading = QUIET, **more: object) -> TargetReading:
    """A reading in which the first engines have these verdicts, and the others are healthy."""
    said = iter(verdicts)
    engines = {}
    for key, engine in base.engines.items():
        name = next(said, "healthy")
        severity = (
            Severity.CRITICAL if name == "preemption_thrash" else catalogue.load().verdicts[name].severity
        )
        engines[key] = replace(engine, judgement=replace(engine.judgement, verdict=name, severity=severity))
    return replace(base, t=t, engines=engines, **more)


def told(active: ActiveAlerts, one: TargetReading) -> dict[str, Notice]:
    """What is told after a poll, by alert name and severity."""
    notices = active.observe(one, EPOCH + one.t)
    return {f"{dict(notice.key)['alertname']} {dict(notice.key)['severity']}": notice for notice in notices}


def after_hold(*verdicts: str, config: AlertmanagerConfig = CONFIG, **more: object) -> dict[str, Notice]:
    """What is told once verdicts were held for the hold time."""
    active = ActiveAlerts(config)
    assert told(active, reading(0.0, *verdicts, **more)) == {}
    return told(active, reading(config.hold, *verdicts, **more))


# When.


def test_an_alert_waits_for_the_hold_time():
    """Not a poll earlier than that."""
    active = ActiveAlerts(CONFIG)
    assert [bool(told(active, reading(t, "kv_bound"))) for t in (0.0, 29.9, 30.0)] == [False, False, True]


def test_a_verdict_that_passes_within_the_hold_time_is_not_told():
    """Neither raised nor resolved, and the time does not add up."""
    active = ActiveAlerts(CONFIG)
    story = [reading(t, "kv_bound") for t in (0.0, 20.0)] + [reading(25.0)]
    story += [reading(t, "kv_bound") for t in (26.0, 55.0)] + [reading(55.5)]
    assert [told(active, one) for one in story] == [{}] * 6


def test_it_is_told_again_before_it_ends_and_begins_when_it_began():
    """With the same start every time, for as long as it lasts."""
    active = ActiveAlerts(CONFIG)
    notices = [
        notice
        for t in range(0, 600, 1)
        for notice in told(active, reading(float(t), "kv_bound")).values()
    ]  # fmt: skip
    assert [notice.ends_at - EPOCH for notice in notices] == [t + 240.0 for t in range(30, 600, 60)]
    assert {notice.starts_at for notice in notices} == {EPOCH + 30.0}
    assert not any(notice.resolved for notice in notices)


def test_it_is_resolved_once_when_the_verdict_is_left():
    """At the very poll, and never again."""
    active = ActiveAlerts(CONFIG)
    for t in (0.0, 30.0):
        told(active, reading(t, "kv_bound"))
    (notice,) = told(active, reading(41.0)).values()
    assert (notice.resolved, notice.starts_at, notice.ends_at) == (True, EPOCH + 30.0, EPOCH + 41.0)
    assert told(active, reading(42.0)) == {}


def test_an_alert_is_kept_as_long_as_by_the_rules():
    """An interruption of less is the same incident: nothing is resolved, and it began when it began."""
    active = ActiveAlerts(replace(CONFIG, keep=900.0, resend_interval=60.0))
    story = dict.fromkeys((*range(40), *range(300, 340)), "kv_bound")
    notices = [
        one for t in range(700) for one in told(active, reading(float(t), story.get(t, "healthy"))).values()
    ]
    assert [one.ends_at - EPOCH for one in notices if one.resolved] == [339.0 + 300.0]
    assert {one.starts_at for one in notices} == {EPOCH + 30.0}


def test_a_failed_poll_does_not_begin_the_hold_time_again():
    """A busy server misses some."""
    active = ActiveAlerts(CONFIG)
    story = [reading(float(t), "unreachable" if t == 15 else "kv_bound", up=t != 15) for t in range(31)]
    assert [list(told(active, one)) for one in story][-1] == ["VllmKvBound warning"]


def test_a_successor_knows_what_was_raised():
    """After a reload an active alert is neither resolved nor raised again."""
    first = ActiveAlerts(replace(CONFIG, keep=120.0))
    for t in (0.0, 30.0):
        told(first, reading(t, "kv_bound"))
    second = ActiveAlerts(replace(CONFIG, keep=120.0), first)
    notices = [
        one for t in (31.0, 32.0, 45.0) for one in told(second, reading(t, *["kv_bound"] * (t > 40))).values()
    ]
    assert [(one.resolved, one.starts_at) for one in notices] == [(False, EPOCH + 30.0)]


def test_another_verdict_ends_one_alert_and_holds_for_another():
    """The new one waits for a hold time of its own."""
    active = ActiveAlerts(CONFIG)
    for t in (0.0, 30.0):
        told(active, reading(t, "kv_bound"))
    assert {name: one.resolved for name, one in told(active, reading(40.0, "seat_bound")).items()} == {
        "VllmKvBound warning": True
    }
    assert {name: one.resolved for name, one in told(active, reading(70.0, "seat_bound")).items()} == {
        "VllmSeatBound warning": False
    }


def test_a_step_of_the_wall_clock_never_makes_an_alert_end_before_it_began():
    """Alertmanager refuses such an alert, and it would stay active."""
    active = ActiveAlerts(CONFIG)
    for t in (0.0, 30.0):
        told(active, reading(t, "kv_bound"))
    (notice,) = active.observe(reading(31.0), EPOCH - 3600.0)
    assert notice.starts_at <= notice.ends_at


@dataclass
class Server:
    """What an Alertmanager knows by the notices that it gets."""

    ends: dict[object, float] = field(default_factory=dict)
    starts: dict[object, float] = field(default_factory=dict)

    def take(self, notice: Notice) -> None:
        """Take one notice, and check what it does to what is known."""
        running = self.ends.get(notice.key, 0.0) > notice.starts_at
        assert not running or self.starts[notice.key] == notice.starts_at
        assert notice.starts_at <= notice.ends_at <= notice.useless_at
        self.starts[notice.key], self.ends[notice.key] = notice.starts_at, notice.ends_at

    def active(self, now: float) -> set[object]:
        """Alerts that have not ended."""
        return {key for key, end in self.ends.items() if end > now}


NAMES = ("healthy", "kv_bound", "seat_bound", "preemption_thrash", "preemption_light", "unreachable")


@given(
    st.lists(st.tuples(st.floats(0.1, 50.0), st.sampled_from(NAMES), st.integers(1, 30)), max_size=30),
    st.sampled_from([0.0, 5.0, 30.0]),
)
def test_what_alertmanager_knows_is_what_was_held_for_the_hold_time(story, hold):
    """After every poll of any story, and nothing ever runs out between two polls."""
    active, server = ActiveAlerts(replace(CONFIG, hold=hold)), Server()
    t, since, before = 0.0, 0.0, None
    for step, verdict, polls in story:
        for _ in range(polls):
            t += step
            since = t if verdict != before else since
            before = verdict
            for notice in active.observe(reading(t, verdict), EPOCH + t):
                server.take(notice)
            entry = catalogue.load().verdicts[verdict]
            page = {entry.model_alert} if verdict in {"preemption_thrash", "unreachable"} else set()
            wanted = ({entry.alert} | page) - {None} if t - since >= hold else set()
            assert {dict(key)["alertname"] for key in server.active(EPOCH + t)} == wanted
            assert {dict(key)["alertname"] for key in server.active(EPOCH + t + 50.0)} == wanted


# Which.


def test_the_model_pages_and_its_engine_is_named_by_a_warning():
    """A critical verdict makes two alerts."""
    notices = after_hold("preemption_thrash")
    assert notices.keys() == {"VllmModelPreemptionThrash critical", "VllmPreemptionThrash warning"}


def test_labels_are_those_of_the_rules_and_where_it_comes_from():
    """Of an engine, with the place from the configuration and the source."""
    notices = after_hold("preemption_thrash")
    place = {"cluster": "eu", "namespace": "prod", "pod": "vllm-0", "source": "sidecar"}
    assert dict(notices["VllmPreemptionThrash warning"].key) == {
        "alertname": "VllmPreemptionThrash",
        "severity": "warning",
        "model_name": "demo-7b",
        "engine": "0",
        **place,
    }
    assert dict(notices["VllmModelPreemptionThrash critical"].key) == {
        "alertname": "VllmModelPreemptionThrash",
        "severity": "critical",
        "model_name": "demo-7b",
        **place,
    }


def test_the_engine_pages_where_that_is_wanted():
    """Then there is no alert of the model."""
    by_engine = replace(CONFIG, page_by="engine")
    assert after_hold("preemption_thrash", config=by_engine).keys() == {"VllmPreemptionThrash critical"}


@pytest.mark.parametrize(("engines", "pages"), [(1, False), (2, True), (3, True)])
def test_a_model_pages_from_a_tenth_of_its_engines_on(engines, pages):
    """One of twenty is a warning."""
    notices = after_hold(*["preemption_thrash"] * engines, base=MANY)
    assert ("VllmModelPreemptionThrash critical" in notices) == pages


def test_a_verdict_that_is_critical_only_at_its_worst_pages_only_then():
    """By the alert of the model, or with the severity of the engine's."""
    for page_by, critical, mild in (
        ("model", "VllmModelDeferredWait critical", "VllmDeferredWait warning"),
        ("engine", "VllmDeferredWait critical", "VllmDeferredWait warning"),
    ):
        config = replace(CONFIG, page_by=page_by)
        assert after_hold("deferred_wait", config=config).keys() == {mild}
        worst = reading(0.0, "deferred_wait")
        engines = {
            key: replace(engine, judgement=replace(engine.judgement, severity=Severity.CRITICAL))
            for key, engine in worst.engines.items()
        }
        active = ActiveAlerts(config)
        told(active, replace(worst, engines=engines))
        names = told(active, replace(worst, engines=engines, t=30.0)).keys()
        assert names == ({critical, mild} if page_by == "model" else {critical})


@pytest.mark.parametrize(
    "name", [name for name, one in catalogue.load().verdicts.items() if one.alert is None]
)
def test_a_verdict_without_an_alert_is_not_told(name):
    """Whatever its severity."""
    assert after_hold(name) == {}


def test_a_server_that_never_answered_pages_without_a_model():
    """It has no engine that could be named."""
    silent = Stage(startup_grace_seconds=0)
    silent.fail(3)
    (notice,) = _all_told(silent).values()
    assert dict(notice.key)["alertname"] == "VllmUnreachable"
    assert dict(notice.key)["severity"] == "critical"
    assert not {"model_name", "engine"} & dict(notice.key).keys()


def test_a_server_that_is_lost_is_told_of_its_engines():
    """And not a second time of the target."""
    lost = Stage()
    lost.play(3)
    lost.fail(40)
    assert _all_told(lost).keys() == {"VllmModelUnreachable critical", "VllmUnreachable warning"}


def test_an_engine_that_is_gone_is_told_of_the_target():
    """It has no metrics any more, which is not told a second time."""
    stage = Stage(engines=("0", "1"))
    stage.play(3)
    stage.play(40, {"0": {}})
    assert _all_told(stage).keys() == {"VllmEngineMissing warning"}


def test_engines_that_share_badly_are_told_of_the_model():
    """With the fix, and without naming an engine."""
    stage = Stage(engines=("0", "1"))
    stage.play(
        240,
        {
            "0": {"running": 30, "waiting": 10, "kv": 0.7, "tokens": 500, "finished": 1},
            "1": {"running": 1, "kv": 0.05, "tokens": 30, "finished": 1},
        },
    )
    notice = _all_told(stage)["VllmDpImbalance warning"]
    assert "engine" not in dict(notice.key)
    assert "1. " in notice.annotations["description"]


def _all_told(stage: Stage) -> dict[str, Notice]:
    """All that is active at the end of a play, without any hold time."""
    active = ActiveAlerts(replace(CONFIG, hold=0.0))
    known: dict[str, Notice] = {}
    for one in stage.readings:
        known |= told(active, one)
    return {name: notice for name, notice in known.items() if not notice.resolved}


def test_a_calm_recording_tells_nothing():
    """With no hold time at all."""
    active = ActiveAlerts(replace(CONFIG, hold=0.0))
    assert all(
        active.observe(one, EPOCH + one.t) == [] for one in real_recordings.replayed(real_recordings.CALM)
    )


def test_a_recorded_queue_pages_nobody():
    """It is told, but not for tonight."""
    active = ActiveAlerts(replace(CONFIG, hold=0.0))
    notices = [
        one
        for each in real_recordings.replayed(real_recordings.QUEUEING)
        for one in active.observe(each, EPOCH)
    ]
    assert {dict(notice.key)["severity"] for notice in notices} == {"warning"}


def test_a_recorded_storm_is_told_at_the_hold_time():
    """The first poll after it, which is well within five seconds."""
    active, at = ActiveAlerts(CONFIG), None
    story = real_recordings.replayed(real_recordings.EXHAUSTION)
    for one in story:
        if active.observe(one, EPOCH + one.t) and at is None:
            at = one.t
    entered = first(story, "preemption_thrash")
    assert entered is not None
    assert 30.0 <= at - entered <= 32.0


# Its words.


def _storm() -> dict[str, Notice]:
    active, notices = ActiveAlerts(CONFIG), {}
    for one in real_recordings.replayed(real_recordings.EXHAUSTION):
        notices |= told(active, one)
        if "VllmModelPreemptionThrash critical" in notices:
            return notices
    raise AssertionError


def test_a_page_says_who_what_and_what_to_change():
    """Engine, numbers, impact, what helps at once, and the best fixes with their flags and costs."""
    notice = _storm()["VllmPreemptionThrash warning"]
    entry = catalogue.load().verdicts["preemption_thrash"]
    assert notice.annotations["summary"] == entry.summary
    assert notice.annotations["runbook_url"].endswith("/VllmPreemptionThrash.md")
    head, impact, now, *deeds, title, first, second, third = notice.annotations["description"].split("\n")
    assert head.startswith("tiny-llama engine 0 (eu/prod/vllm-0): KV usage peak ")
    assert "preemptions/s" in head
    assert impact == entry.impact
    assert now == "Now, without a restart:"
    assert deeds == [f"* {deed}" for deed in relief(entry.name, Severity.WARNING, limit_words(None))]
    assert title == table.FIXES_HEAD
    assert [line[:3] for line in (first, second, third)] == ["1. ", "2. ", "3. "]
    watermark = next(line for line in (first, second, third) if "(--watermark " in line)
    assert watermark.endswith(") [restart]")


def test_the_page_of_a_model_has_the_fixes_of_an_engine_in_it():
    """And says how many engines it is about."""
    notice = _storm()["VllmModelPreemptionThrash critical"]
    assert notice.annotations["description"].startswith(
        "Model tiny-llama (eu/prod/vllm-0): 1 of 1 engines (0), worst engine: KV usage peak "
    )
    assert "1. " in notice.annotations["description"]
    assert notice.annotations["runbook_url"].endswith("/VllmModelPreemptionThrash.md")


def test_a_lost_server_brings_what_to_do_about_it():
    """The candidates of the verdict, for nobody can advise in numbers."""
    notice = after_hold("unreachable")["VllmModelUnreachable critical"]
    titles = [catalogue.load().fixes[name].title for name in catalogue.load().verdicts["unreachable"].fixes]
    for title in titles[:3]:
        assert title in notice.annotations["description"]


def test_runbooks_may_stand_elsewhere():
    """The base is an option."""
    config = replace(CONFIG, runbook_base="https://wiki.example/vllm")
    (notice,) = after_hold("kv_bound", config=config).values()
    assert notice.annotations["runbook_url"] == "https://wiki.example/vllm/VllmKvBound.md"


def test_a_dashboard_is_linked_where_grafana_is_known():
    """With the variables of what the alert names; else there is no link."""
    config = replace(CONFIG, dashboard_base="https://grafana.example")
    notices = after_hold("preemption_thrash", config=config)
    links = {name: notice.annotations["dashboard_url"] for name, notice in notices.items()}
    place = "var-cluster=eu&var-namespace=prod"
    base = "https://grafana.example/d"
    assert links == {
        "VllmPreemptionThrash warning": f"{base}/vllm-pressure-engine?{place}"
        "&var-pod=vllm-0&var-model_name=demo-7b&var-engine=0",
        "VllmModelPreemptionThrash critical": f"{base}/vllm-pressure-fleet?{place}&var-model_name=demo-7b",
    }
    assert all("dashboard_url" not in notice.annotations for notice in after_hold("kv_bound").values())


def test_the_rules_link_to_the_same_dashboards():
    """An alert has the same dashboard whether it is pushed or fired by a rule."""
    base = "https://grafana.example"
    notices = after_hold("preemption_thrash", config=replace(CONFIG, dashboard_base=base))
    rules = (rule for group in sidecar.groups(Options(dashboard_base=base)) for rule in group.rules)
    links = {
        f"{one.name} {one.labels['severity']}": one.annotations["dashboard_url"]
        for one in rules
        if one.timing
    }
    for name, notice in notices.items():
        assert notice.annotations["dashboard_url"].partition("?")[0] == links[name].partition("?")[0]


def test_a_changed_ranking_is_the_same_alert():
    """Fixes are in its text and never in its labels."""
    active = ActiveAlerts(replace(CONFIG, hold=0.0, resend_interval=1.0))
    keys, texts = set(), set()
    for one in real_recordings.replayed(real_recordings.EXHAUSTION):
        for notice in active.observe(one, EPOCH + one.t):
            if dict(notice.key)["alertname"] == "VllmPreemptionThrash":
                keys.add(notice.key)
                texts.add(notice.annotations["description"])
    assert len(keys) == 1
    assert len(texts) > 5


def test_an_alert_outlives_an_exporter_that_starts_anew():
    """Untold it lasts longer than a start, a verdict and the hold time take together."""
    config = AlertmanagerConfig()
    assert LIFETIMES * config.resend_interval - config.resend_interval > config.hold + 60.0


def test_the_line_of_a_fix_has_the_gain_of_a_forecast_and_none_without():
    """The rules print the same words."""
    assert table.gain_words(FixAdvice("lower_max_num_seqs")) == ""
    words = table.gain_words(FixAdvice("lower_max_num_seqs", gain=1.304))
    line = table.fix_line(1, "Cap", "--max-num-seqs 16", restarts=True, gain=words)
    assert line == "1. Cap (--max-num-seqs 16) [restart] [tokens/s 1.30x]"
