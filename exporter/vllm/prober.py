"""What a server tells beside its metrics: its version, the longest request it takes, its configuration.

``/server_info`` answers in vLLM's development mode only, and holds the environment with its keys;
``/v1/models`` holds names and paths. Only the facts that the configuration may hold too are kept, and they
are picked as soon as the answer is there.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, Self
from urllib.parse import urlsplit

from exporter.config import Fact, PollConfig, TargetConfig, arguments, parse_facts
from exporter.vllm.client import JsonAnswer, MetricsClient

__all__ = [
    "Probed",
    "Prober",
    "ask",
    "base_of",
    "from_header",
    "probe",
    "read_models",
    "read_server_info",
    "read_version",
    "to_header",
]

log = logging.getLogger(__name__)

_VERSION: Final = "/version"
_MODELS: Final = "/v1/models"
_SERVER_INFO: Final = "/server_info"
_SERVER_INFO_JSON: Final = "/server_info?config_format=json"
_LONGEST: Final = "max_model_len"
# A release, or a build of one: 0.26.0, 0.11.1rc2.dev41+g1234abc.
_RELEASE: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6}){1,3}[.+-]?[\w.+-]{0,40}", re.ASCII)

# The first /server_info of a server looks at its whole machine, which takes seconds.
PATIENCE_SECONDS: Final = 30.0
# An endpoint that was cut off or timed out is asked again after so many good polls, this often in all.
AGAIN_AFTER_POLLS: Final = 60
TRIES: Final = 3
# What waiting does not change. Without development mode /server_info is a 404, without the key /v1 a 401.
_FINAL_ERRORS: Final = frozenset({"body_too_large", "protocol", "redirect"})


@dataclass(frozen=True, slots=True)
class Probed:
    """What a server told, by vLLM's flag names; what it did not tell is not there.

    Attributes:
        server_info: from ``/server_info``.
        models: from ``/v1/models``: `max_model_len`.
        version: from ``/version``, such as ``0.26.0``.
    """

    server_info: Mapping[str, Fact] = field(default_factory=dict)
    models: Mapping[str, Fact] = field(default_factory=dict)
    version: str | None = None


class Asker(Protocol):
    """Who asks: `exporter.vllm.client.MetricsClient`, or a test's stand-in."""

    async def get_json(self, path: str) -> JsonAnswer:
        """One GET; raises nothing."""
        ...

    async def close(self) -> None:
        """Asks no more."""
        ...


def read_server_info(value: object) -> dict[str, Fact]:
    """Pick the facts from an answer of ``/server_info?config_format=json``, whatever JSON it is."""
    config = value.get("vllm_config") if isinstance(value, dict) else None
    if not isinstance(config, dict):  # older servers answer with a text
        return {}
    told: dict[str, object] = {}
    for name in arguments.FIELDS:
        fields = config.get(name)
        if isinstance(fields, dict):
            told |= arguments.facts_of(name, fields)
    return parse_facts(told, strict=False)[0]


def read_models(value: object) -> dict[str, Fact]:
    """Pick `max_model_len` from an answer of ``/v1/models``, whatever JSON it is.

    ``{"max_model_len": 4096}`` alone, as recordings hold it, is good too. Cards of adapters do not count,
    and where the others disagree nothing is known.
    """
    if not isinstance(value, dict):
        return {}
    cards = value.get("data")
    found = set()
    for card in [value, *(cards if isinstance(cards, list) else ())]:
        if isinstance(card, dict) and not card.get("parent"):
            told, _ = parse_facts({_LONGEST: card.get(_LONGEST)}, strict=False)
            found |= set(told.values())
    return {_LONGEST: found.pop()} if len(found) == 1 else {}


def read_version(value: object) -> str | None:
    """Pick the version from an answer of ``/version``, whatever JSON it is; None where it tells none."""
    word = value.get("version") if isinstance(value, dict) else value
    return word if isinstance(word, str) and _RELEASE.fullmatch(word) else None


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One row: the field of `Probed`, where it is asked for, and how the answer is read."""

    field: str
    path: str
    read: Callable[[object], Any]


# The slow one last.
_ENDPOINTS: Final = (
    _Endpoint("version", _VERSION, read_version),
    _Endpoint("models", _MODELS, read_models),
    _Endpoint("server_info", _SERVER_INFO_JSON, read_server_info),
)


def base_of(url: str) -> str:
    """The path under which a server's endpoints lie: ``/`` for ``/metrics``, ``/a/`` for ``/a/metrics``."""
    above = urlsplit(url).path.strip("/").rpartition("/")[0]
    return f"/{above}/" if above else "/"


async def probe(client: Asker, base: str = "/") -> Probed:
    """Ask the three endpoints once. Errors are normal, and mean that nothing is known from there.

    Args:
        client: who asks; not one whose polls must not wait.
        base: as `base_of` gives it.
    """
    probed = Probed()
    for endpoint in _ENDPOINTS:
        answer = await client.get_json(base + endpoint.path.lstrip("/"))
        probed = _with(probed, endpoint, answer)
    return probed


def _with(probed: Probed, endpoint: _Endpoint, answer: JsonAnswer) -> Probed:
    value = answer.value if answer.error is None else None
    return replace(probed, **{endpoint.field: endpoint.read(value)})


def from_header(probes: Mapping[str, object]) -> Probed:
    """Read a recording's ``probes``: answers by path, whole or as `to_header` keeps them."""
    info = probes.get(_SERVER_INFO_JSON, probes.get(_SERVER_INFO))
    return Probed(
        read_server_info(info), read_models(probes.get(_MODELS)), read_version(probes.get(_VERSION))
    )


def to_header(probed: Probed) -> dict[str, Any]:
    """The ``probes`` of a recording's header, with nothing in them but the facts."""
    header: dict[str, Any] = {}
    if probed.version is not None:
        header[_VERSION] = {"version": probed.version}
    if probed.models:
        header[_MODELS] = dict(probed.models)
    if probed.server_info:
        header[_SERVER_INFO_JSON] = {"vllm_config": arguments.fields_of(probed.server_info)}
    return header


async def ask(client: Asker) -> dict[str, Any]:
    """Ask a server for what is quickly answered, for the header of a recording.

    Returns:
        Answers by path: ``{"/version": {"version": "0.26.0"}, "/v1/models": {"max_model_len": 2048}}``;
        what the server does not answer is left out.
    """
    version = await client.get_json(_VERSION.lstrip("/"))
    if version.error is not None and not version.error.startswith("http_"):
        return {}  # nobody is there, or busy: the metrics matter more
    models = await client.get_json(_MODELS.lstrip("/"))
    return to_header(Probed({}, read_models(models.value), read_version(version.value)))


class Prober:
    """Asks a server what it runs with, once per start of its engine, in a task of its own.

    Whoever polls calls `seen` after each good poll, which costs nothing, and reads `probed`.

    Attributes:
        probed: what this start of the server told so far; empty before.
    """

    def __init__(self, client: Asker, base: str = "/", name: str = "") -> None:
        """Begin with nothing known.

        Args:
            client: a client of its own: a poll must never wait for an answer to this one.
            base: as `base_of` gives it.
            name: of the target, for the log; empty where it is the only one.
        """
        self.probed = Probed()
        self._whose = f" target={name}" if name else ""
        self._client = client
        self._base = base
        self._start: Hashable = None
        self._open: tuple[_Endpoint, ...] = ()
        self._tries = 0
        self._polls = 0
        self._due = asyncio.Event()

    @classmethod
    def of(cls, target: TargetConfig, poll: PollConfig, name: str = "") -> Self:
        """Make one with a patient client for the target; nothing is opened yet."""
        patient = replace(poll, timeout=max(poll.timeout, PATIENCE_SECONDS))
        return cls(MetricsClient(target, patient), base_of(target.url), name)

    def seen(self, start: Hashable) -> None:
        """Take note of a good poll.

        Args:
            start: what changes when an engine starts anew, the number of restarts for instance. Not None.
        """
        if start != self._start:
            self._start = start
            self.probed = Probed()  # it may have been started with other flags
            self._open = _ENDPOINTS
            self._tries = TRIES
            self._polls = 0
            self._due.set()
        elif self._open and self._tries:
            self._polls += 1
            if self._polls >= AGAIN_AFTER_POLLS:
                self._polls = 0
                self._due.set()

    async def refresh(self) -> Probed:
        """Ask what this start of the server has not answered yet. Raises nothing but CancelledError."""
        start = self._start
        self._tries -= 1
        for endpoint in self._open:
            answer = await self._client.get_json(self._base + endpoint.path.lstrip("/"))
            if start != self._start:  # that was the server before
                break
            if _is_final(answer.error):
                self._open = tuple(other for other in self._open if other is not endpoint)
                self.probed = _with(self.probed, endpoint, answer)
        return self.probed

    async def run(self) -> None:
        """Ask whenever that is due, until cancelled. Raises nothing but CancelledError."""
        while True:
            await self._due.wait()
            self._due.clear()
            probed = await self.refresh()
            known = ",".join(sorted({*probed.models, *probed.server_info}))
            version = probed.version or "unknown"
            log.info("asked the server version=%s facts=%s%s", version, known or "none", self._whose)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def _is_final(error: str | None) -> bool:
    return error is None or error.startswith("http_4") or error in _FINAL_ERRORS
