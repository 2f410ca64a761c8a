"""Keeps of a body of metrics what is known to be harmless, and replaces the rest by hashes."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

from exporter.vllm.answers import VERSION, read_version
from exporter.vllm.names import CACHE_CONFIG

__all__ = ["anonymise", "anonymise_probes"]

# Labels with words of vLLM, Python and HTTP. Others may hold a name: of a model, an adapter, a pod, a user.
_WORD_LABELS: Final = frozenset(
    (
        b"block_size cache_dtype finished_reason generation implementation kv_cache_layout "
        b"kv_offloading_backend major mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype method minor "
        b"mode operation outcome patchlevel position prefix_caching_hash_algo reason request_type "
        b"sleep_state source stage status tier transfer_type"
    ).split(),
)
_NUMBER_LABELS: Final = frozenset(b"engine le max_lora pid position quantile".split())
# Any number of these series is a setting of vLLM's, whatever a new release calls its label.
_SETTINGS: Final = CACHE_CONFIG.encode()
_LIST_LABELS: Final = frozenset({b"running_lora_adapters", b"waiting_lora_adapters"})
# The word before a hash, where the label's name is not short and plain.
_HASH_WORDS: Final = {
    b"model_name": b"model",
    b"running_lora_adapters": b"adapter",
    b"waiting_lora_adapters": b"adapter",
    b"NodeAddress": b"node",  # Ray's
}
_NUMBER: Final = re.compile(rb"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?Inf|NaN")
_CONSTANT: Final = re.compile(rb"|True|False|None|none|auto|\[\]|set\(\)")
_WORD: Final = re.compile(rb"[A-Za-z0-9_]{1,40}")
_VERSION: Final = re.compile(r"\d+(?:\.\d+)*(?:\.?(?:a|b|rc|dev|post)\d+)*", re.ASCII)
# Routes of vLLM's server; the last part of others may be a model's name.
_ROUTE: Final = re.compile(
    rb"(?:/(?:v[1-9]|inference|api|metrics|health|ping|load|version|tokenize|detokenize|models|chat|"
    rb"completions|responses|messages|embeddings|pooling|classify|score|rerank|audio|transcriptions|"
    rb"translations|invocations|generate|sleep|wake_up|is_sleeping|server_info|reset_prefix_cache|docs|openapi\.json))+/?"
)

# The end of the line or of the body ends a value too: a body that is cut off inside a name must not show its
# beginning.
_QUOTED: Final = rb'"((?:[^"\\\n]++|\\[^\n]?+)*+)'
_LABEL: Final = re.compile(rb'(?:([A-Za-z_]\w*+)|"((?:[^"\\\n]++|\\.)*+)")?+([ \t]*+=[ \t]*+)' + _QUOTED)
_SAMPLE: Final = re.compile(rb"[ \t]*(?:[A-Za-z_:][\w:]*+)?+[ \t]*+(?:\{|[-+.\dIN])")
_KEPT_COMMENT: Final = re.compile(rb"#[ \t]+(?:(?:TYPE|UNIT)[ \t]+[^\s{}\"]+[ \t]+[a-z_]+|EOF)[ \t\r]*")


def anonymise(body: bytes, *, salt: bytes = b"") -> bytes:
    """Replace the values of all labels by short hashes (`model-3f2a9c`), but for those known to be harmless.

    Kept are the names of metrics and labels, values of samples, and vLLM's own words and numbers under labels
    that this module lists. Comments go, except types, units and the end; so does what is no sample. The same
    value of a label always becomes the same hash, so series stay distinct. It reads both text formats, with
    escapes and a cut-off last line, and never fails.

    Args:
        body: the server's answer.
        salt: makes the hashes of one recording unique; without it a guessed name can be checked.
    """
    made: dict[tuple[bytes, bytes, bool], bytes] = {}  # most labels stand in many series
    lines = (_line(line, salt, made) for line in body.split(b"\n"))
    return b"\n".join(line for line in lines if line is not None)


def anonymise_probes(probes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in a header's `probes`, without the part of the version that may name its builder."""
    known = read_version(probes.get(VERSION))
    return {**probes, VERSION: {"version": _release(known)}} if known else dict(probes)


def _release(version: str) -> str:
    """Return a version without its local part: ``0.26.0`` of ``0.26.0+acme.gpu17``."""
    match = _VERSION.match(version)
    return match[0] if match else ""


def _line(line: bytes, salt: bytes, made: dict[tuple[bytes, bytes, bool], bytes]) -> bytes | None:
    """Return one line without its names; None for what is neither a sample nor a comment that is needed."""
    if not _SAMPLE.match(line):
        return line if not line.strip() or _KEPT_COMMENT.fullmatch(line.lstrip()) else None
    setting = line.partition(b"{")[0].rstrip().endswith(_SETTINGS)

    def replaced(match: re.Match[bytes]) -> bytes:
        label, value = match[1] or match[2] or b"", match[4]
        key = label, value, setting
        if key not in made:
            made[key] = _value(label, value, salt, setting=setting)
        return match[0][: match.start(4) - match.start()] + made[key]

    return _LABEL.sub(replaced, line)


def _value(label: bytes, value: bytes, salt: bytes, *, setting: bool) -> bytes:
    """Return the replacement of one label's value."""
    if _is_harmless(label, value, setting=setting):
        return value
    if label == b"version":
        return _release(value.decode("utf-8", "replace")).encode()
    word = _HASH_WORDS.get(label, label if _WORD.fullmatch(label) else b"label")
    if label in _LIST_LABELS:
        parts = value.split(b",")
        return b",".join(
            part.replace(part.strip(), _hashed(word, part.strip(), salt)) if part.strip() else part
            for part in parts
        )
    return _hashed(word, value, salt)


def _is_harmless(label: bytes, value: bytes, *, setting: bool) -> bool:
    if _CONSTANT.fullmatch(value):
        return True
    if _NUMBER.fullmatch(value):
        return setting or label in _NUMBER_LABELS or label in _WORD_LABELS
    if label == b"handler":
        return _ROUTE.fullmatch(value) is not None
    return label in _WORD_LABELS and _WORD.fullmatch(value) is not None


def _hashed(word: bytes, name: bytes, salt: bytes) -> bytes:
    return word + b"-" + hashlib.sha256(salt + name).hexdigest()[:6].encode()
