"""The status page as HTML: complete, in the catalogue's words, and safe from hostile names."""

import itertools
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from support import bodies
from support.process import ANYWHERE, FAST, Command, until
from support.scenes import Stage, engine_of
from support.servers import Server, recorded
from support.status_page import URL, Shown, several, wearing

from exporter.analysis import catalogue
from exporter.analysis.fixes import Advice, FixAdvice
from exporter.analysis.pipeline import TargetReading
from exporter.analysis.server_facts import ServerFacts
from exporter.publish.metrics.self_metrics import PollCounts
from exporter.publish.page import renderer as published
from exporter.publish.page.renderer import ASSETS, Page, assets, own_lines
from exporter.publish.page.timeline import COLUMNS, Timeline
from exporter.publish.page.view import ENGINES_IN_FULL, TargetView, View

ROOT = Path(__file__).parent.parent.parent
TABLE = catalogue.load()
CACHE = {"kv_cache_size_tokens": 100_000, "block_size": 16, "cache_dtype": "auto"}
HOSTILE = "<img src=x onerror=alert(1)>&quot;'\"<script>alert(2)</script>"
VOID = {"meta", "link", "br", "img", "input"}


class Document(HTMLParser):
    """The tags and words of a page; tags that do not match fail the test."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        """Record the tag and its attributes."""
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Record an SVG element, which closes itself."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        """Check that it closes the last open tag."""
        assert self.open, f"closed, but never opened: {tag}"
        assert self.open.pop() == tag

    def handle_data(self, data):
        """Record the text for every tag around it."""
        self.words.append(data)
        for tag in self.open:
            self.inside.setdefault(tag, []).append(data)

    @property
    def text(self) -> str:
        """Return all text with single spaces."""
        return " ".join(" ".join(self.words).split())


def calm() -> TargetReading:
    """Return a reading of one healthy engine."""
    return Stage(cache=CACHE, max_num_seqs=64).play(90, running=20, kv=0.5, tokens=600, finished=1)[-1]


def storm() -> list[TargetReading]:
    """Return readings of one engine whose pool is too small."""
    stage = Stage(cache=CACHE, max_num_seqs=64, max_model_len=4096)
    stage.play(120, running=20, kv=0.5, tokens=600, finished=1)
    stage.play(60, running=14, waiting=6, kv=0.98, tokens=250, finished=0.3, preemptions=1.5)
    return stage.readings


def rendered(reading, *, late=0.2, timeline=None, url=URL, own=None, engine=None) -> str:
    """Render the page."""
    now = late if reading is None else reading.t + late
    target = TargetView(url, reading, timeline or Timeline())
    view = View(now, 1_750_000_000.0 + now, (target,), own or {})
    return Page(lambda: view, lambda: 0.0).html(engine).body.decode()


def document(*given, **how) -> Document:
    """Render and parse the page."""
    return Document(rendered(*given, **how))


# Words


@pytest.mark.parametrize("verdict", TABLE.verdicts)
def test_every_verdict_is_shown_with_its_whole_catalogue_entry(verdict):
    """Sentence, meaning, impact, severity in a word, ranked fixes with flags, and what will not help."""
    entry = TABLE.verdicts[verdict]
    shown = document(wearing(calm(), verdict))
    impact = () if entry.impact == "None." else (entry.impact,)
    for words in (entry.summary, entry.meaning, *impact, *entry.not_help.values()):
        assert " ".join(words.split()) in shown.text
    for check in entry.confirm:
        assert " ".join(check.text.split()) in shown.text
    for name in entry.fixes:
        fix = TABLE.fixes[name]
        risk = () if fix.risk == "None." else (fix.risk,)
        assert all(
            " ".join(words.split()) in shown.text for words in (fix.title, fix.action, fix.effect, *risk)
        )
        assert fix.flag is None or fix.flag_with(None) in shown.inside["code"]
    severity = "critical" if entry.name == "preemption_thrash" else entry.severity.value
    word = {"none": "No alarm"}.get(severity, severity.capitalize())
    assert word in shown.inside["span"]
    assert shown.inside["title"][0].startswith(f"{word}: ")


@pytest.mark.parametrize(
    "finding", [f for f in TABLE.findings.values() if f.scope == "engine"], ids=lambda f: f.name
)
def test_every_finding_of_an_engine_is_shown_beside_its_verdict(finding):
    """Its summary is on the page."""
    reading = calm()
    engines = {key: replace(one, findings=(finding.name,)) for key, one in reading.engines.items()}
    assert finding.summary in document(replace(reading, engines=engines)).text


def test_a_verdict_that_is_a_finding_of_another_is_shown_too():
    """A finding may be named like a verdict."""
    reading = calm()
    engines = {key: replace(one, findings=("kv_full_ok",)) for key, one in reading.engines.items()}
    assert TABLE.verdicts["kv_full_ok"].summary in document(replace(reading, engines=engines)).text


@pytest.mark.parametrize("name", [v.name for v in TABLE.verdicts.values() if v.of_target])
def test_every_verdict_of_a_target_is_shown_with_what_to_do(name):
    """No engine is known then."""
    entry, reading = TABLE.verdicts[name], Stage().fail(1)[0]
    judgement = replace(reading.judgement, verdict=name, severity=entry.severity, fixes=entry.fixes)
    shown = document(replace(reading, judgement=judgement))
    assert entry.summary in shown.text
    assert all(TABLE.fixes[fix].action in shown.text for fix in entry.fixes)


def test_a_missing_engine_and_an_imbalance_are_cards_of_their_own():
    """Of the target and of the model."""
    stage = Stage(engines=("0", "1"))
    stage.play(
        90, {"0": {"running": 40, "waiting": 20, "kv": 0.9, "tokens": 500}, "1": {"running": 1, "kv": 0.1}}
    )
    unequal = document(stage.readings[-1])
    assert TABLE.findings["dp_imbalance"].summary in unequal.text
    assert TABLE.fixes["balance_routing"].action in unequal.text
    stage.play(10, {"0": {"running": 4, "kv": 0.2, "tokens": 50}})
    gone = document(stage.readings[-1])
    assert TABLE.findings["engine_missing"].summary in gone.text
    assert "Missing: 1 (gone for 10 s)" in gone.text


def test_a_storm_is_explained_with_numbers_and_flags():
    """Evidence with its threshold, fixes in order and why, settings with their source."""
    reading = storm()[-1]
    shown = document(reading)
    assert "Preemptions per finished request lately 5.00 threshold 0.80, ends below 0.40" in shown.text
    advised = engine_of(reading).advice.fixes
    titles = [TABLE.fixes[advice.fix].title for advice in advised]
    at = [shown.text.index(f" {title} ") for title in titles]
    assert at == sorted(at)
    assert "suffices alone" not in shown.text
    assert engine_of(reading).advice.sentence in shown.text
    flags = [advice.flag for advice in advised if advice.flag]
    assert [words for words in shown.inside["code"] if words in flags] == flags
    assert "max_num_seqs 64 configuration" in shown.text
    assert "kv_cache_dtype auto cache_config_info" in shown.text
    assert "Running 14 of 64 seats" in shown.text


def test_missing_inputs_and_assumptions_of_advice_are_shown():
    """Note, missing input, inputs."""
    reading = calm()
    advice = FixAdvice(
        "lower_max_num_seqs", 9, "--max-num-seqs 9", 1.5, False, {"kv_capacity_tokens": 1234.0},
        missing="needs lengths", note="Of the last minute.",
    )  # fmt: skip
    engines = {key: replace(one, advice=Advice((advice,))) for key, one in reading.engines.items()}
    text = document(replace(reading, engines=engines)).text
    for words in ("not enough alone", "tokens/s 1.50x", "Of the last minute.", "No number: needs lengths."):
        assert words in text
    assert "Computed from KV cache capacity 1234" in text


def test_a_flag_without_its_number_cannot_be_copied():
    """A placeholder must not be pasted by accident."""
    shown = document(wearing(calm(), "preemption_thrash"))
    flags = {TABLE.fixes[name].flag for name in TABLE.verdicts["preemption_thrash"].fixes} - {None}
    copied = {attrs["aria-label"].removeprefix("Copy ") for tag, attrs in shown.tags if tag == "button"}
    assert copied & set(shown.inside["code"]) >= {flag for flag in flags if "{value}" not in flag}
    assert "--max-num-seqs VALUE" in shown.inside["code"]
    assert not [words for words in copied if "VALUE" in words]


def test_an_impact_or_risk_of_none_is_left_out():
    """The word "None." is not on the page."""
    text = document(wearing(calm(), "healthy")).text
    assert "None." not in text
    harmless = next(fix for fix in TABLE.fixes.values() if fix.risk == "None.")
    engines = {
        key: replace(one, advice=Advice((FixAdvice(harmless.name),))) for key, one in calm().engines.items()
    }
    advised = document(replace(calm(), engines=engines)).text
    assert harmless.action in advised
    assert "Risk:" not in advised


def test_evidence_that_is_no_number_is_a_word():
    """Neither 0 nor a threshold."""
    reading = Stage(absent=("kv",)).play(30, running=2, tokens=50, finished=1)[-1]
    evidence = engine_of(reading).judgement.evidence
    assert [each.note for each in evidence] == ["absent"]
    assert "KV cache usage absent " in document(reading).text


@pytest.mark.parametrize(
    ("value", "words"),
    [(14.0, "14"), (999_999.0, "999999"), (1e6, "1M"), (1_229_999_964.0, "1.23G"), (999_600_000.0, "1G")],
)
def test_large_numbers_are_short_where_there_is_little_room(value, words):
    """As in the charts; the list of all numbers has every digit."""
    reading = calm()
    engines = {
        key: replace(one, signals=replace(one.signals, requests_waiting=value))
        for key, one in reading.engines.items()
    }
    text = document(replace(reading, engines=engines)).text
    assert f"Waiting {words} " in text
    assert f"Waiting requests {value:.0f} " in text


def test_heads_stand_over_their_columns():
    """Heads of number columns are aligned to the right as well."""
    timeline = Timeline()
    for reading in (readings := storm()):
        timeline.add(reading)
    text = rendered(readings[-1], timeline=timeline)
    tables = re.findall(r"<thead><tr>(.*?)</tr></thead><tbody>\s*<tr[^>]*>(.*?)</tr>", text, re.DOTALL)
    assert len(tables) == 3
    for head, row in tables:
        heads = re.findall(r"<th scope=\"col\"( class=\"n\")?>", head)
        cells = re.findall(r"<t[hd](?: scope=\"row\"| class=.small.)?( class=\"n)?", row)
        assert [bool(one) for one in heads] == [bool(one) for one in cells]


def test_unknown_numbers_are_called_unknown():
    """Never zero."""
    shown = document(Stage().take(bodies.body(bodies.engine(running=3))))
    assert "KV usage unknown" in shown.text
    assert "Running 3" in shown.text


def test_a_value_that_is_not_trusted_is_named():
    """The reason is shown without a click."""
    text = document(Stage().play(2, running=1, kv=7.5)[-1]).text
    assert "Rejected or adjusted readings" in text
    assert TABLE.verdicts["data_untrusted"].summary in text


def test_changes_and_restarts_stand_there_in_words():
    """Each has its time of day; the newest comes first."""
    stage, timeline = Stage(), Timeline()
    stage.play(60, running=4, kv=0.4, tokens=100, finished=1)
    stage.restart()
    stage.play(30, running=4, kv=0.4, tokens=100, finished=1)
    stage.fail(20)
    for reading in stage.readings:
        timeline.add(reading)
    text = document(stage.readings[-1], timeline=timeline).text
    assert re.search(
        r"15:08:\d\d UTC, \d+ s ago: Unreachable \(critical\) .*"
        r"15:07:40 UTC, 49 s ago: The engine restarted .*15:06:40 UTC, 109 s ago: Healthy \(no alarm\)",
        text,
    )


def test_the_charts_are_numbers_without_javascript():
    """The least and greatest values of ten minutes are a table."""
    timeline = Timeline()
    for reading in (readings := storm()):
        timeline.add(reading)
    text = document(readings[-1], timeline=timeline).text
    assert "KV cache usage 50% 98%" in text
    assert "Running requests 14 20" in text


# States


@pytest.mark.parametrize(
    ("scene", "state"),
    [
        (lambda _: None, "not polled yet"),
        (lambda stage: stage.play(1, running=1, kv=0.1)[0], "up"),
        (lambda stage: stage.fail(1, "timeout")[0], "down (timeout)"),
    ],
    ids=["new", "up", "down"],
)
def test_the_page_says_how_the_target_is(scene, state):
    """New, up or down with the reason."""
    shown = document(scene(Stage()))
    assert state in shown.inside["strong"]
    assert f"Polls {URL} : {state}" in shown.text


def test_old_data_is_marked():
    """An engine that was not seen lately, and a poller that does not poll."""
    fresh = document(calm()).text
    assert "Old." not in fresh
    stage = Stage()
    stage.play(5, running=1, kv=0.1)
    down = document(stage.fail(30)[-1]).text
    assert "Old. Last seen 30 s ago, at 15:06:44 UTC." in down
    stuck = document(calm(), late=60.0).text
    assert "old: no poll since" in stuck
    assert "Old. Last seen 60 s ago" in stuck


def test_the_page_says_of_when_it_is():
    """Its time has the format of container logs."""
    assert "As of 15:08:09 UTC" in document(calm()).text


def test_a_missing_engine_is_marked_at_once():
    """A response without the engine means that its values are old."""
    stage = Stage(engines=("0", "1"))
    stage.play(5, running=1, kv=0.1)
    assert "Old. Last seen 1.2 s ago" in document(stage.play(1, {"0": {"running": 1}})[-1]).text


# Many engines


def fleet(count: int, *, stalled: int = 1) -> TargetReading:
    """Return a reading of engines of which the last ones stall."""
    stage = Stage(engines=[str(number) for number in range(count)])
    well = {"running": 2, "kv": 0.2, "tokens": 90}
    stuck = {"running": 2, "kv": 0.2, "tokens": 0, "steps": 0}
    stage.play(100, {str(number): well if number < count - stalled else stuck for number in range(count)})
    return stage.readings[-1]


def articles(shown: Document) -> list[str]:
    """Return the ids of the cards in order."""
    return [attrs["id"] for tag, attrs in shown.tags if tag == "article"]


def test_all_engines_stand_in_a_table_the_worst_first_and_then_as_people_count():
    """Engines that are not healthy are shown in full; the others are links."""
    shown = document(fleet(12, stalled=2))
    rows = [attrs["href"] for tag, attrs in shown.tags if tag == "a" and attrs["href"][:2] in {"#e", "?e"}]
    # The first link skips what stands before the first card.
    assert rows == [f"#{one}" for one in (articles(shown)[0], *articles(shown))] + [
        f"?engine={number}" for number in range(10)
    ]
    assert shown.inside["title"][0] == "Critical: Engine stalled, demo-7b engine 10"


def test_no_more_than_the_worst_engines_are_shown_in_full():
    """Even if more are not healthy."""
    assert len(articles(document(fleet(ENGINES_IN_FULL + 4, stalled=ENGINES_IN_FULL + 2)))) == ENGINES_IN_FULL


def test_of_healthy_engines_only_the_first_is_shown_in_full():
    """The others would only repeat it."""
    shown = document(fleet(12, stalled=0))
    assert len(articles(shown)) == 1
    assert shown.inside["title"][0] == "No alarm: Healthy"
    assert [attrs["href"] for tag, attrs in shown.tags if tag == "a" and "?" in attrs["href"]] == [
        f"?engine={number}" for number in range(1, 12)
    ]


def test_names_are_sorted_as_people_count_whatever_they_are_made_of():
    """Digits of any script and any number of digits are accepted."""
    stage = Stage(engines=("10", "9", "\u00b2", "\u0664", "007", "a" + 5000 * "7", ""))
    rows = re.findall(r'scope="row"><a href="[^"]*"><bdi>(.*?)</bdi>', rendered(stage.play(2, running=1)[-1]))
    assert [name for name in rows if len(name) == 2 or name == "007"] == ["007", "10"]
    assert len(rows) == 7


def test_one_engine_can_be_chosen():
    """By its name; an unknown name changes nothing."""
    reading = fleet(12)
    assert len(articles(document(reading, engine="9"))) == 1
    assert articles(document(reading, engine="9")) != articles(document(reading))
    assert articles(document(reading, engine="no such")) == articles(document(reading))


# The headline


def unequal() -> TargetReading:
    """Return a model with two healthy engines, one of which has far more load."""
    stage = Stage(engines=("0", "1"))
    stage.play(
        90, {"0": {"running": 40, "waiting": 20, "kv": 0.9, "tokens": 500}, "1": {"running": 1, "kv": 0.1}}
    )
    return wearing(stage.readings[-1], "healthy")


def headline_of(reading: TargetReading) -> str:
    """Return the title of the tab, which screen readers announce as well."""
    shown = document(reading)
    (headline,) = [attrs["data-headline"] for tag, attrs in shown.tags if tag == "main"]
    assert shown.inside["title"] == [headline]
    return headline


def test_the_headline_is_a_finding_where_that_is_worse_than_every_verdict():
    """Findings of a model and of the target count."""
    assert headline_of(unequal()) == "Warning: DP imbalance, model demo-7b"
    stage = Stage(engines=("0", "1"))
    stage.play(5, running=1, kv=0.1)
    assert (
        headline_of(wearing(stage.play(1, {"0": {"running": 1}})[-1], "healthy")) == "Warning: Engine missing"
    )


@pytest.mark.parametrize(("verdict", "words"), [("sleeping", "Sleeping"), ("kv_full_ok", "KV full ok")])
def test_the_headline_is_the_engines_verdict_where_all_are_harmless(verdict, words):
    """The server's own healthy verdict comes last."""
    assert headline_of(wearing(calm(), verdict)) == f"No alarm: {words}, demo-7b engine 0"


def test_the_headline_of_a_reading_that_is_old_says_so():
    """The title begins with Old."""
    assert document(calm(), late=60.0).inside["title"] == ["Old: No alarm: Healthy"]


def test_of_several_targets_each_statement_has_the_name():
    """In the headline and in headings; the table counts a finding of a model."""
    down = Stage().fail(1)
    view = several(
        {
            "a:1": [calm()],
            "b:10": [unequal()],
            "b:9": [wearing(calm(), "preemption_thrash")],
            "c:1": down,
            "d:1": [],
        }
    )

    def page_of(target=None):
        return Document(Page(lambda: view, lambda: 0.0).html(None, target).body.decode())

    whole = page_of()
    assert whole.inside["title"] == ["Critical: Preemption thrash, demo-7b engine 0 of b:9"]
    rows = "".join(whole.inside["tbody"])
    assert re.findall(r"[a-d]:\d+(?=pod)", rows) == ["b:9", "b:10", "c:1", "d:1", "a:1"]
    assert "Warning DP imbalance2" in rows
    assert "not polled yetunknown" in rows
    headings = " ".join("".join(whole.inside["h2"]).split())
    for words in ("demo-7b, engine 0 of b:9", "Model demo-7b of b:10", "demo-7b, engine 0 of b:10"):
        assert words in headings
    assert "Target c:1" in "".join(page_of("c:1").inside["h2"])


# Harmless


def hostile_readings() -> list[TargetReading]:
    """Return readings of a server whose names are markup."""
    name = HOSTILE.replace('"', '\\"')
    stage = Stage()
    text = bodies.body(
        bodies.engine(name, model=name, kv=0.4, running=2, cache={"cache_dtype": name, "block_size": 16}),
        bodies.engine("1", model="\u202egnp.exe", kv=0.4, running=2),
    )
    return [stage.take(text) for _ in range(3)]


def test_hostile_names_are_nothing_but_text():
    """Of models, engines, settings and the target's URL; no letter reverses the text."""
    readings = hostile_readings()
    timeline = Timeline()
    for reading in readings:
        timeline.add(reading)
    engines = {
        key: replace(one, server_facts=ServerFacts({"kv_cache_dtype": HOSTILE}, {"kv_cache_dtype": HOSTILE}))
        for key, one in readings[-1].engines.items()
    }
    reading = replace(readings[-1], engines=engines, error=HOSTILE, up=False)
    text = rendered(reading, timeline=timeline, url=f"http://{HOSTILE}/", own={HOSTILE: HOSTILE})
    shown = Document(text)
    assert "<img" not in text
    assert "<script>" not in text
    assert "\u202e" not in text
    assert HOSTILE in "".join(shown.words)
    assert HOSTILE in {attrs.get("data-engine") for _, attrs in shown.tags}
    assert not [name for _, attrs in shown.tags for name in attrs if name.startswith("on")]


def test_nothing_in_the_page_needs_what_the_policy_forbids():
    """No inline script or style, nothing from another host."""
    timeline = Timeline()
    for reading in (readings := storm()):
        timeline.add(reading)
    shown = document(readings[-1], timeline=timeline, own={"Memory": "44 MiB"})
    assert [attrs for tag, attrs in shown.tags if tag == "script"] == [
        {"type": "module", "src": f"page.js?v={assets()[1]}"}
    ]
    assert "style" not in {tag for tag, _ in shown.tags}
    assert not [name for _, attrs in shown.tags for name in attrs if name == "style" or name.startswith("on")]
    links = [attrs.get(name) for _, attrs in shown.tags for name in ("src", "href") if attrs.get(name)]
    assert not [link for link in links if "//" in link]
    for asset in assets()[0].values():
        text = asset.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|innerHTML|insertAdjacentHTML|eval\(|\.write\(|@import|url\(", text)


def test_ids_are_unique():
    """Two engines of one number, in two models."""
    stage = Stage()
    text = bodies.body(*(bodies.engine("0", model=model, kv=0.5, running=1) for model in ("alpha", "zeta")))
    ids = [attrs["id"] for _, attrs in document(stage.take(text)).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_headings_go_down_one_step_at_a_time():
    """Screen readers navigate by headings."""
    levels = [int(tag[1]) for tag, _ in document(storm()[-1]).tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


# Answers


def test_the_sidecar_shows_what_it_watches(tmp_path):
    """The real command: verdict, history and its own cost."""
    with Server(recorded()) as vllm, Command(tmp_path, "--target.url", vllm.url, *FAST, *ANYWHERE) as command:
        until(lambda: command.metric("vllm_pressure_up") == 1, "up")
        up = f"Polls {vllm.url} : up"

        def healthy() -> str:
            text = Document(command.get("/")).text
            return text if "Healthy" in text and up in text else ""

        text = until(healthy, "healthy and up on one page")
        assert re.search(r"Polls \d+, \d+ failed, \d+ skipped", text)  # a busy machine skips some
        (target,) = json.loads(command.get("/api/v1/history"))["targets"]
        (engine,) = target["engines"].values()
        assert len(engine["t"]) >= 1
        assert 0 <= target["now"] < 60


def test_the_page_and_all_it_consists_of_stay_small():
    """Under 150 KB uncompressed with ten minutes of history; a fifth of that compressed."""
    stage = Stage(cache=CACHE, max_num_seqs=64)
    part = {"running": lambda t: t % 50, "waiting": lambda t: t % 7, "kv": lambda t: t / 600, "finished": 1}
    with Shown() as shown:
        shown.play(stage.play(600, **part, tokens=lambda t: 300 + t % 200, preemptions=lambda t: t / 300))
        whole = [shown.page.html(), shown.page.history(), *assets()[0].values()]
    assert sum(len(answer.body) for answer in whole) < 150_000
    assert sum(len(answer.packed) for answer in whole) < 40_000


def test_the_history_is_columns_by_engine():
    """It has the moment from which times count."""
    with Shown() as shown:
        shown.play(Stage().play(5, running=3, kv=0.5))
        history = json.loads(shown.get("/api/v1/history"))
        (target,) = history["targets"]
        assert history["columns"] == ["t", *COLUMNS]
        assert (target["url"], target["start"], target["now"]) == (URL, 1_750_000_000.0, 4.2)
        assert target["engines"]["0"]["requests_running"] == [3] * 5
        assert json.loads(shown.get("/api/v1/history?engine=0")) == history


def test_the_history_of_one_engine_can_be_asked_for():
    """By its name."""
    with Shown() as shown:
        shown.play(Stage(engines=("0", "1")).play(5, running=3, kv=0.5))
        assert set(json.loads(shown.get("/api/v1/history?engine=1"))["targets"][0]["engines"]) == {"1"}
        assert set(json.loads(shown.get("/api/v1/history?engine=x"))["targets"][0]["engines"]) == {"0"}


def test_the_history_is_of_the_engines_that_the_page_shows():
    """The others are links without charts."""
    stage = Stage(engines=[str(number) for number in range(16)])
    well = {"running": 2, "kv": 0.2, "tokens": 90}
    stage.play(100, {str(n): well | {"tokens": 0, "steps": 0} if n in {3, 12} else well for n in range(16)})
    with Shown() as shown:
        shown.play(stage.readings)
        history = json.loads(shown.get("/api/v1/history"))["targets"][0]["engines"]
        drawn = re.findall(r'class="charts"[^>]*data-engine="(\d+)"', shown.get("/"))
    assert list(history) == drawn == ["3", "12"]


def counting(seconds_per_view: float = 0.0):
    """Return a page with a clock that the test moves, the times of its views, and the clock."""
    calls, now = [], [0.0]
    reading = calm()

    def view():
        calls.append(now[0])
        now[0] += seconds_per_view
        return View(reading.t, 0.0, (TargetView(URL, reading, Timeline()),), {})

    return Page(view, lambda: now[0]), calls, now


def test_ten_open_pages_are_rendered_once():
    """Within a second all clients get the same response."""
    page, calls, now = counting()
    answers = {id(page.html()) for _ in range(10)}
    assert (len(answers), len(calls)) == (1, 1)
    now[0] += 1.5
    assert id(page.html()) not in answers


def test_a_slow_page_is_rendered_less_often_and_asked_for_less_often():
    """A rendering of 100 ms is kept for ten seconds: a hundredth of a core at most."""
    page, calls, now = counting(0.1)
    page.html()
    now[0] += 9.0
    assert 'data-every="2"' in page.html().body.decode()
    now[0] += 2.0
    assert 'data-every="10"' in page.html().body.decode()
    assert len(calls) == 2


def test_made_up_names_of_engines_do_not_fill_the_cache():
    """All of them get the same page."""
    page, _, _ = counting()
    assert len({id(page.html(f"made up {number}")) for number in range(100)}) == 1
    assert len(page._kept) == 1


def test_unknown_overhead_is_left_out():
    """Not every system has process metrics."""
    assert own_lines(PollCounts(), (), 1000.0) == {"Polls": "0, 0 failed, 0 skipped"}


def test_the_exporters_overhead_is_shown():
    """Polls, time, memory and processor."""
    own = PollCounts()
    own.polls, own.errors["timeout"], own.duration_sum, own.durations[0] = 100, 3, 0.97, 97
    own.body_bytes, own.interval, own.unreadable = 48_000.0, 1.0, 2
    process = (
        CounterMetricFamily("process_cpu_seconds", "", value=4.0),
        GaugeMetricFamily("process_start_time_seconds", "", value=0.0),
        GaugeMetricFamily("process_resident_memory_bytes", "", value=44 << 20),
    )
    assert own_lines(own, process, 1000.0) == {
        "Polls": "100, 3 failed, 0 skipped",
        "Failures": "timeout 3",
        "Poll duration": "10.0 ms on average",
        "Last response": "47 KiB",
        "Poll interval": "1 s",
        "CPU": "0.4 % of a core since the start",
        "Memory": "44 MiB",
        "Unreadable lines": "2",
    }


def test_the_assets_have_a_version_that_changes_with_them(monkeypatch, tmp_path):
    """Browsers may cache a version without a time limit."""
    before = assets()[1]
    assets.cache_clear()
    for name in ASSETS:
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(published, "_FOLDER", tmp_path)
    try:
        assert assets()[1] != before
    finally:
        assets.cache_clear()


def test_the_wheel_has_the_templates_and_assets(tmp_path):
    """The page of an installed package is rendered from them; another environment has no repository."""
    made = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True, timeout=180)
    (wheel,) = tmp_path.glob("*.whl")
    folder = ROOT / "exporter" / "publish" / "page"
    wanted = {str(path.relative_to(ROOT)) for path in folder.rglob("*.*") if path.suffix != ".pyc"}
    assert len(wanted) > 15
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())


def test_the_template_engine_is_loaded_at_the_first_visit():
    """An exporter whose page nobody opens does not pay for it."""
    code = (
        "import sys; from exporter.commands import serve;"
        " from exporter.publish.page.renderer import Page, View; assert 'jinja2' not in sys.modules;"
        " Page(lambda: View(0.0, 0.0, (), {}), lambda: 0.0).html(); assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=180)


def test_a_value_is_escaped_once():
    """No entity is shown as such."""
    words = unescape(rendered(calm()))
    assert "&amp;" not in words
    assert "&lt;" not in words
