"""A forecast on the surfaces: page, terminal, API and metrics say the same, and how old it is."""

import re
from html import unescape

import pytest
from support.scenes import Stage, engine_of

from exporter.analysis.forecast import EngineForecast, FixForecast, Ratio
from exporter.publish.page.renderer import Page
from exporter.publish.page.timeline import Timeline
from exporter.publish.page.view import TargetView, View
from exporter.publish.status import status_object
from exporter.publish.terminal import report

POOL = {"kv_cache_size_tokens": 299 * 32, "block_size": 32, "cache_dtype": "auto"}
STORM = {"running": 20, "waiting": 12, "kv": 0.98, "tokens": 300, "finished": 0.5, "preemptions": 2}
HELPS = FixForecast("fp8_kv_cache", "helps", None, Ratio(1.4, 1.4, 1.4), Ratio(0.7, 0.7, 0.7))


def storm(*fixes: FixForecast, trusted: bool = True, age: float = 130.0, **more):
    """The last reading of a storm whose forecast, if there are fixes, has an age."""
    stage = Stage(cache=POOL, max_num_seqs=32)
    reading = stage.play(150, **STORM)[-1]
    if not fixes:
        return reading
    at = reading.t + 1 - age
    made = EngineForecast(at, trusted, "tokens/s 300, simulated 500", fixes, **more)
    stage.pipeline.set_forecast(engine_of(reading).key, made)
    return stage.play(1, **STORM)[-1]


def page(reading, later: float = 0.0) -> str:
    """The words of the status page, some seconds after the reading."""
    timeline = Timeline()
    timeline.add(reading)
    view = View(reading.t + later, 1e9, [TargetView("http://a", reading, timeline)], {})
    text = Page(lambda: view, lambda: 0.0).html(None, None).body.decode()
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())


def terminal(reading) -> str:
    """What check prints."""
    return " ".join("\n".join(report(reading)).split())


@pytest.mark.parametrize(
    ("fixes", "trusted", "head", "sentence"),
    [
        ((HELPS,), True, "best", "Ranked by a simulation of this load, which matches the server; forecast"),
        ((HELPS,), False, "cheapest", "without gains: tokens/s 300, simulated 500; forecast"),
        ((), False, "cheapest", "Ordered by cost, without gains: the load has not been simulated yet."),
        (
            (FixForecast("fp8_kv_cache", "no_help"),),
            True,
            "cheapest",
            "No change that was simulated helps; forecast",
        ),
    ],
)
def test_the_heading_says_what_ranked_the_fixes_and_the_forecast_has_its_age(fixes, trusted, head, sentence):
    """Best first only by a forecast that ranks one; on the page it is older by the page's own age."""
    reading = storm(*fixes, trusted=trusted)
    for text, age in ((terminal(reading), "2 min old."), (page(reading, later=55), "3 min old.")):
        assert f"What to change, {head} first" in text
        assert f"{sentence} {age}" if fixes else sentence in text
    (engine,) = status_object("http://a", reading, reading.t)["engines"].values()
    assert sentence.removesuffix("; forecast") in engine["advice"]
