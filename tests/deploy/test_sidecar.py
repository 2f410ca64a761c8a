"""The component adds the exporter to a workload, and changes nothing else about it."""

import copy
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support.cluster import (
    EXAMPLES,
    LABEL,
    NAME,
    ROOT,
    VERSIONS,
    built,
    containers,
    exporter,
    one,
    pod,
    program,
    quality,
    snippets,
    template,
    validate,
    with_sidecar,
)

from exporter import __version__
from exporter.config import WebConfig

pytestmark = pytest.mark.programs

FORMS = ("component", "component-plain-container")
KINDS = ("Deployment", "StatefulSet", "DaemonSet", "Job", "Pod", "LeaderWorkerSet")
FITTING = [*((FORMS[0], kind) for kind in KINDS), *((FORMS[1], kind) for kind in KINDS[:3])]
INSTALL = ROOT / "docs/install.md"
SAME = {"cpu": "4", "memory": "8Gi"}


def workload(kind="Deployment", labels=LABEL, **spec):
    """A workload with two containers that have much to lose."""
    engine = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.30.0",
        "args": ["--model=m", "--max-num-seqs=64"],
        "env": [{"name": "A", "value": "b"}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
        "resources": {"requests": {**SAME, "nvidia.com/gpu": "1"}, "limits": {**SAME, "nvidia.com/gpu": "1"}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    other = {"name": "proxy", "image": "proxy:1", "resources": {"limits": SAME}}
    template = {
        "containers": [engine, other],
        "serviceAccountName": "vllm",
        "securityContext": {"fsGroup": 7},
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        **spec,
    }
    pods = {"metadata": {"labels": {"app": "vllm"}}, "spec": template}
    selected = {"selector": {"matchLabels": {"app": "vllm"}}, "template": pods}
    version, spec = {
        "Deployment": ("apps/v1", {"replicas": 2, **selected}),
        "StatefulSet": ("apps/v1", {"replicas": 2, **selected, "serviceName": "vllm"}),
        "DaemonSet": ("apps/v1", selected),
        "Job": ("batch/v1", {"template": {**pods, "spec": {**template, "restartPolicy": "Never"}}}),
        "Pod": ("v1", template),
        "LeaderWorkerSet": (
            "leaderworkerset.x-k8s.io/v1",
            {
                "replicas": 2,
                "leaderWorkerTemplate": {"size": 2, "leaderTemplate": pods, "workerTemplate": pods},
            },
        ),
    }[kind]
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "vllm", "labels": dict(labels)},
        "spec": copy.deepcopy(spec),
    }


def without_exporter(given):
    """A workload as it would be if nothing had been added."""
    bare = copy.deepcopy(given)
    spec = pod(bare)
    for place in ("initContainers", "containers"):
        spec[place] = [each for each in spec.get(place, []) if each["name"] != NAME]
    if not spec["initContainers"]:
        del spec["initContainers"]
    spec["volumes"] = [each for each in spec["volumes"] if not each["name"].startswith(NAME)]
    if given["kind"] != "Pod":  # a pod has the label itself
        del template(bare)["metadata"]["labels"][NAME]
    return bare


DOWNLOADS = [
    {"name": "download", "image": "d:1", "resources": {"limits": SAME}},
    {"name": "check", "image": "c:1"},
]


@pytest.mark.parametrize(("form", "kind"), FITTING)
@pytest.mark.parametrize("more", [{}, {"initContainers": DOWNLOADS}], ids=["alone", "with init containers"])
def test_nothing_else_changes(form, kind, more, tmp_path):
    """Engine, other containers, their order, the selector and every field of the pod are as before."""
    before = workload(kind, **more)
    (after,) = with_sidecar(tmp_path, [before], form)
    assert without_exporter(after) == before
    assert exporter(after)
    assert LABEL.items() <= template(after)["metadata"]["labels"].items()


@pytest.mark.parametrize("kind", KINDS[2:])
def test_every_kind_gets_the_same_as_a_deployment(kind, tmp_path):
    """The same container, behind the pod's own init containers, and the volume that hides the token."""
    wanted, added = (
        with_sidecar(tmp_path / each, [workload(each, initContainers=DOWNLOADS)])[0]
        for each in ("Deployment", kind)
    )
    assert exporter(added) == exporter(wanted)
    assert pod(added)["initContainers"][-1]["name"] == NAME
    names = [sorted(each["name"] for each in pod(one)["volumes"]) for one in (added, wanted)]
    assert names[0] == names[1] == ["shm", f"{NAME}-no-token"]


def counted(folder):
    """What the command of the guide prints."""
    (command,) = re.findall(
        "^kubectl kustomize . .*grep.*$", INSTALL.read_text(encoding="utf-8"), re.MULTILINE
    )
    path = f"{Path(program('kubectl')).parent}:/usr/bin:/bin"
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    ).stdout.strip()


@pytest.mark.parametrize(("form", "kind"), FITTING)
def test_the_containers_are_counted(form, kind, tmp_path):
    """One more where the component applies."""
    before = workload(kind, initContainers=DOWNLOADS)
    (after,) = with_sidecar(tmp_path, [before], form)
    assert len(containers(pod(after))) == len(containers(pod(before))) + 1
    assert counted(tmp_path) == "1"


@pytest.mark.parametrize("kind", KINDS[:1] + KINDS[-1:])
def test_the_count_shows_that_nothing_was_added(kind, tmp_path):
    """The label is on the pod template only, which kustomize cannot select."""
    before = workload(kind, labels={})
    template(before)["metadata"]["labels"].update(LABEL)
    assert with_sidecar(tmp_path, [before]) == [before]
    assert counted(tmp_path) == "0"


def test_a_leader_gets_its_environment_by_the_patch_of_the_guide(tmp_path):
    """And keeps its containers."""
    (patch,) = [text for text in snippets(INSTALL, "yaml") if "kind: LeaderWorkerSet" in text]
    (before,) = with_sidecar(tmp_path / "without", [workload("LeaderWorkerSet")])
    folder = tmp_path / "with"
    with_sidecar(folder / "base", [workload("LeaderWorkerSet")])
    text = yaml.safe_dump({"resources": ["base"], **yaml.safe_load(patch)})
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
    (after,) = built(folder)
    assert exporter(after).pop("env") == [{"name": "VLLM_PRESSURE_ENGINE_ARGS", "value": "--max-num-seqs 64"}]
    assert after == before


@pytest.mark.parametrize("form", FORMS)
def test_it_comes_last(form, tmp_path):
    """Its start-up grace is not spent on downloads, and `kubectl logs` still means vLLM."""
    (after,) = with_sidecar(tmp_path, [workload(initContainers=DOWNLOADS)], form)
    place = "initContainers" if form == "component" else "containers"
    assert pod(after)[place][-1]["name"] == NAME
    assert pod(after)["containers"][0]["name"] == "vllm"


@pytest.mark.parametrize("form", FORMS)
def test_only_what_has_the_label_gets_it(form, tmp_path):
    """A router in the same kustomization does not."""
    router = workload(labels={"app": "router"})
    router["metadata"]["name"] = "router"
    after = with_sidecar(tmp_path, [workload(), router], form)
    assert one(after, "Deployment", "router") == router
    assert exporter(one(after, "Deployment", "vllm"))


@pytest.mark.parametrize("form", FORMS)
def test_a_guaranteed_pod_stays_guaranteed(form, tmp_path):
    """The exporter asks for what it is limited to."""
    before = workload()
    assert quality(pod(before)) == "Guaranteed"
    (after,) = with_sidecar(tmp_path, [before], form)
    assert quality(pod(after)) == "Guaranteed"
    resources = exporter(after)["resources"]
    assert resources["requests"] == resources["limits"]


def test_the_class_of_a_pod_is_found_rightly():
    """One container without a limit is enough to lose it."""
    spec = pod(workload(initContainers=DOWNLOADS))
    assert quality(spec) == "Burstable"
    assert quality({"containers": [{"name": "a"}]}) == "BestEffort"


@pytest.mark.parametrize("form", FORMS)
def test_it_cannot_take_the_model_out_of_service(form, tmp_path):
    """No probe of it counts for the pod's readiness or delays vLLM; the liveness probe is slow to give up."""
    (after,) = with_sidecar(tmp_path, [workload()], form)
    added = exporter(after)
    assert not {"readinessProbe", "startupProbe", "lifecycle"} & added.keys()
    probe = added["livenessProbe"]
    assert probe["httpGet"]["path"] == "/-/healthy"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 180


@pytest.mark.parametrize("form", FORMS)
def test_it_may_do_nothing_that_it_need_not(form, tmp_path):
    """It fits the restricted Pod Security Standard, with a read-only root and no token."""
    (after,) = with_sidecar(tmp_path, [workload()], form)
    added = exporter(after)
    assert added["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (mount,) = added["volumeMounts"]
    assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert {"name": mount["name"], "emptyDir": {"sizeLimit": "1Mi"}} in pod(after)["volumes"]


@pytest.mark.parametrize("form", FORMS)
def test_its_port_is_the_default_one(form, tmp_path):
    """And has a name by which the PodMonitor finds it, short enough for Kubernetes."""
    (after,) = with_sidecar(tmp_path, [workload()], form)
    (port,) = exporter(after)["ports"]
    assert port == {"name": "vllm-pressure", "containerPort": WebConfig().port}
    assert len(port["name"]) <= 15


def test_the_forms_differ_only_in_kind_and_place(tmp_path):
    """The plain container is the sidecar without `restartPolicy`."""
    (sidecar,) = with_sidecar(tmp_path / "sidecar", [workload()], FORMS[0])
    (plain,) = with_sidecar(tmp_path / "plain", [workload()], FORMS[1])
    assert exporter(sidecar) == {**exporter(plain), "restartPolicy": "Always"}


@pytest.mark.parametrize(("form", "oldest"), [(FORMS[0], VERSIONS[0]), (FORMS[1], "1.25")])
def test_the_schema_accepts_it(form, oldest, tmp_path):
    """From the oldest version that it is meant for to the newest known."""
    for version in (oldest, VERSIONS[-1]):
        kinds = [kind for one_form, kind in FITTING if one_form == form and kind != "LeaderWorkerSet"]
        for resource in with_sidecar(tmp_path, map(workload, kinds), form):
            validate(resource, version)


@pytest.mark.parametrize("form", FORMS)
def test_applied_twice_it_is_there_once(form, tmp_path):
    """A base and an overlay may both name the component."""
    kinds = [kind for one_form, kind in FITTING if one_form == form]
    given = [workload(kind, initContainers=DOWNLOADS) for kind in kinds]
    once = with_sidecar(tmp_path / "once", given, form)
    assert with_sidecar(tmp_path / "twice", once, form) == once


def test_the_image_has_the_version_of_the_sources():
    """Wherever a version of it is named."""
    named = set()
    for folder in ("vllm-deployment", "data-parallel", "central"):
        for resource in built(EXAMPLES / folder):
            if "template" in resource.get("spec", {}):
                named |= {each["image"] for each in containers(pod(resource)) if each["name"] == NAME}
    assert named == {f"registry.example/{NAME}:{__version__}"}
