"""Reads a server's answers about itself: its version, its longest request, its configuration.

``/server_info`` exists in vLLM's development mode only, and contains the environment with its keys;
``/v1/models`` contains names and paths. Only the facts that our configuration may contain too are kept.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from exporter.config import Fact, arguments, parse_facts

__all__ = [
    "MODELS", "NO_ANSWERS", "SERVER_INFO", "VERSION", "ServerAnswers", "from_header", "read_models",
    "read_server_info", "read_version", "to_header",
]  # fmt: skip

VERSION: Final = "/version"
MODELS: Final = "/v1/models"
SERVER_INFO: Final = "/server_info?config_format=json"
_LONGEST: Final = "max_model_len"
# A release, or a build of one: 0.26.0, 0.11.1rc2.dev41+g1234abc.
_RELEASE: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6}){1,3}[.+-]?[\w.+-]{0,40}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """The facts that a server gave, by vLLM's flag names; an unknown one is absent."""

    server_info: Mapping[str, Fact] = field(default_factory=dict)  # from ``/server_info``
    models: Mapping[str, Fact] = field(default_factory=dict)  # from ``/v1/models``: `max_model_len`
    version: str | None = None  # from ``/version``, such as ``0.26.0``


NO_ANSWERS: Final = ServerAnswers()


def read_server_info(value: object) -> dict[str, Fact]:
    """Pick the facts from an answer of ``/server_info?config_format=json``, whatever JSON it is."""
    config = value.get("vllm_config") if isinstance(value, dict) else None
    if not isinstance(config, dict):  # older servers answer with a text
        return {}
    facts: dict[str, object] = {}
    for name in arguments.FIELDS:
        fields = config.get(name)
        if isinstance(fields, dict):
            facts |= arguments.facts_of(name, fields)
    return parse_facts(facts, strict=False)[0]


def read_models(value: object) -> dict[str, Fact]:
    """Pick `max_model_len` from an answer of ``/v1/models``, whatever JSON it is.

    ``{"max_model_len": 4096}`` alone, as recordings hold it, is accepted too. Cards of adapters do not count;
    if the others disagree the length is unknown.
    """
    if not isinstance(value, dict):
        return {}
    cards = value.get("data")
    lengths: set[Fact] = set()
    for card in [value, *(cards if isinstance(cards, list) else ())]:
        if isinstance(card, dict) and not card.get("parent"):
            lengths.update(parse_facts({_LONGEST: card.get(_LONGEST)}, strict=False)[0].values())
    return {_LONGEST: lengths.pop()} if len(lengths) == 1 else {}


def read_version(value: object) -> str | None:
    """Pick the version from an answer of ``/version``, whatever JSON it is; None if it holds none."""
    version = value.get("version") if isinstance(value, dict) else value
    return version if isinstance(version, str) and _RELEASE.fullmatch(version) else None


def from_header(probes: Mapping[str, object]) -> ServerAnswers:
    """Read a recording's ``probes``: answers by path, whole or as `to_header` keeps them."""
    info = probes.get(SERVER_INFO, probes.get("/server_info"))
    models, version = probes.get(MODELS), probes.get(VERSION)
    return ServerAnswers(read_server_info(info), read_models(models), read_version(version))


def to_header(answers: ServerAnswers) -> dict[str, Any]:
    """Build the ``probes`` of a recording's header, with nothing in them but the facts."""
    header: dict[str, Any] = {
        VERSION: answers.version and {"version": answers.version},
        MODELS: dict(answers.models),
        SERVER_INFO: answers.server_info and {"vllm_config": arguments.fields_of(answers.server_info)},
    }
    return {path: answer for path, answer in header.items() if answer}
