"""The image: linted, built without a daemon, and run as its user with a read-only root.

No registry is asked. A Debian with Python, made by mmdebstrap once and kept in the user's cache, takes the
place of the base, under the name that the Dockerfile asks for. Where that cannot be made, the tests say why,
and an environment of the same packages is measured in the image's place.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.cluster import KUSTOMIZE, NAME, ROOT, program
from support.process import ANYWHERE, PATIENCE, until
from support.servers import Server, recorded

from exporter import __version__
from exporter.config import WebConfig

pytestmark = pytest.mark.programs

DOCKERFILE = ROOT / "Dockerfile"
HOME = "/opt/exporter"
PIP = "/usr/local/lib/python3.13/site-packages/pip"
MOST_MEBIBYTES = 90
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / f"{NAME}-tests"
# What a build without a daemon is made of; `.ci/programs` installs it.
NEEDED = ("buildah", "mmdebstrap", "unshare", "mount")
# Copied many times over by the storage that works without a daemon: what nobody reads is left out.
BASE = (
    "mmdebstrap", "--variant=apt", "--include=python3,python3-venv,ca-certificates",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")),
    '--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*',
    "bookworm",
)  # fmt: skip


@dataclass(frozen=True)
class Image:
    """A built image: its unpacked root, and its configuration."""

    root: Path
    config: dict

    @property
    def environ(self):
        """Its variables, as `KEY=VALUE`."""
        return self.config.get("Env", [])


def said(command, **options):
    """Run a command to its end; its output, or a failure with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, **options)
    if done.returncode:
        pytest.fail(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout.strip()


def hindrance():
    """Why no image can be built here; nothing where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root can unpack a base and mount a read-only root"
    if missing := [name for name in NEEDED if not shutil.which(name)]:
        return f"missing: {', '.join(missing)}; `.ci/programs` installs them on Debian"
    probe = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return "" if probe.returncode == 0 else f"no mounts in a namespace here: {probe.stderr.decode().strip()}"


@pytest.fixture(scope="session")
def base():
    """The tar of a Debian with Python; some 50 s the first time."""
    if reason := hindrance():
        pytest.skip(f"no image can be built: {reason}")
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"base-{hashlib.sha256(repr(BASE).encode()).hexdigest()[:8]}.tar"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once make it once
        if not path.exists():
            part = path.with_suffix(".part.tar")
            done = subprocess.run(
                [*BASE, str(part)],
                capture_output=True, text=True, timeout=540, check=False,
            )  # fmt: skip
            if done.returncode:
                part.unlink(missing_ok=True)
                pytest.skip(f"no image can be built: mmdebstrap made no base: {done.stderr[-500:]}")
            part.rename(path)
    return path


@pytest.fixture(scope="session")
def image(base, tmp_path_factory):
    """The image, built from the Dockerfile as it is, but for the base's digest."""
    folder = tmp_path_factory.mktemp("image")
    buildah = [
        "env", "BUILDAH_ISOLATION=chroot", "buildah", "--storage-driver", "vfs",
        "--root", str(folder / "root"), "--runroot", str(folder / "run"),
    ]  # fmt: skip
    context = folder / "base"
    context.mkdir()
    shutil.copy(base, context / "base.tar")
    # Where Python's own image has pip.
    (context / "pip").mkdir()
    (context / "pip" / "__init__.py").touch()
    lines = ["FROM scratch", "ADD base.tar /", f"COPY pip {PIP}"]
    (context / "Dockerfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = DOCKERFILE.read_text(encoding="utf-8")
    ((wanted, digest),) = re.findall(r"^FROM (\S+:\S+)(@sha256:\w+)", text, re.MULTILINE)
    dockerfile = folder / "Dockerfile"  # no stand-in has that digest
    dockerfile.write_text(text.replace(digest, ""), encoding="utf-8")
    said([*buildah, "bud", "--format", "docker", "-t", wanted, str(context)])
    # Packages are fetched over the machine's network, by the certificates that it trusts.
    said([
        *buildah, "bud", "--network", "host", "-v", "/etc/ssl/certs:/etc/ssl/certs:ro", "--pull-never",
        "--format", "docker", "-t", NAME, "-f", str(dockerfile), str(ROOT),
    ])  # fmt: skip
    config = json.loads(said([*buildah, "inspect", "--type", "image", NAME]))["Docker"]["config"]
    container = said([*buildah, "from", "--pull-never", NAME])
    yield Image(Path(said([*buildah, "mount", container])), config)
    said([*buildah, "rm", container])
    shutil.rmtree(folder, ignore_errors=True)


def contained(image, *command):
    """The command line that runs something in the image."""
    script = str(Path(__file__).with_name("contained.py"))
    user = image.config["User"].partition(":")[0]
    return [
        "unshare", "--mount", "--propagation", "private",
        sys.executable, script, str(image.root), user, *image.environ, "--", *command,
    ]  # fmt: skip


def test_hadolint_finds_nothing_to_say():
    """Not even a matter of style."""
    done = subprocess.run([program("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_base_is_pinned():
    """By a version with its patch level and a digest, and there is one base."""
    (base,) = re.findall(r"^FROM (\S+:\S+)", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    pinned = re.fullmatch(r"python:(3)\.(\d+)\.(\d+)-slim-[a-z]+@sha256:[0-9a-f]{64}", base)
    assert pinned
    # Older ones have a use after free in decompressors (CVE-2026-6100).
    assert tuple(map(int, pinned.groups())) >= (3, 13, 14)


def audit(target, folder, **programs):
    """Run a target of the audit with stand-ins for the programs; its status and what it said."""
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    for tool in ("sh", "sed", "head"):
        (folder / tool).symlink_to(shutil.which(tool))
    done = subprocess.run(
        [shutil.which("make"), "-C", str(ROOT), "-o", "setup", target, f"PY={folder / 'python'}"],
        env={"PATH": str(folder)}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(("latest", "status"), [("same", 0), ("3.13.99", 2), ("", 2)])
def test_the_audit_sees_an_old_python(latest, status, tmp_path):
    """In the base of the image, by what uv lists; a list that cannot be read is no success."""
    (base,) = re.findall(r"^FROM python:([\d.]+)", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    line = f"cpython-{base if latest == 'same' else latest}-linux-x86_64-gnu    <download available>"
    listed = f'if [ "$3" = python ]; then echo "{line if latest else ""}"; fi'
    found, text = audit("audit-python", tmp_path, python=listed)
    assert found == status
    wanted = base if latest == "same" else latest or "unknown"
    assert f"The image has Python {base}; the latest is {wanted}." in text


@pytest.mark.parametrize("scanner", ["trivy", "grype"])
@pytest.mark.parametrize("finds", [0, 1])
def test_the_audit_runs_a_scanner(scanner, finds, tmp_path):
    """The one that is there; what it finds fails the audit."""
    status, text = audit("audit-image", tmp_path, **{scanner: f'echo "$@"; exit {finds}'})
    assert status == 2 * finds
    assert text.splitlines()[1 if "Entering" in text else 0].endswith(f" {NAME}")


def test_the_audit_says_that_nothing_was_scanned(tmp_path):
    """And how to do it: no scanner is no success."""
    status, text = audit("audit-image", tmp_path)
    assert status == 2
    assert "not checked: install trivy or grype" in text
    assert f"docker build -t {NAME} ." in text


def test_nobody_can_install_anything_into_it(image):
    """Neither the base's pip nor one of the exporter's environment is there."""
    assert not (image.root / PIP.lstrip("/")).exists()
    assert not list((image.root / HOME.lstrip("/")).glob("lib/python3*/site-packages/pip"))


def test_the_version_is_that_of_the_sources():
    """Of the label, and of the image that the component names."""
    assert f"ARG VERSION={__version__}\n" in DOCKERFILE.read_text(encoding="utf-8")
    patch = yaml.safe_load((KUSTOMIZE / "component/sidecar.yaml").read_text(encoding="utf-8"))
    (container,) = patch["spec"]["template"]["spec"]["initContainers"]
    assert container["image"] == f"{NAME}:{__version__}"


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-build.lock"])
def test_the_image_gets_what_the_tests_run_with(lock):
    """Its locks have the same versions; `make lock` writes all of them."""
    pins = re.compile(r"^([a-z0-9-]+==\S+)", re.MULTILINE)
    tested = set(pins.findall((ROOT / "requirements-test.lock").read_text(encoding="utf-8")))
    assert set(pins.findall((ROOT / lock).read_text(encoding="utf-8"))) <= tested


def test_what_kubernetes_reads_of_it(image):
    """User, port, entry point and labels."""
    assert image.config["User"] == "65532:65532"
    assert list(image.config["ExposedPorts"]) == [f"{WebConfig().port}/tcp"]
    assert image.config["Entrypoint"] == [f"{HOME}/bin/{NAME}"]
    labels = image.config["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_no_build_tools_are_in_it(image):
    """Neither pip nor what builds the wheel, nor the sources."""
    packages = {path.name for path in (image.root / HOME[1:]).glob("lib/python3*/site-packages/*")}
    assert NAME.replace("-", "_") + f"-{__version__}.dist-info" in packages
    assert not {name for name in packages if name.startswith(("pip", "setuptools", "hatchling"))}
    assert not (image.root / "src").exists()
    assert not (image.root / "wheels").exists()


def test_it_has_rules_and_dashboards(image):
    """They are in the package, so that the cluster needs no checkout."""
    entry = image.config["Entrypoint"][0]
    assert "alert: VllmPreemptionThrash" in said(contained(image, entry, "rules"))
    assert "engine" in said(contained(image, entry, "dashboards", "list"))


def test_it_can_check_passwords(image):
    """Nobody can install an extra into an image."""
    code = "import sys, bcrypt; print(bcrypt.checkpw(b'open sesame', sys.argv[1].encode()))"
    hashed = "$2y$04$abcdefghijklmnopqrstuu/LVz6MZlItEy42I2juLihZ66HnQx/cy"
    assert said(contained(image, f"{HOME}/bin/python", "-c", code, hashed)) == "True"


def test_its_root_is_read_only_and_its_user_has_nothing(image):
    """The stand-in for a container does what is said of it."""
    code = (
        "import os, errno\n"
        "try: open('/tmp/x', 'w')\n"
        "except OSError as problem: print(errno.errorcode[problem.errno], os.getuid(), os.getgid())\n"
        "kept = ('CapEff', 'CapBnd', 'NoNewPrivs')\n"
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith(kept)))"
    )
    told = said(contained(image, f"{HOME}/bin/python", "-c", code)).split("\n")
    assert told[0] == "EROFS 65532 65532"
    assert [int(number, 16) for number in told[1].split()] == [0, 0, 1]


def test_it_serves_polls_and_ends(image, tmp_path):
    """As its user with a read-only root: the verdict is there, and SIGTERM ends it with 0."""
    log = tmp_path / "log"
    with Server(recorded()) as upstream, log.open("wb") as out:
        arguments = ("--target.url", upstream.url, *ANYWHERE)
        process = subprocess.Popen(
            contained(image, *image.config["Entrypoint"], *arguments), stdout=out, stderr=subprocess.STDOUT
        )
        try:
            base = until(lambda: re.search(r"serving url=(\S+)", log.read_text()), "serving")[1]
            until(lambda: "vllm_pressure_up 1.0" in fetched(base + "/metrics"), "a good poll")
            assert fetched(base + "/-/healthy")
            assert "vllm_pressure_verdict{" in fetched(base + "/metrics")
            assert "<html" in fetched(base).lower()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
    output = log.read_text()
    assert "stopping signal=SIGTERM" in output
    assert "Traceback" not in output


def fetched(url):
    """A page of the exporter."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.read().decode()


def test_a_wrong_configuration_ends_it_with_its_reason(image):
    """It stands in the pod's termination message."""
    done = subprocess.run(
        contained(image, *image.config["Entrypoint"], "--poll.interval", "never"),
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "poll.interval" in done.stderr


def test_its_content_is_small(request, tmp_path):
    """What the image adds to its base, in MiB; without an image, an environment with the same in it."""
    try:
        folder = request.getfixturevalue("image").root / HOME[1:]
    except pytest.skip.Exception:
        folder = tmp_path / "exporter"
        install(folder)
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 2**20
    assert 10 < size <= MOST_MEBIBYTES


def install(folder):
    """What the Dockerfile does, without an image."""
    said([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "-q"]
    said([*pip, "--only-binary", ":all:", "--require-hashes", "-r", str(ROOT / "requirements.lock")])
    wheels = folder.with_name("wheels")
    said(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(wheels),
            str(ROOT),
        ]
    )
    said([*pip, "--no-deps", "--no-index", *map(str, wheels.glob("*.whl"))])
