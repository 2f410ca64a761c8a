"""Starts a real vLLM server on loopback, with settings, and ends it with all its processes."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import requests

from bench.real.install import Lab

__all__ = ["MODEL", "ServerError", "Settings", "serving"]

MODEL = "lab"
MAX_MODEL_LEN = 2048
BLOCK = 32  # a CPU needs multiples of 32
_START_SECONDS = 300.0


class ServerError(RuntimeError):
    """The server did not start; the message names its log."""


@dataclass(frozen=True)
class Settings:
    """The settings that differ between runs."""

    model: str
    blocks: int
    seats: int
    watermark: float | None = None
    batched_tokens: int | None = None

    def arguments(self) -> list[str]:
        """Return them as arguments of ``vllm serve``."""
        given = {
            "--num-gpu-blocks-override": self.blocks,
            "--max-num-seqs": self.seats,
            "--watermark": self.watermark,
            "--max-num-batched-tokens": self.batched_tokens,
        }
        return [word for flag, value in given.items() if value is not None for word in (flag, f"{value}")]


@contextmanager
def serving(lab: Lab, settings: Settings, log: Path) -> Iterator[str]:
    """Run a server and yield its URL when it is ready.

    Raises:
        ServerError: it ended, or was not ready in time.
    """
    port = _free_port()
    command = [
        *(str(lab.python), "-m", "vllm.entrypoints.cli.main", "serve", str(lab.model(settings.model))),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK)),
        *settings.arguments(),
    ]
    with log.open("wb") as file:
        # Its own session, so that its engine process ends with it.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=_environment(lab), start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(lab: Lab) -> dict[str, str]:
    own = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CONFIG_ROOT": str(lab.folder / "config"),
        "VLLM_CACHE_ROOT": str(lab.folder / "cache"),
        "PATH": f"{lab.python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | own


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"vLLM ended with status {process.returncode}; see {log}")
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=2).ok:
                return
        time.sleep(0.3)
    raise ServerError(f"vLLM was not ready after {_START_SECONDS:.0f} s; see {log}")
