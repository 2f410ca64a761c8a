"""Builds the resources under deploy/ with kustomize: one mapping per resource."""

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
EXAMPLES = DEPLOY / "examples"
NAME = "vllm-preemption-exporter"
LABEL = {NAME: "enabled"}
# The oldest with native sidecars, and the newest known one.
VERSIONS = ("1.29", "1.37")
Resource = dict[str, Any]


def program(name: str) -> str:
    """Return the path of a program from the locked packages."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    assert found, f"{name} is missing from the environment of the tests; `make setup` installs it"
    return found


def documents(text: str) -> list[Resource]:
    """Return all documents of a YAML text."""
    return [one for one in yaml.safe_load_all(text) if one]


@functools.cache
def _built(folder: Path) -> str:
    done = subprocess.run(
        [program("kubectl"), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return done.stdout


def built(folder: Path) -> list[Resource]:
    """Return the resources that `kubectl kustomize` builds from a folder."""
    return documents(_built(folder))


def one(resources: Iterable[Resource], kind: str, name: str = "") -> Resource:
    """Return the only resource of a kind (and a name)."""
    (found,) = [each for each in resources if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    return found


def with_sidecar(folder: Path, workloads: Iterable[Resource], component: str = "component") -> list[Resource]:
    """Build workloads with a component applied, in a folder of the test."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workloads.yaml").write_text(yaml.safe_dump_all(workloads), encoding="utf-8")
    # kustomize needs a path relative to the folder: copy the component there.
    shutil.copytree(KUSTOMIZE / component, folder / component, dirs_exist_ok=True)
    text = yaml.safe_dump({"resources": ["workloads.yaml"], "components": [component]})
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
    return built(folder)


def template(workload: Mapping[str, Any]) -> Resource:
    """Return the pod's template of a workload, or a leader's; a pod itself."""
    if workload["kind"] == "Pod":
        return dict(workload)
    if workload["kind"] == "LeaderWorkerSet":
        return workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    return workload["spec"]["template"]


def pod(workload: Mapping[str, Any]) -> Resource:
    """Return the pod's spec of a workload."""
    return template(workload)["spec"]


def containers(spec: Mapping[str, Any]) -> list[Resource]:
    """Return all containers of a pod, init containers first."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def exporter(workload: Mapping[str, Any]) -> Resource:
    """Return the exporter's container."""
    (found,) = [each for each in containers(pod(workload)) if each["name"] == NAME]
    return found


def quality(spec: Mapping[str, Any]) -> str:
    """Return a pod's quality of service class, from CPU and memory of all containers."""
    resources = [each.get("resources", {}) for each in containers(spec)]
    if all(
        each.get("limits", {}).get(what) and _same(each, what)
        for each in resources
        for what in ("cpu", "memory")
    ):
        return "Guaranteed"
    limited = any(each.get("limits") or each.get("requests") for each in resources)
    return "Burstable" if limited else "BestEffort"


def _same(resources: Mapping[str, Any], what: str) -> bool:
    limit = resources["limits"][what]
    return resources.get("requests", {}).get(what, limit) == limit


def validate(resource: Resource, version: str) -> None:
    """Check a resource against the schema of a Kubernetes version, strictly."""
    kubernetes_validate.validate(resource, version, strict=True)


def snippets(page: Path, language: str) -> Iterator[str]:
    """Return the code blocks of a page in one language, without their indentation."""
    for found in re.finditer(
        rf"^( *)```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        yield re.sub(rf"^{found[1]}", "", found[2], flags=re.MULTILINE)
