"""Makes the text of all metrics of all targets, in slices so that no poll waits for it."""

import asyncio
import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, TypeAlias

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from exporter.publish.metrics.samples import PREFIX, MetricRow, RowCollector

__all__ = ["Scrape", "encoder"]

Encoder: TypeAlias = Callable[[Collector], bytes]
# The collectors of a table of metrics, one or more for each target.
Tables: TypeAlias = Sequence[tuple[Sequence[MetricRow], Sequence[RowCollector]]]

_PLAIN: Final = "text/plain"
_OPENMETRICS: Final = "application/openmetrics-text"
# Polls have their turn after this many characters of text: about two milliseconds of work.
_SLICE: Final = 100_000


def encoder(accept: str) -> tuple[Encoder, str]:
    """Choose the format for an Accept header, the plain one if the header is malformed."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return choose_encoder(_PLAIN)


class Scrape:
    """Makes the text. Simultaneous scrapes in the same format share it."""

    def __init__(self, tables: Callable[[], Tables], rest: Collector) -> None:
        """Keep the source of the present tables, and a collector whose metrics follow them."""
        self._tables = tables
        self._rest = rest
        self._making: dict[str, asyncio.Task[bytes]] = {}

    async def text(self, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type, in the format of an Accept header."""
        encode, content_type = encoder(accept)
        making = self._making.get(content_type)
        if making is None:
            making = self._making[content_type] = asyncio.create_task(self._make(encode, content_type))
            making.add_done_callback(lambda _: self._making.pop(content_type, None))
        # The first client may have disconnected; the others still wait.
        return await asyncio.shield(making), content_type

    async def _make(self, encode: Encoder, content_type: str) -> bytes:
        text = io.BytesIO()
        for rows, collectors in self._tables():
            parts: list[list[str]] = [[] for _ in rows]
            letters = 0
            for collector in collectors:
                for index, lines in enumerate(collector.texts()):
                    if lines is not None:
                        parts[index].append(lines)
                        letters += len(lines)
                if letters > _SLICE:
                    letters = 0
                    await asyncio.sleep(0)
            for row, lines_of in zip(rows, parts, strict=True):
                if lines_of:
                    text.write(_head(row, openmetrics=_OPENMETRICS in content_type))
                    text.write("".join(lines_of).encode())
            await asyncio.sleep(0)
        text.write(encode(self._rest))
        return text.getvalue()


class _Family(Collector):
    def __init__(self, row: MetricRow) -> None:
        self._metric = Metric(PREFIX + row.name, row.help, row.type)

    def collect(self) -> Sequence[Metric]:
        return (self._metric,)


@cache
def _head(row: MetricRow, *, openmetrics: bool) -> bytes:
    """Return help and type of a metric, as prometheus-client writes them."""
    encode, _ = choose_encoder(_OPENMETRICS if openmetrics else _PLAIN)
    return encode(_Family(row)).removesuffix(b"# EOF\n")
