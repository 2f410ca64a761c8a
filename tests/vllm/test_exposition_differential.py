"""The reader says what prometheus-client's parsers say, on every recorded body and on generated ones."""

import itertools
import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from support.reference_reader import (
    EXPOSITIONS,
    RECORDINGS,
    VERSIONS,
    bodies,
    classic_samples,
    engines,
    exposition,
    openmetrics_samples,
)

from exporter.vllm import names
from exporter.vllm.exposition import KNOWN, Exposition, ExpositionError, Reader

FILES = sorted([*RECORDINGS.glob("*.gz"), *RECORDINGS.glob("*.txt"), *EXPOSITIONS.glob("*.txt.gz")])
RECORDED = [path for path in FILES if ".jsonl" in path.name]


def assert_same(ours: Exposition, samples) -> None:
    """Every value, bucket, distrust, duplicate and version that the reference finds, and no more."""
    theirs = engines(samples)
    assert set(ours.engines) == set(theirs)
    for key, expected in theirs.items():
        snapshot = ours.engines[key]
        assert dict(snapshot.values) == expected.values
        assert set(snapshot.untrusted) == expected.untrusted
        assert {reading: dict(counts) for reading, counts in snapshot.buckets.items()} == expected.buckets
        assert snapshot.duplicates == expected.duplicates
        assert snapshot.version == expected.version
    starts = [value for name, _, value in samples if name == names.START_TIME]
    assert ours.start_time == (starts[-1] if starts and 0 < starts[-1] < float("inf") else None)
    assert (ours.truncated, ours.unreadable, ours.dropped) == (False, 0, 0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_recorded_bodies_read_as_with_prometheus_client(path: Path):
    """All values of every tenth body of real servers, and of the last, are those of the reference."""
    recorded = list(bodies(path))
    for body in (*recorded[::10], recorded[-1]):
        assert_same(Reader().read(body), classic_samples(body))


@pytest.mark.long
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_every_recorded_body_reads_as_with_prometheus_client(path: Path):
    """All values of all bodies."""
    for body in bodies(path):
        assert_same(Reader().read(body), classic_samples(body))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_reader_that_has_seen_the_bodies_before_reads_the_same(path: Path):
    """Where no reading has two sources a used reader gives what a new one gives."""
    used = Reader()
    for body in bodies(path):
        fresh = Reader().read(body)
        if not any(snapshot.duplicates for snapshot in fresh.engines.values()):
            assert used.read(body) == fresh


# Lines that a page may have where the one before had another of them, or the same.
LIKE_BEFORE = [
    *(
        b"vllm:num_requests_running" + rest
        for rest in (
            b" 1", b" 2", b" 1 1700000000", b" 1 1700000001", b"  2", b" 2 ", b" \t2", b"\t2", b" 1_0", b" x",
            b" ", b"", b" NaN", b" 2 # 3", b"3", b'{engine="0"} 3', b'{engine="0",} 3', b'{engine="1"} 3',
            b'{engine="0"}3', b'{engine="0" 4',
        )
    ),
    b"vllm:num_requests_waiting 5", b" vllm:num_requests_waiting 6", b"vllm:other 7", b"# vllm:other 8", b"",
]  # fmt: skip


@given(st.lists(st.lists(st.sampled_from(LIKE_BEFORE), max_size=4), min_size=2, max_size=4))
def test_what_the_page_before_was_like_changes_nothing(pages: list[list[bytes]]):
    """A reader that expects the last page's series finds the same as one that expects nothing."""
    used = Reader()
    for lines in pages:
        body = b"".join(line + b"\n" for line in lines)
        fresh, again = Reader().read(body), used.read(body)
        assert again.unreadable == fresh.unreadable
        assert again.engines.keys() == fresh.engines.keys()
        if not any(snapshot.duplicates for snapshot in fresh.engines.values()):
            assert repr(again) == repr(fresh)  # NaN too


def test_each_line_after_each_other_changes_nothing():
    """Of the test above the pairs that matter come up rarely: here are all, with nothing else that changes.

    And nothing is remembered from one reading to the other, else both might be wrong.
    """
    rest = b"vllm:num_preemptions_total 1\n"
    for before, after in itertools.product(LIKE_BEFORE, repeat=2):
        used = Reader()
        KNOWN.clear()
        used.read(before + b"\n" + rest)
        again = [used.read(after + b"\n" + rest) for _ in range(2)]
        KNOWN.clear()
        fresh = Reader().read(after + b"\n" + rest)
        assert again == [fresh] * 2, f"{after!r} after {before!r}"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_order_of_lines_does_not_matter(version: str):
    """A shuffled text gives the same values, though a sum may differ in its last digit."""
    lines = [line for line in exposition(version).splitlines(keepends=True) if not line.startswith(b"#")]
    random.Random(version).shuffle(lines)
    assert Reader().read(b"".join(lines)).engines == Reader().read(exposition(version)).engines


# What can stand in a label value, with what a careless reader stumbles over in front.
AWKWARD = '"\\\n{},#= \t\r}é\u2028\U0001f600ab0'
label_values = st.one_of(
    st.sampled_from(
        ["", "a", "0", "1", "demo-7b", 'a "b" {c="d"} 5', "\\", "\\n", "} 1 # {", "org/model:v1"]
    ),
    st.text(alphabet=AWKWARD, max_size=8),
)
NUMBERS = [
    "0", "0.0", "-0.0", "1", "1.0", "5", "+5", ".5", "5.", "0.97", "97.0", "-38.75", "1.0000001", "1e0",
    "1E+3", "1.7959e+09", "1e-320", "1e400", "123456789012345678901234567890", "NaN", "nan", "+Inf", "-Inf",
    "Inf", "inf",
]  # fmt: skip
numbers = st.one_of(st.sampled_from(NUMBERS), st.floats().map(repr), st.integers(0, 10**20).map(str))
blanks = st.sampled_from(["", "", "", " ", "  ", "\t", " \t "])
gaps = st.sampled_from([" ", " ", " ", "  ", "\t", " \t "])
ends = st.sampled_from(["\n", "\n", "\r\n", " \n", "\n\n", "\n \t\n"])


def quoted(value: str) -> str:
    """A label value as both formats write it."""
    return '"' + value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') + '"'


identities = st.fixed_dictionaries(
    {},
    optional={
        "model_name": st.sampled_from(["m", 'a"b', ""]),
        "model": st.sampled_from(["m", "t"]),
        "engine": st.sampled_from(["0", "1", ""]),
        "ReplicaId": st.sampled_from(["r1", "r2"]),
    },
)
processes = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"pid": st.sampled_from(["7", "8"])}),
    st.fixed_dictionaries({"finished_reason": st.sampled_from(["stop", "length"])}),
    st.fixed_dictionaries({}, optional={"WorkerId": label_values, "_x9": label_values}),
)


@st.composite
def labels_for(draw, row: names.Name, known: list[dict[str, str]]):
    """Labels that name one of the `known` engines, some that tell processes apart, and the row's own."""
    labels = draw(st.sampled_from(known)) | draw(processes)
    if row.kind == "buckets":
        labels |= draw(
            st.sampled_from([{"le": bound} for bound in ("1.0", "1", "5.0", "1e3", "+Inf", "NaN")] + [{}])
        )
    if row.label:
        labels[row.label] = draw(st.sampled_from([row.value, row.value, "other"]))
    return labels


@st.composite
def classic_lines(draw, rows: list[names.Name], known: list[dict[str, str]]):
    """One line of the classic format: a sample of one of `rows` in any spelling, or something else."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        text = draw(st.text(alphabet=AWKWARD.replace("\n", "").replace('"', ""), max_size=20))
        return f"# HELP vllm:{draw(st.sampled_from(names.NAMES)).name} {text} vllm:num_preemptions_total 7\n"
    if kind == 1:
        return draw(
            st.sampled_from(["# a comment\n", "#\n", "\n", " \n", "other_total 5\n", 'up{a="\\"} 1"} 0\n'])
        )
    if kind == 2:
        return f"{names.START_TIME} {draw(numbers)}\n"
    row = draw(st.sampled_from(rows))
    name = draw(st.sampled_from(names.PREFIXES)) + draw(st.sampled_from(names.spellings(row)))
    labels = draw(labels_for(row, known))
    block, gap = "", draw(gaps)
    if labels or draw(st.booleans()):
        parts = []
        for label in draw(st.permutations(list(labels))):
            b = draw(blanks)
            parts.append(f"{b}{label}{draw(blanks)}={draw(blanks)}{quoted(labels[label])}{b}")
        comma = draw(st.sampled_from(["", ","])) if parts else ""
        block, gap = (
            draw(blanks) + "{" + ",".join(parts) + comma + draw(blanks) + "}",
            draw(st.one_of(gaps, blanks)),
        )
    # A blank ends the number where there is one, so blanks and tabs are not mixed after the labels.
    stamp = draw(st.sampled_from(["", "", f" {draw(st.integers(0, 2 * 10**12))}"]))
    if stamp:
        gap = gap.replace("\t", " ")
    return f"{draw(blanks)}{name}{block}{gap}{draw(numbers)}{stamp}{draw(ends)}"


@st.composite
def classic_texts(draw):
    """Lines of few readings and engines, so that names, spellings and processes of a reading meet."""
    reading = draw(st.sampled_from(names.NAMES)).reading
    rows = [row for row in names.NAMES if row.reading == reading]
    known = draw(st.lists(identities, min_size=1, max_size=2))
    lines = draw(st.lists(classic_lines(rows, known), min_size=4, max_size=16))
    core = draw(st.lists(classic_lines(list(names.NAMES[:1]), known), min_size=1, max_size=4))
    return draw(st.permutations(lines + core))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(classic_texts())
def test_generated_classic_texts_read_as_with_prometheus_client(lines: list[str]):
    """Any prefix, spelling, label, blank, number and line end that the classic format allows."""
    body = "".join(lines).encode()
    assert_same(Reader().read(body), classic_samples(body))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(classic_texts(), classic_lines(list(names.NAMES), [{}]), st.integers(1, 40))
def test_a_last_line_that_is_cut_off_is_left_out(lines: list[str], last: str, cut: int):
    """Without its line feed a line says nothing: 0.9 may be the beginning of 0.95."""
    last = last.rstrip("\n")
    last = last[: max(1, len(last) - cut)]
    if "\n" in last or not last.strip():
        return
    whole = "".join(lines).encode()
    ours = Reader().read(whole + last.encode())
    assert ours.truncated == (not last.startswith("#"))
    assert ours.engines == Reader().read(whole).engines


def _families() -> list[tuple[str, str]]:
    """The table's rows as (type, family name) of the OpenMetrics dialect."""
    families = {}
    for row in names.NAMES:
        if row.kind == "gauge":
            families["gauge", row.name] = row
        elif row.kind == "created":
            families["counter", row.name.removesuffix("_created")] = row
        elif row.kind == "counter" and not row.name.endswith(("_sum", "_count")):
            families["counter", row.name] = row
        else:
            families["histogram", row.name.rpartition("_")[0]] = row
    return sorted(families)


FAMILIES = _families()
ROW_OF_FAMILY = {row.name: row for row in names.NAMES if row.label}
safe_values = st.text(alphabet='"\\\n{},#=é\u2028\U0001f600ab0 ', max_size=6)
exemplars = st.one_of(
    st.just(""),
    st.builds(
        ' # {{trace_id="{}"}} {}{}'.format,
        st.text(alphabet="ab0#-=", max_size=6),
        st.sampled_from(["1", "0.5"]),
        st.sampled_from(["", " 1795970636.17"]),
    ),
)


@st.composite
def openmetrics_groups(draw, kind: str, name: str, labels: dict[str, str]):
    """The lines of one family that share a label set."""
    stamp = draw(st.sampled_from(["", "", " 1795970636", " 1795970636.17"]))

    def line(suffix: str, value: str, exemplar: str = "", **more: str) -> str:
        block = ",".join(f"{label}={quoted(value)}" for label, value in (labels | more).items())
        return (
            f"{name}{suffix}{{{block}}} {value}{stamp}{exemplar}\n"
            if block
            else f"{name}{suffix} {value}{stamp}\n"
        )

    if kind == "gauge":
        return line("", draw(numbers))
    if kind == "counter":
        value = draw(st.sampled_from(["0", "7", "7.0", "1e3", "3.5", "+Inf"]))
        created = (
            line("_created", draw(st.sampled_from(["1795970669.38", "1.7e+09"])))
            if draw(st.booleans())
            else ""
        )
        return line("_total", value, draw(exemplars)) + created
    counts = sorted(draw(st.lists(st.integers(0, 10**6), min_size=3, max_size=3)))
    lines = [
        line("_bucket", spelling.format(count), draw(exemplars), le=bound)
        for bound, count, spelling in zip(
            ["1.0", "50.0", "+Inf"], counts, draw(st.permutations(["{}", "{}.0", "{}e0"])), strict=True
        )
    ]
    tail = [line("_count", f"{counts[-1]}.0"), line("_sum", draw(st.sampled_from(["0.0", "12.5", "1e6"])))]
    return "".join(lines + tail)


@st.composite
def openmetrics_bodies(draw):
    """A text as the OpenMetrics specification wants it, the strictness of its parser included."""
    text = ""
    for kind, family in draw(st.lists(st.sampled_from(FAMILIES), unique=True, max_size=8)):
        name = draw(st.sampled_from(names.PREFIXES)) + family
        text += f"# HELP {name} vllm:num_preemptions_total 5 {{#}}\n" if draw(st.booleans()) else ""
        text += f"# TYPE {name} {kind}\n"
        row = ROW_OF_FAMILY.get(family)
        own = {row.label: st.just(row.value)} if row else {}
        label_sets = st.fixed_dictionaries(
            {"model_name": st.sampled_from(["m", "n"]), **own},
            optional={
                "engine": st.sampled_from(["0", "1"]),
                "ReplicaId": st.sampled_from(["r1"]),
                "pid": safe_values,
            },
        )
        groups = draw(
            st.lists(label_sets, min_size=1, max_size=3, unique_by=lambda labels: str(sorted(labels.items())))
        )
        for labels in groups:
            text += draw(openmetrics_groups(kind, name, labels))
    return (text + "# EOF\n").encode()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(openmetrics_bodies())
def test_generated_openmetrics_texts_read_as_with_prometheus_client(body: bytes):
    """Exemplars, timestamps in seconds, ``_created`` and the end mark of the other dialect."""
    assert_same(Reader().read(body), openmetrics_samples(body))


def mutations(body: bytes):
    """Real bodies with slices deleted, doubled, flipped, overwritten or moved."""
    spots = st.integers(0, len(body))
    edit = st.tuples(st.sampled_from("dxfoc"), spots, st.integers(1, 200), st.binary(min_size=1, max_size=8))

    def apply(edits) -> bytes:
        text = body
        for what, at, size, noise in edits:
            piece = text[at : at + size]
            middle = {
                "d": b"",
                "x": piece * 2,
                "f": bytes(byte ^ noise[0] for byte in piece),
                "o": noise,
                "c": None,
            }[what]
            text = text[:at] if middle is None else text[:at] + middle + text[at + size :]
        return text

    return st.lists(edit, min_size=1, max_size=6).map(apply)


@pytest.mark.parametrize("name", ["0.26.0-idle.txt", "0.32.0-idle.txt"])
def test_damaged_bodies_raise_nothing_but_the_own_error(name: str):
    """Whatever happens to a body on its way, reading it ends in a result or in `ExpositionError`."""
    body = (RECORDINGS / name).read_bytes()[:20_000]

    @settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(mutations(body))
    def check(text: bytes) -> None:
        _read_or_refuse(text)

    check()


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=400), st.sampled_from([b"", b"vllm:num_preemptions", b'vllm:kv_cache_usage_perc{a="'])
)
def test_arbitrary_bytes_raise_nothing_but_the_own_error(noise: bytes, start: bytes):
    """Also where the noise follows what looks like a sample."""
    _read_or_refuse(noise)
    _read_or_refuse(start + noise.replace(b"\0", b"") + b"\n")


def _read_or_refuse(text: bytes) -> None:
    try:
        Reader().read(text)
    except ExpositionError:
        return
