"""The command line: help, usage, configuration, exit statuses, and an output that fails."""

import re
import subprocess
import sys

import pytest
from support import bodies, real_recordings
from support.process import shell
from support.real_recordings import write_recording

from exporter import __version__, cli
from exporter.config import OPTIONS
from exporter.vllm.recording import Poll

HIDDEN = "hunter2-is-not-shown"
COMMANDS = [name.split() for name in cli._COMMANDS if name not in cli._GROUPS]
WITH_OPTIONS = ("serve", "check", "record", "replay", "demo", "whatif")
BODY = bodies.body(bodies.engine(running=3, waiting=1, kv=0.4, preemptions=2, finished=5))

pytestmark = pytest.mark.usefixtures("own_logging")


# Help


def test_the_help_lists_every_command(run):
    """On one screen, with a line to copy for the most frequent ones."""
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: vllm-preemption-exporter [COMMAND] [OPTION ...]\n")
    assert all(re.search(rf"^    {name}\s+\w", out, re.MULTILINE) for name, *_ in COMMANDS)
    assert "http://127.0.0.1:8000/metrics" in out
    assert len(out.splitlines()) <= 33


def test_the_help_of_a_command_begins_with_a_short_usage(run):
    """One line, whatever options there are; a command without a configuration too."""
    failures = []
    for words in COMMANDS:
        status, out, err = run(*words, "--help")
        usage = out.partition("\n")[0]
        named = usage.startswith(f"usage: vllm-preemption-exporter {' '.join(words)} ")
        if (status, err) != (0, "") or not named or len(usage) > 100:
            failures.append((words, status, usage, err))
    assert not failures


def test_the_help_of_a_command_has_the_options_of_the_configuration(run):
    """All of them, sorted by section, where it is asked for all."""
    failures = []
    for command in WITH_OPTIONS:
        text = run(command, "--help-all")[1]
        failures += [f"{command} {row.flag}" for row in OPTIONS if (f"  {row.flag} " in text) != row.has_flag]
        sections = ("config", "target", "web", "poll", "log", "analysis")
        failures += [f"{command} {section}" for section in sections if f"\n{section}:\n" not in text]
    assert not failures


def test_the_help_of_a_command_shows_what_matters_first(run, monkeypatch):
    """Its own options and at most ten of the configuration; it names the way to the others."""
    monkeypatch.setenv("COLUMNS", "80")
    failures = []
    for command in WITH_OPTIONS:
        text = run(command, "--help")[1]
        shown = [row.flag for row in OPTIONS if f"  {row.flag} " in text]
        if not 1 <= len(shown) <= 10 or "  --help-all " not in text or "\nanalysis:\n" in text:
            failures.append((command, shown))
        if command != "whatif" and len(text.splitlines()) > 65:
            failures.append((command, len(text.splitlines())))
    assert not failures


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_the_help_fits_a_terminal_of_any_width(run, monkeypatch, columns):
    """Only what cannot be broken is longer than a line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    failures = []
    for words in ([], *([name] for name in WITH_OPTIONS)):
        status, out, _ = run(*words, "--help")
        if status or (columns >= 80 and max(map(len, out.splitlines())) > columns):
            failures.append(words)
    assert not failures


def test_the_help_of_what_polls_names_the_access_log(run):
    """A line per poll, and how to avoid it."""
    hint = "--disable-access-log-for-endpoints /metrics"
    found = {name for name in WITH_OPTIONS if hint in " ".join(run(name, "--help")[1].split())}
    assert found == {"serve", "check", "record"}


def test_the_version_is_printed(run):
    """With the program's name."""
    assert run("--version") == (0, f"vllm-preemption-exporter {__version__}\n", "")


# Usage

SLIPS = {
    ("fly",): "invalid choice: 'fly'",
    ("simulate",): "required: run|compare|serve",
    ("simulate", "fly"): "invalid choice: 'fly'",
    ("--nope",): "serve: error: unknown arguments: --nope",
    ("record", "http://h:1"): "required: -o/--output",
    ("replay",): "required: FILE",
    ("replay", "x", "--format", "xml"): "invalid choice: 'xml'",
    ("demo", "--for", "soon"): "expected a duration from 100ms to 168h (such as 500ms, 10s, 2m, 1h)",
    ("demo", "--for", "-3s"): "--for",
    ("demo", "--for", "1e400"): "expected a duration",
    ("serve", "--poll.int", "1s"): "unknown arguments: --poll.int",
}


def test_a_server_instead_of_a_command_is_checked(run):
    """By its URL, or by host and port; an option of its own is understood."""
    for address in ("http://127.0.0.1:9/metrics", "127.0.0.1:9"):
        status, out, _ = run(address, "--for", "200ms", "--poll.interval", "100ms")
        assert status == 3, out
        assert "Nothing listens" in out


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--max-num-seqs=64",), "args: --max-num-seqs 64\n"),
        (("--max-num-seqs 64",), "args: --max-num-seqs 64\n"),
        (("--enable-prefix-caching",), "args: --enable-prefix-caching\n"),
        (("vllm serve m --max-num-seqs 64",), "args: --max-num-seqs 64\n"),
    ],
)
def test_arguments_of_vllm_are_no_options_of_ours(run, words, facts):
    """One word that begins with a hyphen is the value of --engine.args."""
    status, out, err = run("serve", "--config.check", "--engine.args", *words)
    assert (status, err) == (0, "")
    assert facts in out


def test_the_usage_of_a_slip_is_that_of_its_command(run):
    """Not the program's."""
    assert "usage: vllm-preemption-exporter check" in run("check", "--nope")[2]


def test_bad_usage_is_status_2(run):
    """With a usage of a line or two, not a page, and what was wrong."""
    failures = []
    for words, expected in SLIPS.items():
        status, out, err = run(*words)
        short = err.startswith("usage: vllm-preemption-exporter") and len(err.splitlines()) <= 3
        if (status, out) != (2, "") or expected not in err or not short:
            failures.append((words, status, out, err))
    assert not failures


def test_bad_usage_of_check_is_status_3(run):
    """Its 2 means critical: a slip says nothing about the server."""
    assert run("check", "--nope")[0] == run("check", "no-url-at-all")[0] == 3


@pytest.mark.parametrize("words", [("--config.check",), ("serve", "--config.check")])
def test_without_a_command_it_serves(run, words):
    """Options alone are options of `serve`."""
    assert "listen_address" in run(*words)[1]


# Configuration


def test_every_problem_of_the_configuration_is_listed(run, tmp_path):
    """One line each, with the key; status 2."""
    path = tmp_path / "config.yaml"
    path.write_text("poll: {interval: soon}\nweb: {listen_adress: ':1'}\n")
    status, out, err = run("--config.file", path, "--log.level", "loud")
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        "vllm-preemption-exporter: invalid configuration:",
        "  --log.level: expected one of debug, info, warning, error, got 'loud'",
        "  web.listen_adress: unknown key (did you mean listen_address?)",
        "  poll.interval: expected a duration from 100ms to 1m (such as 500ms, 10s, 2m, 1h), got 'soon'",
    ]


@pytest.fixture
def several(tmp_path):
    """A configuration that names two servers and a way to find more."""
    path = tmp_path / "several.yaml"
    path.write_text("targets: [{url: 'http://a'}, {url: 'http://b'}]\ntargets_dns: [{name: x}]\n")
    return path


@pytest.mark.parametrize(
    ("command", "status"), [(("check",), 3), (("record", "-o", "x.jsonl"), 2), (("whatif",), 2)]
)
def test_a_command_about_one_server_needs_to_know_which(run, several, command, status):
    """Where the configuration names several; none is polled."""
    got, out, err = run(*command, "--config.file", several)
    assert (got, out) == (status, "")
    assert "names 2 targets and 1 ways to find more" in err
    assert f"{command[0]} needs one: expected its URL" in err


# Output


def test_a_reader_that_closes_the_pipe_is_no_error():
    """`replay F | head` ends in silence."""
    path = real_recordings.RECORDINGS / f"{real_recordings.EXHAUSTION}.jsonl.gz"
    with subprocess.Popen(
        [sys.executable, "-m", "exporter", "replay", str(path), "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline().startswith(b'{"t":0.0,')
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(10) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("script", "status", "err"),
    [
        ('"$@" > /dev/full', 1, "vllm-preemption-exporter: no space left on device\n"),
        ('"$@" >&-', 0, ""),
        ('PYTHONIOENCODING=ascii "$@" > /dev/null', 0, ""),
    ],
    ids=["full", "closed", "ascii"],
)
def test_an_output_that_fails_is_no_traceback(tmp_path, script, status, err):
    """A full disk is an error; a closed output was meant."""
    path = write_recording(tmp_path / "ж.jsonl", Poll(0.0, BODY))
    done = shell(script, "replay", path)
    assert (done.returncode, done.stderr) == (status, err)
