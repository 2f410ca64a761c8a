"""The time to read a body grows with its length and not faster, whatever stands in it."""

import time
from collections.abc import Callable

import pytest

from exporter.vllm.exposition import Reader
from exporter.vllm.series import KNOWN, EngineKey

NAME = b"vllm:num_requests_running"
RUNNING = NAME + b" 3\n"

SHAPES: dict[str, Callable[[int], bytes]] = {
    "one endless line": lambda n: NAME + b" " + b"1" * n + b"\n",
    "an endless label value": lambda n: NAME + b'{a="' + b"x" * n + b'"} 1\n',
    "backslashes in a label": lambda n: NAME + b'{a="' + b"\\" * n + b'"} 1\n',
    "backslashes and no end": lambda n: NAME + b'{a="' + b"\\" * n + b"\n",
    "quotes": lambda n: NAME + b'{a="' + b'"' * n + b"\n",
    "many labels": lambda n: NAME + b"{" + b"".join(b'a%d="",' % i for i in range(n // 8)) + b"} 1\n",
    "one label again and again": lambda n: NAME + b"{" + b'a="",' * (n // 5) + b"} 1\n",
    "braces": lambda n: NAME + b"{" * n + b"}" * n + b" 1\n",
    "commas": lambda n: NAME + b"{" + b"," * n + b"} 1\n",
    "blanks before the name": lambda n: b" \t" * n + NAME[:-1] + b" 1\n",
    "blanks before the value": lambda n: NAME + b" \t" * n + b"x\n",
    "blanks after the value": lambda n: NAME + b" 1" + b" \t" * n + b"x\n",
    "blanks in the labels": lambda n: NAME + b"{" + b" \t" * n + b"x\n",
    "marks of exemplars": lambda n: NAME + b" 1" + b" #" * n + b"\n",
    "carriage returns": lambda n: NAME + b" 1" + b"\r" * n + b"x\n",
    "no line end": lambda n: NAME * (n // len(NAME)),
    "empty lines": lambda n: b"\n" * n,
    "blank lines": lambda n: b" \n" * n,
    "beginnings of prefixes": lambda n: b"\nray_vllm" * (n // 9),
    "beginnings of names": lambda n: (b"\n" + NAME[:-1]) * (n // 20),
    "blanks before a page": lambda n: b" " * n + b"x\n",
    "half of an object": lambda n: b"{" + b" " * n + b'"' + b"a" * n + b"\n",
    "samples of one series": lambda n: (NAME + b" 1\n") * (n // 20),
    "broken samples": lambda n: (NAME + b"{ 1\n") * (n // 20),
    "other series": lambda n: b"".join(NAME + b'{a="%d"} 1\n' % i for i in range(n // 40)),
    "engines": lambda n: b"".join(NAME + b'{engine="%d"} 1\n' % i for i in range(n // 40)),
    "bounds": lambda n: b"".join(
        b'vllm:request_prompt_tokens_bucket{le="%d"} 1\n' % i for i in range(n // 40)
    ),
}
SIZE = 40_000


def seconds(body: bytes) -> float:
    """The least process time of a few reads, each with nothing remembered."""
    best = float("inf")
    for _ in range(3):
        KNOWN.clear()
        start = time.process_time()
        Reader().read(body)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_reading_takes_time_linear_in_the_length(shape: Callable[[int], bytes]):
    """Eight times the bytes take about eight times as long; a quadratic reader would take 64 times."""
    for _ in range(3):  # another process may have been in the way
        short, long = seconds(shape(SIZE)), seconds(shape(8 * SIZE))
        if long <= 24 * max(short, 50e-6):
            return
    pytest.fail(f"{long:.6f} s for eight times what took {short:.6f} s")


def test_a_very_long_line_is_read_and_not_remembered():
    """What is remembered of series is bounded in size, not only in number."""
    KNOWN.clear()
    exposition = Reader().read(NAME + b'{a="' + b"x" * 300_000 + b'"} 3\n')
    (snapshot,) = exposition.engines.values()
    assert snapshot.values == {"requests_running": 3}
    assert not KNOWN


def test_a_line_of_a_megabyte_costs_only_itself():
    """To take it apart would need many times its size."""
    exposition = Reader().read(RUNNING + NAME + b'{a="' + b"x" * 1_000_000 + b'"} 3\n' + RUNNING)
    assert [snapshot.values for snapshot in exposition.engines.values()] == [{"requests_running": 3}]
    assert (exposition.dropped, exposition.unreadable) == (1, 0)


@pytest.mark.parametrize(("size", "pages"), [(10, 30), (1000, 12), (4000, 12)])
def test_what_is_remembered_of_series_is_bounded(size: int, pages: int):
    """A page of ever new series cannot fill the memory, be they many or long."""
    KNOWN.clear()
    reader = Reader()
    for page in range(pages):
        reader.read(b"".join(NAME + b'{a="%d-%d%s"} 1\n' % (page, i, b"x" * size) for i in range(1000)))
    assert 0 < len(KNOWN) <= 20_000
    assert sum(map(len, KNOWN)) + sum(len(series.source) for series in KNOWN.values()) <= 4_000_000
    KNOWN.clear()


def test_of_very_many_lines_the_first_are_read_and_the_others_counted():
    """No server has as many; the lines that are read say what they say."""
    exposition = Reader().read(RUNNING + b"vllm:num_requests_waiting 1_0\n" * 30_000 + RUNNING)
    assert [snapshot.values for snapshot in exposition.engines.values()] == [{"requests_running": 3}]
    assert (exposition.dropped, exposition.unreadable) == (10_002, 19_999)


def test_of_very_long_lines_only_some_are_read():
    """Two megabytes of them together; a short one behind them is read still."""
    long = NAME + b'{engine="%d",a="' + b"x" * 50_000 + b'"} 1\n'
    exposition = Reader().read(
        b"".join(long % engine for engine in range(100)) + b"vllm:num_preemptions_total 7\n"
    )
    assert exposition.dropped == 100 - 41
    assert len(exposition.engines) == 41
    assert exposition.engines[EngineKey("", "0")].values == {"requests_running": 1, "preemptions": 7}


def test_lines_that_are_left_out_are_counted_anew_on_each_page():
    """Also where what is read of it is as on the page before."""
    reader = Reader()
    for more in (5, 6, 0):
        assert reader.read(RUNNING * (20_000 + more)).dropped == more


@pytest.mark.long
def test_the_largest_body_takes_hardly_longer_than_a_quarter_of_it():
    """Beyond what a server may print only the ends of lines are sought."""
    line = NAME + b'{engine="%d",x="%d"} 1\n'
    quarter, whole = (b"".join(line % (k % 256, k) for k in range(n)) for n in (40_000, 160_000))
    for _ in range(3):  # another process may have been in the way
        short, long = seconds(quarter), seconds(whole)
        if long < 2 * short:
            return
    pytest.fail(f"{long:.3f} s for four times what took {short:.3f} s")


def test_a_full_memory_changes_no_result(monkeypatch):
    """Series that were forgotten are read anew."""
    body = b"".join(NAME + b'{engine="%d"} %d\n' % (i, i) for i in range(50))
    fresh = Reader().read(body)
    monkeypatch.setattr("exporter.vllm.series._KNOWN_LIMIT", 7)
    KNOWN.clear()
    assert Reader().read(body) == fresh
    assert Reader().read(body) == fresh


@pytest.mark.parametrize("size", [1_000, 2_000_000])
def test_a_page_without_samples_is_none_like_the_page_before(size: int):
    """Of a page that was too large to remember nothing stays, and of one that was remembered neither."""
    reader = Reader()
    for _ in range(2):
        (snapshot,) = reader.read(NAME + b" 3\n" + b"#" * size + b"\n").engines.values()
        assert snapshot.values == {"requests_running": 3}
        assert not reader.read(b"# nothing\n").engines


def test_the_lines_of_a_large_page_are_not_kept():
    """A hostile server's megabytes are not remembered beside what they mean."""
    reader = Reader()
    reader.read((NAME + b" 3\n") * 100_000)
    assert not reader._page.lines
    assert not reader._page.heads


def test_a_choice_between_processes_is_forgotten_with_its_engine():
    """What a reader keeps from poll to poll is bounded by what the last body held."""
    reader = Reader()
    for engine in range(50):
        reader.read(b"".join(NAME + b'{engine="%d",pid="%d"} 1\n' % (engine, pid) for pid in (7, 8)))
    assert len(reader._choices) == 1
