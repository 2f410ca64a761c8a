"""What is known of a server's limits, and from where: the facts of all sources, the best one for each.

Pure. Unknown is not zero, and no default of vLLM's is made up here: it depends on version and GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from exporter.config import Fact, arguments, as_number, parse_facts
from exporter.vllm.exposition import CacheConfig

__all__ = ["SOURCES", "Limits", "merge", "parse_arguments"]

SOURCES: Final = (
    "configuration",
    "argument line",
    "server_info",
    "v1/models",
    "cache_config_info",
    "version",
)
"""Where a fact may come from, the one that goes before the others first."""

# The server decides: another source may know as what.
_UNDECIDED: Final = "auto"


@dataclass(frozen=True, slots=True)
class Limits:
    """What is known of one engine's server.

    Attributes:
        facts: values by vLLM's flag name; a name that is not there is unknown.
        source: for each of them where it comes from, one of `SOURCES`.
    """

    facts: Mapping[str, Fact] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """A fact that is a number; None where it is unknown, or no number."""
        return as_number(self.facts.get(name))

    def flag(self, name: str) -> bool | None:
        """A fact that is true or false; None where it is unknown, or neither."""
        value = self.facts.get(name)
        return value if isinstance(value, bool) else None

    def word(self, name: str) -> str | None:
        """A fact that is a word; None where it is unknown, or no word."""
        value = self.facts.get(name)
        return value if isinstance(value, str) else None


def merge(
    configuration: Mapping[str, Fact] | None = None,
    argument_line: Mapping[str, Fact] | None = None,
    server_info: Mapping[str, Fact] | None = None,
    models: Mapping[str, Fact] | None = None,
    cache_labels: CacheConfig | None = None,
    version: Mapping[str, Fact] | None = None,
) -> Limits:
    """Take each fact from the first source that knows it.

    ``auto`` (of `kv_cache_dtype`) gives way to a source that says what the server made of it.

    Args:
        configuration: what the operator told, by name.
        argument_line: what `parse_arguments` read.
        server_info: what ``/server_info`` answered.
        models: what ``/v1/models`` answered; only `max_model_len` counts.
        cache_labels: the labels of the engine's ``cache_config_info``.
        version: the answer of ``/version``, by the name `vllm_version`.
    """
    longest = {name: value for name, value in (models or {}).items() if name == "max_model_len"}
    labels = _label_facts(cache_labels) if cache_labels is not None else {}
    facts: dict[str, Fact] = {}
    source: dict[str, str] = {}
    told = (configuration or {}, argument_line or {}, server_info or {}, longest, labels, version or {})
    for origin, known in zip(SOURCES, told, strict=True):
        for name, value in known.items():
            if name not in facts or (facts[name] == _UNDECIDED and value != _UNDECIDED):
                facts[name] = value
                source[name] = origin
    return Limits(facts, source)


def parse_arguments(line: str) -> dict[str, Fact]:
    """Read a vLLM argument line, ``vllm serve MODEL --max-num-seqs 64 -tp 8 ...``.

    Only what the analysis can use is kept. What cannot be read is left out, and so is all of a line whose
    quotations are not closed. Raises nothing.
    """
    try:
        given = arguments.read(line)
    except ValueError:
        return {}
    return parse_facts(given, strict=False)[0]


@lru_cache(maxsize=256)  # labels change when an engine starts, and are asked for at every poll
def _label_facts(labels: CacheConfig) -> Mapping[str, Fact]:
    told = {
        "block_size": labels.block_size,
        "enable_prefix_caching": labels.enable_prefix_caching,
        "gpu_memory_utilization": labels.gpu_memory_utilization,
        "kv_cache_dtype": labels.cache_dtype,
        "kv_cache_memory_bytes": labels.kv_cache_memory_bytes,
        "kv_offloading_size": labels.kv_offloading_size,
        "num_gpu_blocks_override": labels.num_gpu_blocks_override,
    }
    return parse_facts(told, strict=False)[0]
