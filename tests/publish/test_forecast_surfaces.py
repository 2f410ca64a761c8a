"""A forecast on the surfaces: page, terminal, API and metrics say the same, and how old it is."""

import math
import re
from dataclasses import replace
from html import unescape

import pytest
from support.metrics_text import text_of
from support.scenes import Stage, engine_of

from exporter.analysis.forecast import EngineForecast, FixForecast, Ratio
from exporter.commands._history import History
from exporter.config import AlertmanagerConfig, Config, TargetConfig
from exporter.config.sections import GpuConfig
from exporter.publish.alerts.tracker import ActiveAlerts
from exporter.publish.metrics.table import ReadingCollector
from exporter.publish.page.renderer import Page
from exporter.publish.page.timeline import Timeline
from exporter.publish.page.view import TargetView, View
from exporter.publish.status import status_object
from exporter.publish.terminal import report

POOL = {"kv_cache_size_tokens": 299 * 32, "block_size": 32, "cache_dtype": "auto"}
STORM = {"running": 20, "waiting": 12, "kv": 0.98, "tokens": 300, "finished": 0.5, "preemptions": 2}
HELPS = FixForecast("fp8_kv_cache", "helps", None, Ratio(1.4, 1.4, 1.4), Ratio(0.7, 0.7, 0.7))


def storm(*fixes: FixForecast, trusted: bool = True, age: float = 130.0, facts=None, **more):
    """The last reading of a storm whose forecast, if there are fixes, has an age."""
    stage = Stage(cache=POOL, max_num_seqs=32, **(facts or {}))
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


def pushed(reading) -> str:
    """The texts of the alerts that are pushed."""
    alerts = ActiveAlerts(AlertmanagerConfig(urls=("http://a:9093",), hold=0.0))
    return " ".join(notice.annotations["description"] for notice in alerts.observe(reading, 1e9))


def surfaces(reading) -> dict[str, str]:
    """The words of each surface."""
    (engine,) = status_object("http://a", reading, reading.t)["engines"].values()
    return {
        "page": page(reading),
        "terminal": terminal(reading),
        "API": " ".join(engine["now"]),
        "push": pushed(reading),
    }


def seats_and_watermark(outcome: str = "helps", value: float = 14):
    """A forecast in which two changes help, each alone, and both together suffice."""
    seats = FixForecast("lower_max_num_seqs", outcome, value, Ratio(1.1, 1.1, 1.1), score=1.1)
    share = FixForecast("set_watermark", "helps", 0.1, Ratio(1.2, 1.2, 1.2), score=1.2)
    both = {"outcome": "suffices", "tokens": Ratio(1.9, 1.9, 1.9), "latency": Ratio(0.5, 0.5, 0.5)}
    return (HELPS, seats, share), ((replace(seats, **both), replace(share, **both)),)


def test_a_pair_that_suffices_comes_first_on_all_surfaces_where_no_change_does_alone():
    """Each of the two names the other, with the effect of both."""
    fixes, pairs = seats_and_watermark()
    reading = storm(*fixes, pairs=pairs)
    first, second, third, *_ = engine_of(reading).advice.fixes
    assert [(one.fix, one.flag) for one in (first, second)] == [
        ("set_watermark", "--watermark 0.1"), ("lower_max_num_seqs", "--max-num-seqs 14"),
    ]  # fmt: skip
    assert third.fix == "fp8_kv_cache"
    assert (first.gain, first.suffices, first.together.fix) == (1.2, False, "lower_max_num_seqs")
    said = 'Together with "Keep some blocks free when admitting" it suffices. Forecast: tokens/s x1.90, time'
    for surface in (page, terminal):
        assert said in surface(reading)
        assert "suffices with: Let fewer requests run at once" in surface(reading)
    (engine,) = status_object("http://a", reading, reading.t)["engines"].values()
    assert engine["fixes"][0]["together"] == {
        "fix": "lower_max_num_seqs", "outcome": "suffices", "tokens_ratio": [1.9, 1.9, 1.9],
        "latency_ratio": [0.5, 0.5, 0.5],
    }  # fmt: skip
    assert metric(reading, "fix_pair_gain_ratio") == [1.9, 1.9]
    words = "[restart] [tokens/s 1.20x] [with the other of this pair it suffices: tokens/s 1.90x]"
    assert f"1. Keep some blocks free when admitting (--watermark 0.1) {words}" in pushed(reading)
    history = History()
    (line, _) = (line for line in history.note(0.0, reading) if "engine" in line or "running" in line)
    assert "(--watermark 0.1) together with: Let fewer requests run at once (--max-num-seqs 14)" in line


@pytest.mark.parametrize("why", ["one suffices alone", "one is rejected", "not trusted", "no pair"])
def test_no_pair_is_advised_where_it_is_not_needed_or_a_part_of_it_is_rejected(why):
    """Then each fix stands for itself."""
    fixes, pairs = seats_and_watermark(*(("worse", 14) if why == "one is rejected" else ()))
    if why == "one suffices alone":
        fixes = (replace(HELPS, outcome="suffices"), *fixes[1:])
    reading = storm(*fixes, trusted=why != "not trusted", pairs=() if why == "no pair" else pairs)
    assert not any(one.together for one in engine_of(reading).advice.fixes)
    assert metric(reading, "fix_pair_gain_ratio") == []
    assert "this pair" not in pushed(reading)


def metric(reading, name: str) -> list[float]:
    """The values of a metric."""
    text = text_of(ReadingCollector(lambda: reading, lambda: reading.t, lambda: 0.0))
    return [
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm_pressure_{name}{{")
    ]


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


def fewer(outcome: str, value: float, tokens: float) -> FixForecast:
    """The forecast of fewer seats."""
    return FixForecast("lower_max_num_seqs", outcome, value, Ratio(tokens, tokens, tokens))


@pytest.mark.parametrize(
    ("fixes", "trusted", "words", "value"),
    [
        ((fewer("worse", 12, 0.8),), True, None, [math.inf]),
        ((fewer("no_help", 18, 1.0),), True, None, [math.inf]),
        ((fewer("helps", 14, 1.1),), True, "at the gateway to about 14 requests per engine", [14.0]),
        ((fewer("uncertain", 14, 1.0),), True, "at the gateway to fewer requests than now", []),
        ((fewer("worse", 12, 0.8),), False, "at the gateway to fewer requests than now", []),
        ((HELPS,), True, "at the gateway to fewer requests than now", []),
        ((), False, "at the gateway to fewer requests than now", []),
    ],
)
def test_a_limit_at_the_gateway_agrees_with_the_forecast_of_fewer_seats(fixes, trusted, words, value):
    """Where fewer requests cost throughput, the first thing to do is to move traffic."""
    reading = storm(*fixes, trusted=trusted)
    for surface, text in surfaces(reading).items():
        assert ("Limit concurrency" in text) is (words is not None), surface
        assert words is None or words in text, surface
        assert "Send new requests to other replicas" in text, surface
    assert metric(reading, "gateway_limit_requests") == value


def test_check_and_replay_use_the_forecast_that_they_have_just_made():
    """Also for the limit at the gateway."""
    stage = Stage(cache=POOL, max_num_seqs=32)
    reading = stage.play(150, **STORM)[-1]
    key = engine_of(reading).key
    stage.pipeline.set_forecast(
        key, EngineForecast(reading.t, True, "they match", (fewer("worse", 12, 0.8),))
    )
    assert "Limit concurrency" in terminal(reading)
    assert "Limit concurrency" not in terminal(stage.pipeline.reconsidered(reading))


@pytest.mark.parametrize(
    ("per_token", "facts", "time", "money", "words"),
    [
        # 700 tokens/s * 20 us = 1.4 % of the time; * 8 GPUs * 2.50 = 0.28 per hour.
        (
            20e-6,
            {"gpu_hourly_price": 2.5, "tensor_parallel_size": 4, "pipeline_parallel_size": 2},
            [0.014],
            [0.28],
            " again, at least 1.4% of the GPU's time, at least 0.28 per hour (8 GPUs at 2.5 per hour).",
        ),
        # The operator knows better than the sizes: 0.1 * 3 * 10 = 3.
        (
            1 / 7000,
            {"gpu_hourly_price": 10.0, "gpus_per_replica": 3, "tensor_parallel_size": 4},
            [0.1],
            [3.0],
            "at least 3.00 per hour (3 GPUs at 10 per hour).",
        ),
        # One GPU is the least that any server has: 0.014 * 1 * 2.5 = 0.035.
        (
            20e-6,
            {"gpu_hourly_price": 2.5},
            [0.014],
            [0.035],
            "at least 0.04 per hour (1 GPU at 2.5 per hour).",
        ),
        (20e-6, {"tensor_parallel_size": 4}, [0.014], [], "again, at least 1.4% of the GPU's time."),
        # The observations allow that a token costs no time: no bound.
        (0.0, {"gpu_hourly_price": 2.5}, [], [], "compute 700 tokens/s again."),
    ],
)
def test_what_preemptions_cost_is_the_same_on_all_surfaces(per_token, facts, time, money, words):
    """Tokens/s again, a share of the GPU's time and money, each only where it is known."""
    more = {"recomputed_per_second": 700.0, "recomputed_ratio": 0.38, "seconds_per_token": per_token}
    reading = storm(HELPS, facts=facts, **more)
    for surface in (page, terminal):
        assert "By the forecast, preemptions make it compute 700 tokens/s again" in surface(reading)
        assert words in surface(reading)
    (engine,) = status_object("http://a", reading, reading.t)["engines"].values()
    assert engine["measured"][-1].endswith(words)
    shown = [[engine["forecast"].get(f"recomputed_{name}")] for name in ("gpu_time_ratio", "cost_per_hour")]
    assert shown == [pytest.approx(time or [None]), pytest.approx(money or [None])]
    assert metric(reading, "recomputed_tokens_per_second") == [700.0]
    assert metric(reading, "recomputed_gpu_time_ratio") == pytest.approx(time)
    assert metric(reading, "recomputed_cost_per_hour") == pytest.approx(money)


@pytest.mark.parametrize(("trusted", "recomputed"), [(False, 700.0), (True, None), (True, 0.0)])
def test_no_cost_is_said_without_a_forecast_that_matches_or_where_nothing_is_computed_again(
    trusted, recomputed
):
    """Unknown is not zero: without a forecast there are no series; where nothing is lost they are 0."""
    facts = {"gpu_hourly_price": 2.5}
    reading = storm(
        HELPS, trusted=trusted, facts=facts, recomputed_per_second=recomputed, seconds_per_token=1e-5
    )
    assert "By the forecast" not in page(reading) + terminal(reading)
    zero = [0.0] if trusted and recomputed == 0.0 else []
    for name in ("tokens_per_second", "gpu_time_ratio", "cost_per_hour"):
        assert metric(reading, f"recomputed_{name}") == zero


def test_the_price_comes_from_flags_or_from_the_settings_of_a_server():
    """A server's own settings go first."""
    config = Config(gpu=GpuConfig(hourly_price=2.5, per_replica=4))
    assert config.facts_of(TargetConfig()) == {"gpu_hourly_price": 2.5, "gpus_per_replica": 4}
    dear = TargetConfig(facts={"gpu_hourly_price": 9.0, "max_num_seqs": 8})
    assert config.facts_of(dear) == {"gpu_hourly_price": 9.0, "gpus_per_replica": 4, "max_num_seqs": 8}
    assert Config().facts_of(TargetConfig()) == {}
