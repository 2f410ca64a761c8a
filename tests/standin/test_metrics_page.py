"""The fake page against pages of real servers: the same bytes but for the values."""

import re

import pytest
from support import real_recordings

from exporter.standin.metrics_page import VERSIONS, Finished, MetricsPage
from exporter.vllm import names
from exporter.vllm.exposition import Reader
from exporter.vllm.series import bounded

# The body after a storm, from a server that had answered requests.
REAL = {version: real_recordings.polls(f"{version}-exhaustion")[-1].body for version in VERSIONS}


def page(version="0.32.0", **more):
    """A page of a server like the recorded ones."""
    return MetricsPage(version, "tiny-llama", 1000.0, **{"max_model_len": 2048, "cache": {}, **more})


def shape(body):
    """A body without its values and help texts."""
    lines = body.decode().splitlines()
    return [re.sub(r"^(# HELP \S+).*" if line[0] == "#" else r" \S+$", r"\1" * (line[0] == "#"), line)
            for line in lines]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_it_looks_like_a_real_servers_byte_by_byte(version):
    """Names, labels with their values, types, buckets, and the order of all of them."""
    assert shape(page(version).body(1001.0)) == shape(REAL[version])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_reader_finds_all_that_it_finds_in_a_real_body(version):
    """The same readings and buckets, and the configuration of the cache."""
    (fake,) = Reader().read(page(version).body(1001.0)).engines.values()
    (real,) = Reader().read(REAL[version]).engines.values()
    assert fake.values.keys() == real.values.keys()
    assert {name: list(each) for name, each in fake.buckets.items()} == {
        name: list(each) for name, each in real.buckets.items()
    }
    assert (fake.cache, fake.key, fake.version) == (real.cache, real.key, real.version)
    assert not fake.untrusted


def test_engines_stand_beside_each_other_as_in_a_real_body():
    """Series by series, as a server with two data-parallel engines prints its counters and gauges."""
    real = real_recordings.polls(real_recordings.TWO_ENGINES)[-1].body.decode()
    fake = page("0.26.0", engines=2).body(1001.0).decode()
    for name in ("num_preemptions_total", "request_success_total", "num_requests_waiting_by_reason"):
        wanted = re.findall(rf"^(vllm:{name}\S+) ", real, re.MULTILINE)
        assert re.findall(rf"^(vllm:{name}\S+) ", fake, re.MULTILINE) == wanted


def test_buckets_of_lengths_follow_the_longest_sequence():
    """1, 2, 5, 10 and so on, as far as the model goes."""
    body = page(max_model_len=600).body(1001.0).decode()
    bounds = re.findall(r'request_prompt_tokens_bucket\{engine="0",le="([^"]+)"', body)
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "+Inf"]


def test_what_is_counted_is_read_again():
    """Through the exporter's own reader."""
    fake = page()
    engine = fake.engines[0]
    engine.gauges(3, 2, 0.75)
    engine.preempted(7)
    engine.first_token(100, 32, 0.5)
    engine.next_tokens(9, 0.02)
    engine.next_tokens(1, 3.0)
    engine.steps(10, 120)
    engine.finished(Finished(100, 11, 68, 0.1, 0.5, 4.0, 2))
    exposition = Reader().read(fake.body(1001.0))
    (snapshot,) = exposition.engines.values()
    assert exposition.start_time == 1000.0
    wanted = {
        "requests_running": 3, "requests_waiting": 2, "kv_usage": 0.75,
        "preemptions": 7, "prompt_tokens": 100, "prompt_tokens_computed": 68, "generation_tokens": 11,
        "prefix_queries": 100, "prefix_hits": 32, "engine_steps": 10, "step_tokens": 120,
        "first_token_seconds": 0.5, "first_token_count": 1, "inter_token_count": 10,
        "inter_token_seconds": pytest.approx(3.18), "queue_seconds": 0.1, "requests_finished": 1,
        "prompt_length_sum": 100, "output_length_sum": 11, "preemptions_of_finished": 2,
        "requests_deferred": 0,
    }  # fmt: skip
    assert {name: snapshot.values[name] for name in wanted} == wanted
    assert snapshot.buckets["prompt_length"][100.0] == 1
    assert snapshot.buckets["prompt_length"][50.0] == 0


def test_every_name_that_is_filled_is_on_the_page():
    """A name that vLLM dropped would be counted in vain."""
    fake = page()
    engine = fake.engines[0]
    engine.gauges(1, 1, 0.1)
    engine.preempted(1)
    engine.first_token(10, 0, 0.1)
    body = fake.body(1001.0).decode()
    assert all(f"vllm:{name}{{" in body for name, _ in engine.values)
    assert {row.name for row in names.NAMES if row.reading in ("kv_usage", "requests_running")} >= {
        "kv_cache_usage_perc",
        "num_requests_running",
    }


def test_a_name_cannot_break_the_page():
    """Quotes and newlines in a model's name are escaped, and read again."""
    fake = MetricsPage("0.32.0", 'a"b\\c\n', 1.0, max_model_len=2048, cache={})
    (key,) = Reader().read(fake.body(2.0)).engines
    assert key.model == bounded('a"b\\c\n')


def test_another_version_is_refused():
    """There is no recorded page of it."""
    with pytest.raises(ValueError, match="expected one of the versions"):
        page("0.25.0")


def test_deferred_requests_wait_too():
    """Of five that wait, two wait for something other than capacity."""
    made = page()
    made.engines[0].gauges(3, 5, 0.75, 2)
    (engine,) = Reader().read(made.body(1001.0)).engines.values()
    assert (engine.values["requests_waiting"], engine.values["requests_deferred"]) == (5.0, 2.0)
    assert b'reason="capacity"} 3.0' in made.body(1001.0)
