"""Old data on the status page: vLLM is down, the exporter is gone, the tab was hidden or asleep."""

import re

import pytest
from playwright.sync_api import expect
from support.browser import HIDDEN_PAUSE, hide, lose, opened, storm, wait_for_pauses
from support.status_page import Shown

pytestmark = pytest.mark.programs


def test_old_data_of_the_server_is_marked(browser):
    """While vLLM is down the page says how old its numbers are, and that the present ones are unknown."""
    stage = storm()
    with Shown() as shown:
        shown.play(stage.readings)
        with opened(browser, shown.base) as page:
            expect(page.locator(".aged")).to_have_count(0)
            shown.play(stage.fail(30))
            expect(page.locator(".engine .aged")).to_contain_text("Old. Last seen 30 s ago")
            expect(page.locator(".engine.old h2")).to_contain_text("Unreachable")
            expect(page.locator(".tiles")).to_contain_text("unknown")


def test_a_page_without_its_exporter_says_that_it_is_old(browser):
    """When the exporter is gone the page is marked as old; when it is back the mark disappears."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base) as page:
            expect(page.locator("#lost")).to_be_hidden()
            lose(page)
            expect(page.locator("#lost")).to_have_text("Old: the exporter does not respond.")
            expect(page).to_have_title("Old: Critical: Preemption thrash, demo-7b engine 0")
            assert "lost" in page.evaluate("document.body.className")
            expect(page.locator(".lead")).to_be_visible()
            page.unroute("**/*")
            expect(page.locator("#lost")).to_be_hidden()
            expect(page).to_have_title("Critical: Preemption thrash, demo-7b engine 0")
            assert "lost" not in page.evaluate("document.body.className")


def test_a_screen_reader_says_once_that_the_page_is_old(browser):
    """The passing seconds are outside of the element that is read aloud."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base, clock=True) as page:
            lose(page)
            expect(page.locator("#lost")).to_have_text("Old: the exporter does not respond.")
            page.clock.fast_forward(20_000)
            expect(page.locator("#since")).to_have_text(re.compile(r"Last updated ([2-9]\d s|\d min) ago"))
            expect(page.locator("#lost")).to_have_text("Old: the exporter does not respond.")
            assert page.locator("[role=alert] #since, [aria-live] #since").count() == 0


def test_a_tab_that_is_hidden_keeps_its_title_true(browser):
    """A hidden tab asks less often, and its title says when the exporter no longer answers."""
    stage = storm()
    with Shown() as shown:
        shown.play(stage.readings[:150])
        with opened(browser, shown.base, clock=True) as page:
            hide(page, True)
            wait_for_pauses(page, 1, HIDDEN_PAUSE)  # a pause that is not set yet cannot be skipped
            expect(page).to_have_title("No alarm: Healthy")
            shown.play(stage.readings[150:])
            page.clock.fast_forward(31_000)
            expect(page).to_have_title("Critical: Preemption thrash, demo-7b engine 0")
            wait_for_pauses(page, 2, HIDDEN_PAUSE)
            lose(page)
            page.clock.fast_forward(31_000)
            expect(page).to_have_title("Old: Critical: Preemption thrash, demo-7b engine 0")


def test_a_page_that_wakes_is_marked_before_the_exporter_answers(browser):
    """Old data is marked while the first request is still open."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base, clock=True) as page:
            page.seen.lost = True
            hide(page, True)
            wait_for_pauses(page, 1, HIDDEN_PAUSE)
            page.route("**/*", lambda _: None)  # neither answered nor refused
            page.clock.fast_forward(20_000)
            assert "lost" not in page.evaluate("document.body.className")
            hide(page, False)
            assert page.title() == "Old: Critical: Preemption thrash, demo-7b engine 0"
            expect(page.locator("#since")).to_be_visible()
            expect(page.locator("#lost")).to_be_empty()  # it may answer yet
            page.unroute("**/*")  # now they are answered
            expect(page.locator("#since")).to_be_hidden()
            expect(page).to_have_title("Critical: Preemption thrash, demo-7b engine 0")


def test_another_exporter_behind_the_address_is_a_new_page(browser):
    """It may be another release with other assets: the page is reloaded."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base) as page:
            with page.expect_event("load"):
                shown.page._run = "another"
                shown.show(shown.reading)
            expect(page.locator(".lead")).to_be_visible()


def test_a_page_is_reloaded_once_however_long_that_takes(browser):
    """A second reload would start the first one again."""
    loads = []

    def keep_page(route):
        if route.request.is_navigation_request():
            loads.append(route)
            route.fulfill(status=204)  # no content: the browser stays on the page
        else:
            route.continue_()

    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base, clock=True) as page:
            page.route("**/*", keep_page)
            with page.expect_request(lambda request: request.is_navigation_request()):
                shown.page._run = "another"
                shown.show(shown.reading)
            before = len(page.seen.requests)
            page.clock.run_for(5000)
            hide(page, False)
            page.evaluate("fetch('-/healthy').then(() => true)")  # earlier requests are seen before this one
            assert page.seen.requests[before:] == [f"{shown.base}/-/healthy"]
            assert len(loads) == 1
