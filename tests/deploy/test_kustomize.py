"""Every kustomization builds, and every resource fits its schema."""

import json
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from support.cluster import (
    DEPLOY,
    EXAMPLES,
    KUSTOMIZE,
    LABEL,
    NAME,
    ROOT,
    VERSIONS,
    built,
    containers,
    documents,
    exporter,
    one,
    pod,
    program,
    quality,
    snippets,
    validate,
    with_sidecar,
)
from support.promtool import RULES

from exporter.config import WebConfig, load
from exporter.rules.options import JOB, NATIVE_JOB

pytestmark = pytest.mark.programs

FOLDERS = [
    KUSTOMIZE / "monitoring",
    KUSTOMIZE / "monitoring-kube-prometheus-stack",
    KUSTOMIZE / "network-policy",
    EXAMPLES / "vllm-deployment",
    EXAMPLES / "data-parallel",
    EXAMPLES / "central",
]
MODELS = {"PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule, "ScaledObject": ScaledObject}
# Younger than the model of the resource.
LATER = {"ScaledObject": ("fallback", "behavior")}
MOST = 1 << 20  # bytes in a ConfigMap


def check(resource):
    """Hold a resource against its schema, Kubernetes' own or an operator's; nothing in it is unknown."""
    model = MODELS.get(resource["kind"])
    if model is None:
        for version in VERSIONS:
            validate(resource, version)
        return
    dumped = model.model_validate(resource).model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_unset=True
    )
    if resource["kind"] in LATER:
        part, key = LATER[resource["kind"]]
        dumped["spec"][part].setdefault(key, resource["spec"][part][key])
    assert dumped == resource


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_builds_and_fits(folder):
    """Strictly: a misspelt field is an error."""
    resources = built(folder)
    assert resources
    for resource in resources:
        check(resource)


@pytest.mark.parametrize("name", ["scaledobject.yaml", "hpa.yaml"])
def test_single_files_fit(name):
    """The autoscalers, which are applied one or the other."""
    (resource,) = documents((EXAMPLES / "autoscaling" / name).read_text(encoding="utf-8"))
    check(resource)


def test_no_folder_is_forgotten():
    """Every kustomization under deploy/ is built by a test."""
    found = {path.parent for path in DEPLOY.glob("**/kustomization.yaml")}
    stack = EXAMPLES / "production-stack"
    components = {KUSTOMIZE / "component", KUSTOMIZE / "component-plain-container", stack / "label"}
    assert found == {*FOLDERS, *components, stack}


def test_a_misspelt_field_would_be_seen():
    """The checks above can fail."""
    workload = one(built(EXAMPLES / "vllm-deployment"), "Deployment")
    exporter(workload)["restartPolicies"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(workload, VERSIONS[-1])
    monitor = one(built(KUSTOMIZE / "monitoring"), "PodMonitor")
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    with pytest.raises(AssertionError):
        check(monitor)


@pytest.mark.parametrize("name", ["vllm-deployment", "data-parallel"])
def test_the_examples_are_guaranteed(name):
    """With the sidecar in them."""
    (workload,) = [each for each in built(EXAMPLES / name) if each["kind"] in ("Deployment", "StatefulSet")]
    assert quality(pod(workload)) == "Guaranteed"
    assert exporter(workload)["restartPolicy"] == "Always"


def test_vllm_does_not_log_each_poll():
    """Every vLLM of the examples is started with the flag."""
    for name in ("vllm-deployment", "data-parallel"):
        (workload,) = [
            each for each in built(EXAMPLES / name) if each["kind"] in ("Deployment", "StatefulSet")
        ]
        for container in pod(workload)["containers"]:
            assert "--disable-access-log-for-endpoints=/metrics" in container["args"]


def test_the_pod_monitor_finds_the_ports():
    """Both endpoints by the names of the example's ports, under the jobs that the rules look for."""
    monitor = one(built(KUSTOMIZE / "monitoring"), "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"] == LABEL
    workload = one(built(EXAMPLES / "vllm-deployment"), "Deployment")
    assert LABEL.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ports = {port["name"] for container in containers(pod(workload)) for port in container["ports"]}
    jobs = {
        endpoint["port"]: endpoint["relabelings"][0]["replacement"]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    }
    assert jobs == {"vllm-pressure": JOB, "http": NATIVE_JOB}
    assert jobs.keys() <= ports


def test_two_pods_of_one_node_have_ports_of_their_own(tmp_path):
    """In the host's network: the patch of the page moves the port in all places, and only there."""
    (patch,) = [text for text in snippets(KUSTOMIZE / "README.md", "yaml") if "LISTEN_ADDRESS" in text]
    pair = [chart_deployment(name) for name in ("vllm-a", "vllm-b")]
    for each in pair:
        each["metadata"]["labels"] |= LABEL
        pod(each)["hostNetwork"] = True
    with_sidecar(tmp_path / "base", pair)
    text = yaml.safe_dump({"resources": ["base"], **yaml.safe_load(patch)})
    (tmp_path / "kustomization.yaml").write_text(text, encoding="utf-8")
    first, second = (exporter(each) for each in built(tmp_path))
    (environ,) = second.pop("env")
    config = load({}, {environ["name"]: environ["value"]}, lambda _: "")
    assert [each.pop("ports") for each in (first, second)] == [
        [{"name": "vllm-pressure", "containerPort": port}] for port in (WebConfig().port, config.web.port)
    ]
    assert config.web.port != WebConfig().port
    assert config.web.host == WebConfig().host
    assert first == second  # its probe names the port


def test_kube_prometheus_stack_sees_the_same_in_every_namespace():
    """Its label is on every object, the monitor looks into all namespaces, and nothing else differs."""
    plain, stack = (built(KUSTOMIZE / f"monitoring{suffix}") for suffix in ("", "-kube-prometheus-stack"))
    for before, after in zip(plain, stack, strict=True):
        assert after["metadata"]["labels"].pop("release") == "kube-prometheus-stack"
        if after["kind"] == "PodMonitor":
            assert after["spec"].pop("namespaceSelector") == {"any": True}
            assert after["spec"]["selector"]["matchLabels"] == LABEL
        if not after["metadata"]["labels"]:
            del after["metadata"]["labels"]
        assert after == before


@pytest.mark.parametrize("page", ["docs/install.md", "deploy/kustomize/README.md"])
def test_every_document_has_one_command_and_the_query_that_shows_that_it_works(page):
    """The namespace is that of vLLM, or any by the overlay."""
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = [line.strip() for line in text.splitlines() if "-k deploy/kustomize/monitoring" in line]
    assert commands == [
        "kubectl apply --server-side -k deploy/kustomize/monitoring -n NAMESPACE",
        "kubectl apply --server-side -k deploy/kustomize/monitoring-kube-prometheus-stack -n monitoring",
    ]
    assert f'up{{job="{JOB}"}}' in text


def test_the_central_form_keeps_the_labels_of_the_targets():
    """And puts no pod of its own in their place."""
    resources = built(EXAMPLES / "central")
    (endpoint,) = one(resources, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    assert {"action": "labeldrop", "regex": "pod|container"} in endpoint["relabelings"]
    assert one(resources, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


def test_the_rules_are_current():
    """The PrometheusRule is what `rules --format prometheusrule` prints; `make docs` writes it anew."""
    rule = one(built(KUSTOMIZE / "monitoring"), "PrometheusRule")
    (printed,) = documents(RULES["sidecar"].read_text(encoding="utf-8"))
    assert rule["spec"]["groups"] == printed["groups"]


def test_promtool_accepts_the_rules(tmp_path):
    """As they come out of the built resource."""
    rule = one(built(KUSTOMIZE / "monitoring"), "PrometheusRule")
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps(rule["spec"]), encoding="utf-8")
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing; `.ci/programs` installs it"
    done = subprocess.run(
        [promtool, "check", "rules", "--lint=all", "--lint-fatal", str(path)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_the_files():
    """One ConfigMap for each, with the label that Grafana's sidecar looks for, and not too large."""
    maps = [each for each in built(KUSTOMIZE / "monitoring") if each["kind"] == "ConfigMap"]
    shipped = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "dashboards").glob("*.json")}
    assert len(maps) == len(shipped)
    for found in maps:
        ((file, text),) = found["data"].items()
        assert text == shipped[file.removeprefix("vllm-pressure-").removesuffix(".json")]
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(text.encode()) < MOST


def admitted(policy, port):
    """Who may reach a port of a policy's pods; an empty mapping is anybody."""
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    return [
        peer
        for rule in policy["spec"]["ingress"]
        if not rule.get("ports")
        or any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])
        for peer in rule.get("from", [{}])
    ]


PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}


def test_the_policy_leaves_vllm_its_ports():
    """It closes all that it does not name: each rank's port is open, and those among the pods of vLLM."""
    policy = one(built(KUSTOMIZE / "network-policy"), "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"] == LABEL
    ranks = one(built(EXAMPLES / "data-parallel"), "StatefulSet")
    for container in pod(ranks)["containers"]:
        assert {} in admitted(policy, container["ports"][0]["containerPort"])
    workers = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}
    among = [{"podSelector": {"matchLabels": LABEL}}, {"podSelector": workers}]
    for port in (5600, 13345, 29500, 45678):
        assert admitted(policy, port) == among
    assert admitted(policy, WebConfig().port) == [*among, PROMETHEUS]


def test_only_prometheus_reaches_the_central_exporter():
    """Its pods are those of the Deployment."""
    (policy,) = documents((EXAMPLES / "central/networkpolicy.yaml").read_text(encoding="utf-8"))
    check(policy)
    deployment = one(built(EXAMPLES / "central"), "Deployment")
    assert policy["metadata"]["namespace"] == deployment["metadata"]["namespace"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert admitted(policy, WebConfig().port) == [PROMETHEUS]
    assert admitted(policy, 8000) == []


def test_what_the_chart_renders_gets_the_sidecar(tmp_path):
    """The engine of the production stack, and not its router."""
    shutil.copytree(EXAMPLES / "production-stack", tmp_path / "examples" / "stack")
    shutil.copytree(KUSTOMIZE, tmp_path / "kustomize")
    rendered = [chart_deployment("stack-qwen3-deployment-vllm"), chart_deployment("stack-deployment-router")]
    done = subprocess.run(
        [str(tmp_path / "examples/stack/post-render.sh")],
        input="---\n".join(json.dumps(each) + "\n" for each in rendered),
        env={"PATH": f"{Path(program('kubectl')).parent}:/usr/bin:/bin"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    after = documents(done.stdout)
    assert exporter(one(after, "Deployment", "stack-qwen3-deployment-vllm"))
    assert one(after, "Deployment", "stack-deployment-router") == rendered[1]


def chart_deployment(name):
    """A Deployment as the chart writes it."""
    labels = {"model": "qwen3", "helm-release-name": "stack", "environment": "test", "release": "test"}
    container = {"name": "vllm", "image": "vllm/vllm-openai:v0.30.0", "command": ["vllm", "serve", "m"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "llm", "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


@pytest.mark.parametrize("page", ["docs/install.md", "deploy/kustomize/README.md"])
def test_the_snippets_are_yaml(page):
    """What a page tells to paste can be read, and names images and ports as everywhere."""
    found = list(snippets(ROOT / page, "yaml"))
    assert found
    for text in found:
        assert documents(text)
        if "containerPort: 21900" in text:
            assert NAME in text
