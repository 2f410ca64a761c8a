"""``dashboards``: what it prints, and what it pushes to a Grafana."""

import json
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import pytest
from support.dashboard_files import NAMES, ROOT, document
from support.process import refusing_port

from exporter import cli
from exporter.commands._outcome import CommandError
from exporter.commands.dashboards import adapt

TOKEN = "glsa_hunter2-is-not-shown"
pytestmark = pytest.mark.usefixtures("own_logging")


class Grafana:
    """A server that takes dashboards as Grafana does.

    Attributes:
        token: that it expects, empty for none.
        folders: uid by title.
        dashboards: what was pushed, by uid, with the folder's uid.
        says: status and body of every response in place of its own, None for its own.
    """

    def __init__(self, token: str = TOKEN) -> None:
        self.token = token
        self.folders: dict[str, str] = {}
        self.dashboards: dict[str, dict] = {}
        self.says: tuple[int, bytes] | None = None
        self.headers: list[dict[str, str]] = []
        grafana = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(*grafana.take(self.path, None, dict(self.headers)))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*grafana.take(self.path, body, dict(self.headers)))

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "https://user:secret@elsewhere.example/login")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, path: str, body: dict | None, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self.headers.append(headers)
        if self.says is not None:
            return self.says
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            return 401, b'{"message": "Unauthorized"}'
        status, answer = self._answer(path.removeprefix("/grafana"), body)
        return status, json.dumps(answer).encode()

    def _answer(self, path: str, body: dict | None) -> tuple[int, object]:
        if path.startswith("/api/folders") and body is None:
            return 200, [{"title": title, "uid": uid} for title, uid in self.folders.items()]
        if path == "/api/folders":
            self.folders[body["title"]] = f"f{len(self.folders)}"
            return 200, {"title": body["title"], "uid": self.folders[body["title"]]}
        assert path == "/api/dashboards/db"
        uid = body["dashboard"]["uid"]
        if uid in self.dashboards and not body["overwrite"]:
            return 412, {
                "message": "the dashboard has been changed by someone else",
                "status": "version-mismatch",
            }
        self.dashboards[uid] = body
        return 200, {"uid": uid, "url": f"/grafana/d/{uid}/x", "status": "success"}


@pytest.fixture
def grafana():
    """A running one."""
    with Grafana() as running:
        yield running


@pytest.fixture
def run(capsys, monkeypatch):
    """A function that runs the command with a token; its status, output and complaints."""
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)

    def command(*arguments: str):
        status = cli.main(["dashboards", *arguments])
        out, err = capsys.readouterr()
        assert TOKEN not in out + err
        return status, out, err

    return command


# Listed and printed


def test_they_are_listed(run):
    """By name, each with what it is about."""
    status, out, _ = run()
    assert status == 0
    assert {line.split()[0] for line in out.splitlines()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_one_is_printed_as_it_is_committed(run, name):
    """Ready for a file."""
    status, out, _ = run("print", name)
    assert (status, json.loads(out)) == (0, document(name))


def test_runbooks_may_be_elsewhere(run):
    """Every link changes."""
    _, out, _ = run("print", "engine", "--runbook-base", "https://wiki.example/runbooks/")
    assert "https://wiki.example/runbooks/VllmPreemptionThrash.md" in out
    assert "github.com" not in out


def test_another_label_may_tell_servers_apart():
    """In selectors, groups, variables and hidden columns; the variable keeps its name."""
    text = json.dumps(adapt("fleet", server_label="host"))
    assert 'host=~\\"$pod\\"' in text
    assert "by (cluster, namespace, host, target, instance" in text
    assert '\\"server\\", \\"|\\", \\"target\\", \\"host\\", \\"instance\\"' in text
    assert ", host)" in text
    assert (
        '{"id": "byName", "options": "host"}, "properties": [{"id": "custom.hidden", "value": true}' in text
    )
    assert "var-pod=${__data.fields.host}" in text
    assert "pod=~" not in text
    assert "var-pod=" in text


def test_an_invalid_label_is_rejected():
    """Before any of it gets into an expression."""
    for label in ("", "a-b", "x{", '"'):
        with pytest.raises(CommandError, match="--server-label: expected the name of a label"):
            adapt("engine", server_label=label)


REJECTED = {
    ("print",): "print needs one name: fleet, engine, exporter",
    ("print", "engine", "fleet"): "print needs one name",
    ("print", "gpu"): "unknown dashboard gpu",
    ("push",): "push needs --grafana URL",
    ("push", "--grafana", "grafana:3000"): "expected a URL such as http://grafana:3000",
    ("push", "--grafana", "file:///etc/passwd"): "expected a URL",
}


def test_options_that_make_no_sense_are_rejected(run):
    """With what was expected."""
    failures = []
    for words, reason in REJECTED.items():
        status, out, err = run(*words)
        if (status, out) != (1, "") or reason not in err:
            failures.append((words, status, out, err))
    assert not failures


# Pushed


def test_all_are_pushed_into_a_new_folder(run, grafana):
    """Without an id, which would be that of another dashboard; the lines have the URLs."""
    status, out, err = run("push", "--grafana", grafana.url, "--folder", "vLLM")
    assert (status, err) == (0, "")
    assert set(grafana.dashboards) == {f"vllm-pressure-{name}" for name in NAMES}
    for name in NAMES:
        sent = grafana.dashboards[f"vllm-pressure-{name}"]
        assert sent["dashboard"] == {**document(name), "id": None}
        assert sent["folderUid"] == grafana.folders["vLLM"]
        assert sent["overwrite"] is False
        assert f"{grafana.url}/grafana/d/vllm-pressure-{name}/x" in out


def test_an_existing_folder_is_used(run, grafana):
    """By its title."""
    grafana.folders = {"Other": "f0", "vLLM": "abc"}
    run("push", "engine", "--grafana", grafana.url, "--folder", "vLLM")
    assert grafana.dashboards["vllm-pressure-engine"]["folderUid"] == "abc"
    assert len(grafana.folders) == 2


def test_without_a_folder_they_go_to_the_general_one(run, grafana):
    """Which has no uid to name."""
    run("push", "engine", "--grafana", grafana.url)
    assert "folderUid" not in grafana.dashboards["vllm-pressure-engine"]
    assert not grafana.folders


def test_an_existing_dashboard_is_replaced_only_with_overwrite(run, grafana):
    """Somebody may have changed it."""
    run("push", "engine", "--grafana", grafana.url)
    status, out, err = run("push", "--grafana", grafana.url)
    assert (status, "vllm-pressure-engine exists already; --overwrite replaces it" in err) == (1, True)
    assert grafana.dashboards.keys() == {
        "vllm-pressure-engine",
        "vllm-pressure-fleet",
        "vllm-pressure-exporter",
    }
    assert "engine" not in out
    _, _, err = run("push", "fleet", "engine", "--grafana", grafana.url)
    assert "vllm-pressure-fleet, vllm-pressure-engine exist already; --overwrite replaces them" in err
    status, _, _ = run("push", "engine", "--grafana", grafana.url, "--overwrite")
    assert status == 0
    assert grafana.dashboards["vllm-pressure-engine"]["overwrite"] is True


def test_grafana_may_be_served_under_a_path(run, grafana):
    """Which the answer has too, and the line only once."""
    status, out, _ = run("push", "engine", "--grafana", f"{grafana.url}/grafana/")
    assert status == 0
    assert f"{grafana.url}/grafana/d/vllm-pressure-engine/x" in out


def test_a_password_in_the_url_is_used_and_not_shown(run, grafana, monkeypatch):
    """Where there is no token."""
    monkeypatch.delenv("GRAFANA_TOKEN")
    grafana.token = ""
    url = grafana.url.replace("://", "://admin:hunter2@")
    status, out, err = run("push", "engine", "--grafana", url)
    assert status == 0
    assert grafana.headers[-1]["Authorization"].startswith("Basic ")
    assert "hunter2" not in out + err


def test_the_token_goes_before_what_a_netrc_says(run, grafana, monkeypatch, tmp_path):
    """Without precautions, requests would prefer the file."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert run("push", "engine", "--grafana", grafana.url)[0] == 0


RESPONSES = {
    (401, b"{}"): "rejects the token in GRAFANA_TOKEN",
    (403, b'{"message": "no"}'): "it needs the role Editor",
    (302, b""): "redirects to https://elsewhere.example/login; pass that address as --grafana",
    (500, b'{"message": "database is locked"}'): "returned 500: database is locked",
    (502, b"<html>"): "returned 502: Bad Gateway",
    (404, b"[]"): "returned 404: Not Found",
    (200, b"<html>Welcome"): "returned no JSON for /api/dashboards/db; is it the address of a Grafana?",
}


def test_a_rejection_says_what_to_do(run, grafana):
    """Where that is known. A redirect is not followed: the token is for one host."""
    failures = []
    for grafana.says, reason in RESPONSES.items():
        status, _, err = run("push", "engine", "--grafana", grafana.url)
        if status != 1 or reason not in err or "secret" in err:
            failures.append((grafana.says, status, err))
    assert not failures
    assert len(grafana.headers) == len(RESPONSES)


def test_a_token_that_no_header_can_carry_is_no_traceback(run, grafana, monkeypatch):
    """The content of a file with a second line, for example."""
    for token in ("PW\nSECRET", "PW SECRET", "PWSECRÉT"):
        monkeypatch.setenv("GRAFANA_TOKEN", token)
        status, out, err = run("push", "engine", "--grafana", grafana.url)
        assert (status, "GRAFANA_TOKEN: expected visible ASCII characters" in err) == (1, True), err
        assert "PW" not in out + err
    assert not grafana.headers


def test_a_push_without_a_login_says_how_to_log_in(run, grafana, monkeypatch):
    """Without any, and with a wrong password."""
    monkeypatch.delenv("GRAFANA_TOKEN")
    _, _, err = run("push", "engine", "--grafana", grafana.url)
    assert "needs a login: set GRAFANA_TOKEN" in err
    _, _, err = run("push", "engine", "--grafana", grafana.url.replace("://", "://admin:wrong@"))
    assert "rejects this user and password" in err
    assert "wrong" not in err


def test_json_that_is_not_grafanas_is_no_traceback(run, grafana):
    """From something else that speaks JSON."""
    failures = []
    for body in (b'{"message": "x"}', b'["x"]', b"[1]", b"[{}]", b'"x"', b"7", b"null", b"[]"):
        grafana.says = (200, body)
        status, _, err = run("push", "engine", "--grafana", grafana.url, "--folder", "vLLM")
        if status != 1 or "is it the address of a Grafana?" not in err:
            failures.append((body, status, err))
    assert not failures


def test_a_grafana_that_does_not_run_is_an_error(run):
    """Without a traceback, and without the secrets of the URL."""
    with refusing_port() as port:
        status, _, err = run("push", "--grafana", f"http://admin:hunter2@127.0.0.1:{port}")
    assert status == 1
    assert f"cannot reach http://127.0.0.1:{port}: no connection" in err
    assert "hunter2" not in err


# In the package


def test_the_wheel_has_them(tmp_path):
    """An installed package has no repository around it."""
    made = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True, timeout=180)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in NAMES:
            packed = archive.read(f"exporter/data/dashboards/{name}.json")
            assert packed == (ROOT / "dashboards" / f"{name}.json").read_bytes()
        archive.extractall(tmp_path / "installed")
    command = [sys.executable, "-c", "from exporter.cli import main; main(['dashboards', 'print', 'engine'])"]
    environ = {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, timeout=180)
    assert json.loads(done.stdout) == document("engine")
