"""Mutants of bytes: damage as transport and enemies do it, and pieces that readers stumble over."""

import random
from collections.abc import Sequence

# What has a meaning to one of the readers; put in anywhere it may open what nothing closes.
PIECES: Sequence[bytes] = (
    b"{", b"}", b'"', b"\\", b"\n", b"\r", b"\0", b" ", b"\t", b",", b"=", b"#", b"# EOF\n", b"\\n",
    b'\\"', b"_", b"NaN", b"nan", b"+Inf", b"-Inf", b"-0", b"1e400", b"-1e308", b"1_0", b"0x1", b"1e",
    b"9" * 400, b"\xff", b"\xc3", "\u2028".encode(), "\U0001f600".encode(), b"\xed\xa0\x80", b"vllm:",
    b"vllm_", b"ray_vllm_", b"vllm:num_preemptions_total", b"vllm:kv_cache_usage_perc{", b"_total",
    b"_created", b"_bucket", b'le="+Inf"', b'le="NaN"', b'engine="0"', b'engine="1"', b'model_name="m"',
    b"process_start_time_seconds ", b'{"t": 1, "body": ', b'"error": ', b'"\\ud800"', b"null", b"true",
    b"[", b"]", b"{}", b"1e999", b"-1", b"\x1f\x8b\x08", b": ", b"- ", b"&a ", b"*a", b"<<: *a",
    b"!!python/object:os.system ", b"!!binary ", b"---\n", b"...\n", b"%YAML 9\n", b"|\n", b">\n", b"? ",
    b"~", b"targets:", b"\\x", b"\\U99999999", b"1:2:3", b"0o7", b"2001-01-01",
)  # fmt: skip


def mutant(random_: random.Random, seeds: Sequence[bytes], longest: int) -> bytes:
    """A seed after one to eight changes."""
    text = bytearray(random_.choice(seeds))
    for _ in range(random_.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        _change(random_, text, seeds)
    return bytes(text[:longest])


def _change(random_: random.Random, text: bytearray, seeds: Sequence[bytes]) -> None:
    at = random_.randrange(len(text) + 1)
    size = random_.choice((1, 1, 2, 4, 16, 64, 256))
    match random_.randrange(9):
        case 0:
            del text[at : at + size]
        case 1:
            text[at:at] = text[at : at + size]
        case 2:
            text[at:at] = random_.choice(PIECES)
        case 3:
            text[at : at + size] = random_.choice(PIECES)
        case 4 if text:
            text[at % len(text)] ^= 1 << random_.randrange(8)
        case 5:
            text[at : at + size] = random_.randbytes(size)
        case 6:
            del text[at:]
        case 7:  # the beginning of one and the end of another
            other = random_.choice(seeds)
            text[at:] = other[random_.randrange(len(other) + 1) :]
        case _:
            _swap_lines(random_, text)


def _swap_lines(random_: random.Random, text: bytearray) -> None:
    lines = bytes(text).split(b"\n")
    one, two = random_.randrange(len(lines)), random_.randrange(len(lines))
    lines[one], lines[two] = lines[two], lines[one]
    text[:] = b"\n".join(lines)
