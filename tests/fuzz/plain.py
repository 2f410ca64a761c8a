"""The plain lines of a body: those of which it is known without a reader what they say.

They are what the reader is held against prometheus-client on. Of other lines both may think as they like:
that one cuts lines at other characters, looks for numbers in other places, and takes words in braces that are
no labels.
"""

import re
from collections.abc import Iterable

from support.reference_reader import Engine, classic_samples, engines

from exporter.vllm import names
from exporter.vllm.exposition import Exposition, Reader
from exporter.vllm.series import MOST_CHARACTERS

# prometheus-client takes no label that begins with two underscores.
_LABEL = rb'(?!__)[a-zA-Z_][a-zA-Z0-9_]*="[^"\\{}\x00-\x1f\x7f-\xff]{0,%d}"' % MOST_CHARACTERS
_NUMBER = rb'[^ \t#{}"\x00-\x1f\x7f-\xff]{1,60}'
_LINE = re.compile(
    rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:%(label)s(?:,%(label)s)*,?)?)\})?[ \t]+(%(number)s)"
    rb"(?:[ \t]+(%(number)s))?(?:[ \t]+#(?: [^\x00-\x1f\x7f-\xff]*)?)?[ \t]*\r?"
    % {b"label": _LABEL, b"number": _NUMBER}
)
_LABEL_NAME = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="[^"]*"')
_OURS = frozenset(
    prefix.encode() + spelling.encode()
    for prefix in names.PREFIXES
    for spelling in (
        names.CACHE_CONFIG,
        names.LORA_INFO,
        *(spelling for row in names.NAMES for spelling in names.spellings(row)),
    )
) | {names.START_TIME.encode()}


def differ(body: bytes) -> str:
    """What the reader and prometheus-client say differently of the plain lines of a body; empty if nothing.

    A line that has a label twice, or a number with an underscore in it, is to cost only itself.
    """
    plain, readable, refused = _plain(body)
    ours = Reader().read(b"".join(line + b"\n" for line in plain))
    if ours.dropped or ours.truncated:
        return ""
    if ours.unreadable != refused:
        return f"{ours.unreadable} unreadable lines where {refused} are none of the format"
    theirs = engines(classic_samples(b"".join(line + b"\n" for line in readable)))
    if set(ours.engines) != set(theirs):
        return f"engines {set(ours.engines)}, with prometheus-client {set(theirs)}"
    return "; ".join(_engines_differ(ours, theirs))


def _engines_differ(ours: Exposition, theirs: dict[tuple[str, str, str], Engine]) -> Iterable[str]:
    for key, engine in ours.engines.items():
        expected = theirs[key]
        for what, one, other in (
            ("values", engine.values, expected.values),
            ("untrusted", set(engine.untrusted), expected.untrusted),
            ("buckets", engine.buckets, expected.buckets),
            ("duplicates", engine.duplicates, expected.duplicates),
        ):
            if one != other:
                yield f"{what} {one}, with prometheus-client {other}"


def _plain(body: bytes) -> tuple[list[bytes], list[bytes], int]:
    """The plain lines; what is left of those that are to be read; how many lines of ours are not."""
    plain, readable, refused = [], [], 0
    for line in body.split(b"\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name, labels, value, stamp = match.groups()
        plain.append(line)
        if _twice(labels or b"") or not _is_number(value) or not _is_number(stamp or b"0"):
            refused += name in _OURS
        else:
            readable.append(name + (b"" if labels is None else b"{" + labels + b"}") + b" " + value)
    return plain, readable, refused


def _twice(labels: bytes) -> bool:
    found = _LABEL_NAME.findall(labels)
    return len(found) > len(set(found))


def _is_number(text: bytes) -> bool:
    try:
        return b"_" not in text and float(text) is not None
    except ValueError:
        return False
