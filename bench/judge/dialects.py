"""The metrics page of another vLLM release: lines renamed and left out of the page of 0.32.0.

Only the series that the exporter reads are translated; the rest of the page stays as it is.
"""

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["DIALECTS", "Dialect"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a release prints its page.

    Attributes:
        version: The release.
        renamed: Names in the page of 0.32.0 and here.
        dropped: Beginnings of lines that this release does not have.
        labels_dropped: Labels of ``cache_config_info`` that this release does not have.
        blocks_unknown: Whether ``num_gpu_blocks`` reads ``None``.
    """

    version: str
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    labels_dropped: tuple[str, ...] = ()
    blocks_unknown: bool = False

    @property
    def number(self) -> tuple[int, ...]:
        """The release as numbers, for comparisons."""
        return tuple(map(int, self.version.split(".")))

    def translate(self, body: bytes, *, api_servers: int = 1) -> bytes:
        """Return a page of 0.32.0 as this release prints it.

        With several API servers the page has no times of creation and nothing of the process.
        """
        dropped = self.dropped
        if api_servers > 1:
            dropped += ("process_", "python_", r"vllm:\w+_created")
        if dropped:
            body = _dropping(dropped).sub(b"", body)
        for old, new in self.renamed:
            body = body.replace(old.encode(), new.encode())
        if self.labels_dropped or self.blocks_unknown:
            body = _CACHE_CONFIG.sub(self._cache_config, body)
        return body

    def _cache_config(self, line: re.Match[bytes]) -> bytes:
        text = line[0]
        for label in self.labels_dropped:
            text = re.sub(rb",?\b%s=\"[^\"]*\"" % label.encode(), b"", text).replace(b"{,", b"{")
        if self.blocks_unknown:
            text = re.sub(rb'\bnum_gpu_blocks="\d+"', b'num_gpu_blocks="None"', text)
        return text


_CACHE_CONFIG: Final = re.compile(rb"^vllm:cache_config_info\{.*$", re.MULTILINE)
_PATTERNS: dict[tuple[str, ...], re.Pattern[bytes]] = {}


def _dropping(beginnings: tuple[str, ...]) -> re.Pattern[bytes]:
    pattern = _PATTERNS.get(beginnings)
    if pattern is None:
        words = "|".join(beginnings)
        pattern = re.compile(rf"^(?:# (?:HELP|TYPE) )?(?:{words}).*\n".encode(), re.MULTILINE)
        _PATTERNS[beginnings] = pattern
    return pattern


_SINCE_032: Final = ("vllm:prompt_tokens_cached_by_source", "vllm:admission_rejections")
_SINCE_030: Final = ("vllm:request_num_preemptions", *_SINCE_032)
_SINCE_020: Final = ("vllm:num_requests_waiting_by_reason", *_SINCE_030)
_SINCE_016: Final = (
    "vllm:prompt_tokens_by_source",
    "vllm:prompt_tokens_cached",
    "vllm:estimated_",
    *_SINCE_020,
)
_SINCE_011: Final = (
    "vllm:engine_sleep_state",
    "vllm:external_prefix_cache",
    "vllm:mm_cache",
    "vllm:request_time_per_output_token",
    "vllm:request_prefill_kv_computed",
    *_SINCE_016,
)
_CAPACITY: Final = ("kv_cache_size_tokens", "kv_cache_max_concurrency")
_NEW_LABELS: Final = (
    "cache_hit_alignment_tokens",
    "effective_attention_block_size",
    "kv_cache_layout",
    "use_replayssm",
    "prefix_match_unit",
    "skip_page_size_padded",
)

DIALECTS: Final = (
    Dialect(
        "0.8.5",
        (
            ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            ("vllm:prefix_cache_", "vllm:gpu_prefix_cache_"),
            ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        ),
        _SINCE_011,
        (*_CAPACITY, *_NEW_LABELS, "_block_size_resolved", "mamba_cache_mode", "kv_offloading_backend"),
        blocks_unknown=True,
    ),
    Dialect(
        "0.9.2",
        (("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),),
        _SINCE_011,
        (*_CAPACITY, *_NEW_LABELS, "_block_size_resolved", "mamba_cache_mode", "kv_offloading_backend"),
    ),
    Dialect(
        "0.11.2",
        (),
        ("vllm:request_prefill_kv_computed", *_SINCE_016),
        (*_CAPACITY, *_NEW_LABELS, "_block_size_resolved", "mamba_cache_mode"),
    ),
    Dialect("0.15.1", (), _SINCE_016, (*_CAPACITY, *_NEW_LABELS, "_block_size_resolved")),
    Dialect("0.19.1", (), _SINCE_020, (*_CAPACITY, *_NEW_LABELS)),
    Dialect("0.22.1", (), _SINCE_030, (*_CAPACITY, *_NEW_LABELS)),
    Dialect("0.26.0", (), _SINCE_030, _NEW_LABELS[:4]),
    Dialect("0.30.0", (), _SINCE_032, _NEW_LABELS[:2]),
    Dialect("0.32.0"),
    Dialect("0.33.0"),
)
