"""How a command ends: the exit statuses, and the errors that the command line reports."""

import sys
from typing import Final

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "OK",
    "PROGRAM",
    "UNKNOWN",
    "USAGE",
    "CommandError",
    "UsageError",
    "complain",
    "reason",
]

PROGRAM: Final = "vllm-preemption-exporter"
OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
# Of `check` only, whose 0 to 2 are the server's state.
UNKNOWN: Final = 3
INTERRUPTED: Final = 130


class CommandError(Exception):
    """A command cannot do its work; the text is for the user. Exit status 1."""


class UsageError(CommandError):
    """The options, the configuration or an input file are invalid. Exit status 2, for `check` 3."""


def complain(text: str) -> None:
    """Print an error for the user to standard error."""
    print(f"{PROGRAM}: {text}", file=sys.stderr)


def reason(problem: OSError, *, with_file: bool = True) -> str:
    """Return the text of a system error: lower case, without its number, after the file's name."""
    text = problem.strerror or str(problem)
    text = text[:1].lower() + text[1:]
    return f"{problem.filename}: {text}" if with_file and problem.filename else text
