"""Right values, worked out by hand, for recorded and for made-up bodies."""

import itertools
import json
from gzip import decompress

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest as classic
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from support.reference_reader import RECORDINGS, bodies

from exporter.vllm.exposition import EngineKey, Exposition, ExpositionError, Reader, Snapshot
from exporter.vllm.series import bounded

EXHAUSTION = RECORDINGS / "0.26.0-exhaustion.jsonl.gz"
RUNNING = b"vllm:num_requests_running 3\n"


def read(*lines: str) -> Exposition:
    """What a reader that has seen nothing makes of these lines."""
    return Reader().read("".join(line + "\n" for line in lines).encode())


def only(exposition: Exposition) -> Snapshot:
    """The one engine of a body."""
    (snapshot,) = exposition.engines.values()
    return snapshot


# Recorded bodies.


def test_the_exhaustion_run_preempts_531_times_and_finishes_219_requests():
    """From the first body to the last; KV usage peaks at exactly 1."""
    reader = Reader()
    snapshots = [only(reader.read(body)) for body in bodies(EXHAUSTION)]
    first, last = snapshots[0].values, snapshots[-1].values
    assert last["preemptions"] - first["preemptions"] == 531
    assert last["requests_finished"] - first["requests_finished"] == 219
    assert max(snapshot.values["kv_usage"] for snapshot in snapshots) == 1.0
    assert not any(snapshot.untrusted or snapshot.duplicates for snapshot in snapshots)


def test_running_falls_from_27_to_8_within_two_seconds_before_the_counter_moves():
    """The counter lags: what the gauges show comes first."""
    lines = [json.loads(line) for line in decompress(EXHAUSTION.read_bytes()).splitlines()[1:]]
    polls = [(line["t"], only(Reader().read(line["body"].encode())).values) for line in lines]
    moved = next(at for at, (_, values) in enumerate(polls) if values["preemptions"] > 0)
    before = [(t, v["requests_running"], v["requests_waiting"]) for t, v in polls[moved - 3 : moved]]
    assert [(running, waiting) for _, running, waiting in before] == [(27, 5), (19, 13), (8, 23)]
    assert before[-1][0] - before[0][0] < 2


def test_all_that_one_body_of_the_exhaustion_run_says():
    """Poll 100 in the middle of the storm, value for value."""
    body = next(itertools.islice(bodies(EXHAUSTION), 100, None))
    exposition = Reader().read(body)
    snapshot = exposition.engines[EngineKey("tiny-llama", "0")]
    assert exposition.start_time == 1795970636.17
    assert (snapshot.values["requests_running"], snapshot.values["requests_waiting"]) == (6, 25)
    assert snapshot.values["requests_deferred"] == 0
    assert snapshot.values["kv_usage"] == 153 / 199
    assert snapshot.values["preemptions"] == 267
    assert snapshot.values["requests_finished"] == 475
    assert snapshot.values["generation_tokens"] == 154067
    assert snapshot.values["engine_steps"] == 19160
    assert snapshot.values["created"] == 1795970669.3809383
    assert snapshot.buckets["prompt_length"][100.0] == 154
    assert snapshot.buckets["output_length"][float("inf")] == 475
    assert snapshot.cache
    assert (snapshot.cache.block_size, snapshot.cache.num_gpu_blocks) == (32, 200)
    assert (snapshot.cache.kv_cache_size_tokens, snapshot.cache.kv_cache_max_concurrency) == (6400, 3.125)
    assert snapshot.cache.enable_prefix_caching is True
    assert snapshot.version == (0, 26)


def test_two_data_parallel_engines_are_read_apart():
    """Each with its own counters and with the cache configuration that names it."""
    *_, body = bodies(RECORDINGS / "0.26.0-two-engines.jsonl.gz")
    engines = Reader().read(body).engines
    assert {key.engine: snapshot.values["preemptions"] for key, snapshot in engines.items()} == {
        "0": 95,
        "1": 113,
    }
    assert [snapshot.cache.num_gpu_blocks for snapshot in engines.values()] == [240, 240]


def test_with_several_api_servers_gauges_are_unknown_until_the_first_request():
    """The counters are there and 0, so the engine is known; what is absent is not 0."""
    recorded = list(bodies(RECORDINGS / "0.26.0-two-api-servers.jsonl.gz"))
    first, last = only(Reader().read(recorded[0])).values, only(Reader().read(recorded[-1])).values
    assert first["preemptions"] == 0
    assert "requests_running" not in first
    assert "kv_usage" not in first
    assert "created" not in last
    assert (last["requests_running"], last["preemptions"]) == (0, 213)


def test_after_a_restart_the_start_time_is_new_and_the_counter_began_again():
    """The recording holds two processes."""
    seen: dict[float, list[float]] = {}
    for body in bodies(RECORDINGS / "0.26.0-restart.jsonl.gz"):
        exposition = Reader().read(body)
        seen.setdefault(exposition.start_time, []).append(only(exposition).values["preemptions"])
    assert list(seen) == [1795971173.03, 1795971241.33]
    before, after = seen.values()
    assert before[-1] > 0
    assert (after[0], after[-1]) == (0, 144)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
def test_a_server_without_statistics_has_no_engine(version: str):
    """Only the process's start is told."""
    exposition = Reader().read((RECORDINGS / f"{version}-stats-disabled.txt").read_bytes())
    assert exposition.engines == {}
    assert exposition.start_time is not None


# Names, spellings and dialects.


def test_both_dialects_of_the_same_content_give_the_same_snapshot():
    """The classic text, OpenMetrics, and OpenMetrics with its names cleaned of colons."""
    registry = CollectorRegistry()
    labels = {"model_name": 'a "b"\\\n{c="d"} 5', "engine": "1"}
    for name, value in (("num_requests_running", 3), ("kv_cache_usage_perc", 0.25)):
        Gauge(f"vllm:{name}", "Help.", labels, registry=registry).labels(**labels).set(value)
    Counter("vllm:num_preemptions", "Help.", labels, registry=registry).labels(**labels).inc(7)
    lengths = Histogram("vllm:request_prompt_tokens", "H", labels, registry=registry, buckets=[1, 50])
    lengths.labels(**labels).observe(20)
    texts = [
        classic(registry),
        openmetrics(registry, escaping="allow-utf-8"),
        openmetrics(registry, escaping="underscores"),
    ]
    results = [Reader().read(text) for text in texts]
    snapshot = only(results[0])
    # Whether the client prints creation times is a setting of the whole process, not of this test.
    assert {reading: value for reading, value in snapshot.values.items() if reading != "created"} == {
        "requests_running": 3, "kv_usage": 0.25, "preemptions": 7,
        "prompt_length_sum": 20,
    }  # fmt: skip
    assert snapshot.buckets == {"prompt_length": {1.0: 0, 50.0: 1, float("inf"): 1}}
    assert snapshot.key.model == bounded(labels["model_name"])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("order", [1, -1])
def test_the_new_name_of_kv_usage_wins_over_the_old_one(order: int):
    """Never their mean, whichever stands first."""
    lines = ["vllm:gpu_cache_usage_perc 0.2", "vllm:kv_cache_usage_perc 0.6"][::order]
    assert only(read(*lines)).values == {"kv_usage": 0.6}


def test_the_old_name_of_kv_usage_is_read_where_it_stands_alone():
    """As vLLM up to 0.8 prints it."""
    assert only(read("vllm:gpu_cache_usage_perc 0.2")).values == {"kv_usage": 0.2}


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "ray_vllm:", "ray_vllm_"])
@pytest.mark.parametrize("suffix", ["_total", "", "_total_total"])
def test_a_counter_is_read_in_every_spelling(prefix: str, suffix: str):
    """With each prefix, with ``_total``, without it, and with two."""
    assert only(read(f'{prefix}num_preemptions{suffix}{{engine="0"}} 7')).values == {"preemptions": 7}


@pytest.mark.parametrize("order", [1, -1])
def test_two_spellings_of_one_counter_are_not_added(order: int):
    """Ray prints a counter and a gauge of it; the counter counts."""
    lines = ["ray_vllm_num_preemptions 6", "ray_vllm_num_preemptions_total 7"][::order]
    assert only(read(*lines)).values == {"preemptions": 7}


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_prefixes_the_first_of_the_table_wins(order: int):
    """What vLLM prints itself counts before what Ray makes of it; they are not two processes."""
    lines = ["vllm:num_requests_running 3", "vllm_num_requests_running 4", "ray_vllm_num_requests_running 5"]
    snapshot = only(read(*lines[::order]))
    assert snapshot.values == {"requests_running": 3}
    assert snapshot.duplicates == frozenset()


def test_a_name_that_only_begins_like_one_of_ours_is_another_metric():
    """Names are compared whole."""
    assert (
        read("vllm:num_preemptions_total_more 5", "vllm:num_preemption 5", "vllm:num_preemptions").engines
        == {}
    )


def test_metric_like_text_in_help_and_comments_is_no_sample():
    """Only a line that begins with the name counts."""
    exposition = read(
        "# HELP vllm:num_requests_running vllm:num_requests_running 9",
        "# vllm:num_requests_running 9",
        "vllm:num_requests_running 3",
        'other{text="vllm:num_requests_running 9"} 1',
    )
    assert only(exposition).values == {"requests_running": 3}


def test_counters_of_one_engine_are_added_over_their_other_labels():
    """Finished requests are the sum of all reasons."""
    exposition = read(
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 3',
        'vllm:request_success_total{finished_reason="length",model_name="m"} 4',
    )
    assert only(exposition).values == {"requests_finished": 7}


def test_a_label_picks_the_reading():
    """Of the reasons to wait one is a reading and others are none."""
    exposition = read(
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 5',
        'vllm:num_requests_waiting_by_reason{reason="deferred"} 2',
        'vllm:num_requests_waiting_by_reason{reason="new"} 9',
        "vllm:num_requests_waiting 7",
    )
    assert only(exposition).values == {
        "requests_waiting": 7, "requests_deferred": 2,
    }  # fmt: skip


def test_buckets_are_read_by_their_bound():
    """And those of several processes are added bound by bound."""
    exposition = read(
        'vllm:request_prompt_tokens_bucket{le="1.0",pid="1"} 1',
        'vllm:request_prompt_tokens_bucket{le="+Inf",pid="1"} 4',
        'vllm:request_prompt_tokens_bucket{le="1",pid="2"} 2',
        'vllm:request_prompt_tokens_bucket{le="+Inf",pid="2"} 5',
        "vllm:num_requests_running 0",
    )
    assert only(exposition).buckets == {"prompt_length": {1.0: 3, float("inf"): 9}}


# A series that stands there twice is one.


@pytest.mark.parametrize("order", [1, -1])
def test_a_counter_that_is_printed_twice_counts_once(order: int):
    """Its last line; another order of its labels makes no other series of it."""
    lines = ['vllm:num_preemptions_total{a="1",pid="7"} 3', 'vllm:num_preemptions_total{pid="7",a="1"} 4'][
        ::order
    ]
    assert only(read(*lines)).values == {"preemptions": 4 if order == 1 else 3}


def test_counters_of_several_processes_are_added_once_each():
    """However often each is printed."""
    line = 'vllm:num_preemptions_total{{pid="{}"}} {}'.format
    assert only(read(line(7, 3), line(8, 4), line(7, 3), line(8, 5))).values == {"preemptions": 8}


def test_processes_with_long_names_that_differ_at_their_end_are_added():
    """What tells them apart is kept short, and still tells them apart."""
    line = 'vllm:num_preemptions_total{{WorkerId="{}{}"}} {}'.format
    assert only(read(line("w" * 3000, 7, 3), line("w" * 3000, 8, 4))).values == {"preemptions": 7}


def test_a_gauge_that_is_printed_twice_is_no_report_of_two_processes():
    """The last line counts."""
    snapshot = only(read('vllm:kv_cache_usage_perc{pid="7"} 0.9', 'vllm:kv_cache_usage_perc{pid="7"} 0.2'))
    assert snapshot.values == {"kv_usage": 0.2}
    assert snapshot.duplicates == frozenset()


def test_buckets_that_are_printed_twice_count_once():
    """And those of several processes are added still."""
    bucket = 'vllm:request_prompt_tokens_bucket{{le="{}",pid="{}"}} {}'.format
    lines = [bucket(le, pid, 2) for pid in (7, 8) for le in ("1.0", "+Inf")]
    exposition = read(*lines, *lines, "vllm:num_requests_running 0")
    assert only(exposition).buckets == {"prompt_length": {1.0: 4, float("inf"): 4}}


def test_a_whole_body_that_comes_twice_says_what_it_says_once():
    """A real one: values, buckets, and no duplicates."""
    body = next(itertools.islice(bodies(EXHAUSTION), 100, None))
    assert Reader().read(body * 2).engines == Reader().read(body).engines


# Whose it is.


def test_a_missing_or_empty_engine_label_means_engine_0():
    """As V0 and V1 of 0.7 print it."""
    assert list(read('vllm:num_requests_running{model_name="m"} 1').engines) == [EngineKey("m", "0")]
    assert list(read('vllm:num_requests_running{engine=""} 1').engines) == [EngineKey("", "0")]


def test_replicas_are_engines_of_their_own():
    """Two replicas behind one page, both with engine 0."""
    engines = read(
        'ray_vllm_num_requests_running{model_name="m",engine="0",ReplicaId="a",WorkerId="1"} 3',
        'ray_vllm_num_requests_running{model_name="m",engine="0",ReplicaId="b",WorkerId="2"} 5',
    ).engines
    assert {key.name: snapshot.values["requests_running"] for key, snapshot in engines.items()} == {
        "a/0": 3,
        "b/0": 5,
    }


def test_two_engines_never_have_the_same_name():
    """A slash in the label of an engine is one between replica and engine, or series come twice."""
    engines = read(
        'vllm:num_requests_running{model_name="m",engine="0",ReplicaId="a"} 3',
        'vllm:num_requests_running{model_name="m",engine="a/0"} 5',
        'vllm:num_requests_running{model_name="m",engine="b/0",ReplicaId="a"} 1',
        'vllm:num_requests_running{model_name="m",engine="0",ReplicaId="a/b"} 1',
        'vllm:num_requests_running{model_name="m",engine="0"} 1',
    ).engines
    assert sorted(key.name for key in engines) == ["0", "a/0", "a/b/0"]


def test_the_model_label_of_triton_names_the_model():
    """Where ``model_name`` is not there."""
    assert list(read('vllm:num_requests_running{model="m",version="1"} 1').engines) == [EngineKey("m", "0")]


def test_labels_without_a_core_reading_are_no_engine():
    """A spare counter without an engine label does not make an engine 0."""
    exposition = read(
        'vllm:num_requests_running{engine="1"} 3',
        "vllm:external_prefix_cache_queries_total 5",
    )
    assert list(exposition.engines) == [EngineKey("", "1")]


# Several processes report one gauge.


def pids(first: float, second: float) -> bytes:
    """A body in which two processes report KV usage."""
    line = 'vllm:kv_cache_usage_perc{{pid="{}"}} {}\n'.format
    return (line(7, first) + line(8, second)).encode()


def test_of_two_processes_the_larger_value_counts_at_first_sight_and_is_flagged():
    """Nobody has changed yet, so nobody is known to be dead."""
    snapshot = only(Reader().read(pids(0.9, 0.2)))
    assert snapshot.values == {"kv_usage": 0.9}
    assert snapshot.duplicates == {"kv_usage"}


def test_of_two_processes_the_one_that_changed_last_counts():
    """A process that is gone leaves its last value for ever."""
    reader = Reader()
    values = [
        only(reader.read(pids(*pair))).values["kv_usage"]
        for pair in [(0.9, 0.2), (0.9, 0.3), (0.9, 0.3), (0.9, 0.1), (0.8, 0.1), (0.8, 0.1)]
    ]
    assert values == [0.9, 0.3, 0.3, 0.1, 0.8, 0.8]


def test_when_both_processes_change_the_larger_value_counts():
    """Two live ones."""
    reader = Reader()
    reader.read(pids(0.9, 0.2))
    assert only(reader.read(pids(0.5, 0.6))).values == {"kv_usage": 0.6}


def test_a_process_that_says_nan_does_not_hide_the_other():
    """NaN never equals itself, and is no change."""
    reader = Reader()
    for body in (pids(float("nan"), 0.2), pids(0.2, float("nan")), pids(float("nan"), 0.2)):
        assert only(reader.read(body)).values == {"kv_usage": 0.2}


def test_when_the_chosen_process_is_gone_the_larger_of_the_others_counts():
    """The choice is made anew."""
    reader = Reader()
    reader.read(pids(0.9, 0.2))
    reader.read(pids(0.9, 0.3))
    body = pids(0.9, 0.4).replace(b'pid="8"', b'pid="9"')
    assert only(reader.read(body)).values == {"kv_usage": 0.9}


def test_a_newer_name_ends_the_choice_between_processes_of_the_older_one():
    """One series of the new name is no duplicate."""
    body = pids(0.9, 0.2).replace(b"kv_cache", b"gpu_cache") + b"vllm:kv_cache_usage_perc 0.5\n"
    snapshot = only(Reader().read(body))
    assert snapshot.values == {"kv_usage": 0.5}
    assert snapshot.duplicates == frozenset()


# What cannot be true.


@pytest.mark.parametrize(
    ("value", "shown"),
    [("-38.75", "-38.75"), ("NaN", "nan"), ("97.0", "97.0"), ("1.0000001", "1.0000001"), ("+Inf", "inf")],
)
def test_an_impossible_kv_usage_is_untrusted_and_not_clamped(value: str, shown: str):
    """The reason says what was wanted and what was got; the value is nowhere."""
    snapshot = only(read(f"vllm:kv_cache_usage_perc {value}", "vllm:num_requests_running 3"))
    assert snapshot.values == {"requests_running": 3}
    assert snapshot.untrusted == {"kv_usage": f"kv_usage is {shown}, expected 0 to 1"}


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf", "-Inf"])
def test_an_impossible_count_is_untrusted(value: str):
    """Counters and gauges of requests are finite and not negative."""
    snapshot = only(read(f"vllm:num_preemptions_total {value}"))
    assert snapshot.values == {}
    assert "expected a finite number from 0" in snapshot.untrusted["preemptions"]


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf"])
def test_a_histogram_with_an_impossible_bucket_is_untrusted(value: str):
    """As a whole: its quantiles would be wrong."""
    bucket = 'vllm:request_prompt_tokens_bucket{{le="{}"}} {}'.format
    for values in ((value, "3"), ("1", value)):
        snapshot = only(
            read(bucket("1", values[0]), bucket("+Inf", values[1]), "vllm:num_requests_running 3")
        )
        assert snapshot.buckets == {}
        assert list(snapshot.untrusted) == ["prompt_length"]


@pytest.mark.parametrize("value", ["0", "-1", "NaN", "+Inf"])
def test_an_impossible_start_time_is_unknown(value: str):
    """A process did not start before 1970 or never."""
    assert read(f"process_start_time_seconds {value}").start_time is None


def test_bounds_of_kv_usage_are_trusted():
    """Exactly 0 and exactly 1 are real values."""
    assert only(read("vllm:kv_cache_usage_perc 0.0")).values == {"kv_usage": 0}
    assert only(read("vllm:kv_cache_usage_perc 1.0")).values == {"kv_usage": 1}


# Bodies that are cut off, empty or no metrics.


def test_a_body_that_ends_in_mid_number_loses_its_last_line():
    """0.9 of 0.95 would be a lie."""
    exposition = Reader().read(RUNNING + b"vllm:kv_cache_usage_perc 0.9")
    assert exposition.truncated
    assert only(exposition).values == {"requests_running": 3}


def test_a_missing_line_feed_after_the_end_mark_cuts_nothing_off():
    """``# EOF`` says that all was sent."""
    exposition = Reader().read(RUNNING + b"# EOF")
    assert not exposition.truncated
    assert only(exposition).values == {"requests_running": 3}


@pytest.mark.parametrize(
    "body", [b"", b"\n", b"\r\n\r\n", b"# EOF\n", b"up 1\n", b"Not Found\n", b"\xff\xfe\n"]
)
def test_a_body_without_our_metrics_has_no_engine(body: bytes):
    """It may be a page of another program; that is for others to judge."""
    assert Reader().read(body) == Exposition({})


@pytest.mark.parametrize(
    "body",
    [
        b"<!DOCTYPE html><html></html>",
        b"\n  <html>",
        b'{"detail": "Not Found"}',
        b"{}",
        b'\n[{"a": 1}]',
        b"up 1\n\0",
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    ],
)
def test_a_page_json_or_binary_data_is_refused(body: bytes):
    """With the module's own error, which says what was wanted."""
    with pytest.raises(ExpositionError, match="expected a metrics text"):
        Reader().read(body)


def test_a_zero_byte_beside_good_samples_costs_nothing_else():
    """One broken label is no reason to lose the engine."""
    assert only(Reader().read(RUNNING + b'other{a="\0"} 1\n')).values == {"requests_running": 3}


def test_a_line_that_cannot_be_read_costs_only_itself():
    """It is counted, and the others stand."""
    exposition = read(
        "vllm:kv_cache_usage_perc{a=} 1", "vllm:num_preemptions_total 1_0", "vllm:num_requests_running 3"
    )
    assert only(exposition).values == {"requests_running": 3}
    assert exposition.unreadable == 2


def test_at_most_256_engines_are_kept_and_the_rest_is_counted():
    """A hostile page cannot make more."""
    exposition = read(*(f'vllm:num_requests_running{{engine="{number}"}} {number}' for number in range(300)))
    assert len(exposition.engines) == 256
    assert exposition.engines[EngineKey("", "255")].values == {"requests_running": 255}
    assert exposition.dropped == 44


# What concerns the whole server.


def test_the_newest_label_set_of_the_adapters_counts_and_only_numbers_are_kept():
    """Old label sets stay on the page; the value is the time of the change."""
    labels = 'max_lora="4",running_lora_adapters="{}",waiting_lora_adapters="{}"'
    line = f"vllm:lora_requests_info{{{{{labels}}}}} {{}}".format
    state = read(
        line("a,b", "", 1700000002.5), line("", "secret", 1700000001), line("c", "d, e,f", "NaN")
    ).lora
    assert state
    assert (state.slots, state.running, state.waiting) == (4, 2, 0)
    assert "a,b" not in repr(state)


def test_a_cache_configuration_of_none_is_unknown():
    """None is what vLLM writes for what it does not know yet; a label may begin with an underscore."""
    snapshot = only(
        read(
            'vllm:cache_config_info{_block_size_resolved="True",block_size="None",num_gpu_blocks="None",'
            'kv_cache_size_tokens="None",cache_dtype="None",enable_prefix_caching="None",engine="0",'
            'gpu_memory_utilization="0.92",sliding_window="None"} 1.0',
            'vllm:num_requests_running{model_name="m"} 3',
        )
    )
    assert snapshot.cache
    assert (snapshot.cache.block_size, snapshot.cache.num_gpu_blocks) == (None, None)
    assert (snapshot.cache.cache_dtype, snapshot.cache.enable_prefix_caching) == (None, None)
    assert snapshot.cache.gpu_memory_utilization == 0.92
    assert snapshot.version == (0, 24)


def test_a_cache_configuration_without_engine_is_every_engine_s():
    """As vLLM up to 0.8.5 prints it; one that names an engine is that engine's alone."""
    engines = read(
        'vllm:cache_config_info{block_size="16"} 1.0',
        'vllm:cache_config_info{block_size="32",engine="1"} 1.0',
        'vllm:num_requests_running{engine="0"} 3',
        'vllm:num_requests_running{engine="1"} 3',
    ).engines
    assert {key.engine: snapshot.cache.block_size for key, snapshot in engines.items()} == {"0": 16, "1": 32}


# Counters of several sources.


def counted(**sources: float) -> bytes:
    """A page on which each process has its own counter of preemptions."""
    return b"".join(
        b'vllm:num_preemptions_total{pid="%s"} %d\n' % (name.encode(), n) for name, n in sources.items()
    )


def counts(*pages: bytes, reading: str = "preemptions") -> list[float]:
    """The counter on each of these pages, read one after the other."""
    reader = Reader()
    return [only(reader.read(page)).values[reading] for page in pages]


def test_a_second_source_begins_with_nothing_and_adds_what_it_counts_from_then_on():
    """60,000 preemptions of another process are no work of the last second."""
    pages = [counted(a=100), counted(a=101, b=60_000), counted(a=102, b=60_003)]
    assert counts(*pages) == [100, 101, 105]


def test_a_source_that_vanishes_stays_in_the_sum_and_returns_with_its_difference():
    """Its counter did not fall: nobody shows it. A return is no second first sight."""
    pages = [counted(a=100, b=50_000), counted(a=101), counted(a=102, b=50_007), counted(a=102, b=50_008)]
    assert counts(*pages) == [50_100, 50_101, 50_109, 50_110]


def test_a_restart_of_all_sources_shows_the_new_values():
    """The sum must fall then, whatever was added or left out before."""
    more, less = [counted(a=100, b=50_000), counted(a=101)], [counted(a=100), counted(a=100, b=60_000)]
    assert counts(*more, counted(a=7))[-1] == 7
    assert counts(*less, counted(a=7, b=2))[-1] == 9
    assert counts(counted(a=100, b=50_000), counted(a=3, b=4, c=5))[-1] == 12


def test_a_new_finish_reason_is_new_work_and_a_cut_page_doubles_none():
    """The first aborted requests count whole; reasons beyond the cut come back with their difference."""
    line = b'vllm:request_success_total{finished_reason="%s"} %d\n'
    first, whole = line % (b"stop", 100), line % (b"stop", 101) + line % (b"abort", 30)
    pages = [first, whole, first.replace(b"100", b"102"), whole.replace(b"30", b"31").replace(b"101", b"102")]
    assert counts(*pages, reading="requests_finished") == [100, 131, 132, 133]
