"""``simulate serve``: the metrics of simulated vLLM servers, in real time."""

import argparse

from exporter.commands._outcome import ExitStatus, UsageError
from exporter.config import Config
from exporter.runtime import process
from exporter.standin.metrics_page import VERSIONS
from exporter.standin.scenarios import SCENARIOS
from exporter.standin.server import FakeServer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = "%(prog)s [--scenario NAME] [--port PORT] [OPTION ...]"
    parser.description = "Serve simulated vLLMs in real time, for dashboards, rules and load tests."
    parser.add_argument("--list", action="store_true", help="list the scenarios and exit")
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="number of servers, on consecutive ports"
    )
    parser.add_argument("--port", type=int, default=8000, help="port of the first server; 0: any free ones")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--scenario", choices=tuple(SCENARIOS), default="day", metavar="NAME", help=", ".join(SCENARIOS)
    )
    parser.add_argument(
        "--vllm-version",
        choices=VERSIONS,
        default=VERSIONS[-1],
        metavar="VERSION",
        help=f"vLLM version that the metrics look like: {' or '.join(VERSIONS)}",
    )
    parser.add_argument("--model", default="simulated-8b", help="name of the served model")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed of the first server's arrivals, one more for each further server",
    )


def run(options: argparse.Namespace, _config: Config) -> int:
    """Serve until SIGTERM or SIGINT."""
    if options.list:
        print("| scenario | shows | verdicts |\n|---|---|---|")
        for name, scenario in SCENARIOS.items():
            words = dict.fromkeys([*scenario.verdict.values(), *filter(None, [scenario.finding])])
            print(f"| `{name}` | {scenario.about} | {', '.join(f'`{word}`' for word in words)} |")
        return ExitStatus.OK
    if options.replicas < 1:
        raise UsageError(f"--replicas: expected at least 1, got {options.replicas}")
    process.run(_serve(options))
    return ExitStatus.OK


async def _serve(options: argparse.Namespace) -> None:
    stopped = process.stop_signal()
    started: list[FakeServer] = []
    try:
        for number in range(options.replicas):
            server = FakeServer(
                options.scenario,
                host=options.host,
                port=options.port + number if options.port else 0,
                version=options.vllm_version,
                model=options.model,
                seed=options.seed + number,
            )
            url = await server.start()
            started.append(server)
            print(f"{url}/metrics  simulated vLLM {options.vllm_version}, {options.scenario}", flush=True)
        await stopped
    finally:
        for server in started:
            await server.stop()
