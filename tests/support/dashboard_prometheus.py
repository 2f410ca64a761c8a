"""Runs a real Prometheus on loopback that holds half an hour of a fleet and scrapes nothing."""

import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.dashboard_scenes import Server, openmetrics
from support.process import free_port, until


@contextmanager
def prometheus_of(servers: Sequence[Server], begin: float, folder: Path) -> Iterator[str]:
    """Start it; yields its base URL once it answers. It ends with the block.

    Args:
        servers: the fleet.
        begin: unix seconds of the first poll.
        folder: for its blocks, its configuration and its log.
    """
    _make_blocks(servers, begin, folder)
    (folder / "prometheus.yml").write_text("global: {}\n")
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(_command(folder, port), stdout=log, stderr=log)
    try:
        until(lambda: _ready(base), "Prometheus")
        yield base
    finally:
        process.kill()
        process.wait()


def _make_blocks(servers: Sequence[Server], begin: float, folder: Path) -> None:
    with (folder / "fleet.txt").open("w", encoding="utf-8") as file:
        file.writelines(openmetrics(servers, begin))
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing; `.ci/programs` installs it"
    made = [promtool, "tsdb", "create-blocks-from", "openmetrics", "fleet.txt", "data"]
    subprocess.run(made, cwd=folder, check=True, capture_output=True, timeout=60)


def _command(folder: Path, port: int) -> list[str]:
    program = shutil.which("prometheus")
    assert program, "prometheus is missing; `.ci/programs` installs it"
    return [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.retention.time=100y",
        "--log.level=warn",
    ]


def _ready(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/-/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
