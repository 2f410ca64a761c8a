"""``simulate run``: its results, for people and for programs, and what it refuses."""

import functools
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("own_logging")

WORKLOAD = str(Path(__file__).parents[1] / "simulation" / "truth" / "workload.json")


@pytest.fixture
def simulate(run):
    """A function that runs the command; its status, output and errors."""
    return functools.partial(run, "simulate", "run")


def test_a_real_run_is_simulated_from_the_shell(simulate):
    """The fields that were promised, among others, as one JSON object."""
    code, out, err = simulate(
        "--workload", WORKLOAD, "--num-gpu-blocks", "150", "--block-size", "32", "--max-num-seqs", "32",
        "--max-num-batched-tokens", "2048", "--watermark", "0.05", "--arrivals", "burst", "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result["preemptions"] == pytest.approx(54, abs=2)
    assert result["engine_steps"] == pytest.approx(3850, rel=0.01)
    assert result["kv_peak_ratio"] == 1.0
    assert result["output_tokens"] == 30589
    assert result["recomputed_tokens"] > 0


@pytest.mark.parametrize(
    "more",
    [
        ["--arrivals", "closed", "--clients", "32"],
        ["--arrivals", "poisson", "--rate", "2", "--seed", "3"],
        ["--no-prefix-caching", "--policy", "priority"],
        ["--recovery", "swap", "--swap-blocks", "50"],
        ["--async-scheduling", "--no-full-prompt-reservation", "--max-model-len", "2048"],
        ["--no-chunked-prefill"],
    ],
    ids=" ".join,
)
def test_every_request_is_finished_whatever_the_settings(simulate, more):
    """Each way to arrive, to recover and to schedule does all the work."""
    arguments = ["--workload", WORKLOAD, "--num-gpu-blocks", "200", "--block-size", "32", "--json"]
    code, out, _ = simulate(*arguments, *more)
    assert code == 0
    assert json.loads(out)["finished"] == 64


def test_a_person_gets_lines(simulate):
    """What did not happen is left out."""
    _, out, _ = simulate("--workload", WORKLOAD, "--num-gpu-blocks", "200", "--block-size", "32")
    lines = dict(line.rsplit(maxsplit=1) for line in out.splitlines())
    assert lines["requests finished"] == "64"
    assert lines["KV peak"] == "100.0%"
    assert "blocks swapped out" not in lines


def test_a_duration_repeats_the_requests(simulate):
    """A closed loop of 4 goes on for ten minutes with the 64 requests of the file."""
    arguments = ["--workload", WORKLOAD, "--num-gpu-blocks", "900", "--arrivals", "closed", "--clients", "4"]
    _, out, _ = simulate(*arguments, "--duration", "600", "--json")
    result = json.loads(out)
    assert result["finished"] > 300
    assert result["seconds"] > 600


def test_a_trace_is_read_by_its_name(simulate, tmp_path):
    """CSV, with arrival times in seconds."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n0,100,10\n60,100,10\n")
    _, out, _ = simulate("--workload", str(path), "--num-gpu-blocks", "99", "--arrivals", "trace", "--json")
    assert json.loads(out)["seconds"] > 60


def test_step_times_can_be_given(simulate):
    """Only a fixed part: as many seconds as steps, times that."""
    arguments = ["--workload", WORKLOAD, "--num-gpu-blocks", "900", "--json"]
    times = ["--step-fixed-ms", "2", "--step-token-us", "0", "--step-sequence-us", "0"]
    result = json.loads(simulate(*arguments, *times)[1])
    assert result["seconds"] == pytest.approx(0.002 * result["steps"])


def test_an_engine_that_is_stuck_says_so(simulate):
    """In the result, and for a person who reads only what goes wrong."""
    code, out, err = simulate(
        "--workload", WORKLOAD, "--num-gpu-blocks", "10", "--block-size", "32", "--json"
    )
    assert code == 0
    assert "can never be scheduled" in json.loads(out)["stuck"]
    assert err.startswith("vllm-preemption-exporter: the engine is stuck: request 0 needs 12 blocks")


REJECTED = {
    ("--num-gpu-blocks", "1"): "num_gpu_blocks: ",
    ("--max-num-batched-tokens", "8"): "at least max_num_seqs",
    ("--arrivals", "poisson"): "needs --rate",
    ("--arrivals", "trace"): "request 0 has none",
    ("--arrivals", "closed", "--clients", "0"): "at least 1 client",
    ("--duration", "60"): "needs arrivals closed or poisson",
    ("--step-token-us", "nan"): "--step-token-us: expected a time",
}


def test_invalid_options_are_status_2(simulate):
    """With one line that says what was expected."""
    failures = []
    for words, expected in REJECTED.items():
        status, out, err = simulate("--workload", WORKLOAD, "--num-gpu-blocks", "200", *words)
        if (status, out, err.count("\n")) != (2, "", 1) or expected not in err:
            failures.append((words, status, out, err))
    assert not failures


def test_a_missing_workload_is_status_1(simulate):
    """As any file that cannot be read."""
    expected = "vllm-preemption-exporter: no/such/file.json: no such file or directory\n"
    assert simulate("--workload", "no/such/file.json", "--num-gpu-blocks", "200") == (1, "", expected)


@pytest.mark.parametrize("text", ["not json", "{}", '{"requests": [{}]}'])
def test_a_broken_file_is_named(simulate, tmp_path, text):
    """The path comes with the reason."""
    path = tmp_path / "workload.json"
    path.write_text(text)
    code, _, err = simulate("--workload", str(path), "--num-gpu-blocks", "200")
    assert code == 2
    assert str(path) in err


def test_chosen_fields_are_printed_a_line_each(simulate):
    """In the given order; an unknown field is bad usage."""
    arguments = ("--workload", WORKLOAD, "--num-gpu-blocks", "200", "--block-size", "32")
    _, out, _ = simulate(*arguments, "--show", "finished,kv_peak_ratio,stuck")
    assert out == "finished       64\nkv_peak_ratio  1.00\nstuck          None\n"
    assert simulate(*arguments, "--show", "wings")[0] == 2
