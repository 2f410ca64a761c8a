"""The component adds the exporter to a workload, and changes nothing else about it."""

import copy

import pytest
from support.cluster import (
    EXAMPLES,
    LABEL,
    NAME,
    VERSIONS,
    built,
    containers,
    exporter,
    one,
    pod,
    quality,
    validate,
    with_sidecar,
)

from exporter import __version__
from exporter.config import WebConfig

pytestmark = pytest.mark.programs

FORMS = ("component", "component-plain-container")
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
    own = {"serviceName": "vllm"} if kind == "StatefulSet" else {}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "vllm", "labels": dict(labels)},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "vllm"}},
            "template": {"metadata": {"labels": {"app": "vllm"}}, "spec": template},
            **own,
        },
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
    del bare["spec"]["template"]["metadata"]["labels"][NAME]
    return bare


DOWNLOADS = [
    {"name": "download", "image": "d:1", "resources": {"limits": SAME}},
    {"name": "check", "image": "c:1"},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
@pytest.mark.parametrize("more", [{}, {"initContainers": DOWNLOADS}], ids=["alone", "with init containers"])
def test_nothing_else_changes(form, kind, more, tmp_path):
    """Engine, other containers, their order, the selector and every field of the pod are as before."""
    before = workload(kind, **more)
    (after,) = with_sidecar(tmp_path, [before], form)
    assert without_exporter(after) == before
    assert exporter(after)


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
        for resource in with_sidecar(tmp_path, [workload(), workload("StatefulSet")], form):
            validate(resource, version)


@pytest.mark.parametrize("form", FORMS)
def test_applied_twice_it_is_there_once(form, tmp_path):
    """A base and an overlay may both name the component."""
    once = with_sidecar(tmp_path / "once", [workload(initContainers=DOWNLOADS)], form)
    assert with_sidecar(tmp_path / "twice", once, form) == once


def test_the_image_has_the_version_of_the_sources():
    """Wherever a version of it is named."""
    named = set()
    for folder in ("vllm-deployment", "data-parallel", "central"):
        for resource in built(EXAMPLES / folder):
            if "template" in resource.get("spec", {}):
                named |= {each["image"] for each in containers(pod(resource)) if each["name"] == NAME}
    assert named == {f"registry.example/{NAME}:{__version__}"}
