"""Dashboards pushed to a Grafana through its HTTP API."""

from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import requests

from exporter.commands._outcome import CommandError
from exporter.net.urls import shown_url

__all__ = ["TOKEN", "Grafana"]

TOKEN: Final = "GRAFANA_TOKEN"  # noqa: S105 (the name of the variable)
_TIMEOUT: Final = 10.0
_FOLDERS_PER_PAGE: Final = 1000
_WRONG_ADDRESS: Final = "is it the address of a Grafana?"

Json = dict[str, Any]


class _Bearer(requests.auth.AuthBase):
    """Sends the token, and never the credentials that a .netrc file has for the host."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class Grafana:
    """A Grafana to push dashboards to."""

    def __init__(self, url: str, token: str) -> None:
        """Prepare, without sending anything.

        Args:
            url: its base, with the path under which it is served; may hold a user and a password.
            token: of a service account with the role Editor; empty for none.

        Raises:
            CommandError: the URL is invalid.
        """
        self._url = url.rstrip("/")
        self._shown = shown_url(url).rstrip("/")
        self._token = token
        parts = urlsplit(url)
        self._user = parts.username
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandError(f"--grafana: expected a URL such as http://grafana:3000, got {self._shown!r}")
        self._session = requests.Session()
        if token or not self._user:
            self._session.auth = _Bearer(token)

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def push(self, documents: Iterable[Json], folder: str, *, overwrite: bool) -> Iterator[str]:
        """Create or replace dashboards; yields a line for each that was pushed.

        The folder of that title is created if it is missing; an empty title is the general folder. Without
        `overwrite` existing dashboards are kept, and reported at the end.

        Raises:
            CommandError: Grafana cannot be reached or rejects them, or some exist already.
        """
        place = {"folderUid": self._folder_uid(folder)} if folder else {}
        kept: list[str] = []
        for document in documents:
            body = {"dashboard": {**document, "id": None}, "overwrite": overwrite, **place}
            answer = self._call("POST", "/api/dashboards/db", body)
            if answer is None:
                kept.append(document["uid"])
                continue
            path = answer.get("url", "") if isinstance(answer, dict) else ""
            # Grafana's answer includes the path under which it is served, and so does the given URL.
            prefix = urlsplit(self._shown).path
            yield f"{document['title']}: {self._shown}{str(path).removeprefix(prefix)}"
        if kept:
            exist, them = ("exists", "it") if len(kept) == 1 else ("exist", "them")
            raise CommandError(f"{', '.join(kept)} {exist} already; --overwrite replaces {them}")

    def _folder_uid(self, title: str) -> str:
        """Find the folder, or create it."""
        page = 1
        try:
            while folders := self._call("GET", f"/api/folders?limit={_FOLDERS_PER_PAGE}&page={page}"):
                for folder in folders:
                    if folder["title"] == title:
                        return str(folder["uid"])
                if len(folders) < _FOLDERS_PER_PAGE:
                    break
                page += 1
            return str(self._call("POST", "/api/folders", {"title": title})["uid"])
        except (TypeError, LookupError):
            wrong = f"returned an unexpected body for /api/folders; {_WRONG_ADDRESS}"
            raise CommandError(f"{self._shown} {wrong}") from None

    def _call(self, method: str, path: str, body: Json | None = None) -> Any:
        """Send one request and return its JSON, None for what exists already.

        Redirects are not followed: the token is for one host.
        """
        try:
            answer = self._session.request(
                method, self._url + path, json=body, timeout=_TIMEOUT, allow_redirects=False
            )
        except requests.RequestException as problem:
            raise CommandError(f"cannot reach {self._shown}: {_reason(problem)}") from None
        if answer.status_code == requests.codes.precondition_failed:
            return None
        if not answer.ok or answer.is_redirect:
            raise CommandError(f"{self._shown} {self._rejection(answer)}")
        try:
            return answer.json()
        except ValueError:
            raise CommandError(f"{self._shown} returned no JSON for {path}; {_WRONG_ADDRESS}") from None

    def _rejection(self, answer: requests.Response) -> str:
        """Return what an error status means, and the next step where that is known."""
        if answer.is_redirect:
            to = shown_url(answer.headers.get("Location", "")).rstrip("/")
            return f"redirects to {to}; pass that address as --grafana"
        if answer.status_code == requests.codes.unauthorized:
            if self._token:
                return f"rejects the token in {TOKEN}: it is of another Grafana, or expired"
            if self._user:
                return "rejects this user and password"
            return f"needs a login: set {TOKEN} to the token of a service account"
        if answer.status_code == requests.codes.forbidden:
            return "does not allow this account to do it: it needs the role Editor"
        try:
            message = str(answer.json().get("message", ""))
        except (ValueError, AttributeError):
            message = ""
        return f"returned {answer.status_code}: {message[:200] or answer.reason or 'no reason given'}"


def _reason(problem: requests.RequestException) -> str:
    """Return the cause without the URL that requests puts into its texts: it may hold a password."""
    if isinstance(problem, requests.exceptions.SSLError):
        return "its certificate is not trusted; REQUESTS_CA_BUNDLE names the file of a private authority"
    if isinstance(problem, requests.Timeout):
        return f"no answer within {_TIMEOUT:g} s"
    if isinstance(problem, requests.ConnectionError):
        return "no connection"
    return type(problem).__name__
