"""Dashboards pushed to a Grafana through its HTTP API."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import requests

from exporter.commands._outcome import CommandError
from exporter.net.urls import shown_url

__all__ = ["TOKEN", "Grafana", "push"]

TOKEN: Final = "GRAFANA_TOKEN"  # noqa: S105 (the name of the variable)
_TIMEOUT: Final = 10.0
_FOLDERS_PER_PAGE: Final = 1000

Json = dict[str, Any]


class _ExistsError(CommandError):
    """A dashboard exists, and was not to be replaced."""


@dataclass(frozen=True, slots=True)
class Grafana:
    """A Grafana to push to.

    Attributes:
        url: its base, with the path under which it is served; may hold a user and a password.
        token: of a service account with the role Editor; empty for none.
    """

    url: str
    token: str = ""

    @property
    def shown(self) -> str:
        """The URL without what is secret."""
        return shown_url(self.url).rstrip("/")


class _Bearer(requests.auth.AuthBase):
    """Sends the token, and never the credentials that a .netrc file has for the host."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def push(grafana: Grafana, documents: Iterable[Json], folder: str = "", *, overwrite: bool) -> Iterator[str]:
    """Create or replace dashboards; yields a line for each that was pushed.

    Args:
        grafana: where to.
        documents: the dashboards.
        folder: title of the folder, created if it is missing; empty for the general one.
        overwrite: replace existing dashboards; otherwise they are kept, and reported at the end.

    Raises:
        CommandError: Grafana cannot be reached or rejects them, or some exist already.
    """
    if urlsplit(grafana.url).scheme not in ("http", "https") or not urlsplit(grafana.url).hostname:
        raise CommandError(f"--grafana: expected a URL such as http://grafana:3000, got {grafana.shown!r}")
    with requests.Session() as session:
        if grafana.token or not urlsplit(grafana.url).username:
            session.auth = _Bearer(grafana.token)
        place = {"folderUid": _folder_uid(session, grafana, folder)} if folder else {}
        kept: list[str] = []
        for document in documents:
            body = {"dashboard": {**document, "id": None}, "overwrite": overwrite, **place}
            try:
                answer = _call(session, grafana, "POST", "/api/dashboards/db", body)
            except _ExistsError:
                kept.append(document["uid"])
                continue
            path = answer.get("url", "") if isinstance(answer, dict) else ""
            # Grafana's answer includes the path under which it is served, and so does the given URL.
            prefix = urlsplit(grafana.shown).path
            yield f"{document['title']}: {grafana.shown}{str(path).removeprefix(prefix)}"
    if kept:
        exist, them = ("exists", "it") if len(kept) == 1 else ("exist", "them")
        raise CommandError(f"{', '.join(kept)} {exist} already; --overwrite replaces {them}")


def _folder_uid(session: requests.Session, grafana: Grafana, title: str) -> str:
    """Find the folder, or create it."""
    page = 1
    try:
        while folders := _call(
            session, grafana, "GET", f"/api/folders?limit={_FOLDERS_PER_PAGE}&page={page}"
        ):
            for folder in folders:
                if folder["title"] == title:
                    return str(folder["uid"])
            if len(folders) < _FOLDERS_PER_PAGE:
                break
            page += 1
        return str(_call(session, grafana, "POST", "/api/folders", {"title": title})["uid"])
    except (TypeError, LookupError):
        raise CommandError(
            f"{grafana.shown} returned an unexpected body for /api/folders; is it the address of a Grafana?"
        ) from None


def _call(
    session: requests.Session, grafana: Grafana, method: str, path: str, body: Json | None = None
) -> Any:
    """Send one request and return its JSON. Redirects are not followed: the token is for one host."""
    url = grafana.url.rstrip("/") + path
    try:
        answer = session.request(method, url, json=body, timeout=_TIMEOUT, allow_redirects=False)
    except requests.RequestException as problem:
        raise CommandError(f"cannot reach {grafana.shown}: {_reason(problem)}") from None
    if answer.status_code == requests.codes.precondition_failed:
        raise _ExistsError
    if not answer.ok or answer.is_redirect:
        raise CommandError(_rejection(answer, grafana))
    try:
        return answer.json()
    except ValueError:
        raise CommandError(
            f"{grafana.shown} returned no JSON for {path}; is it the address of a Grafana?"
        ) from None


def _reason(problem: requests.RequestException) -> str:
    """Return the cause without the URL that requests puts into its texts: it may hold a password."""
    if isinstance(problem, requests.exceptions.SSLError):
        return "its certificate is not trusted; REQUESTS_CA_BUNDLE names the file of a private authority"
    if isinstance(problem, requests.Timeout):
        return f"no answer within {_TIMEOUT:g} s"
    if isinstance(problem, requests.ConnectionError):
        return "no connection"
    return type(problem).__name__


def _rejection(answer: requests.Response, grafana: Grafana) -> str:
    """Return what an error status means, and the next step where that is known."""
    status = answer.status_code
    if answer.is_redirect:
        to = Grafana(answer.headers.get("Location", "")).shown
        return f"{grafana.shown} redirects to {to}; pass that address as --grafana"
    if status == requests.codes.unauthorized and grafana.token:
        return f"{grafana.shown} rejects the token in {TOKEN}: it is of another Grafana, or expired"
    if status == requests.codes.unauthorized and urlsplit(grafana.url).username:
        return f"{grafana.shown} rejects this user and password"
    if status == requests.codes.unauthorized:
        return f"{grafana.shown} needs a login: set {TOKEN} to the token of a service account"
    if status == requests.codes.forbidden:
        return f"{grafana.shown} does not allow this account to do it: it needs the role Editor"
    try:
        message = str(answer.json().get("message", ""))
    except (ValueError, AttributeError):
        message = ""
    return f"{grafana.shown} returned {status}: {message[:200] or answer.reason or 'no reason given'}"
