r"""Recordings: a file with a server's answers, poll by poll.

A recording has one JSON object per line, plain or gzipped. The first line is the header, the others are polls
in time order::

    {"case": "demo", "interval": 1.0, "config": {"max_num_seqs": 64}, "probes": {"/health": 200}}
    {"t": 0.0, "body": "# HELP ...\n...", "content_type": "text/plain; version=1.0.0"}
    {"t": 1.0, "error": "connection_refused"}

Bodies are bytes, which JSON lacks. They are decoded as UTF-8 with `surrogateescape` and written as ASCII, so
every body is read back byte for byte: a byte that is not UTF-8 becomes a lone surrogate in the file (0x80
becomes `\udc80`), which other JSON readers show as a replacement character.
"""

import gzip
import json
import math
import os
import re
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from exporter.config import as_number

__all__ = ["Header", "Poll", "RecordingError", "Writer", "read"]

_GZIP_MAGIC: Final = b"\x1f\x8b"
_MOST_SECONDS: Final = 1e12  # unix milliseconds fit in, and the difference of two times is finite
_GZIP_WBITS: Final = 31  # zlib's code for: with gzip's header and check sum
_BLOCK: Final = 64 * 1024
# A poll's largest body, 8 MiB, with each byte escaped: the bound on memory for a file without newlines.
_LONGEST_LINE: Final = 56 * 1024 * 1024
_LONGEST_HEADER: Final = 1024 * 1024
_MOST_BLANK: Final = 1024 * 1024  # bytes of blank lines
_MOST_POLLS: Final = 1_000_000  # eleven days of them
# A poll is an object without objects in it: a line of 50 MB of `{},{},...` would become 1.5 GB.
_STRING: Final = rb'"(?:[^"\\]++|\\.)*+"'
_FLAT: Final = re.compile(
    rb"\s*+\{(?:\s*+" + _STRING + rb"\s*+:\s*+(?:" + _STRING + rb"|[^\s\"\[\]{},]++)\s*+,?+){0,32}+\s*+\}\s*+"
)


class RecordingError(ValueError):
    """A recording cannot be read any further; every line before the one it names was readable."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line  # number of the line that could not be read, from 1


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a recording."""

    case: str  # a name for the recording
    interval: float = 1.0  # seconds between polls, as planned
    # Settings of the server that the operator gave, by vLLM's flag name.
    config: Mapping[str, Any] = field(default_factory=dict)
    # Answers of the server's other endpoints, by path.
    probes: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # settings from the server's argument line

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval) and self.interval > 0):
            raise ValueError(f"expected an interval above 0 s, got {self.interval}")


@dataclass(frozen=True, slots=True)
class Poll:
    """One poll: either a body or the reason why there is none."""

    t: float  # seconds, from any origin
    body: bytes | None = None  # of an answer with status 200, or None
    error: str | None = None  # reason of the failure in one word ("timeout", "http_503"), or None
    content_type: str = ""  # of the body; "" if it was not recorded

    def __post_init__(self) -> None:
        if not abs(self.t) <= _MOST_SECONDS:
            raise ValueError(f"expected a finite time t, got {self.t}")
        if (self.body is None) == (not self.error):
            got = "neither" if self.body is None else "both"
            raise ValueError(f"expected either a body or an error, got {got}")


# ---- reading


def read(path: str | os.PathLike[str]) -> Iterator[Header | Poll]:
    """Yield a recording's header, then its polls, without holding the whole file in memory.

    Blank lines and unknown keys with plain values are ignored, within bounds on memory and on polls.

    Raises:
        RecordingError: after everything readable, if the file is cut off, broken or has another form.
        OSError: the file itself cannot be opened or read (raised at the first `next`).
    """
    with Path(path).open("rb") as file:
        before: float | None = None  # the time of the previous poll
        for polls, (number, line) in enumerate(_lines(file)):
            if polls > _MOST_POLLS:
                raise RecordingError(number, f"expected at most {_MOST_POLLS} polls, got more")
            try:
                _check_form(line, header=before is None)
                row = _object(line)
                value = _header(row) if before is None else _poll(row, before)
            except ValueError as error:
                raise RecordingError(number, str(error)) from None
            before = value.t if isinstance(value, Poll) else -math.inf
            yield value
        if before is None:
            raise RecordingError(1, "expected a recording's header, got an empty file")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank with its number, from 1."""
    number = 1
    parts: list[bytes] = []  # of a line whose end has not been read yet
    length = blank = 0
    try:
        for block in chain(_blocks(file), [b"\n"]):  # the last line may have no end
            *ends, rest = block.split(b"\n")
            for end in ends:
                line = b"".join([*parts, end])
                if line.strip():
                    yield number, line
                else:
                    blank += len(line) + 1
                    if blank > _MOST_BLANK:
                        raise RecordingError(number, "expected a recording, got nothing but blank lines")
                number += 1
                parts, length = [], 0
            parts.append(rest)
            length += len(rest)
            if length > _LONGEST_LINE:
                raise RecordingError(number, f"expected at most {_LONGEST_LINE} bytes, got more")
    except EOFError as error:
        raise RecordingError(number, f"expected the rest of the gzip file, got {error}") from None


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Return the file's text in blocks of bounded size, unzipped if it begins as gzip does."""
    blocks = iter(partial(file.read, _BLOCK), b"")
    first = next(blocks, b"")
    blocks = chain([first], blocks)
    return _unzipped(blocks) if first.startswith(_GZIP_MAGIC) else blocks


def _unzipped(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the text of all members of a gzip file, up to the byte at which it is cut off or broken.

    (`gzip.GzipFile` drops what it had unzipped of the block in which it meets an error.)

    Raises:
        EOFError: at that byte; the message says how the data ends.
    """
    inflater = zlib.decompressobj(_GZIP_WBITS)
    for block in blocks:
        rest = block
        while rest:
            if inflater.eof:
                rest = rest.lstrip(b"\0")  # padding between and after members is allowed
                inflater = zlib.decompressobj(_GZIP_WBITS) if rest else inflater
                continue
            checkpoint = inflater.copy()
            try:
                text = inflater.decompress(rest, _BLOCK)
            except zlib.error as error:
                with suppress(zlib.error):
                    for at in range(len(rest)):
                        yield checkpoint.decompress(rest[at : at + 1])
                raise EOFError(f"broken data ({error})") from None
            yield text
            rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
    with suppress(zlib.error):
        yield inflater.flush()  # the text that the bound on the last block's size held back
    if not inflater.eof:
        raise EOFError("its end: the file is cut off")


def _check_form(line: bytes, *, header: bool) -> None:
    """Refuse what would need far more memory than its line, before it is read as JSON."""
    if header and len(line) > _LONGEST_HEADER:
        raise ValueError(f"expected a header of at most {_LONGEST_HEADER} bytes, got {len(line)}")
    if not header and len(line) > _LONGEST_HEADER and not _FLAT.fullmatch(line):
        raise ValueError(f"expected a poll with few and plain values, got {reprlib.repr(line)}")


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why: object = error
        if isinstance(error, json.JSONDecodeError):  # its own text would name "line 1"
            why = f"{error.msg.lower()} at character {error.pos}"
        raise ValueError(f"expected a JSON object, got {reprlib.repr(line)} ({why})") from None
    if isinstance(value, dict):
        return value
    raise ValueError(f"expected a JSON object, got {reprlib.repr(value)}")


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _header(row: dict[str, Any]) -> Header:
    if "case" not in row:
        raise ValueError(f"expected a recording's header with a case, got {reprlib.repr(row)}")
    return Header(
        case=_of_type(row, "case", str, "a text"),
        interval=_number(row, "interval"),
        config=_of_type(row, "config", Mapping, "an object", {}),
        probes=_of_type(row, "probes", Mapping, "an object", {}),
        arguments=_of_type(row, "arguments", Mapping, "an object", {}),
    )


def _poll(row: dict[str, Any], earliest: float) -> Poll:
    body = _of_type(row, "body", str | None, "a text")
    try:
        encoded = None if body is None else body.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError("expected a body that stands for bytes, got a stray surrogate") from None
    poll = Poll(
        t=_number(row, "t"),
        body=encoded,
        error=_of_type(row, "error", str | None, "a text"),
        content_type=_of_type(row, "content_type", str, "a text", ""),
    )
    if poll.t < earliest:
        raise ValueError(f"expected a t of {earliest} or more, got {poll.t}")
    return poll


def _of_type(row: dict[str, Any], key: str, kind: Any, wanted: str, default: Any = None) -> Any:
    value = row.get(key, default)
    if isinstance(value, kind):
        return value
    raise ValueError(f"expected {wanted} as {key}, got {reprlib.repr(value)}")


def _number(row: dict[str, Any], key: str) -> float:
    value = as_number(row.get(key))
    if value is not None:
        with suppress(OverflowError):
            return float(value)
    raise ValueError(f"expected a number as {key}, got {reprlib.repr(row.get(key))}")


# ---- writing


class Writer(AbstractContextManager["Writer"]):
    """Writes a recording; gzipped if the path ends in `.gz`.

    Every line is a gzip member of its own (which costs 4 % in size) and is written at once: the file of a
    killed writer has every poll so far, at worst followed by one cut-off member. It has no path and no time.

    Args:
        path: of the new file.
        header: its first line.
        force: overwrite an existing file.

    Raises:
        FileExistsError: the file exists, and `force` is false.
        OSError: the file cannot be created; `write` raises it when the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header, *, force: bool = False) -> None:
        self._gzip = str(path).endswith(".gz")
        known = {name: dict(getattr(header, name)) for name in ("config", "probes", "arguments")}
        first = self._encode({"case": header.case, "interval": header.interval, **known})
        # Unbuffered: after a failed write close() has nothing left to write again.
        self._file = Path(path).open("wb" if force else "xb", buffering=0)  # noqa: SIM115 - until close()
        try:
            self._put(first)
        except BaseException:
            self._file.close()
            raise

    def write(self, poll: Poll) -> None:
        """Append one poll."""
        row: dict[str, Any] = {"t": poll.t}
        if poll.body is None:
            row["error"] = poll.error
        else:
            row["body"] = poll.body.decode("utf-8", "surrogateescape")
        if poll.content_type:
            row["content_type"] = poll.content_type
        self._put(self._encode(row))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, row: dict[str, Any]) -> bytes:
        line = json.dumps(row, allow_nan=False).encode("ascii") + b"\n"
        return gzip.compress(line, 9, mtime=0) if self._gzip else line

    def _put(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
