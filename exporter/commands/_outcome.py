"""How a command ends: the exit statuses, and the errors that the command line reports."""

import sys
from enum import IntEnum
from typing import Final

from exporter.publish.inert import inert_lines

__all__ = ["PROGRAM", "CommandError", "ExitStatus", "UsageError", "complain", "reason"]

PROGRAM: Final = "vllm-preemption-exporter"


class ExitStatus(IntEnum):
    """The exit statuses; those of `check` are 0 good, 1 warning, 2 critical and 3 unknown or bad usage."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNKNOWN = 3
    INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot do its work; the text is for the user. Exit status 1."""


class UsageError(CommandError):
    """The options, the configuration or an input file are invalid. Exit status 2, for `check` 3."""


def complain(text: str) -> None:
    """Print an error for the user to standard error; it may hold names that a server or a file made up."""
    print(f"{PROGRAM}: {inert_lines(text)}", file=sys.stderr)


def reason(problem: OSError, *, with_file: bool = True) -> str:
    """Return the text of a system error: lower case, without its number, after the file's name."""
    text = problem.strerror or str(problem)
    text = text[:1].lower() + text[1:]
    return f"{problem.filename}: {text}" if with_file and problem.filename else text
