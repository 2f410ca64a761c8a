"""``dashboards``: the shipped Grafana dashboards, listed, printed, or pushed to a Grafana.

They are files that ``dashboards/build.py`` of the repository writes. An installation may want two things
otherwise: where the runbooks are, and which label tells one server from another.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import requests

from exporter.net.urls import shown_url
from exporter.publish.alerts.table import RUNBOOK_BASE

__all__ = ["NAMES", "DashboardError", "Grafana", "adapted", "listed", "push", "run"]

NAMES: Final = ("fleet", "engine", "exporter")
TOKEN: Final = "GRAFANA_TOKEN"  # noqa: S105 (the name of the variable)
_TIMEOUT: Final = 10.0
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
# The label in an expression, not the variable of the same name.
_POD: Final = re.compile(r"(?<![\w$\"-])pod(?![\w-])|(?<=\")pod(?=\")|(?<=\{\{)pod(?=\}\})")

Json = dict[str, Any]


class DashboardError(Exception):
    """What was asked cannot be done; the text says what was wanted and what was got."""


class _ThereError(DashboardError):
    """A dashboard is there already, and was not to be replaced."""


@dataclass(frozen=True, slots=True)
class Grafana:
    """A Grafana to push to.

    Attributes:
        url: its base, with a path where it is served under one; may hold a user and a password.
        token: of a service account with the role Editor; empty for none.
    """

    url: str
    token: str = ""

    @property
    def shown(self) -> str:
        """The URL as it may be shown."""
        return shown_url(self.url).rstrip("/")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[str]:
    """What the command prints, line by line.

    Raises:
        DashboardError: it cannot be done.
    """
    documents = {name: adapted(name, options.runbook_base, options.server_label) for name in _chosen(options)}
    if options.action == "list":
        yield from listed(documents)
    elif options.action == "print":
        yield from (_text(document) for document in documents.values())
    else:
        if not options.grafana:
            raise DashboardError("push needs --grafana URL")
        token = environ.get(TOKEN, "").strip()
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise DashboardError(f"{TOKEN}: expected visible ASCII characters without spaces, got others")
        grafana = Grafana(options.grafana, token)
        yield from push(grafana, documents.values(), options.folder, overwrite=options.overwrite)


def _chosen(options: argparse.Namespace) -> tuple[str, ...]:
    names = tuple(options.names)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise DashboardError(f"no dashboard is called {unknown[0]}; there are {', '.join(NAMES)}")
    if options.action == "print" and len(names) != 1:
        raise DashboardError(f"print needs one name: {', '.join(NAMES)}")
    return names or NAMES


def listed(documents: Mapping[str, Json]) -> Iterator[str]:
    """A line for each: name, title, what it is about."""
    for name, document in documents.items():
        yield f"{name:10} {document['title']:26} {document['description']}"


def _text(document: Json) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)


# The files.


def _folder() -> Traversable:
    """In an installed package they are its data; beside the sources they stand where they are built."""
    inside = resources.files("exporter") / "data" / "dashboards"
    return inside if inside.is_dir() else Path(__file__).parent.parent.parent / "dashboards"


def adapted(name: str, runbook_base: str = "", server_label: str = "pod") -> Json:
    """A dashboard for an installation.

    Args:
        name: one of `NAMES`.
        runbook_base: where the runbooks are; empty for where they are published.
        server_label: the label that both scrapes of a server have and no other server.

    Raises:
        DashboardError: the label is none, or the package lacks the file.
    """
    if not _LABEL.fullmatch(server_label):
        raise DashboardError(f"--server-label: expected the name of a label, got {server_label!r}")
    try:
        text = (_folder() / f"{name}.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DashboardError(f"this installation lacks the dashboard {name}") from None
    document: Json = json.loads(text.replace(RUNBOOK_BASE, runbook_base.rstrip("/") or RUNBOOK_BASE))
    return document if server_label == "pod" else _relabelled(document, server_label)


def _relabelled(value: Any, label: str) -> Any:
    """With another label in the place of ``pod``, in everything that names labels."""
    if isinstance(value, list):
        return [_relabelled(one, label) for one in value]
    if not isinstance(value, dict):
        return value
    changed: Json = {}
    for key, one in value.items():
        if isinstance(one, str) and key in ("expr", "query", "textFormat", "url"):
            changed[key] = _POD.sub(label, one)
        elif key in ("excludeByName", "indexByName", "renameByName"):
            changed[key] = {label if name == "pod" else name: value for name, value in one.items()}
            changed[key] |= {"pod": True} if key == "excludeByName" else {}
        elif key == "options" and one == "pod":  # of a matcher: the column of that name
            changed[key] = label
        else:
            changed[key] = _relabelled(one, label)
    return changed


# Grafana.


class _Bearer(requests.auth.AuthBase):
    """The token, and not what a .netrc file may say about the host."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def push(grafana: Grafana, documents: Iterable[Json], folder: str = "", *, overwrite: bool) -> Iterator[str]:
    """Create or replace dashboards; yields a line for each that is there.

    Args:
        grafana: where to.
        documents: the dashboards.
        folder: title of the folder, which is made where there is none; empty for the general one.
        overwrite: replace those that are there already; else they are left alone, and said at the end.

    Raises:
        DashboardError: Grafana cannot be reached or does not want them, or some were left alone.
    """
    if urlsplit(grafana.url).scheme not in ("http", "https") or not urlsplit(grafana.url).hostname:
        raise DashboardError(f"--grafana: expected a URL such as http://grafana:3000, got {grafana.shown!r}")
    with requests.Session() as session:
        if grafana.token or not urlsplit(grafana.url).username:
            session.auth = _Bearer(grafana.token)
        place = {"folderUid": _folder_uid(session, grafana, folder)} if folder else {}
        left: list[str] = []
        for document in documents:
            sent = {"dashboard": {**document, "id": None}, "overwrite": overwrite, **place}
            try:
                answer = _ask(session, grafana, "POST", "/api/dashboards/db", sent)
            except _ThereError:
                left.append(document["uid"])
                continue
            path = answer.get("url", "") if isinstance(answer, dict) else ""
            # Grafana's answer has the path it is served under, and so has the URL given.
            prefix = urlsplit(grafana.shown).path
            yield f"{document['title']}: {grafana.shown}{str(path).removeprefix(prefix)}"
    if left:
        are, them = ("is", "it") if len(left) == 1 else ("are", "them")
        raise DashboardError(f"{', '.join(left)} {are} there already; --overwrite replaces {them}")


def _folder_uid(session: requests.Session, grafana: Grafana, title: str) -> str:
    page = 1
    try:
        while found := _ask(session, grafana, "GET", f"/api/folders?limit=1000&page={page}"):
            for folder in found:
                if folder["title"] == title:
                    return str(folder["uid"])
            if len(found) < 1000:  # noqa: PLR2004 (the limit asked for)
                break
            page += 1
        return str(_ask(session, grafana, "POST", "/api/folders", {"title": title})["uid"])
    except (TypeError, LookupError):
        raise DashboardError(
            f"{grafana.shown} answered /api/folders with something else; is it the address of a Grafana?"
        ) from None


def _ask(
    session: requests.Session,
    grafana: Grafana,
    method: str,
    path: str,
    body: Json | None = None,
) -> Any:
    """One request and its JSON; redirects are not followed, for a token belongs to one host."""
    url = grafana.url.rstrip("/") + path
    try:
        answer = session.request(method, url, json=body, timeout=_TIMEOUT, allow_redirects=False)
    except requests.RequestException as problem:
        raise DashboardError(f"{grafana.shown} cannot be reached: {_reason(problem)}") from None
    if not answer.ok or answer.is_redirect:
        if answer.status_code == requests.codes.precondition_failed:
            raise _ThereError
        raise DashboardError(_refused(answer, grafana))
    try:
        return answer.json()
    except ValueError:
        raise DashboardError(
            f"{grafana.shown} answered {path} with no JSON; is it the address of a Grafana?"
        ) from None


def _reason(problem: requests.RequestException) -> str:
    """Why, without the URL that requests puts into its texts: it may hold a password."""
    if isinstance(problem, requests.exceptions.SSLError):
        return "its certificate is not trusted; REQUESTS_CA_BUNDLE names the file of a private authority"
    if isinstance(problem, requests.Timeout):
        return f"no answer within {_TIMEOUT:g} s"
    if isinstance(problem, requests.ConnectionError):
        return "no connection"
    return type(problem).__name__


def _refused(answer: requests.Response, grafana: Grafana) -> str:
    status = answer.status_code
    if answer.is_redirect:
        to = Grafana(answer.headers.get("Location", "")).shown
        return f"{grafana.shown} redirects to {to}; give that address as --grafana"
    if status == requests.codes.unauthorized and grafana.token:
        return f"{grafana.shown} does not take the token in {TOKEN}: it may be of another Grafana, or expired"
    if status == requests.codes.unauthorized and urlsplit(grafana.url).username:
        return f"{grafana.shown} does not take this user and password"
    if status == requests.codes.unauthorized:
        return f"{grafana.shown} wants to know who asks: set {TOKEN} to the token of a service account"
    if status == requests.codes.forbidden:
        return f"{grafana.shown} does not let this account do it: the role Editor is needed"
    return f"{grafana.shown} answered {status}: {_told(answer)}"


def _told(answer: requests.Response) -> str:
    try:
        told = answer.json().get("message", "")
    except (ValueError, AttributeError):
        told = ""
    return str(told)[:200] or answer.reason or "no reason given"
