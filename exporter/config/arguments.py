"""Reads vLLM's own arguments, and keeps the few that the analysis uses.

A line can hold ``--api-key`` and ``--hf-token``, so this is an allow-list: only the names in `FIELDS` are
read. Values are returned as written; `exporter.config.parse_facts` checks them.
"""

import contextlib
import difflib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Final

__all__ = ["FIELDS", "facts_of", "fields_of", "join", "misspelt", "read", "read_list"]

# Fields of vLLM's configuration objects whose flags (and facts) have another name.
_RENAMED: Final = {"cache_dtype": "kv_cache_dtype", "kv_role": "role", "policy": "scheduling_policy"}
# vLLM's configuration objects: field -> name of the flag (of the fact). The same names serve
# ``/server_info``, JSON options (``--speculative-config '{...}'``) and dotted ones.
FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    config: {field: _RENAMED.get(field, field) for field in fields}
    for config, fields in {
        "cache_config": (
            "block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization",
            "kv_cache_memory_bytes", "kv_offloading_size", "num_gpu_blocks_override",
        ),
        "scheduler_config": (
            "async_scheduling", "enable_chunked_prefill", "long_prefill_token_threshold",
            "max_num_active_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens",
            "max_num_seqs", "policy", "scheduler_reserve_full_isl", "watermark",
        ),
        "parallel_config": ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"),
        "model_config": ("max_model_len",),
        "lora_config": ("max_loras",),
        "speculative_config": ("num_speculative_tokens",),
        "kv_transfer_config": ("kv_role",),
    }.items()
}  # fmt: skip

_ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_KV_ROLES: Final = {role: kv_role for kv_role, role in _ROLES.items()}
_FLAGS: Final = frozenset(fact for fields in FIELDS.values() for fact in fields.values()) - {"role"}
_ALIASES: Final = {"device_memory_utilization": "gpu_memory_utilization"}  # since 0.31
_SWITCHES: Final = frozenset(
    {"async_scheduling", "enable_chunked_prefill", "enable_prefix_caching", "scheduler_reserve_full_isl"}
)
_SHORT: Final = {
    "-dp": "data_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-sc": "speculative_config",
    "-tp": "tensor_parallel_size",
}
# Facts without a flag of their own, and how they are written.
_DOTTED: Final = {
    "num_speculative_tokens": "--speculative-config.num_speculative_tokens",
    "role": "--kv-transfer-config.kv_role",
}

# vLLM's human_readable_int, which it applies to these only: 1k is 1000, 1K is 1024, 25.6k is 25600.
_SIZED: Final = frozenset({"kv_cache_memory_bytes", "max_model_len", "max_num_batched_tokens"})
_SIZE: Final = re.compile(r"([0-9]{1,20})(\.[0-9]{1,20})?([kKmMgGtT])")

# Names that a flag may have been meant for, and how near it must be: vLLM's other flags are at 0.86 at most.
_KNOWN: Final = sorted(_FLAGS | _ALIASES.keys())
_NEARLY: Final = 0.9
_NAME: Final = re.compile(r"[a-z_]{4,40}")

_CONTINUED: Final = re.compile(r"\\[ \t]*\r?\n")
_COMMAND_NEXT: Final = re.compile(r"-[elux]*c")  # sh -c, bash -euxc
_FLAG_AND_MORE: Final = re.compile(r"-[^\s=]*\s")
_NO_VALUE: Final = re.compile(r"-(?![0-9.])")


def read(line: str) -> dict[str, object]:
    """Read an argument line, with or without the command before it, quoted and continued as in a shell.

    Returns:
        Values by the name of the fact, as written; None if the server decides at its start
        (``--max-model-len auto``) or the value cannot be read. The last of several values wins.

    Raises:
        ValueError: a quotation is not closed; the message does not repeat the line.
    """
    return read_list(_split(line))


def read_list(arguments: Iterable[str]) -> dict[str, object]:
    """Read arguments that are split already, as in a Kubernetes manifest; otherwise as `read`."""
    tokens = list(_expanded(arguments))
    found: dict[str, object] = {}
    for token, after in zip_longest(tokens, tokens[1:], fillvalue=""):
        if token.startswith("-"):
            flag, equals, value = token.partition("=")
            name = flag[2:].replace("-", "_") if flag.startswith("--") else _SHORT.get(flag, "")
            # The value of another flag passes here too, and gives no fact.
            found.update(_facts(name, value if equals else None, after))
    return found


def misspelt(arguments: str | Iterable[str]) -> tuple[str, str] | None:
    """Return the first flag that is nearly one of ours but none, and that one; None if there is none.

    Of vLLM's hundreds of flags only ours are known here: a flag that is not near to any of them is vLLM's.
    """
    tokens = _expanded(_split(arguments) if isinstance(arguments, str) else arguments)
    flags = (token.partition("=")[0] for token in tokens if token.startswith("--"))
    for flag in flags:
        name = flag[2:].removeprefix("no-").partition(".")[0].replace("-", "_")
        near = difflib.get_close_matches(name, _KNOWN, 1, _NEARLY)
        if near and name not in near and _NAME.fullmatch(name):
            return flag, "--" + near[0].replace("_", "-")
    return None


def facts_of(config: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Pick the facts from the fields of an object, `config` in `FIELDS`; None for those it lacks."""
    return {fact: _as_fact(fact, fields.get(field)) for field, fact in FIELDS[config].items()}


def fields_of(facts: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Put facts back into the configuration objects from which `facts_of` picks them."""
    objects = {
        config: {field: _as_field(fact, facts[fact]) for field, fact in fields.items() if fact in facts}
        for config, fields in FIELDS.items()
    }
    return {config: fields for config, fields in objects.items() if fields}


def join(facts: Mapping[str, object]) -> str:
    """Write facts as an argument line; the inverse of `read`."""
    parts = []
    for fact, value in facts.items():
        flag = _DOTTED.get(fact, "--" + fact.replace("_", "-"))
        if isinstance(value, bool):
            parts.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            parts.append(f"{flag} {shlex.quote(str(_as_field(fact, value)))}")
    return " ".join(parts)


def _as_field(fact: str, value: object) -> object:
    return _KV_ROLES[str(value)] if fact == "role" else value


def _split(line: str) -> list[str]:
    try:
        return shlex.split(_CONTINUED.sub(" ", line))
    except ValueError:
        raise ValueError("expected a line with closed quotations") from None


def _expanded(arguments: Iterable[str], *, whole: bool = True) -> Iterator[str]:
    """Split arguments that hold several: ``sh -c "vllm serve ..."``, ``- --max-num-seqs 64``."""
    command = False
    for argument in arguments:
        if whole and (command or _FLAG_AND_MORE.match(argument)):
            with contextlib.suppress(ValueError):
                yield from _expanded(_split(argument), whole=False)
        else:
            yield argument
        command = _COMMAND_NEXT.fullmatch(argument) is not None


def _facts(name: str, own: str | None, after: str) -> dict[str, object]:
    """The facts of one flag.

    Args:
        name: with underscores, ``speculative_config.num_speculative_tokens``; empty for none.
        own: the text after its ``=``, None without one.
        after: the argument that follows.
    """
    name = _ALIASES.get(name, name)
    if name in _SWITCHES:
        word = (after if own is None else own).lower()
        return {name: word if own is not None or word in {"true", "false"} else True}
    if name.removeprefix("no_") in _SWITCHES:
        return {name.removeprefix("no_"): False if own is None else None}
    value = own if own is not None or _NO_VALUE.match(after) else after
    if name in _FLAGS:
        return {name: _as_fact(name, value)}
    config, _, field = name.partition(".")
    if config not in FIELDS:
        return {}
    if not field:
        return facts_of(config, _object(value))
    fact = FIELDS[config].get(field)
    return {} if fact is None else {fact: _as_fact(fact, value)}


def _object(text: str | None) -> Mapping[str, object]:
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _as_fact(fact: str, value: object) -> object:
    """Convert a value from vLLM's spelling to the configuration's."""
    if fact == "role":
        return _ROLES.get(value) if isinstance(value, str) else None
    if not isinstance(value, str):
        return value
    text = value.strip()
    if fact == "max_model_len" and text.lower() in {"auto", "-1"}:
        return None
    return _sized(text) if fact in _SIZED else text


def _sized(text: str) -> object:
    found = _SIZE.fullmatch(text)
    if found is None:
        return text
    count, fraction, unit = found.groups()
    power = "kmgt".index(unit.lower()) + 1
    if unit.isupper():
        return None if fraction else int(count) * 1024**power
    return int(float(count + (fraction or "")) * 1000**power)
