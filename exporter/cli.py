"""The command ``vllm-preemption-exporter``: what each command takes, and how its outcome reads."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from exporter import __version__, logs, loop
from exporter.config import Config, ConfigError, add_flags, describe, flags_given, load
from exporter.options import Refused, duration

__all__ = ["main"]

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

_PROGRAM: Final = "vllm-preemption-exporter"
_SECONDS: Final = duration(0.1, 7 * 86_400.0)
_ABOUT: Final = """\
Watches the metrics of a vLLM server every second, judges its KV cache and preemptions, and exports what it
finds to Prometheus. Without a command it serves; without options it watches http://127.0.0.1:8000/metrics
and serves on port 21900."""
_ACCESS_LOG: Final = """\
vLLM writes a line to its access log for every poll unless it runs with
--disable-access-log-for-endpoints /metrics"""

Run = Callable[[argparse.Namespace, Config], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 good, 1 failed, 2 usage or configuration."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help", "--version")):
        given.insert(0, "serve")
    options = _parser().parse_args(given)
    run: Run = options.run
    try:
        config = load(_flags(options), os.environ, _read_text)
        logs.set_up(config.log.level, config.log.format)
        status = run(options, config)
        sys.stdout.flush()
    except ConfigError as problem:
        _complain("the configuration is not good:\n" + "\n".join(f"  {line}" for line in problem.problems))
        return USAGE
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as problem:
        _complain(str(problem))
        return FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description=_ABOUT, epilog=_ACCESS_LOG, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Run, text: str, epilog: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", epilog=epilog
        )
        added.set_defaults(run=run)
        return added

    serve = command("serve", _serve, "watch a server and serve what is found (the default)", _ACCESS_LOG)
    serve.add_argument(
        "--config.check", dest="check", action="store_true", help="check the configuration and exit"
    )

    record = command("record", _record, "keep what a server answers in a file", _ACCESS_LOG)
    record.add_argument("url", metavar="URL", help="vLLM's metrics, such as http://127.0.0.1:8000/metrics")
    record.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="where to; .jsonl or .jsonl.gz"
    )
    record.add_argument(
        "--for", dest="seconds", type=_duration, metavar="DURATION", help="stop by itself after this long"
    )
    record.add_argument(
        "--anonymise", action="store_true", help="replace names of models and adapters by hashes"
    )
    record.add_argument("--force", action="store_true", help="overwrite an existing file")

    replay = command("replay", _replay, "run a recording through the analysis, as fast as it can")
    replay.add_argument("file", type=Path, metavar="FILE", help="a recording, plain or gzipped")
    replay.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="a line per poll for people, or an object per poll",
    )

    demo = command(
        "demo", _demo, "see it work: a recorded vLLM with too small a KV cache, and the exporter on it"
    )
    demo.add_argument(
        "--for", dest="seconds", type=_duration, metavar="DURATION", help="stop by itself after this long"
    )

    for added in (serve, record, replay, demo):
        add_flags(added)
    return parser


def _serve(options: argparse.Namespace, config: Config) -> int:
    if options.check:
        print(describe(config), end="")
        return OK
    from exporter import serve  # noqa: PLC0415 (the other commands need no server)

    loop.run(serve.run(config))
    return OK


def _record(options: argparse.Namespace, config: Config) -> int:
    from exporter import record  # noqa: PLC0415 (as above)

    try:
        polls, failed = loop.run(
            record.run(
                config,
                options.output,
                _Progress(),
                seconds=options.seconds,
                anonymised=options.anonymise,
                force=options.force,
            )
        )
    except FileExistsError:
        _complain(f"{options.output} exists; choose another file or --force")
        return FAILED
    print(f"\n{options.output}: {polls} polls, {failed} failed", file=sys.stderr)
    return OK if polls > failed else FAILED


def _replay(options: argparse.Namespace, config: Config) -> int:
    from exporter import replay  # noqa: PLC0415 (as above)
    from exporter.recording import RecordingError  # noqa: PLC0415

    line = replay.as_json if options.format == "json" else replay.as_text
    try:
        for t, reading in replay.readings(options.file, config):
            print(line(t, reading))
    except RecordingError as problem:
        sys.stdout.flush()
        _complain(f"{options.file}: {problem}")
        return FAILED
    return OK


def _demo(options: argparse.Namespace, config: Config) -> int:
    from exporter import demo  # noqa: PLC0415 (as above)

    logging.getLogger().setLevel(logging.WARNING)  # the demo's own lines are for the terminal
    loop.run(demo.run(config, lambda line: print(line, flush=True), seconds=options.seconds))
    return OK


class _Progress:
    """A line that is written over on a terminal; elsewhere one in ten seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._lines = 0

    def __call__(self, line: str) -> None:
        if self._terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif self._lines % 10 == 0:
            print(line, file=sys.stderr, flush=True)
        self._lines += 1


def _flags(options: argparse.Namespace) -> dict[str, str]:
    flags = flags_given(options)
    url = getattr(options, "url", None)
    return {**flags, "target.url": url} if url is not None else flags


def _duration(text: str) -> float:
    try:
        return _SECONDS.read(text)
    except Refused as problem:
        raise argparse.ArgumentTypeError(problem.endings[0].lstrip(": ")) from None


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _complain(text: str) -> None:
    print(f"{_PROGRAM}: {text}", file=sys.stderr)
