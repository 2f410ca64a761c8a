"""From what an exporter says of an engine to a simulation of its present."""

import pytest
from support import real_recordings

from exporter.commands import whatif
from exporter.config import Config
from exporter.publish.status import choose_engine, status_object
from exporter.simulation.candidates import candidates
from exporter.simulation.from_status import PresentError, present_from_status
from exporter.simulation.timing import StepTime
from exporter.simulation.whatif import forecast

LOAD = {
    "window_seconds": 60.0,
    "arrivals_per_second": 2.0,
    "requests_running_mean": 10.0,
    "requests_running_max": 12.0,
    "requests_waiting_mean": 0.0,
    "preemptions_per_minute": 3.0,
    "prefix_cache_hit_ratio": 0.25,
    "prompt_tokens": {"mean": 120.0, "buckets": [[100.0, 10.0], [200.0, 30.0], [None, 0.0]]},
    "output_tokens": {"mean": 300.0, "buckets": [[200.0, 0.0], [500.0, 40.0], [None, 0.0]]},
    "steps": [[5.0, 250.0, 3000.0, 2500.0]],
    "kv_capacity_tokens": 16_000.0,
    "num_gpu_blocks": 1000,
    "block_size": 16,
}
LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 2048, "watermark": 0.01}


def status(limits=LIMITS, **load):
    """An engine's object in the status, with some of it changed."""
    limits = {name: {"value": value, "source": "configuration"} for name, value in limits.items()}
    return {"load": {**LOAD, **load}, "limits": limits}


def test_all_that_is_known_is_used():
    """Nothing has to be assumed."""
    present = present_from_status(status())
    engine = present.engine
    assert (engine.num_gpu_blocks, engine.block_size, engine.max_num_seqs) == (1000, 16, 64)
    assert (engine.max_num_batched_tokens, engine.max_model_len, engine.watermark) == (4096, 2048, 0.01)
    assert (present.load.rate, present.load.prefix_tokens) == (2.0, 30)
    assert present.load.prompts.mean == pytest.approx(120, abs=1)
    assert present.load.outputs.mean == pytest.approx(300, abs=1)
    assert (present.observed.figures["preemptions_per_minute"], present.assumed) == (3.0, ())
    assert "2 requests/s, prompts of 120 tokens (30 shared), answers of 300" in present.sentence


def test_the_observed_steps_take_the_observed_time():
    """250 steps of 12 tokens and 10 requests in 5 s: 20 ms each."""
    assert present_from_status(status()).engine.step_time.of(12, 10) == pytest.approx(20e6, rel=1e-6)


def test_what_is_not_known_is_said():
    """The defaults of vLLM, each by name; at least as many seats as were seen taken."""
    present = present_from_status(status({}, requests_running_max=300.0, steps=[], block_size=None))
    assert (present.engine.max_num_seqs, present.engine.step_time) == (300, StepTime())
    assert [text.partition(" =")[0] for text in present.assumed[:3]] == [
        "block_size", "max_num_seqs", "max_num_batched_tokens",
    ]  # fmt: skip
    assert "step time" in present.assumed[3]


def test_what_somebody_tells_counts_first():
    """Flags of the command."""
    engine = present_from_status(status(), {"max_num_seqs": 8, "num_gpu_blocks": 77, "watermark": 0.2}).engine
    assert (engine.max_num_seqs, engine.num_gpu_blocks, engine.watermark) == (8, 77, 0.2)


@pytest.mark.parametrize(
    ("load", "blocks"),
    [
        ({"num_gpu_blocks": 2000}, 1000),  # of two data-parallel engines
        ({"num_gpu_blocks": None}, 1001),  # the null block holds nothing
        ({"num_gpu_blocks": 700}, 1001),  # a hybrid model: the capacity decides
    ],
)
def test_blocks_of_one_engine(load, blocks):
    """The server tells those of all of them."""
    assert present_from_status(status(**load)).engine.num_gpu_blocks == blocks


def test_lengths_without_buckets_are_spread_around_the_mean():
    """From half of it to one and a half."""
    present = present_from_status(status(prompt_tokens={"mean": 100.0, "buckets": [[None, 5.0]]}))
    assert present.load.prompts.ranges == ((50, 150, 1),)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"load": None}, "the load of the engine is unknown"),
        (status(prompt_tokens=None), "prompt tokens of requests are unknown"),
        (status(kv_capacity_tokens=None), "--num-gpu-blocks"),
        (status(arrivals_per_second=0.0), "no request arrived"),
    ],
)
def test_what_cannot_do_without_is_named(changed, told):
    """Rather than a guess."""
    with pytest.raises(PresentError, match=told):
        present_from_status(changed)


@pytest.mark.parametrize(
    ("name", "trusted"),
    [
        ("0.26.0-exhaustion", True),
        ("0.32.0-exhaustion", True),
        ("0.28.0-exhaustion-short", False),  # the window begins before the storm
        # Two API servers count steps in ways of their own.
        ("0.26.0-two-api-servers", False),
    ],
)
def test_the_present_of_a_real_server_is_simulated_or_not_trusted(name, trusted):
    """In the worst minute of each recording: preemptions within a tenth, tokens per second within 6 %."""
    path = real_recordings.RECORDINGS / f"{name}.jsonl.gz"
    shown = whatif._status_of_recording(path, None, Config())
    _, engine = choose_engine(shown, None)
    present = present_from_status(engine)
    result = forecast(present.load, candidates(present.load, present.engine)[:1], observed=present.observed)
    assert result.calibration.trusted is trusted
    if trusted:
        figures = result.present.figures
        real = engine["signals"]["generation_tokens_per_second"]
        assert figures["preemptions_per_minute"].mean == pytest.approx(
            present.observed.figures["preemptions_per_minute"], rel=0.1, abs=1
        )
        assert figures["output_tokens_per_second"].mean == pytest.approx(real, rel=0.06)
    else:
        assert "do not trust" in result.calibration.sentence


def test_the_calm_are_calm():
    """No preemption in the forecast of a server that had none."""
    fed = real_recordings.pipeline(real_recordings.CALM)
    for poll in real_recordings.polls(real_recordings.CALM)[:40]:
        reading = fed.feed(poll.t, poll.body, poll.error)
    _, engine = choose_engine(status_object("", reading, reading.t, fed.loads()), None)
    present = present_from_status(engine)
    result = forecast(present.load, candidates(present.load, present.engine)[:1], observed=present.observed)
    assert result.present.figures["preemptions_per_minute"].mean == 0.0
