"""Recordings: written, read, broken on purpose."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from exporter.vllm.recording import Header, Poll, RecordingError, Writer, read

RECORDINGS = Path(__file__).parents[1] / "recordings"
EXPOSITIONS = Path(__file__).parents[1] / "expositions"
HEADER = Header(
    case="a case",
    interval=0.5,
    config={"max_num_seqs": 64},
    probes={"/health": 200},
    arguments={"watermark": 0.1},
)
SAMPLE_POLLS = [
    Poll(0.0, b'vllm:num_requests_running{engine="0"} 1.0\n', content_type="text/plain; version=0.0.4"),
    Poll(0.5, error="connection_refused"),
    Poll(1.25, b""),
]


def write(path, polls, header=HEADER, **options):
    """Write a recording and return its path."""
    with Writer(path, header, **options) as writer:
        for poll in polls:
            writer.write(poll)
    return path


def read_until_broken(path):
    """Return what could be read and the error that ended it, or None."""
    found = []
    try:
        for value in read(path):
            found.append(value)  # noqa: PERF402 - extend() would lose what came before the error
    except RecordingError as error:
        return found, error
    return found, None


def lines_in(text):
    """Return how many lines of the bytes are whole."""
    return text.count(b"\n")


# ---- round trips


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.jsonl"])
def test_what_is_written_is_read_back(tmp_path, name):
    """A header and polls come back equal, from a gzipped and from a plain file."""
    assert list(read(write(tmp_path / name, SAMPLE_POLLS))) == [HEADER, *SAMPLE_POLLS]


def test_the_name_decides_about_compression_and_the_content_about_reading(tmp_path):
    """Only a path in `.gz` is gzipped, and a gzipped file is read whatever its name."""
    plain = write(tmp_path / "r.jsonl", SAMPLE_POLLS).read_bytes()
    packed = write(tmp_path / "r.jsonl.gz", SAMPLE_POLLS).read_bytes()
    assert gzip.decompress(packed) == plain
    (tmp_path / "renamed").write_bytes(packed)
    assert list(read(tmp_path / "renamed")) == [HEADER, *SAMPLE_POLLS]


bodies = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")),
    st.sampled_from(
        [b"\xed\xa0\xbd\xed\xb8\x80", "\U0001f600".encode() + b"\x80", b"\r\n\0\x1f\x8b", b"\xff" * 9]
    ),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
recorded = st.tuples(
    st.builds(
        Header,
        case=st.text(),
        interval=st.floats(min_value=0.01, max_value=1e6),
        config=st.dictionaries(st.text(), json_values, max_size=3),
        probes=st.dictionaries(st.text(), json_values, max_size=3),
    ),
    st.lists(
        st.one_of(
            st.builds(Poll, st.just(0.0), body=bodies, content_type=st.text(max_size=20)),
            st.builds(Poll, st.just(0.0), error=st.text(min_size=1, max_size=20)),
        ),
        max_size=6,
    ),
    st.lists(st.floats(min_value=-1e9, max_value=1e9), min_size=6, max_size=6).map(sorted),
)


@given(recorded, st.sampled_from([".jsonl", ".jsonl.gz"]))
@settings(max_examples=60, deadline=None)
def test_any_recording_comes_back_byte_for_byte(tmp_path_factory, recording, suffix):
    """Whatever the bytes of a body, UTF-8 or not, what is read equals what was recorded."""
    header, polls, times = recording
    polls = [Poll(t, poll.body, poll.error, poll.content_type) for t, poll in zip(times, polls, strict=False)]
    path = tmp_path_factory.mktemp("r") / f"r{suffix}"
    assert list(read(write(path, polls, header))) == [header, *polls]


def test_a_file_holds_nothing_of_the_machine(tmp_path):
    """Neither the file's name nor the time stands in the gzip header, so equal recordings are equal files."""
    one = write(tmp_path / "one.jsonl.gz", SAMPLE_POLLS).read_bytes()
    assert one == write(tmp_path / "two.jsonl.gz", SAMPLE_POLLS).read_bytes()
    assert b"one" not in one


# ---- the writer


def test_an_existing_file_is_kept(tmp_path):
    """The writer refuses to overwrite, and leaves the file as it was."""
    path = write(tmp_path / "r.jsonl.gz", SAMPLE_POLLS)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Writer(path, HEADER)
    assert path.read_bytes() == before


def test_force_overwrites(tmp_path):
    """With `force` the old recording makes room for the new one."""
    path = write(tmp_path / "r.jsonl.gz", SAMPLE_POLLS)
    write(path, SAMPLE_POLLS[:1], force=True)
    assert list(read(path)) == [HEADER, SAMPLE_POLLS[0]]


def test_a_header_that_cannot_be_written_leaves_no_file(tmp_path):
    """The header is encoded before the file is made."""
    with pytest.raises(TypeError):
        Writer(tmp_path / "r.jsonl.gz", Header("a", config={"a": object()}))
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_harmless(tmp_path):
    """A second `close` does nothing."""
    writer = Writer(tmp_path / "r.jsonl", HEADER)
    writer.close()
    writer.close()


def test_a_full_disk_is_an_os_error():
    """What the file system refuses is said by OSError, and not later than at the write that it concerns."""
    with pytest.raises(OSError, match="No space left"):
        Writer("/dev/full", HEADER, force=True)


def test_each_poll_is_on_file_before_write_returns(tmp_path):
    """A reader sees every poll while the writer is still at it."""
    path = tmp_path / "r.jsonl.gz"
    with Writer(path, HEADER) as writer:
        assert list(read(path)) == [HEADER]
        writer.write(SAMPLE_POLLS[0])
        assert list(read(path)) == [HEADER, SAMPLE_POLLS[0]]


KILLED_WRITER = """
import itertools, sys
from exporter.vllm.recording import Header, Poll, Writer
writer = Writer(sys.argv[1], Header("killed"))
for number in itertools.count(1):
    writer.write(Poll(float(number), b"%d " % number * 5000))
    print(number, flush=True)
"""


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.jsonl"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_a_killed_writer_leaves_all_it_had_written(tmp_path, name, how):
    """`kill -9` and Ctrl-C in the middle of writing cost at most the line that was being written."""
    path = tmp_path / name
    command = [sys.executable, "-c", KILLED_WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        while int(child.stdout.readline()) < 20:
            pass
        child.send_signal(how)
        said = child.stdout.read().split()
    written = int(said[-1]) if said else 20

    found, error = read_until_broken(path)

    assert [poll.t for poll in found[1:]][:written] == [float(number) for number in range(1, written + 1)]
    assert found[-1].body == b"%d " % (len(found) - 1) * 5000
    assert error is None or error.line == len(found) + 1


# ---- broken files


@pytest.fixture(scope="module")
def packed():
    """Return a real recording, as one long gzip member."""
    return (RECORDINGS / "0.26.0-two-engines.jsonl.gz").read_bytes()


def test_a_gzip_file_cut_off_anywhere_gives_all_that_was_readable(tmp_path, packed):
    """At every 1000th byte: each line that can be unzipped is yielded, then the error names the next one."""
    whole = list(read(RECORDINGS / "0.26.0-two-engines.jsonl.gz"))
    path = tmp_path / "cut.jsonl.gz"
    for length in range(1000, len(packed), 1000):
        path.write_bytes(packed[:length])
        readable = lines_in(zlib.decompressobj(31).decompress(packed[:length]))
        found, error = read_until_broken(path)
        assert found == whole[:readable]
        assert error.line == readable + 1
        assert "cut off" in str(error)


def test_a_recording_of_ours_cut_off_anywhere_gives_all_that_was_readable(tmp_path):
    """The same for a file of many gzip members, at every byte; between two members nothing is missing."""
    whole = write(tmp_path / "whole.jsonl.gz", SAMPLE_POLLS).read_bytes()
    expected = [HEADER, *SAMPLE_POLLS]
    path = tmp_path / "cut.jsonl.gz"
    between = 0
    for length in range(2, len(whole)):
        path.write_bytes(whole[:length])
        found, error = read_until_broken(path)
        assert found == expected[: len(found)]
        assert error is None or error.line == len(found) + 1
        between += error is None
    assert between == len(expected) - 1


def test_a_flipped_byte_in_a_gzip_file_costs_nothing_before_it(tmp_path, packed):
    """Broken data in the middle are met byte by byte: the lines before them are all there."""
    whole = list(read(RECORDINGS / "0.26.0-two-engines.jsonl.gz"))
    path = tmp_path / "broken.jsonl.gz"
    for position in range(5000, len(packed), 10_000):
        path.write_bytes(packed[:position] + bytes([packed[position] ^ 0xFF]) + packed[position + 1 :])
        before = lines_in(zlib.decompressobj(31).decompress(packed[:position]))
        found, error = read_until_broken(path)
        assert found[:before] == whole[:before]
        assert error is not None
        assert error.line > before


def test_a_wrong_check_sum_is_said_after_everything(tmp_path):
    """A file whose text is whole but whose check sum is not gives all polls, then the error."""
    data = gzip.compress(write(tmp_path / "r.jsonl", SAMPLE_POLLS).read_bytes())
    path = tmp_path / "sum.jsonl.gz"
    path.write_bytes(data[:-8] + b"\0\0\0\0" + data[-4:])
    found, error = read_until_broken(path)
    assert found == [HEADER, *SAMPLE_POLLS]
    assert error.line == 5


def test_padding_behind_a_gzip_file_is_no_fault(tmp_path):
    """Zero bytes after the last member are ignored, as gzip does."""
    path = write(tmp_path / "r.jsonl.gz", SAMPLE_POLLS)
    path.write_bytes(path.read_bytes() + b"\0" * 100_000)
    assert list(read(path)) == [HEADER, *SAMPLE_POLLS]


def test_garbage_behind_a_gzip_file_is_an_error(tmp_path):
    """Anything else after the last member is not silently dropped."""
    path = write(tmp_path / "r.jsonl.gz", SAMPLE_POLLS)
    path.write_bytes(path.read_bytes() + b"garbage")
    found, error = read_until_broken(path)
    assert found == [HEADER, *SAMPLE_POLLS]
    assert "broken data" in str(error)


GOOD_HEADER = '{"case": "a", "interval": 1, "config": {}, "probes": {}}'
GOOD_POLL = '{"t": 1, "body": "x"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"t": 2, "bo', 'expected a JSON object, got b\'{"t": 2, "bo\' (unterminated string'),
        ("\xff", "expected a JSON object"),
        ("[1]", "expected a JSON object, got [1]"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"t": 1' + "0" * 5000 + "}", "expected a JSON object"),
        ('{"t": NaN, "body": ""}', "NaN is not JSON"),
        ('{"body": ""}', "expected a number as t, got None"),
        ('{"t": "2", "body": ""}', "expected a number as t, got '2'"),
        ('{"t": true, "body": ""}', "expected a number as t, got True"),
        ('{"t": 1' + "0" * 400 + ', "body": ""}', "expected a number as t"),
        ('{"t": 1e999, "body": ""}', "expected a finite time t, got inf"),
        ('{"t": 0.5, "body": ""}', "expected a t of 1.0 or more, got 0.5"),
        ('{"t": 2}', "expected either a body or an error, got neither"),
        ('{"t": 2, "error": ""}', "expected either a body or an error, got neither"),
        ('{"t": 2, "body": "", "error": "timeout"}', "expected either a body or an error, got both"),
        ('{"t": 2, "body": 5}', "expected a text as body, got 5"),
        ('{"t": 2, "error": 503}', "expected a text as error, got 503"),
        ('{"t": 2, "body": "", "content_type": []}', "expected a text as content_type, got []"),
        ('{"t": 2, "body": "\\ud800"}', "expected a body that stands for bytes"),
        (GOOD_HEADER, "expected a number as t, got None"),
    ],
)
def test_a_broken_line_is_named_after_all_before_it(tmp_path, line, message):
    """The polls before the broken line are yielded, then the error says its number and what was expected."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(f"{GOOD_HEADER}\n{GOOD_POLL}\n\n{line}\n{GOOD_POLL}\n".encode("latin-1"))
    found, error = read_until_broken(path)
    assert found == [Header("a"), Poll(1.0, b"x")]
    assert error.line == 4
    assert str(error).startswith("line 4: expected ") or "is not JSON" in str(error)
    assert message in str(error)
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "expected a recording's header, got an empty file"),
        (GOOD_POLL, "expected a recording's header with a case"),
        ('{"case": 1, "interval": 1}', "expected a text as case, got 1"),
        ('{"case": "a"}', "expected a number as interval, got None"),
        ('{"case": "a", "interval": 0}', "expected an interval above 0 s, got 0.0"),
        ('{"case": "a", "interval": 1, "config": []}', "expected an object as config, got []"),
        ('{"case": "a", "interval": 1, "probes": "x"}', "expected an object as probes, got 'x'"),
        ("# HELP vllm:num_requests_running", "expected a JSON object"),
    ],
)
def test_a_bad_header_is_line_1(tmp_path, line, message):
    """Nothing is yielded from a file that is no recording."""
    path = tmp_path / "r.jsonl"
    path.write_text(line)
    found, error = read_until_broken(path)
    assert found == []
    assert error.line == 1
    assert message in str(error)


def test_unknown_keys_are_ignored(tmp_path):
    """A recording of a later version of this program is read as far as this one understands it."""
    path = tmp_path / "r.jsonl"
    path.write_text(
        GOOD_HEADER.replace("{", '{"new": 1, ', 1) + "\n" + GOOD_POLL.replace("{", '{"new": 1, ', 1)
    )
    assert list(read(path)) == [Header("a"), Poll(1.0, b"x")]


def test_a_missing_file_is_an_os_error(tmp_path):
    """What concerns the file itself stays what it is."""
    with pytest.raises(FileNotFoundError):
        next(read(tmp_path / "none"))


@given(st.binary(max_size=300), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_bytes_raise_anything_else(tmp_path_factory, data, zipped, headed):
    """Random bytes, random bytes behind a header, and both zipped end well or in a RecordingError."""
    content = (GOOD_HEADER + "\n").encode() * headed + data
    path = tmp_path_factory.mktemp("r") / "r"
    path.write_bytes(gzip.compress(content) if zipped else content)
    found, error = read_until_broken(path)
    assert error is not None or isinstance(found[0], Header)


# ---- memory


def test_reading_holds_one_poll_at_a_time(tmp_path):
    """A recording of 20 MB is read within a few bodies' memory."""
    path = write(tmp_path / "r.jsonl.gz", [Poll(float(t), b"x" * 50_000) for t in range(400)])
    tracemalloc.start()
    count = sum(1 for _ in read(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 401
    assert peak < 2_000_000


def test_a_line_without_end_is_given_up(tmp_path):
    """A gzip bomb without a newline stops at the longest line that a poll can make."""
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 70_000_000, 1))
    found, error = read_until_broken(path)
    assert found == []
    assert error.line == 1
    assert "bytes, got more" in str(error)


MANY = 200_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD_HEADER + '\n{"t": 0, "error": "x", "z": [' + "{}," * 6 * MANY + "{}]}", "few and plain values"),
        (GOOD_HEADER + '\n{"t": 0, "error": "x"' + ',"a":1' * MANY + "}", "few and plain values"),
        ('{"case": "a", "interval": 1, "z": [' + "{}," * 6 * MANY + "{}]}", "expected a header of at most"),
    ],
)
def test_a_small_file_cannot_make_much_memory(tmp_path, text, message):
    """Zipped these are some kilobytes, as Python's objects a hundred megabytes."""
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    tracemalloc.start()
    _, error = read_until_broken(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message in str(error)
    assert peak < 20_000_000


@pytest.mark.parametrize("line", ["\n", " " * MANY + "\n"], ids=["empty", "spaces"])
def test_a_small_file_cannot_make_much_work(tmp_path, line):
    """Blank lines compress a thousandfold."""
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(f"{GOOD_HEADER}\n{line * (7 * MANY // len(line))}{GOOD_POLL}\n".encode()))
    found, error = read_until_broken(path)
    assert found == [Header("a")]
    assert "nothing but blank lines" in str(error)


def test_polls_are_bounded(tmp_path, monkeypatch):
    """A million is eleven days at one per second."""
    monkeypatch.setattr("exporter.vllm.recording._MOST_POLLS", 3)
    polls = [Poll(float(t), b"x") for t in range(4)]
    assert read_until_broken(write(tmp_path / "three.jsonl", polls[:3]))[1] is None
    assert "at most 3 polls" in str(read_until_broken(write(tmp_path / "four.jsonl", polls))[1])


# ---- the test data


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.gz")), ids=lambda path: path.name)
def test_each_recording_here_is_whole(path):
    """Every recording reads to its end, its polls in time order, most of them with a body."""
    header, *polls = read(path)
    assert f"{header.case}.jsonl.gz" == path.name
    assert all(poll.body is None or poll.body.startswith(b"# HELP") for poll in polls)
    assert sum(poll.body is not None for poll in polls) >= 25


def test_each_file_here_is_explained():
    """The README names every recording."""
    text = (RECORDINGS / "README.md").read_text()
    files = [path.name for path in RECORDINGS.iterdir() if path.name != "README.md"]
    assert [name for name in files if f"`{name}`" not in text] == []


def test_the_data_stay_small():
    """A clone stays quick: recordings under 4.5 MB, expositions under 150 KB."""
    assert sum(path.stat().st_size for path in RECORDINGS.iterdir()) < 4_500_000
    assert sum(path.stat().st_size for path in EXPOSITIONS.iterdir()) < 150_000


def test_each_exposition_here_is_a_whole_body():
    """One body per version, readable by prometheus_client, from 0.10.2 to 0.33.0."""
    paths = sorted(EXPOSITIONS.glob("*.txt.gz"))
    assert len(paths) == 24
    for path in paths[:: len(paths) - 1]:
        assert any(
            s.name.startswith("vllm:")
            for s in text_string_to_metric_families(gzip.decompress(path.read_bytes()).decode())
        )


def test_the_json_is_plain_for_other_readers(tmp_path):
    """Any JSON reader can take a recording apart: each line is ASCII and an object."""
    path = write(tmp_path / "r.jsonl", [Poll(0.0, "é\U0001f600".encode() + b"\x80")])
    rows = [json.loads(line) for line in path.read_text("ascii").splitlines()]
    assert rows[1] == {"t": 0.0, "body": "é\U0001f600\udc80"}
