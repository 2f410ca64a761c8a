"""The status page by day and night, on a phone, by keyboard, through a screen reader, without JavaScript."""

import re
from dataclasses import replace

import pytest
from playwright.sync_api import expect
from support.browser import CACHE, PHONE, by_verdict, complaints, lose, open_details, opened, overhang, storm
from support.scenes import Stage
from support.status_page import Shown, several

from exporter.analysis import catalogue

pytestmark = pytest.mark.programs

# Each text under a filter, with the contrast that the filter leaves, computed as WCAG 2 does; the matrix of
# saturate() is in the Filter Effects specification.
FILTERED = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const filterOf = element => element.closest("main, .tiles, .columns") && [...function* () {
    for (let at = element; at; at = at.parentElement) yield at;
  }()].find(at => getComputedStyle(at).filter !== "none");
  const paler = ([r, g, b], s) => {
    const grey = 0.213 * r + 0.715 * g + 0.072 * b;
    return [r, g, b].map(one => grey + s * (one - grey));
  };
  const light = colour => {
    const [r, g, b] = colour.map(one => one / 255)
      .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element, filtered, s) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha] = numbers(getComputedStyle(at).backgroundColor);
      if (alpha === undefined || alpha === 1) return filtered.contains(at) ? paler([r, g, b], s) : [r, g, b];
    }
    return [255, 255, 255];
  };
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, filtered = filterOf(element);
    if (!filtered || !walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const s = Number(style && getComputedStyle(filtered).filter.match(/^saturate\\(([\\d.]+)\\)$/)[1]);
    const own = numbers(element.closest("svg") ? style.fill : style.color).slice(0, 3);
    const [high, low] = [light(paler(own, s)), light(ground(element, filtered, s))].sort((a, b) => b - a);
    texts.push({
      text: walker.currentNode.data.trim().slice(0, 40),
      contrast: (high + 0.05) / (low + 0.05),
      wanted: size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5,
    });
  }
  return texts;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desk", "phone"])
def test_the_accessibility_checker_finds_nothing(browser, scheme, size):
    """Contrast, labels, roles, order of headings: of a storm with everything open, in both colour schemes."""
    how = PHONE if size == "phone" else {}
    with Shown(own={"Memory": "44 MiB"}) as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base, color_scheme=scheme, **how) as page:
            open_details(page)
            assert complaints(page) == []
            assert overhang(page) <= 0


@pytest.mark.parametrize("verdict", ["seat_bound", "preemption_light", "healthy", "unreachable"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_severity_has_enough_contrast(browser, scheme, verdict):
    """Warning, info, none; and old data, which is shown paler."""
    with Shown() as shown:
        shown.play(by_verdict()[verdict])
        with opened(browser, shown.base, color_scheme=scheme, wanted=".card") as page:
            assert complaints(page) == []


@pytest.mark.parametrize("old", ["page", "engine"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paler_text_has_enough_contrast(browser, scheme, old):
    """The checker ignores filters: compute each text's contrast in the filtered colours."""
    stage = storm()
    with Shown() as shown:
        shown.play(stage.readings)
        if old == "engine":
            shown.play(stage.fail(30))
        with opened(browser, shown.base, color_scheme=scheme) as page:
            open_details(page)
            if old == "page":
                lose(page)
                page.wait_for_selector("body.lost")
            texts = page.evaluate(FILTERED)
            assert len(texts) > 20
            assert [one for one in texts if one["contrast"] < one["wanted"]] == []


def test_many_engines_pass_the_checker_too(browser):
    """With the overview, an imbalance and an engine that is missing."""
    stage = Stage(engines=("0", "1", "2"))
    busy, idle = (
        {"running": 40, "waiting": 20, "kv": 0.9, "tokens": 500},
        {"running": 1, "kv": 0.1, "tokens": 9},
    )
    stage.play(90, {"0": busy, "1": idle, "2": idle})
    with Shown() as shown:
        shown.play([*stage.readings, *stage.play(10, {"0": busy, "1": idle})])
        with opened(browser, shown.base, **PHONE) as page:
            expect(page.locator(".overview tbody tr")).to_have_count(3)
            expect(page.locator(".card h2").filter(has_text="DP imbalance")).to_be_visible()
            assert complaints(page) == []
            assert overhang(page) <= 0


def calm_and_storm():
    """Return four targets; the three healthy ones have long names."""
    calm = Stage(cache=CACHE).play(240, running=4, kv=0.3, tokens=100, finished=1)
    names = [f"vllm-{number}.vllm.inference.svc.cluster.local:8000" for number in range(3)]
    return several(dict.fromkeys(names, calm) | {"vllm-9:8000": storm().readings})


def test_several_targets_pass_the_checker_too(browser):
    """Names are in the headings, and none is broken letter by letter on a phone."""
    with Shown() as shown:
        shown.show_several(calm_and_storm())
        with opened(browser, shown.base, **PHONE) as page:
            assert complaints(page) == []
            assert overhang(page) <= 0
            heights = page.evaluate(
                "[...document.querySelectorAll('.overview tbody tr')].map(one => one.offsetHeight)"
            )
            assert len(heights) == 4
            assert max(heights) < 110


def test_a_target_that_is_chosen_has_its_history(browser):
    """Its charts are requested by its name, even where others are worse."""
    with Shown() as shown:
        shown.show_several(calm_and_storm())
        path = "/?target=vllm-2.vllm.inference.svc.cluster.local%3A8000"
        with opened(browser, shown.base, path) as page:
            expect(page.locator(".engine h2")).to_contain_text("engine 0 of vllm-2.vllm")
            page.wait_for_function(
                "() => document.querySelector('.chart .filled[d*=L]').getAttribute('d').split('L')[190]"
            )
            assert len([url for url in page.seen.requests if "history" in url]) == 1


def test_charts_stay_those_of_their_target_when_another_one_goes(browser):
    """Its place in the list changes; its history stays."""
    view = calm_and_storm()
    with Shown() as shown:
        shown.show_several(view)
        with opened(browser, shown.base) as page:
            chart = page.locator(".target", has_text="vllm-9:8000").locator(".chart > svg").first
            expect(chart).to_have_attribute("aria-label", re.compile("from 50% to 98%.*over 5 min"))
            shown.show_several(replace(view, targets=view.targets[2:]))
            expect(page.locator(".targets tbody tr")).to_have_count(2)
            shown.show_several(replace(view, targets=view.targets[3:]))
            expect(page.locator(".targets tbody tr")).to_have_count(1)
            expect(chart).to_have_attribute("aria-label", re.compile("from 50% to 98%.*over 5 min"))


def wild():
    """Return readings of an engine with very long numbers."""
    return Stage(cache=CACHE).play(
        60, running=1_229_999_964, waiting=10_000, kv=0.5, tokens=3e6, finished=0.0117, preemptions=0.0117
    )


@pytest.mark.parametrize("scene", [wild, lambda: storm().readings], ids=["wild", "storm"])
def test_no_number_is_broken_in_two_lines(browser, scene):
    """On a phone, for numbers and thresholds."""
    with Shown() as shown:
        shown.play(scene())
        with opened(browser, shown.base, **PHONE) as page:
            open_details(page)
            broken = page.evaluate("""() => {
              const all = document.querySelectorAll("td.n, .evidence td, .tiles dd, .chart i, .tick");
              return [...all].filter(one => {
                const range = document.createRange();
                range.selectNodeContents(one);
                return new Set([...range.getClientRects()].map(({ top }) => Math.round(top / 8))).size > 1;
              }).map(one => one.textContent);
            }""")
            assert broken == []
            assert overhang(page) <= 0


def test_great_numbers_do_not_stick_out_of_their_charts(browser):
    """Millions and billions have a letter."""
    with Shown() as shown:
        shown.play(wild())
        with opened(browser, shown.base, **PHONE) as page:
            expect(page.locator(".chart").nth(2).locator("i").first).to_have_text("1.23G")
            expect(page.locator(".chart").nth(3).locator("i").first).to_have_text("3M")
            # In one script: what is drawn again between two of them has no place.
            left, *ticks = page.evaluate(
                "[...document.querySelectorAll('.charts, .tick')]"
                ".map(one => one.getBoundingClientRect().left)"
            )
            assert min(ticks) >= left


def test_hidden_parts_are_invisible(browser):
    """An unknown limit is not shown as 0."""
    with Shown() as shown:
        shown.play(Stage(cache=CACHE).play(30, running=4, kv=0.4, tokens=100, finished=1))
        with opened(browser, shown.base) as page:
            assert page.locator("[hidden]").count() > 0
            assert page.locator("[hidden]:visible").count() == 0
            expect(page.locator(".chart").nth(2)).not_to_contain_text("seats 0", use_inner_text=True)


def test_an_engine_that_is_gone_is_as_wide_as_its_card(browser):
    """Parts that only the target's card has leave no hole beside the charts."""
    stage = storm()
    with Shown() as shown:
        shown.play([*stage.readings, *stage.fail(30)])
        with opened(browser, shown.base) as page:
            widths = page.evaluate(
                "['.charts', '.tiles'].map(one => document.querySelector(one).getBoundingClientRect().width)"
            )
            assert widths[0] == widths[1]


def test_no_line_is_drawn_from_one_process_to_the_next(browser):
    """Even after a short outage: no poll was in between."""
    stage = Stage(cache=CACHE)
    stage.play(60, running=20, kv=1.0, tokens=600, finished=1)
    stage.fail(4)
    stage.restart()
    stage.play(20, running=0, kv=0.0, tokens=0)
    with Shown() as shown:
        shown.play(stage.readings)
        with opened(browser, shown.base) as page:
            curve = page.locator(".chart").first.locator("> svg .curve.filled").get_attribute("d")
            area = page.locator(".chart").first.locator("> svg .area").get_attribute("d")
            assert (curve.count("M"), area.count("M")) == (2, 2)


def test_a_badge_stands_on_the_line_of_its_text(browser):
    """And notes have room below them."""
    stage = Stage(engines=("0", "1"))
    with Shown() as shown:
        shown.play(stage.play(20, running=1, kv=0.1))
        with opened(browser, shown.base) as page:
            # An empty inline block stands on the line of the letters before it.
            lines = page.evaluate("""() => {
              const badge = document.querySelector(".overview .badge");
              return [badge, badge.parentElement].map(one => {
                const mark = document.createElement("span");
                mark.style.cssText = "display: inline-block; width: 1px; height: 0";
                one.append(mark);
                const { bottom } = mark.getBoundingClientRect();
                mark.remove();
                return bottom;
              });
            }""")
            assert abs(lines[0] - lines[1]) < 0.6
            lose(page)
            page.wait_for_selector("body.lost")
            gap = page.evaluate("""() => document.querySelector("main").getBoundingClientRect().top
              - document.querySelector(".stale").getBoundingClientRect().bottom""")
            assert gap >= 8
        with opened(browser, shown.base, wanted=".lead", java_script_enabled=False) as page:
            note, main = page.locator(".note").bounding_box(), page.locator("main").bounding_box()
            assert main["y"] - note["y"] - note["height"] >= 8


def test_a_tap_on_a_chart_reads_it(browser):
    """Until the next tap elsewhere."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base, **PHONE) as page:
            chart = page.locator(".chart").first
            chart.scroll_into_view_if_needed()
            box = chart.bounding_box()
            page.touchscreen.tap(box["x"] + 0.6 * box["width"], box["y"] + 0.6 * box["height"])
            expect(page.locator(".when")).to_have_text(re.compile(r"UTC, \d+ .* ago: Healthy"))
            expect(page.locator(".cursor")).to_have_count(5)
            expect(chart.locator("i").first).to_have_text("50%")
            page.locator(".columns h3").first.tap()
            expect(page.locator(".cursor")).to_have_count(0)
            expect(page.locator(".when")).to_be_empty()


def test_dark_is_dark(browser):
    """The colour scheme follows the system."""
    with Shown() as shown:
        shown.play(storm().readings)
        for scheme, dark in (("dark", True), ("light", False)):
            with opened(browser, shown.base, color_scheme=scheme) as page:
                colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 200) is dark


def test_the_keyboard_reaches_everything(browser):
    """The skip link first; the charts are read with the arrow keys."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base) as page:
            page.keyboard.press("Tab")
            expect(page.locator(".skip")).to_be_focused()
            page.keyboard.press("Enter")
            expect(page.locator(".card").first).to_be_focused()
            slider = page.get_by_role("slider")
            slider.focus()
            assert page.locator(".charts").evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
            expect(slider).to_have_attribute("aria-valuetext", "Now")
            for _ in range(30):
                page.keyboard.press("ArrowLeft")
            expect(page.locator(".when")).to_have_text("15:08:09 UTC, 3 min ago: Healthy")
            expect(slider).to_have_attribute("aria-valuenow", "-150")
            expect(slider).to_have_attribute(
                "aria-valuetext",
                "15:08:09: Healthy, KV usage 50%, KV usage peak 50%, preemptions/s 0,"
                " inferred preemptions/s 0, running 20, waiting 0, tokens/s 600, tokens/s usually 600",
            )
            assert complaints(page) == []
            page.keyboard.press("Home")
            expect(slider).to_have_attribute("aria-valuenow", "-300")
            expect(slider).to_have_attribute("aria-valuetext", re.compile("Unknown, KV usage unknown"))
            page.keyboard.press("End")
            expect(slider).to_have_attribute("aria-valuetext", "Now")
            for _ in range(30):
                page.keyboard.press("ArrowLeft")
            expect(page.locator(".chart > svg .cursor")).to_have_count(5)
            expect(page.locator(".chart").first.locator("i").first).to_have_text("50%")
            page.keyboard.press("Escape")
            expect(page.locator(".cursor")).to_have_count(0)
            expect(page.locator(".chart").first.locator("i").first).to_have_text("98%")


def test_a_flag_is_copied_with_one_press(browser):
    """And the button confirms it."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base, permissions=["clipboard-read", "clipboard-write"]) as page:
            flag = page.locator(".fixes .flag").first
            flag.locator("button").click()
            expect(page.locator("#said")).to_contain_text("Copied: --")
            assert page.evaluate("navigator.clipboard.readText()") == flag.locator("code").inner_text()


def test_charts_have_text_alternatives(browser):
    """Restarts, verdicts and inferred preemptions have text for screen readers."""
    stage = Stage(cache=CACHE)
    stage.play(60, running=20, kv=0.95, tokens=600, finished=1)
    stage.restart()
    stage.play(20, running=20, kv=0.97, tokens=600, finished=1)
    stage.play(20, running=8, waiting=12, kv=0.97, tokens=100)
    with Shown() as shown:
        shown.play(stage.readings)
        with opened(browser, shown.base) as page:
            labels = [one.get_attribute("aria-label") for one in page.locator(".chart > svg").all()]
            kv = "KV usage: 97%, from 95% to 97%; KV usage peak: 97%, from 95% to 97%"
            assert labels[0] == f"KV cache usage. {kv}; over 2 min."
            assert "inferred preemptions/s: 0." in labels[1]
            assert "restart 39 s ago" in labels[4]
            assert page.locator(".chart > svg .dot.amber").count() > 0
            assert page.locator(".chart > svg .again").count() == 5


def test_the_page_is_complete_without_javascript(browser):
    """As text: verdict, evidence, fixes, numbers of the last ten minutes."""
    with Shown() as shown:
        shown.play(storm().readings)
        with opened(browser, shown.base, wanted=".lead", java_script_enabled=False) as page:
            text = page.locator("body").inner_text()
            for words in (
                catalogue.load().verdicts["preemption_thrash"].summary,
                "--watermark 0.05",
                "What will not help",
                "Without JavaScript this page does not update.",
                "The last ten minutes",
            ):
                assert words in text
            expect(page.locator(".copy").first).to_be_hidden()
