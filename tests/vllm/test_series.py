"""One line taken apart: what the format allows is read, what it does not is refused."""

import math

import pytest

from exporter.vllm.series import IGNORED, KNOWN, EngineKey, bounded, read_line, read_number


def source_of(labels: str) -> bytes:
    """What tells the processes apart that report a line with these labels."""
    sample = read_line(f"vllm:num_requests_running{{{labels}}} 3".encode())
    assert sample
    return sample[0].source


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running 3",
        b"vllm:num_requests_running\t3",
        b"  vllm:num_requests_running   3  ",
        b"vllm:num_requests_running 3\r",
        b"vllm:num_requests_running 3 1795970636170",
        b"vllm:num_requests_running 3\t1795970636.17",
        b"vllm:num_requests_running{} 3",
        b"vllm:num_requests_running{}3",
        b'vllm:num_requests_running {engine="0"} 3',
        b'vllm:num_requests_running{ engine = "0" , } 3.0e0',
        b'vllm:num_requests_running{engine="0",} +3',
        b'vllm:num_requests_running{engine="0"} 3 # {trace_id="} 9"} 0.5 1795970636.17',
        b'vllm:num_requests_running{engine="0"} 3 1795970636 # {trace_id="a"} 0.5',
    ],
)  # fmt: skip
def test_what_the_formats_allow_is_read(line: bytes):
    """Blanks, tabs, timestamps, exemplars, empty blocks and trailing commas."""
    sample = read_line(line)
    assert sample
    series, value = sample
    assert (series.reading, series.key, value) == ("requests_running", EngineKey("", "0"), 3)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running ",
        b"vllm:num_requests_running three",
        b"vllm:num_requests_running 1_0",
        b"vllm:num_requests_running 0x10",
        b"vllm:num_requests_running 3 soon",
        b"vllm:num_requests_running 3 4 5",
        b"vllm:num_requests_running{ 3",
        b"vllm:num_requests_running{engine} 3",
        b"vllm:num_requests_running{engine=0} 3",
        b'vllm:num_requests_running{engine="0} 3',
        b'vllm:num_requests_running{engine="0\\"} 3',
        b'vllm:num_requests_running{engine="0"x="1"} 3',
        b'vllm:num_requests_running{engine="0",,x="1"} 3',
        b'vllm:num_requests_running{engine="0",engine="1"} 3',
        b'vllm:num_requests_running{0engine="0"} 3',
        b'vllm:num_requests_running{engine="0"} # {a="b"} 3',
    ],
)
def test_what_they_do_not_allow_is_refused(line: bytes):
    """No value is better than a wrong one."""
    assert read_line(line) is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (rb"a\"b", 'a"b'), (rb"a\\", "a\\"), (rb"a\nb", "a\nb"), (rb"a\\nb", "a\\nb"), (rb"\\\"", '\\"'),
        (rb"a\tb", "a\\tb"), (b'} 1 # {c=\\"d', '} 1 # {c="d'), ("é\u2028".encode(), "é\u2028"),
    ],
)  # fmt: skip
def test_escapes_in_label_values(written: bytes, meant: str):
    """Three escapes exist; another backslash stands for itself."""
    sample = read_line(b'vllm:num_requests_running{model_name="' + written + b'"} 3')
    assert sample
    assert sample[0].key.model == bounded(meant)


def test_bytes_that_are_no_utf8_are_replaced():
    """A broken label does not cost the sample."""
    sample = read_line(b'vllm:num_requests_running{model_name="a\xff"} 3')
    assert sample
    assert sample[0].key.model == "a\ufffd"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b"NaN", math.nan),
        (b"+Inf", math.inf),
        (b"-Inf", -math.inf),
        (b"1.7959e+09", 1.7959e9),
        (b"1e400", math.inf),
    ],
)
def test_numbers_in_every_notation(text: bytes, number: float):
    """Exponents, NaN and infinities."""
    assert read_number(text) == pytest.approx(number, nan_ok=True)


def test_processes_are_told_apart_by_their_other_labels():
    """In any order; the labels that name the engine do not count."""
    assert source_of('pid="1",WorkerId="2"') == source_of('WorkerId="2",pid="1",engine="0",model_name="m"')
    assert source_of('pid="1"') != source_of('pid="2"')
    assert source_of('model_name="m",engine="1",ReplicaId="a"') == b""


def test_what_tells_processes_apart_is_kept_in_few_bytes():
    """A label of kilobytes would be kept as often as it is printed."""
    long = [source_of(f'x="{"y" * 3000}{number}"') for number in range(2)]
    assert long[0] != long[1]
    assert max(map(len, long)) <= 64
    assert source_of(f'x="{"y" * 3000}0"') == long[0]


def test_a_bound_tells_series_apart_that_are_no_buckets():
    """There it is a label like any other."""
    assert source_of('le="1"') != source_of('le="2"')


@pytest.mark.parametrize(("count", "readable"), [(38, True), (128, True), (129, False), (2000, False)])
def test_a_line_with_very_many_labels_is_refused(count: int, readable: bool):
    """The longest of vLLM 0.33 has 38."""
    labels = ",".join(f'a{number}="1"' for number in range(count))
    assert (read_line(f"vllm:num_requests_running{{{labels}}} 3".encode()) is not None) is readable


@pytest.mark.parametrize("bound", ["", 'le="x"', 'le="NaN"', 'le="1_0"'])
def test_a_bucket_without_a_bound_is_ignored(bound: str):
    """There is nowhere to put it."""
    assert read_line(f"vllm:request_prompt_tokens_bucket{{{bound}}} 3".encode()) == (IGNORED, 3)


@pytest.mark.parametrize(
    ("lora", "counts"),
    [
        ('max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters="c"', (2, 2, 1)),
        ('max_lora="None",running_lora_adapters="",waiting_lora_adapters=" , "', (None, 0, 0)),
        ("", (None, 0, 0)),
    ],
)
def test_adapters_are_counted(lora: str, counts: tuple):
    """An empty list has none."""
    sample = read_line(f"vllm:lora_requests_info{{{lora}}} 1700000000.5".encode())
    assert sample
    state = sample[0].lora
    assert state
    assert (state.slots, state.running, state.waiting) == counts


@pytest.mark.parametrize("value", ["None", "", "-1", "0", "NaN", "inf", "16.5", "1_6"])
def test_a_cache_label_that_is_no_positive_whole_number_is_unknown(value: str):
    """Blocks are counted in whole numbers."""
    sample = read_line(f'vllm:cache_config_info{{block_size="{value}"}} 1'.encode())
    assert sample
    assert sample[0].cache
    assert sample[0].cache.block_size is None


def test_one_engine_has_one_key_object():
    """The reader of bodies compares keys by identity before it looks them up."""
    first = read_line(b'vllm:num_requests_running{model_name="m"} 3')
    second = read_line(b'vllm:num_requests_waiting{model_name="m",engine="0"} 3')
    assert first
    assert second
    assert first[0].key is second[0].key


def test_a_line_with_a_timestamp_is_not_remembered_by_its_value():
    """The memory holds what stands before the value and nothing of the value."""
    KNOWN.clear()
    read_line(b"vllm:num_requests_running 3 1795970636170")
    read_line(b'vllm:num_requests_running{a="b"} 3 # {trace_id="a"} 0.5')
    assert not KNOWN
    read_line(b'vllm:num_requests_running{a="b c"} 3')
    assert list(KNOWN) == [b'vllm:num_requests_running{a="b c"}']
