"""Replaces the names of models, adapters and nodes, and paths, in a body of metrics."""

import hashlib
import re
from collections.abc import Mapping
from typing import Final

__all__ = ["anonymise"]

_Hashes = Mapping[bytes, bytes]  # by name

# The labels whose whole value is a name, with the word before its hash. Commas separate lists.
_NAME_LABELS: Final[Mapping[bytes, bytes]] = {
    b"model_name": b"model",
    b"model": b"model",  # the Triton back end's word for a model
    b"running_lora_adapters": b"adapter",
    b"waiting_lora_adapters": b"adapter",
    b"NodeAddress": b"node",  # Ray's
}
_LIST_LABELS: Final = frozenset({b"running_lora_adapters", b"waiting_lora_adapters"})
# The labels with words and numbers of vLLM's own, and routes, which look like paths. They are kept, even if a
# model is called "stop" or an adapter "0".
_KEPT_LABELS: Final = frozenset(
    (
        b"engine le quantile pid position handler method status reason finished_reason source stage "
        b"sleep_state transfer_type outcome operation tier mode request_type"
    ).split(),
)
# A value like these identifies nobody: block_size="16" is kept, even if an adapter has that name.
_PLAIN_VALUE: Final = re.compile(rb"[-+.\d]*(?:[eE][-+]?\d+)?|True|False|None|auto")
_SHORTEST_NAME_INSIDE: Final = 3

# name="value" anywhere in the body, the value still escaped. The end of the line or of the body ends a value
# too: a body that is cut off inside a name must not reveal its beginning.
_LABEL: Final = re.compile(
    rb'(?<![\w:])([A-Za-z_]\w*+)([ \t]*+=[ \t]*+")((?:[^"\\\n]++|\\[^\n]?+)*+)',
)
_PATH: Final = re.compile(rb"(?<![\w./+~-])(?:[A-Za-z][\w.+-]*+:/|~|\.\.?)?/[^\s,;'\"()\[\]{}\\]+")


def anonymise(body: bytes, *, salt: bytes = b"") -> bytes:
    """Replace the names in a body of metrics with short hashes (`model-3f2a9c`); keep all other bytes.

    Names are the values of labels with model names, LoRA adapters and node addresses; the same names inside
    other labels' values; and file paths and URLs in any label. The same name always becomes the same hash, so
    series stay distinct. It reads both text formats, with escapes and a cut-off last line, and never fails.

    Args:
        body: the server's answer.
        salt: makes the hashes of one recording unique; without it a guessed name can be checked.
    """
    names: dict[bytes, bytes] = {}
    values = {(match[1], match[3]) for match in _LABEL.finditer(body)}
    for label, value in sorted(values):
        if word := _NAME_LABELS.get(label):
            parts = map(bytes.strip, value.split(b",")) if label in _LIST_LABELS else [value]
            for name in filter(None, parts):
                names.setdefault(name, _hashed(word, name, salt))
    inside = _any_of(names)
    new = {pair: _replaced(*pair, names, inside, salt) for pair in values}
    return _LABEL.sub(lambda match: match[1] + match[2] + new[match[1], match[3]], body)


def _hashed(word: bytes, name: bytes, salt: bytes) -> bytes:
    return word + b"-" + hashlib.sha256(salt + name).hexdigest()[:6].encode()


def _any_of(names: _Hashes) -> re.Pattern[bytes]:
    """Match the names that are too long to appear by chance; the longest first, and no part of a word."""
    long = sorted((name for name in names if len(name) >= _SHORTEST_NAME_INSIDE), key=len, reverse=True)
    words = b"|".join(map(re.escape, long)) or b"(?!)"  # which matches nothing
    return re.compile(rb"(?<![A-Za-z0-9])(?:" + words + rb")(?![A-Za-z0-9])")


def _replaced(label: bytes, value: bytes, names: _Hashes, inside: re.Pattern[bytes], salt: bytes) -> bytes:
    """Return the replacement of one label's value."""
    if label in _LIST_LABELS:
        return b",".join(
            part.replace(part.strip(), names.get(part.strip(), b"")) for part in value.split(b",")
        )
    if label in _NAME_LABELS:
        return names.get(value, value)
    if label in _KEPT_LABELS or _PLAIN_VALUE.fullmatch(value):
        return value
    if value in names:
        return names[value]
    if start := _PATH.match(value):
        # A path may hold blanks; only a comma surely begins something else.
        whole = value if b"," not in value else start[0]
        value = value.replace(whole, _hashed(b"path", whole, salt), 1)
    value = _PATH.sub(lambda match: _hashed(b"path", match[0], salt), value)
    return inside.sub(lambda match: names[match[0]], value)
