"""``dashboards``: list or print the shipped Grafana dashboards, or push them to a Grafana.

They are files, built by ``dashboards/build.py`` of the repository. Two things are adapted to an installation:
where the runbooks are, and which label tells one server from another.
"""

import argparse
import contextlib
import json
import os
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final

from exporter.commands._grafana import TOKEN, Grafana
from exporter.commands._outcome import CommandError, ExitStatus
from exporter.config import Config
from exporter.config.labels import is_label_name
from exporter.publish.alerts.table import RUNBOOK_BASE
from exporter.publish.inert import inert

__all__ = ["adapt", "add_arguments", "run"]

_NAMES: Final = ("fleet", "engine", "exporter")
# The label in an expression, not the variable of the same name.
_POD: Final = re.compile(r"(?<![\w$\"-])pod(?![\w-])|(?<=\")pod(?=\")|(?<=\{\{)pod(?=\}\})")

Json = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [list|print NAME|push --grafana URL] [OPTION ...]"
    parser.epilog = f"push sends the token in the environment variable {TOKEN}, if it is set"
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "print", "push"),
        default="list",
        metavar="list|print|push",
        help="list all, print one, or push some or all",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]} (default: all)"
    )
    parser.add_argument(
        "--grafana", metavar="URL", help="the Grafana to push to, such as http://grafana:3000"
    )
    parser.add_argument(
        "--folder", default="", metavar="TITLE", help="folder to push to, created if it is missing"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing dashboards")
    parser.add_argument(
        "--runbook-base", default="", metavar="URL", help="where the runbooks are (default: as published)"
    )
    parser.add_argument(
        "--server-label",
        default="pod",
        metavar="LABEL",
        help="label that tells servers apart, in the scrapes of the exporter and of vLLM",
    )


def run(options: argparse.Namespace, _config: Config) -> int:
    """List, print or push."""
    for line in _lines(options):
        print(line)
    return ExitStatus.OK


def _lines(options: argparse.Namespace) -> Iterator[str]:
    names = tuple(options.names)
    if unknown := [name for name in names if name not in _NAMES]:
        raise CommandError(f"unknown dashboard {unknown[0]}; expected {', '.join(_NAMES)}")
    if options.action == "print" and len(names) != 1:
        raise CommandError(f"print needs one name: {', '.join(_NAMES)}")
    documents = {name: adapt(name, options.runbook_base, options.server_label) for name in names or _NAMES}
    if options.action == "list":
        for name, document in documents.items():
            yield f"{name:10} {document['title']:26} {document['description']}"
    elif options.action == "print":
        yield from (json.dumps(document, indent=2, ensure_ascii=False) for document in documents.values())
    else:
        if not options.grafana:
            raise CommandError("push needs --grafana URL")
        token = os.environ.get(TOKEN, "").strip()
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise CommandError(f"{TOKEN}: expected visible ASCII characters without spaces, got others")
        with contextlib.closing(Grafana(options.grafana, token)) as grafana:
            yield from map(
                inert, grafana.push(documents.values(), options.folder, overwrite=options.overwrite)
            )


def adapt(name: str, runbook_base: str = "", server_label: str = "pod") -> Json:
    """Return a dashboard, adapted to an installation; an empty `runbook_base` is where they are published.

    `server_label` must be the same in both scrapes of a server, and different between servers.

    Raises:
        CommandError: the label is invalid, or the package lacks the file.
    """
    if not is_label_name(server_label):
        raise CommandError(f"--server-label: expected the name of a label, got {server_label!r}")
    folder = resources.files("exporter") / "data" / "dashboards"
    if not folder.is_dir():  # the package is not installed: it runs in the repository
        folder = Path(__file__).parent.parent.parent / "dashboards"
    try:
        text = (folder / f"{name}.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CommandError(f"this installation lacks the dashboard {name}") from None
    document: Json = json.loads(text.replace(RUNBOOK_BASE, runbook_base.rstrip("/") or RUNBOOK_BASE))
    return document if server_label == "pod" else _relabel(document, server_label)


def _relabel(value: Any, label: str) -> Any:
    """Replace ``pod`` by another label in everything that names labels."""
    if isinstance(value, list):
        return [_relabel(item, label) for item in value]
    if not isinstance(value, dict):
        return value
    changed: Json = {}
    for key, item in value.items():
        if isinstance(item, str) and key in ("expr", "query", "textFormat", "url"):
            changed[key] = _POD.sub(label, item)
        elif key in ("excludeByName", "indexByName", "renameByName"):
            changed[key] = {label if name == "pod" else name: setting for name, setting in item.items()}
            changed[key] |= {"pod": True} if key == "excludeByName" else {}
        elif key == "options" and item == "pod":  # of a matcher: the column of that name
            changed[key] = label
        else:
            changed[key] = _relabel(item, label)
    return changed
