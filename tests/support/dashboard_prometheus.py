"""Runs a real Prometheus on loopback that holds half an hour of a fleet and scrapes nothing."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.dashboard_scenes import Server, openmetrics
from support.programs import Program


class _Prometheus(Program):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "prometheus")

    def arguments(self) -> Sequence[str]:
        return (
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            "--storage.tsdb.retention.time=100y",
        )


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
    with _Prometheus(folder) as server:
        yield server.url


def _make_blocks(servers: Sequence[Server], begin: float, folder: Path) -> None:
    with (folder / "fleet.txt").open("w", encoding="utf-8") as file:
        file.writelines(openmetrics(servers, begin))
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing; `.ci/programs` installs it"
    made = [promtool, "tsdb", "create-blocks-from", "openmetrics", "fleet.txt", "data"]
    subprocess.run(made, cwd=folder, check=True, capture_output=True, timeout=180)
