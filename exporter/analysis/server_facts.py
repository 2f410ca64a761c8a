"""Merges the settings of a server from all sources, with the best source for each.

Pure. Unknown is not zero, and vLLM's defaults are not filled in: they depend on version and GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from exporter.config import Fact, as_number, parse_facts, seat_limit
from exporter.vllm.exposition import CacheConfig

__all__ = ["SOURCES", "ServerFacts", "merge"]

SOURCES: Final = (
    "configuration", "argument line", "server_info", "v1/models", "cache_config_info", "version",
)  # fmt: skip
"""The sources of facts, the one with the highest priority first."""

# The server chooses the value; another source may know its choice.
_UNDECIDED: Final = "auto"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The known settings of one engine's server."""

    # Values by vLLM's flag name; a missing name is unknown.
    facts: Mapping[str, Fact] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)  # the source of each, one of `SOURCES`

    def number(self, name: str) -> float | None:
        """Return a fact as a number; None where it is unknown or no number."""
        return as_number(self.facts.get(name))

    @property
    def seats(self) -> float | None:
        """The most requests that run at once; None where no limit is known."""
        return self.number(seat_limit(self.facts))


def merge(
    configuration: Mapping[str, Fact] | None = None,
    argument_line: Mapping[str, Fact] | None = None,
    server_info: Mapping[str, Fact] | None = None,
    models: Mapping[str, Fact] | None = None,
    cache_labels: CacheConfig | None = None,
    version: Mapping[str, Fact] | None = None,
) -> ServerFacts:
    """Take each fact from the first source that knows it.

    ``auto`` (of `kv_cache_dtype`) gives way to a source that has the server's choice.

    Args:
        configuration: settings of the operator, by name.
        argument_line: settings of the server's argument line.
        server_info: the response of ``/server_info``.
        models: the response of ``/v1/models``; only `max_model_len` counts.
        cache_labels: the labels of the engine's ``cache_config_info``.
        version: the response of ``/version``, under the name `vllm_version`.
    """
    longest = {name: value for name, value in (models or {}).items() if name == "max_model_len"}
    labels = _label_facts(cache_labels) if cache_labels is not None else {}
    facts: dict[str, Fact] = {}
    source: dict[str, str] = {}
    given = (configuration or {}, argument_line or {}, server_info or {}, longest, labels, version or {})
    for origin, known in zip(SOURCES, given, strict=True):
        for name, value in known.items():
            if name not in facts or (facts[name] == _UNDECIDED and value != _UNDECIDED):
                facts[name] = value
                source[name] = origin
    return ServerFacts(facts, source)


@lru_cache(maxsize=256)  # labels change only when an engine starts, but are read at every poll
def _label_facts(labels: CacheConfig) -> Mapping[str, Fact]:
    values = {
        "block_size": labels.block_size,
        "enable_prefix_caching": labels.enable_prefix_caching,
        "gpu_memory_utilization": labels.gpu_memory_utilization,
        "kv_cache_dtype": labels.cache_dtype,
        "kv_cache_memory_bytes": labels.kv_cache_memory_bytes,
        "kv_offloading_size": labels.kv_offloading_size,
        "num_gpu_blocks_override": labels.num_gpu_blocks_override,
    }
    return parse_facts(values, strict=False)[0]
