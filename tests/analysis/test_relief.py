"""What helps at once, without a restart, and what the fixes cost."""

import re

import pytest
from support.scenes import Stage

from exporter.analysis.catalogue import Severity, load
from exporter.analysis.relief import limit_words, loss, paid, relief
from exporter.publish.status import status_object
from exporter.publish.terminal import report

CACHE = {"kv_cache_size_tokens": 100_000}
CALM = {"kv": 0.9, "tokens": 800, "finished": 1}
STORM = {"waiting": 10, "kv": 0.99, "tokens": 300, "finished": 1, "preemptions": 2}


def storm(*, before: int | None, running: int, **part: float):
    """Return the last reading of a storm, after some calm minutes unless `before` is None."""
    stage = Stage(cache=CACHE)
    if before is not None:
        stage.play(120, **CALM | {"running": before})
    return stage.play(60, **STORM | {"running": running} | part)[-1]


def limit(reading):
    """The limit of the one engine."""
    (engine,) = reading.engines.values()
    assert engine.judgement.verdict == "preemption_thrash"
    return engine.gateway_limit


def test_the_limit_is_what_ran_without_preemption():
    """It is near to what runs on average in the storm, and more are in flight."""
    assert limit(storm(before=20, running=20)) == 20
    assert limit(storm(before=20, running=21)) == 20


@pytest.mark.parametrize(
    ("before", "running", "waiting"),
    [
        pytest.param(None, 20, 10, id="no calm time was seen"),
        pytest.param(30, 20, 15, id="requests have grown since: 30 do not fit any more"),
        pytest.param(10, 20, 10, id="half of what runs would cost throughput"),
        pytest.param(20, 18, 1, id="no more than that are in flight"),
        pytest.param(1, 1, 10, id="one request alone fills the pool"),
    ],
)
def test_there_is_no_limit_where_it_would_not_help(before, running, waiting):
    """Then the words have no number."""
    assert limit(storm(before=before, running=running, waiting=waiting)) is None


def test_a_limit_at_the_gateway_is_only_for_what_preempts():
    """A queue is as long at the gateway as at the engine."""
    for name, verdict in load().verdicts.items():
        wanted = name in {"preemption_thrash", "preemption_light", "kv_pressure_rising"}
        assert ("limit_concurrency" in verdict.now) is wanted, name


@pytest.mark.parametrize(
    "name", ["metrics_missing", "data_untrusted", "starting", "sleeping", "deferred_wait", "healthy"]
)
def test_nothing_is_done_at_once_where_nothing_helps(name):
    """Data cannot be read, or the queue waits for a connector or an adapter, which no traffic rule brings."""
    assert load().verdicts[name].now == ()


def test_a_stuck_engine_gets_no_new_requests():
    """What hangs is taken out of the router before anybody restarts it; an endless request is ended."""
    table = load().verdicts
    assert {name for name in table if "leave_router" in table[name].now} == {
        "unreachable", "engine_stalled", "scheduler_deadlock",
    }  # fmt: skip
    assert table["unfittable_request"].now[0] == "stop_request"


def test_relief_begins_with_a_warning():
    """An info needs no action."""
    assert relief("preemption_light", Severity.INFO, limit_words(None)) == ()
    first, *_ = relief("preemption_light", Severity.WARNING, limit_words(12))
    assert first.startswith(
        "Limit concurrency at the gateway to about 12 requests per engine. The others wait"
    )
    assert first.endswith("It is no cure, and too low a limit costs throughput.")
    assert (
        "to fewer requests than now." in relief("preemption_thrash", Severity.CRITICAL, limit_words(None))[0]
    )


def test_every_relief_is_used_and_costs_no_restart():
    """The words that would restart a server are not in it."""
    used = {name for verdict in load().verdicts.values() for name in verdict.now}
    assert used == set(load().relief)
    words = " ".join(deed.action + deed.effect for deed in load().relief.values())
    assert not re.search(r"[Rr]estart|--\w", words)


def test_terminal_and_api_begin_with_it():
    """Before the evidence and the fixes; each fix says how many requests its restart loses."""
    reading = storm(before=20, running=20)
    text = "\n".join(report(reading))
    now = relief("preemption_thrash", Severity.WARNING, limit_words(20))
    assert text.index("Now, without a restart\n  * Limit concurrency") < text.index("What to change")
    assert all(f"\n  * {deed}\n" in text for deed in now)
    assert "     Cost: needs a restart: 20 running requests are lost, minutes to load.\n" in text
    (engine,) = status_object("http://vllm", reading, reading.t)["engines"].values()
    assert engine["now"] == list(now)
    costs = {fix["fix"]: (fix["cost"], fix["restart"]) for fix in engine["fixes"]}
    assert costs["set_watermark"] == ("flag", True)
    assert costs["add_replicas"] == ("gpus", False)


@pytest.mark.parametrize(
    ("name", "running", "words"),
    [
        ("set_watermark", 24, "needs a restart: 24 running requests are lost, minutes to load"),
        ("set_watermark", 1, "needs a restart: 1 running request is lost, minutes to load"),
        ("set_watermark", 0, "needs a restart: minutes to load"),
        ("set_watermark", None, "needs a restart: running requests are lost, minutes to load"),
        ("fp8_kv_cache", 2, "answers change, needs a restart: 2 running requests are lost, minutes to load"),
        ("raise_tensor_parallel", 0, "more GPUs, needs a restart: minutes to load"),
        ("add_replicas", 24, "more GPUs"),
        ("balance_routing", 24, "no restart"),
    ],
)
def test_a_fix_says_what_it_costs(name, running, words):
    """With the requests that run now, where their number is known."""
    assert loss(load().fixes[name], running) == words


def test_the_cost_in_few_words():
    """For lists and tables."""
    fixes = load().fixes
    assert [paid(fixes[name]) for name in ("set_watermark", "quantize_weights", "add_replicas")] == [
        "restart", "answers change, restart", "more GPUs",
    ]  # fmt: skip
