"""The table of names agrees with itself and with what vLLM's releases print, and it is the only one."""

import ast
import functools
from collections import Counter
from itertools import pairwise
from pathlib import Path

from support.reference_reader import VERSIONS, Sample, classic_samples, exposition

import exporter
from exporter.vllm import names
from exporter.vllm.exposition import Reader

PACKAGE = Path(exporter.__file__).parent

# Rows that no text shows: their metrics come with a KV connector, and the texts were printed without one.
CONNECTOR_ONLY = {
    "nixl_num_kv_expired_reqs",
    "nixl_num_failed_transfers",
    "mooncake_num_kv_expired_reqs",
    "mooncake_num_failed_transfers",
    "kv_offload_load_bytes",
    "kv_offload_total_bytes",
    "kv_offload_load_time",
    "kv_offload_total_time",
}

# The release that the reader takes each text to be at least of. Where that is an older one, nothing
# that the table knows is new in the release itself.
GUESSES = {
    "0.10.2": (0, 10, 2), "0.11.2": (0, 11), "0.12.0": (0, 11), "0.13.0": (0, 11), "0.14.1": (0, 11),
    "0.15.1": (0, 15), "0.16.0": (0, 16), "0.17.1": (0, 16), "0.18.1": (0, 18), "0.19.1": (0, 19),
    "0.20.2": (0, 20), "0.21.0": (0, 20), "0.22.1": (0, 20), "0.23.0": (0, 20), "0.24.0": (0, 24),
    "0.25.1": (0, 25), "0.26.0": (0, 26), "0.27.1": (0, 27), "0.28.0": (0, 27), "0.29.0": (0, 29),
    "0.30.0": (0, 30), "0.31.0": (0, 31), "0.32.0": (0, 32), "0.33.0": (0, 33),
}  # fmt: skip


@functools.cache
def samples(version: str) -> list[Sample]:
    """All samples of a release."""
    return classic_samples(exposition(version))


def printed(version: str) -> set[str]:
    """The names of all samples of a release, without prefix."""
    return {name.removeprefix("vllm:") for name, _, _ in samples(version)}


def cache_labels(version: str) -> set[str]:
    """The labels of a release's cache configuration."""
    (labels,) = [set(labels) for name, labels, _ in samples(version) if name == "vllm:" + names.CACHE_CONFIG]
    return labels


def in_time(row: names.Name, version: str) -> bool:
    """Whether the table says that a release has a name; ``until`` means a whole minor release."""
    key, last = names.version_key(version), names.version_key(row.until)
    return names.version_key(row.since) <= key and (not row.until or key[: len(last)] <= last)


# The table and itself.


def test_no_name_stands_twice():
    """One row per name and label value."""
    twice = [
        key for key, n in Counter((row.name, row.label, row.value) for row in names.NAMES).items() if n > 1
    ]
    assert twice == []


def test_no_spelling_of_one_row_is_a_name_of_another():
    """Otherwise one series would be two readings."""
    spelt = Counter((word, row.label, row.value) for row in names.NAMES for word in names.spellings(row))
    assert [key for key, n in spelt.items() if n > 1] == []


def test_all_names_of_a_reading_are_of_one_kind_and_range():
    """A reading does not change its nature with its name."""
    natures: dict[str, set] = {}
    for row in names.NAMES:
        natures.setdefault(row.reading, set()).add((row.kind, row.most))
    assert [reading for reading, found in natures.items() if len(found) > 1] == []


def test_rows_of_a_reading_stand_together_newest_name_first():
    """Their order is their priority."""
    readings = [row.reading for row in names.NAMES]
    assert len([a for a, b in pairwise([*readings, ""]) if a != b]) == len(set(readings))
    for earlier, later in pairwise(names.NAMES):
        if earlier.reading == later.reading and earlier.kind != "created" and later.until:
            assert names.version_key(earlier.since) >= names.version_key(later.since)


def well_formed(row: names.Name) -> bool:
    """No prefix, no ``_total``; a label has its value; releases in order; endings of their kind only."""
    return (
        not row.name.startswith(names.PREFIXES)
        and not row.name.endswith("_total")
        and bool(row.label) == bool(row.value)
        and (not row.until or names.version_key(row.since) <= names.version_key(row.until))
        and (row.kind == "created") == row.name.endswith("_created")
        and (row.kind == "buckets") == row.name.endswith("_bucket")
    )


def test_rows_are_written_as_the_reader_needs_them():
    """Every row of the table."""
    assert [row for row in names.NAMES if not well_formed(row)] == []


def test_core_readings_exist():
    """A core reading without a row would be an engine's that nobody has."""
    assert {row.reading for row in names.NAMES} >= names.CORE


def test_releases_are_ordered_by_number():
    """Not by text; what is no number counts as 0."""
    assert names.version_key("0.9") < names.version_key("0.10.2") < names.version_key("0.11")
    assert names.version_key("0.26.0rc1") == (0, 26, 0)
    assert names.version_key("0.\u00b2") == (0, 0)


# The table and the releases.


def test_texts_of_all_releases_are_there():
    """From the last that still had V0 to the newest."""
    assert list(GUESSES) == VERSIONS


def has_row(version: str, row: names.Name) -> bool:
    """Whether a release prints a row's name in any spelling, with the label value that the row wants."""
    return any(
        name.removeprefix("vllm:") in names.spellings(row) and labels.get(row.label, "") == row.value
        for name, labels, _ in samples(version)
    )


def test_a_name_is_printed_by_the_releases_from_since_to_until_and_by_no_other():
    """Every row but those of connectors, in every release."""
    checked = [row for row in names.NAMES if row.name not in CONNECTOR_ONLY]
    wrong = [
        (version, row)
        for version in VERSIONS
        for row in checked
        if has_row(version, row) != in_time(row, version)
    ]
    assert wrong == []


def test_names_of_connectors_are_in_no_text():
    """Otherwise they would be no exceptions and their releases could be checked."""
    words = {word for version in VERSIONS for word in printed(version)}
    assert [word for word in words if word.startswith(tuple(CONNECTOR_ONLY))] == []


def test_a_cache_label_that_tells_a_release_is_in_no_older_one():
    """And its first release has it, where that is not older than the texts; later releases may drop it."""
    labels = {version: cache_labels(version) for version in VERSIONS}
    wrong = []
    for label, since in names.CACHE_LABEL_SINCE.items():
        having = [version for version in VERSIONS if label in labels[version]]
        later = [version for version in VERSIONS if names.version_key(version) >= names.version_key(since)]
        if not having or having != later[: len(having)]:
            wrong.append((label, since, having))
    assert wrong == []


def newest_sign(version: str) -> tuple[int, ...]:
    """The release of the newest name or label that a text shows."""
    shown = [
        *(row.since for row in names.NAMES if printed(version).intersection(names.spellings(row))),
        *(names.CACHE_LABEL_SINCE.get(label, "0") for label in cache_labels(version)),
    ]
    return max(map(names.version_key, shown))


def test_the_guess_of_the_release_is_a_lower_bound():
    """Never newer than the server, and as new as the newest name or label that it shows."""
    guesses = {
        version: snapshot.version
        for version in VERSIONS
        for snapshot in Reader().read(exposition(version)).engines.values()
    }
    assert guesses == GUESSES == {version: newest_sign(version) for version in VERSIONS}
    assert [version for version, guess in guesses.items() if guess > names.version_key(version)] == []


def test_every_release_has_the_core_readings():
    """And its KV usage under the name that counts."""
    wrong = [
        (version, names.CORE - set(snapshot.values), snapshot.untrusted)
        for version in VERSIONS
        for snapshot in Reader().read(exposition(version)).engines.values()
        if snapshot.untrusted or not set(snapshot.values) >= names.CORE
    ]
    assert wrong == []


# The wall around the table.

# Where a name stands as a word that people read, not as something to look for in a body.
SHOWN = {
    "analysis/server_facts.py": {names.CACHE_CONFIG},  # the name of a source of facts
    "publish/page/renderer.py": {names.START_TIME},  # of the exporter's own process
}


def _is_vllm_name(text: str) -> bool:
    """Whether a string is a name of the table in any spelling; our own words for readings are none."""
    bare = text
    for prefix in names.PREFIXES:
        bare = bare.removeprefix(prefix)
    if bare == text and text in {row.reading for row in names.NAMES}:
        return False
    spelt = {word for row in names.NAMES for word in (*names.spellings(row), row.name)}
    return bare in spelt | {names.CACHE_CONFIG, names.LORA_INFO, names.START_TIME} or text in names.PREFIXES


def vllm_names(path: Path) -> list[tuple[int, str]]:
    """The strings of a module that are names of vLLM's, with their lines; a sentence may mention one."""
    shown = SHOWN.get(path.relative_to(PACKAGE).as_posix(), set())
    strings = [
        (node.lineno, node.value if isinstance(node.value, str) else node.value.decode("latin-1"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    ]
    return [(line, text) for line, text in strings if _is_vllm_name(text.strip("{ \n")) and text not in shown]


def test_a_vllm_name_stands_only_in_the_table():
    """No other module has a string that is one."""
    modules = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "vllm" / "names.py"})
    assert {path: found for path in modules if (found := vllm_names(path))} == {}
