"""The command ``vllm-preemption-exporter``: what each command takes, and how its outcome reads."""

import argparse
import functools
import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from exporter import __version__
from exporter.config import Config, ConfigError, TargetConfig, add_flags, describe, flags_given, load
from exporter.config.options import Refused, duration
from exporter.rules.options import add_arguments as add_rule_arguments
from exporter.runtime import logs, loop, signals

__all__ = ["main"]

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNKNOWN: Final = 3
INTERRUPTED: Final = 130

_PROGRAM: Final = "vllm-preemption-exporter"
_SECONDS: Final = duration(0.1, 7 * 86_400.0)
_ABOUT: Final = f"""\
Watches the metrics of a vLLM server every second, judges its KV cache and preemptions, and exports what it \
finds to Prometheus. Without a command it serves; without options it watches http://127.0.0.1:8000/metrics \
and serves on port 21900.

  {_PROGRAM} demo
  {_PROGRAM} --target.url http://vllm:8000/metrics
  {_PROGRAM} check http://vllm:8000/metrics
  {_PROGRAM} record http://vllm:8000/metrics -o vllm.jsonl.gz
  {_PROGRAM} replay vllm.jsonl.gz
  {_PROGRAM} whatif vllm.jsonl.gz"""
_MORE: Final = f"`{_PROGRAM} COMMAND --help` tells the options of a command."
_ACCESS_LOG: Final = """\
vLLM writes a line to its access log for every poll unless it runs with \
--disable-access-log-for-endpoints /metrics"""

Run = Callable[[argparse.Namespace, Config], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0 good, 1 failed, 2 usage or configuration, 130 interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever letters a path or a label has
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        status = OK  # whoever read our output has seen enough
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as problem:
        _complain(_told(problem))
        status = FAILED
    _settle_output()
    return status


def _run(given: list[str]) -> int:
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help", "--version")):
        given.insert(0, "serve")
    if given[0] == "serve" and "--config.check" not in given:  # a check that is broken off found nothing good
        with signals.signals_at_start():
            return _run_command(given)
    return _run_command(given)


def _run_command(given: list[str]) -> int:
    # Monitoring reads the status of `check`, where 2 is critical: bad usage proves nothing of the server.
    usage = UNKNOWN if given[0] == "check" else USAGE
    try:
        options = _parser(given[0]).parse_args(given)
    except SystemExit as end:  # argparse has said what there was to say
        return usage if end.code else OK
    try:
        config = load(flags_given(options), os.environ, _read_text, getattr(options, "url", None))
    except ConfigError as problem:
        _complain_of(problem)
        return usage
    if given[0] != "serve" and not config.alone:
        if _asks_one(given[0], options):
            _complain(_which_one(given[0], config))
            return usage
        config = replace(config, targets=(TargetConfig(),), targets_dns=(), targets_file_sd=())
    logs.set_up(config.log.level, config.log.format)
    run: Run = options.run
    try:
        return run(options, config)
    except ConfigError as problem:  # of a file that the configuration names
        _complain_of(problem)
        return usage


def _settle_output() -> None:
    """Write out what is buffered; what cannot be written is dropped, or Python would complain at its end."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Help(argparse.HelpFormatter):
    """Wraps texts by the line, so that they may have paragraphs; an indented line stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapped = (
            line if line[:1] in ("", " ") else super(_Help, self)._fill_text(line, width, indent)
            for line in text.splitlines()
        )
        return "\n".join(wrapped)


def _parser(chosen: str) -> argparse.ArgumentParser:
    """The parser; what needs a room of its own to be described is left out unless it is chosen."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage="%(prog)s [COMMAND] [OPTION ...]",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=_PROGRAM)

    def command(name: str, usage: str, run: Run, text: str, epilog: str = "") -> argparse.ArgumentParser:
        """A command; its usage names what is its own, the options of all commands come in groups below."""
        added = commands.add_parser(
            name,
            usage=f"%(prog)s {usage}[OPTION ...]",
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=epilog,
            formatter_class=_Help,
        )
        added.set_defaults(run=run)
        if name == chosen and name in _ARGUMENTS:
            _ARGUMENTS[name](added)
        return added

    serve = command("serve", "", _serve, "watch a server and serve what is found (the default)", _ACCESS_LOG)
    serve.add_argument(
        "--config.check", dest="check", action="store_true", help="check the configuration, show it and exit"
    )

    check = command(
        "check",
        "[URL] [--for 15s] [--json] ",
        _check,
        "say in one shot what is the matter and what to change",
        "exit status: 0 good, 1 warning, 2 critical, 3 unknown or bad usage\n" + _ACCESS_LOG,
    )
    _add_url(check)
    check.add_argument(
        "--for",
        dest="seconds",
        type=_duration,
        default=15.0,
        metavar="DURATION",
        help="how long to watch (default: 15s); what takes a minute to be sure of is said sooner in less",
    )
    check.add_argument("--json", action="store_true", help="print one JSON object instead of a report")
    check.add_argument(
        "--what-if", action="store_true", help="simulate what each fix would do (see the command whatif)"
    )

    record = command("record", "[URL] -o FILE ", _record, "keep what a server answers in a file", _ACCESS_LOG)
    _add_url(record)
    record.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="where to; .jsonl or .jsonl.gz"
    )
    _add_for(record)
    record.add_argument(
        "--anonymise", action="store_true", help="replace names of models and adapters by hashes"
    )
    record.add_argument("--force", action="store_true", help="overwrite an existing file")

    replay = command(
        "replay",
        "FILE [--format text|json] ",
        _replay,
        "run a recording through the analysis, as fast as it can",
    )
    replay.add_argument("file", type=Path, metavar="FILE", help="a recording, plain or gzipped")
    replay.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        metavar="text|json",
        help="a line per poll for people (the default), or an object per poll",
    )

    demo = command(
        "demo",
        "[--scenario NAME] ",
        _demo,
        "see it work: a day of a simulated vLLM in two minutes, and the exporter on it",
    )
    _add_for(demo)

    whatif = command(
        "whatif",
        "[SOURCE] [--json] ",
        _whatif,
        "simulate what each fix would do to a load",
    )

    dashboards = command(
        "dashboards",
        "[list|print NAME|push --grafana URL] ",
        _dashboards,
        "list, print or push the Grafana dashboards",
        "push sends the token of the environment variable GRAFANA_TOKEN, where it is set",
    )
    _add_dashboards(dashboards)

    rules = command("rules", "[--native] ", _rules, "print the Prometheus rules, adapted to an installation")
    add_rule_arguments(rules)

    for added in (serve, check, record, replay, demo, whatif):
        add_flags(added)
    command(
        "simulate",
        "run|compare|serve ",
        _simulate,
        "simulate vLLM's scheduler: one workload, runs of real servers, or whole servers",
    )
    return parser


def _add_dashboards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "print", "push"), default="list")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="fleet, engine or exporter; all unless given"
    )
    parser.add_argument("--grafana", metavar="URL", help="where to push to, such as http://grafana:3000")
    parser.add_argument(
        "--folder", default="", metavar="TITLE", help="folder to push to, made where there is none"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace dashboards that are there already")
    parser.add_argument("--runbook-base", default="", metavar="URL", help="where the runbooks are")
    parser.add_argument(
        "--server-label",
        default="pod",
        metavar="LABEL",
        help="label that tells servers apart, of the exporter's scrape and of vLLM's own (default: pod)",
    )


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    from exporter.standin.scenarios import RECORDED, SCENARIOS  # noqa: PLC0415 (read when it is asked)

    parser.add_argument(
        "--scenario",
        choices=(*SCENARIOS, RECORDED),
        default="day",
        metavar="NAME",
        help=f"{', '.join(SCENARIOS)}, or {RECORDED}: a real vLLM with too small a KV cache (default: day)",
    )


def _add_whatif(parser: argparse.ArgumentParser) -> None:
    from exporter.commands import whatif  # noqa: PLC0415 (as above)

    whatif.add_arguments(parser)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    from exporter.commands import simulate  # noqa: PLC0415 (as above)

    simulate.add_arguments(parser)


_ARGUMENTS: Final[Mapping[str, Callable[[argparse.ArgumentParser], None]]] = {
    "demo": _add_scenario,
    "whatif": _add_whatif,
    "simulate": _add_simulate,
}


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="vLLM's metrics, such as http://vllm:8000/metrics; else --target.url",
    )


def _add_for(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for", dest="seconds", type=_duration, metavar="DURATION", help="stop by itself after this long"
    )


def _serve(options: argparse.Namespace, config: Config) -> int:
    if options.check:
        if config.web.config.file:
            from exporter.publish.web import webconfig  # noqa: PLC0415 (most have none)

            webconfig.Guard(config.web.config.file)
        print(describe(config), end="")
        return OK
    from exporter.runtime import sidecar  # noqa: PLC0415 (the other commands need no server)

    loop.run(sidecar.run(config, functools.partial(load, flags_given(options), os.environ, _read_text)))
    signals.ignore_signals()
    return OK


def _check(options: argparse.Namespace, config: Config) -> int:
    from exporter.commands import check  # noqa: PLC0415 (as above)
    from exporter.publish.terminal import coloured, plain  # noqa: PLC0415

    logging.getLogger().setLevel(logging.ERROR)  # the report says it all
    progress = _Progress()
    seen = loop.run(check.run(config, options.seconds, progress))
    progress.end()
    forecast = check.what_if(config, seen, sys.stderr) if options.what_if else None
    if options.json:
        print(check.as_json(config, seen, options.seconds, forecast))
    else:
        paint = coloured if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else plain
        print(check.as_text(config, seen, options.seconds, paint, forecast))
    return check.exit_status(seen.reading)


def _whatif(options: argparse.Namespace, config: Config) -> int:
    from exporter.commands import whatif  # noqa: PLC0415 (as above)
    from exporter.simulation.from_status import PresentError  # noqa: PLC0415
    from exporter.simulation.workload import WorkloadError  # noqa: PLC0415
    from exporter.vllm.recording import RecordingError  # noqa: PLC0415

    try:
        whatif.run(options, config, out=sys.stdout, err=sys.stderr)
    except (PresentError, RecordingError, WorkloadError) as problem:
        _complain(str(problem))
        return FAILED
    except ValueError as problem:
        _complain(str(problem))
        return USAGE
    return OK


def _simulate(options: argparse.Namespace, _config: Config) -> int:
    from exporter.commands import simulate  # noqa: PLC0415 (as above)

    return simulate.run(options)


def _record(options: argparse.Namespace, config: Config) -> int:
    from exporter.commands import record  # noqa: PLC0415 (as above)

    progress = _Progress()
    if progress.terminal:
        logging.getLogger().setLevel(logging.ERROR)  # the line that is written over says it all
    try:
        polls, failed = loop.run(
            record.run(
                config,
                options.output,
                progress,
                seconds=options.seconds,
                anonymised=options.anonymise,
                force=options.force,
            )
        )
    except FileExistsError:
        _complain(f"{options.output} exists; choose another file or --force")
        return FAILED
    except OSError as problem:  # of the file: whatever the server does is recorded
        progress.end()
        _complain(f"cannot write {options.output}: {_told(problem, name=False)}")
        return FAILED
    progress.end()
    print(f"{options.output}: {polls} polls, {failed} failed", file=sys.stderr)
    return OK if polls > failed else FAILED


def _replay(options: argparse.Namespace, config: Config) -> int:
    from exporter.commands import replay  # noqa: PLC0415 (as above)
    from exporter.vllm.recording import RecordingError  # noqa: PLC0415

    line = replay.as_json if options.format == "json" else replay.as_text
    try:
        for t, reading in replay.readings(options.file, config):
            print(line(t, reading))
    except RecordingError as problem:
        if sys.stdout is not None:
            sys.stdout.flush()
        _complain(f"{options.file}: {problem}")
        return FAILED
    return OK


def _dashboards(options: argparse.Namespace, _config: Config) -> int:
    from exporter.commands import dashboards  # noqa: PLC0415 (as above)

    try:
        for line in dashboards.run(options, os.environ):
            print(line)
    except dashboards.DashboardError as problem:
        _complain(str(problem))
        return FAILED
    return OK


def _rules(options: argparse.Namespace, _config: Config) -> int:
    from exporter.commands.rules import OptionsError, printed  # noqa: PLC0415 (as above)

    try:
        print(printed(options), end="")
    except OptionsError as problem:
        _complain(str(problem))
        return USAGE
    return OK


def _demo(options: argparse.Namespace, config: Config) -> int:
    from exporter.commands import demo  # noqa: PLC0415 (as above)

    logging.getLogger().setLevel(logging.WARNING)  # the demo's own lines are for the terminal
    say = functools.partial(print, flush=True)
    loop.run(demo.run(config, say, scenario=options.scenario, seconds=options.seconds))
    return OK


class _Progress:
    """A line that is written over on a terminal; elsewhere one in ten."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self._lines = 0

    def __call__(self, line: str) -> None:
        if self.terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif self._lines % 10 == 0:
            print(line, file=sys.stderr, flush=True)
        self._lines += 1

    def end(self) -> None:
        """Leave the line that is written over."""
        if self.terminal and self._lines:
            print(file=sys.stderr)


def _asks_one(command: str, options: argparse.Namespace) -> bool:
    """Whether a command is about one server, and none was named that it could be."""
    if command == "whatif":
        return options.source is None and options.rate is None and options.clients is None
    return command in {"check", "record"}


def _which_one(command: str, config: Config) -> str:
    found = len(config.targets_dns) + len(config.targets_file_sd)
    named = f"{len(config.targets)} targets" + (f" and {found} ways to find more" if found else "")
    wanted = "http://EXPORTER:21900/?target=HOST:PORT" if command == "whatif" else "http://HOST:PORT/metrics"
    return f"the configuration names {named}, and {command} is about one: expected its URL, {wanted}"


def _duration(text: str) -> float:
    try:
        return _SECONDS.read(text)
    except Refused as problem:
        raise argparse.ArgumentTypeError(problem.endings[0].lstrip(": ")) from None


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _told(problem: OSError, *, name: bool = True) -> str:
    """An error of the system in our words: no number, lower case, the file's name first."""
    text = problem.strerror or str(problem)
    text = text[:1].lower() + text[1:]
    return f"{problem.filename}: {text}" if name and problem.filename else text


def _complain_of(problem: ConfigError) -> None:
    _complain("the configuration is not good:\n" + "\n".join(f"  {line}" for line in problem.problems))


def _complain(text: str) -> None:
    print(f"{_PROGRAM}: {text}", file=sys.stderr)
