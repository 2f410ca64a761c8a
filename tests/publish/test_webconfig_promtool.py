"""``--web.config.file`` held against Prometheus' own tool."""

import shutil
import subprocess

import pytest
from support.web_config import HASH, TLS, USERS, VERIFIED, Pki

from exporter.config import ConfigError
from exporter.publish.web.webconfig import Guard


@pytest.fixture
def pki(tmp_path):
    """An authority of the test's own."""
    return Pki(tmp_path)


def header(name: str, value: str) -> str:
    """A file that sets a header."""
    return f"http_server_config: {{headers: {{{name}: {value}}}}}"


def user(name: str) -> str:
    """A file that names a user."""
    return f"basic_auth_users: {{{name}: {HASH}}}"


TAKEN = [
    "",
    "---\n",
    TLS % "" + USERS,
    VERIFIED,
    USERS,
    TLS % ", min_version: TLS13",
    TLS % ", client_auth_type: NoClientCert",
    TLS % ", client_auth_type: RequestClientCert",
    TLS % ", client_auth_type: RequestClientCert, client_ca_file: ca.pem",
    TLS % ", client_auth_type: VerifyClientCertIfGiven, client_ca_file: ca.pem",
    *(f"http_server_config: {{http2: {word}}}" for word in ("false", "true", "yes", "no", "On", "OFF")),
    *(header("X-Frame-Options", value) for value in ("deny", "sameorigin")),
    header("X-Content-Type-Options", "nosniff"),
    header("X-XSS-Protection", "anything"),
    header("Strict-Transport-Security", "max-age=1"),
    header("Content-Security-Policy", '""'),
    *(user(name) for name in ("alice@example.com", '"a b"', "j\u00fcrgen", '""', "123", '"#"')),
]
REFUSED = [
    "- a",
    "nonsense: 1",
    TLS % ", nonsense: 1",
    TLS % ", client_ca_file: ca.pem",
    TLS % ", client_ca_file: ca.pem, client_auth_type: NoClientCert",
    TLS % ", client_auth_type: nonsense",
    TLS % ", min_version: TLS14",
    "http_server_config: {http2: maybe}",
    *(header("X-Frame-Options", value) for value in ("DENY", "foo", '""')),
    *(header("X-Content-Type-Options", value) for value in ("sniff", "NOSNIFF")),
    header("X-Other", "x"),
    header("x-frame-options", "deny"),
    "basic_auth_users: {alice: plain}",
    f"basic_auth_users: {{alice: {HASH}, alice: {HASH}}}",
]
STRICTER = [
    "{}\n---\n{}",
    TLS % ", cipher_suites: [TLS_AES_128_GCM_SHA256]",
    TLS % ", client_auth_type: RequireAnyClientCert",
    TLS % ", client_auth_type: VerifyClientCertIfGiven",
    TLS % ", client_auth_type: RequireAndVerifyClientCert",
    TLS % ", min_version: TLS10",
    TLS % ", min_version: TLS13, max_version: TLS12",
    user('"a:b"'),
    user("alice").replace("$2b$04", "$2b$17"),
]


@pytest.mark.programs
@pytest.mark.parametrize("text", TAKEN)
def test_promtool_takes_what_is_taken_here(tmp_path, pki, text):
    """The format is that of every exporter."""
    (tmp_path / "web.yml").write_text(text)
    Guard(str(tmp_path / "web.yml"))
    done = promtool(tmp_path / "web.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.programs
@pytest.mark.parametrize("text", REFUSED)
def test_what_promtool_refuses_is_refused_here(tmp_path, pki, text):
    """A file that is checked in a pipeline is good everywhere."""
    (tmp_path / "web.yml").write_text(text)
    assert promtool(tmp_path / "web.yml").returncode != 0
    with pytest.raises(ConfigError):
        Guard(str(tmp_path / "web.yml"))


@pytest.mark.programs
@pytest.mark.parametrize("text", STRICTER)
def test_what_could_not_be_kept_is_refused_though_promtool_takes_it(tmp_path, pki, text):
    """As SECURITY.md says."""
    (tmp_path / "web.yml").write_text(text)
    done = promtool(tmp_path / "web.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    with pytest.raises(ConfigError):
        Guard(str(tmp_path / "web.yml"))


def promtool(path) -> subprocess.CompletedProcess[bytes]:
    """What Prometheus' own tool says of a file."""
    program = shutil.which("promtool")
    assert program, "promtool is missing; `.ci/programs` installs it"
    return subprocess.run(
        [program, "check", "web-config", str(path)], capture_output=True, timeout=180, check=False
    )
