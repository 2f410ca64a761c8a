"""Several pages of one server, one after another: each is like the one before, with something changed.

A reader that knows the last page takes short cuts on the next. Whether they are right shows only where pages
are alike; mutants of whole bodies are not.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Ends a page in a stored input.
BETWEEN = b"\f\n"

_LINE = re.compile(
    rb"([ \t]*[a-zA-Z_:][\w:]*(?:\{[^}\n]*\})?)([ \t]*)([^ \t#]*)(?:[ \t]+([^ \t#]+))?([ \t]*#.*|[ \t\r]*)"
)
_VALUES = (
    b"0", b"1", b"2", b"5", b"7", b"12", b"10", b"1_0", b"1_2", b"0.5", b"1e3", b"+5", b".5", b"1e400",
    b"1e19", b"-1", b"NaN", b"+Inf", b"-Inf", b"x", b"0x1", b"_1", b"",
)  # fmt: skip
_STAMPS = (b"1000", b"2000", b"1700000000000", b"1700000001000", b"1700000000.5", b"-1", b"1_0", b"soon")
_EXEMPLARS = (
    b' # {trace_id="a"} 0.5',
    b' # {trace_id="a"} 7',
    b' # {a="} 9"} 3 17.5',
    b" # 8",
    b" #",
    b"# 6",
)
_LABELS = (
    b'engine="0"', b'engine="1"', b'engine=""', b'pid="7"', b'pid="8"', b'model_name="m"', b'le="1"',
    b'le="1.0"', b'le="+Inf"', b'le="1_0"', b'a="} 5"', b'a=""', b"", b'finished_reason="stop"',
    b'x="' + b"y" * 70 + b'"',
)  # fmt: skip
_NAMES = (
    (b"kv_cache_usage", b"gpu_cache_usage"),
    (b"inter_token_latency", b"time_per_output_token"),
    (b":prefix_cache", b":gpu_prefix_cache"),
    (b"_total", b""),
    (b"_total", b"_total_total"),
    (b"vllm:", b"ray_vllm_"),
    (b"vllm:", b"vllm_"),
    (b"vllm:", b" vllm:"),
    (b"running", b"waiting"),
    (b"vllm:", b"vllm:x"),
)


def sequence(random_: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Two to five pages."""
    pages = random_.choice(seeds).split(BETWEEN)
    if random_.randrange(4) == 0:
        pages[-1] = _next(random_, pages[-1], seeds)
    for _ in range(random_.choice((1, 2, 2, 3, 4))):
        kind = random_.randrange(10)
        if kind == 0:
            pages.append(pages[-1])
        elif kind == 1:
            pages.append(random_.choice(pages))
        else:
            pages.append(_next(random_, pages[-1], seeds))
    return BETWEEN.join(pages[-5:])


def _next(random_: random.Random, page: bytes, seeds: Sequence[bytes]) -> bytes:
    """A page after one to three changes, mostly of what stands behind the series."""
    lines = page.split(b"\n")
    for _ in range(random_.choice((1, 1, 2, 3))):
        at = random_.randrange(len(lines))
        if random_.randrange(6) == 0:
            _other_lines(random_, lines, at, seeds)
            continue
        line = _Line.of(lines[at])
        if line is not None:
            line.change(random_)
            lines[at] = line.text()
    return b"\n".join(lines)


def _other_lines(random_: random.Random, lines: list[bytes], at: int, seeds: Sequence[bytes]) -> None:
    match random_.randrange(6):
        case 0 if len(lines) > 1:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
        case 2:
            other = random_.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines.insert(at, random_.choice(random_.choice(seeds).split(BETWEEN)[0].split(b"\n")))
        case 4:
            lines.insert(at, random_.choice((b"", b"# EOF", b"# vllm:num_requests_running 9", b"up 1")))
        case _:  # cut off
            whole = b"\n".join(lines)
            lines[:] = whole[: random_.randrange(len(whole) + 1)].split(b"\n")


@dataclass
class _Line:
    """One sample's line in its parts."""

    series: bytes
    gap: bytes
    value: bytes
    stamp: bytes
    end: bytes

    @classmethod
    def of(cls, line: bytes) -> "_Line | None":
        match = _LINE.fullmatch(line)
        return None if match is None else cls(*(part or b"" for part in match.groups()))

    def text(self) -> bytes:
        return self.series + self.gap + self.value + (b" " + self.stamp if self.stamp else b"") + self.end

    def change(self, random_: random.Random) -> None:
        match random_.randrange(16):
            case 0 | 1 | 2:
                self.stamp = random_.choice((b"", *_STAMPS))
            case 3 | 4:
                self.end = random_.choice((b"", b"", *_EXEMPLARS))
            case 5:
                self.end = random_.choice((b" ", b"\t", b"\r", b"  "))
            case 6:
                self.gap = random_.choice((b"  ", b"\t", b" \t", b" ", b""))
            case 7 | 8:
                self._relabel(random_)
            case 9:
                old, new = random_.choice(_NAMES)[:: random_.choice((1, -1))]
                name, brace, rest = self.series.partition(b"{")
                self.series = (name.replace(old, new, 1) if old else name + new) + brace + rest
            case _:
                self.value = random_.choice(_VALUES)

    def _relabel(self, random_: random.Random) -> None:
        name, brace, inside = self.series.partition(b"{")
        labels = inside.removesuffix(b"}").split(b",") if brace and inside != b"}" else []
        at = random_.randrange(len(labels) + 1)
        if labels and random_.randrange(3) == 0:
            del labels[at % len(labels)]
        elif labels and random_.randrange(3) == 0:
            labels.insert(at, labels[at % len(labels)])
        else:
            labels.insert(at, random_.choice(_LABELS))
        self.series = name + b"{" + b",".join(labels) + b"}"
