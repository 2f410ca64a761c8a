"""The status page in a real Chromium: every verdict, live news, hostile names, its cost."""

import functools
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support import bodies
from support.browser import CACHE, by_verdict, opened, overhang, storm, wait_for_pauses
from support.process import until
from support.scenes import Stage
from support.status_page import Shown, wearing

from exporter.analysis import catalogue
from exporter.analysis.target_verdict import REACHABLE

pytestmark = pytest.mark.programs

TABLE = catalogue.load()
CASES = Path(__file__).parent.parent / "cases"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b>"
FIRST_PAINT = 500  # milliseconds, while the machine does nothing else


# Every verdict


@pytest.mark.parametrize("verdict", [name for name in TABLE.verdicts if name != REACHABLE])
def test_every_verdict_can_be_seen(browser, verdict):
    """Its summary, impact and severity are visible; the page does not scroll sideways."""
    entry, readings = TABLE.verdicts[verdict], by_verdict()[verdict]
    with Shown() as shown:
        shown.play(readings)
        with opened(browser, shown.base, wanted=".card") as page:
            card = page.locator(".card").filter(has=page.locator(".lead", has_text=entry.summary)).first
            expect(card.locator(".lead")).to_be_visible()
            expect(card.locator("h2 .badge")).to_be_visible()
            if entry.impact != "None.":
                expect(card).to_contain_text(entry.impact)
            assert overhang(page) <= 0
            if readings[-1].engines:
                page.wait_for_selector(".chart > svg .curve", state="attached")


def test_a_server_that_answers_has_no_card_beside_those_of_its_engines(browser):
    """The verdict of a reachable target says nothing that its engines' verdicts do not."""
    stage = storm()
    assert stage.readings[-1].judgement.verdict == REACHABLE
    with Shown() as shown:
        shown.play(stage.readings)
        with opened(browser, shown.base, wanted=".card") as page:
            expect(page.locator(".card")).to_have_count(1)
            expect(page.locator(".card h2")).to_contain_text("engine 0")
            expect(page.locator("main")).not_to_contain_text(TABLE.verdicts[REACHABLE].summary)


# Live


def test_an_open_page_updates_itself(browser):
    """Numbers, verdict, tab and charts change; screen readers announce a new verdict."""
    stage = storm()
    with Shown() as shown:
        shown.play(stage.readings[:150])
        with opened(browser, shown.base) as page:
            expect(page.locator(".engine h2")).to_contain_text("Healthy")
            before = page.locator(".chart > svg").first.inner_html()
            shown.play(stage.readings[150:])
            expect(page.locator(".engine h2")).to_contain_text("Preemption thrash")
            expect(page.locator(".tiles")).to_contain_text("98%")
            expect(page).to_have_title(re.compile("^Critical: Preemption thrash"))
            expect(page.locator("#said")).to_have_text("Critical: Preemption thrash, demo-7b engine 0")
            expect(page.locator("#asof")).to_have_text("As of 15:10:39 UTC")
            assert page.locator(".chart > svg").first.inner_html() != before


def test_an_update_does_not_disturb_the_reader(browser):
    """Open details, focus and selection stay."""
    stage = storm()
    with Shown() as shown:
        shown.play(stage.readings)
        with opened(browser, shown.base) as page:
            more = page.locator(".card > details").last
            more.locator("summary").click()
            button = page.locator(".copy:visible").first
            button.focus()
            page.evaluate("getSelection().selectAllChildren(document.querySelector('.lead'))")
            shown.play(
                stage.play(5, running=14, waiting=9, kv=0.97, tokens=250, finished=0.3, preemptions=1.5)
            )
            expect(page.locator(".tiles")).to_contain_text("97%")
            assert more.get_attribute("open") is not None
            assert page.evaluate("document.activeElement.className") == "copy"
            assert page.evaluate("String(getSelection())").startswith("vLLM keeps preempting")


def test_a_page_that_slept_has_no_hole_in_its_charts(browser):
    """After a longer pause it fetches the history again."""
    stage = storm()
    with Shown() as shown:
        shown.play(stage.readings[:60])
        with opened(browser, shown.base) as page:
            asked = len([url for url in page.seen.requests if "history" in url])
            shown.play(stage.readings[60:200])
            curve = page.locator(".chart").first.locator("> svg .curve.filled")
            expect(curve).to_have_attribute("d", re.compile("(L[^L]+){191}"))
            wait_for_pauses(page, 2 + page.evaluate("pauses.length"))
            assert len([url for url in page.seen.requests if "history" in url]) == asked + 1


def test_an_engine_that_comes_later_is_drawn_too(browser):
    """And one that goes is removed."""
    stage = Stage(engines=("0", "1"))
    asleep = functools.partial(wearing, verdict="sleeping")  # of engines that are well only one is shown
    with Shown() as shown:
        shown.play(map(asleep, stage.play(20, {"0": {"running": 2, "kv": 0.2, "tokens": 50}})))
        with opened(browser, shown.base) as page:
            expect(page.locator(".engine")).to_have_count(1)
            shown.play(map(asleep, stage.play(10, running=2, kv=0.3, tokens=50)))
            expect(page.locator(".engine")).to_have_count(2)
            expect(page.locator(".chart > svg .curve.filled")).to_have_count(6)
            shown.show(Stage().play(5, running=1, kv=0.1)[-1])
            expect(page.locator(".engine")).to_have_count(1)


# Harmless


def test_hostile_names_are_inert(browser):
    """They are shown as text and never executed, at first and after an update."""
    stage = Stage()
    name = HOSTILE.replace('"', '\\"')

    def poll(kv):
        one = bodies.engine(name, model=name, kv=kv, running=2, cache={"cache_dtype": name, "block_size": 16})
        return stage.take(bodies.body(one))

    with Shown(url=f"http://{HOSTILE}/metrics", own={HOSTILE: HOSTILE}) as shown:
        shown.play([poll(0.4) for _ in range(10)])
        with opened(browser, shown.base) as page:
            page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
            expect(page.locator(".engine h2 bdi").first).to_have_text(HOSTILE)
            shown.play([poll(0.7) for _ in range(10)])
            expect(page.locator(".tiles")).to_contain_text("70%")
            assert page.locator("main img, main script, main b >> text=bold").count() == 0
            assert page.evaluate("[...document.querySelectorAll('*')].every(e => !e.onerror)")


def test_the_policy_holds_in_the_browser(browser):
    """An injected script would not run, and no string becomes markup."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base) as page:
            refused = page.evaluate(
                "() => { try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true } }"
            )
            assert refused
            expect(page.locator(".lead")).to_be_visible()
            page.seen.lost = True  # the browser says what it refused


# Cost


def test_the_page_is_painted_with_data_at_once(browser):
    """Within half a second on loopback, with everything under 150 KB."""
    stage = Stage(cache=CACHE, max_num_seqs=64)
    stage.play(
        600, running=lambda t: t % 50, waiting=lambda t: t % 7, kv=lambda t: t / 600, tokens=400, finished=1
    )
    with Shown() as shown:
        shown.play(stage.readings)

        def painted_soon() -> bool:
            with opened(browser, shown.base) as page:
                paints, pages, parts = page.evaluate(
                    """["paint", "navigation", "resource"].map(type => performance.getEntriesByType(type)
                      .map(one => [one.name, one.startTime, one.decodedBodySize]))"""
                )
            assert sum(size for _, _, size in (*pages, *parts)[:5]) < 150_000
            return next(at for name, at, _ in paints if name == "first-contentful-paint") < FIRST_PAINT

        until(painted_soon, "a first paint in time")  # a busy machine has its quiet moments
