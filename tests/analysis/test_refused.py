"""Requests that vLLM refuses at its queue limits are demand that neither queue nor seats show."""

import pytest
from support.bodies import body, engine
from support.scenes import advice, engine_of

from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig

SEATS = 10


def play(by_requests=0.0, by_tokens=0.0, engines=("0",), waiting=2, finishing=2, series=True):
    """The last reading after 90 s of engines on full seats that finish some requests per second each."""
    pipeline = Pipeline(AnalysisConfig(), {"max_num_seqs": SEATS}, 1.0)
    for t in range(90):
        each = {
            "running": SEATS,
            "waiting": waiting,
            "kv": 0.3,
            "finished": finishing * t,
            "generation_tokens": 500 * t,
        }
        text = body(
            *(engine(name, steps=20 * t, preemptions=0, prompt_tokens=900 * t, **each) for name in engines)
        )
        for reason, rate in (("reqs", by_requests), ("tokens", by_tokens)) if series else ():
            labels = f'model_name="demo-7b",reason="max_num_queued_{reason}"'
            text += f"vllm:admission_rejections_total{{{labels}}} {rate * t}\n".encode()
        reading = pipeline.feed(float(t), text)
    return reading


def test_refused_requests_are_a_finding_a_rate_and_demand():
    """12 of 10 seats, and as many are refused as finish: demand is doubled, and replicas follow it."""
    reading = play(by_requests=1.5, by_tokens=0.5)
    one = engine_of(reading)
    assert one.findings[0] == "requests_refused"
    assert one.signals.requests_refused_per_second == pytest.approx(2.0)
    assert one.saturation["seats"] == pytest.approx(2.4)
    by_tokens = "0.5 requests/s by --max-num-queued-tokens"
    said = f"The server refuses 1.5 requests/s by --max-num-queued-reqs and {by_tokens}."
    assert said in one.measured
    assert advice(reading, "add_replicas").value == 2


def test_a_queue_that_looks_calm_is_above_full():
    """Nothing waits at the polls; what is refused shows that the seats are too few."""
    assert engine_of(play(by_requests=0.5, waiting=0)).saturation["seats"] == pytest.approx(1.25)
    assert engine_of(play(waiting=0)).saturation["seats"] == 1.0


def test_a_server_that_finishes_nothing_has_no_demand_by_what_it_refuses():
    """A hang is cured by no replica, and nothing divided by nothing is no number of them."""
    one = engine_of(play(by_requests=5.0, finishing=0))
    assert one.findings[0] == "requests_refused"
    assert one.saturation["seats"] == pytest.approx(1.2)


def test_each_engine_has_its_share_of_what_the_server_refuses():
    """The counter has no label of an engine; together the engines have the server's rate once."""
    reading = play(by_tokens=3.0, engines=("0", "1", "2"))
    rates = [one.signals.requests_refused_per_second for one in reading.engines.values()]
    assert rates == pytest.approx([1.0, 1.0, 1.0])
    one = play(by_tokens=3.0, engines=("5",))
    assert engine_of(one, "5").signals.requests_refused_per_second == pytest.approx(3.0)
    assert len(one.engines) == 1


@pytest.mark.parametrize(("series", "rate"), [(True, 0.0), (False, None)])
def test_a_server_that_refuses_none_or_does_not_count_has_no_finding(series, rate):
    """Zero is known, absence is not zero; a server without the counter keeps no column for it."""
    one = engine_of(play(series=series))
    assert one.signals.requests_refused_per_second == rate
    assert "requests_refused" not in one.findings
    assert one.saturation["seats"] == pytest.approx(1.2)
    assert not one.measured
