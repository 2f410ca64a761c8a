"""The parts of ``make real`` that need no vLLM: changes, figures and the judgement of a row."""

import gzip
import json

import pytest

from bench.real.__main__ import Row, advised_change, changed
from bench.real.load import LOADS
from bench.real.trial import figures


def page(tokens: float, seconds: float, finished: int, preemptions: int) -> str:
    """A page with what the figures need."""
    engine = '{engine="0",model_name="lab"}'
    return (
        f"vllm:generation_tokens_total{engine} {tokens}\n"
        f"vllm:num_preemptions_total{engine} {preemptions}\n"
        f"vllm:e2e_request_latency_seconds_sum{engine} {seconds}\n"
        f"vllm:e2e_request_latency_seconds_count{engine} {finished}\n"
        f"vllm:inter_token_latency_seconds_sum{engine} {tokens / 100}\n"
        f"vllm:inter_token_latency_seconds_count{engine} {tokens}\n"
    )


def test_figures_are_those_after_the_warm_up(tmp_path):
    """45 s of measured time: 9,000 tokens are 200 a second, 30 requests took 150 s."""
    path = tmp_path / "run.jsonl.gz"
    rows = [
        {"case": "run", "interval": 1.0, "config": {}, "probes": {}},
        {"t": 0.0, "body": page(0, 0, 0, 0)},
        {"t": 54.0, "body": page(5_000, 900, 90, 9)},
        {"t": 55.0, "body": page(6_000, 1_000, 100, 10)},
        {"t": 99.0, "error": "timeout"},
        {"t": 100.0, "body": page(15_000, 1_150, 130, 70)},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    found = figures(path)
    assert found.tokens_per_second == 200.0
    assert found.e2e_seconds == 5.0
    assert found.inter_token_seconds == 0.01
    assert found.preemptions_per_finished == 2.0


def test_a_change_is_made_on_the_server_or_on_its_clients():
    """Combinations as well."""
    storm = LOADS["storm"]
    settings, clients = changed(storm, "seats=12+pool=x1.5+watermark=0.05")
    assert (settings.seats, settings.blocks, settings.watermark, clients) == (12, 300, 0.05, 32)
    assert changed(storm, "replicas=x3") == (storm.settings, 11)


@pytest.mark.parametrize(
    ("fixes", "change"),
    [
        ([{"fix": "balance_routing"}, {"fix": "lower_max_num_seqs", "value": 12}], "seats=12"),
        ([{"fix": "set_watermark"}, {"fix": "fp8_kv_cache"}], "pool=x2"),
        ([{"fix": "add_replicas", "value": 2}], "replicas=x3"),
        ([{"fix": "restart_engine"}], None),
    ],
)
def test_the_first_advice_that_this_machine_can_follow(fixes, change):
    """A fix without its number cannot be followed."""
    assert advised_change({"fixes": fixes}) == change


def test_a_row_fails_outside_its_tolerance_or_where_the_advice_hurts():
    """1.3 promised and 1.2 found is right within a tenth, 1.4 is not."""
    assert Row("storm", "pool=x2", True, (1.3, 1.2), (0.8, 0.8), 0.1).problems == ()
    assert Row("storm", "pool=x2", True, (1.4, 1.2), (0.8, 0.8), 0.1).problems == ("tokens/s",)
    assert Row("storm", "seats=8", False, (0.8, 0.8), (None, 1.3), 0.1).problems == ()
    assert Row("storm", "seats=8", True, (0.8, 0.8), (1.3, 1.3), 0.1).problems == ("ADVISED, MAKES IT WORSE",)
