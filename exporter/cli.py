"""The command line ``vllm-preemption-exporter``: finds the command, loads the configuration, runs it."""

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from exporter import __version__
from exporter.commands._options import read_configuration
from exporter.commands._outcome import PROGRAM, CommandError, ExitStatus, UsageError, complain, reason
from exporter.config import ConfigError
from exporter.runtime import logs
from exporter.runtime.process import signals_at_start

__all__ = ["main"]

# Command: its line in the help. Its module is `exporter.commands.NAME`, with "_" for a blank.
_COMMANDS: Final[Mapping[str, str]] = {
    "serve": "poll servers and serve the results (the default)",
    "check": "watch a server for some seconds, then report what is wrong and what to change",
    "record": "save a server's responses to a file",
    "replay": "run a recording through the analysis",
    "demo": "simulate a day of vLLM traffic in two minutes and watch it",
    "whatif": "simulate what each fix would do to a load",
    "dashboards": "list, print or push the Grafana dashboards",
    "rules": "print the Prometheus rules, adapted to an installation",
    "simulate": "simulate vLLM's scheduler, or serve simulated servers",
    "simulate run": "simulate one workload on one engine and print the result",
    "simulate compare": "compare the simulation with runs of real servers",
    "simulate serve": "serve the metrics of simulated vLLM servers",
}
# Commands that only hold others, and how those are listed in the usage.
_GROUPS: Final[Mapping[str, str]] = {"simulate": "run|compare|serve"}
# A server instead of a command: it is checked.
_ADDRESS: Final = re.compile(r"https?://\S+|[\w.-]+:[0-9]{1,5}(?:/\S*)?")
_ENGINE_ARGUMENTS: Final = "--engine.args"
_ABOUT: Final = f"""\
Polls the metrics of a vLLM server every second, judges its KV cache and preemptions, and exports the result \
to Prometheus. Without a command it runs `serve`; without options it polls http://127.0.0.1:8000/metrics and \
serves on port 21900.

  {PROGRAM} demo
  {PROGRAM} --target.url http://vllm:8000/metrics
  {PROGRAM} check http://vllm:8000/metrics
  {PROGRAM} record http://vllm:8000/metrics -o vllm.jsonl.gz
  {PROGRAM} replay vllm.jsonl.gz
  {PROGRAM} whatif vllm.jsonl.gz"""
_MORE: Final = f"`{PROGRAM} COMMAND --help` (or `--help-all`) lists its options."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command: the words after the program's name, those of the process by default.

    Returns the exit status, one of `ExitStatus` or of those of `check`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths and labels may hold any character
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        status = ExitStatus.OK  # the reader of our output has closed it, as in `replay FILE | head`
    except KeyboardInterrupt:
        status = ExitStatus.INTERRUPTED
    except OSError as problem:
        complain(reason(problem))
        status = ExitStatus.FAILED
    _flush_output()
    return status


def _run(words: list[str]) -> int:
    if words and _ADDRESS.fullmatch(words[0]):
        words.insert(0, "check")
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "serve")
    # SIGTERM during the start ends `serve` with status 0; an interrupted check of the configuration fails.
    serves = words[0] == "serve" and "--config.check" not in words
    with signals_at_start() if serves else contextlib.nullcontext():
        return _run_command(words)


def _run_command(words: Sequence[str]) -> int:
    # Monitoring reads the status of `check`, where 2 means critical: bad usage says nothing about the server.
    bad_usage = ExitStatus.UNKNOWN if words[0] == "check" else ExitStatus.USAGE
    try:
        options, unknown = _parser(words).parse_known_args(_joined(words))
        if unknown:
            options.parser.error(f"unknown arguments: {' '.join(unknown)}")
    except SystemExit as end:  # argparse has printed the help or the error
        return bad_usage if end.code else ExitStatus.OK
    try:
        config = read_configuration(options)
        logs.set_up(config.log.level, config.log.format)
        status: int = options.run(options, config)
    except ConfigError as problem:
        complain("invalid configuration:\n" + "\n".join(f"  {line}" for line in problem.problems))
        return bad_usage
    except UsageError as problem:
        complain(str(problem))
        return bad_usage
    except CommandError as problem:
        complain(str(problem))
        return ExitStatus.FAILED
    return status


def _joined(words: Sequence[str]) -> list[str]:
    """Join vLLM's arguments to their option: as a word of their own they look like options of ours."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == _ENGINE_ARGUMENTS and word.startswith("-"):
            joined[-1] = f"{_ENGINE_ARGUMENTS}={word}"
        else:
            joined.append(word)
    return joined


def _flush_output() -> None:
    """Write the buffered output, and drop it if that fails: Python would report it at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Help(argparse.HelpFormatter):
    """Wraps line by line, so that texts may have paragraphs, and never within a flag; adds the defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(line if line[:1] in ("", " ") else indent + _wrap(line, width) for line in lines)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_none = action.default in (None, argparse.SUPPRESS, "", []) or action.default is False
        return text if has_none or "default" in text else f"{text} (default: %(default)s)"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(" ".join(text.split()), width).splitlines()


def _wrap(line: str, width: int) -> str:
    return textwrap.fill(line, width, break_on_hyphens=False)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser. Only the command that `words` begin with is imported and adds its options."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s [COMMAND] [OPTION ...]",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    listed = {"": parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=parser.prog)}
    for name, text in _COMMANDS.items():
        group, _, word = name.rpartition(" ")
        added = listed[group].add_parser(
            word, help=text, description=f"{text[0].upper()}{text[1:]}.", formatter_class=_Help
        )
        if name in _GROUPS:
            added.usage = f"%(prog)s {_GROUPS[name]} [OPTION ...]"
            listed[name] = added.add_subparsers(metavar=_GROUPS[name], required=True, prog=added.prog)
        elif [*words[: len(name.split())]] == name.split():
            command = importlib.import_module(f"exporter.commands.{name.replace(' ', '_')}")
            command.add_arguments(added)
            added.set_defaults(run=command.run, parser=added)
    return parser
