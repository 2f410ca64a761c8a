"""The examples that are no resources of Kubernetes: configurations, compose, queries."""

import re
import shutil
import subprocess

import compose_spec
import promql_parser
import pytest
import yaml
from support.cluster import EXAMPLES, NAME, ROOT, documents

from exporter import __version__
from exporter.config import load
from exporter.publish.metrics.table import METRICS

pytestmark = pytest.mark.programs

COMPOSE = EXAMPLES / "compose"


class Reader(yaml.SafeLoader):
    """Reads what compose adds to YAML: ``!reset`` takes a key out of the file it is laid over."""


RESET = object()
Reader.add_constructor("!reset", lambda *_: RESET)


def laid_over(below, above):
    """Two compose files as one."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = {**below, **{key: laid_over(below.get(key), value) for key, value in above.items()}}
    return {key: value for key, value in merged.items() if value is not RESET}


def compose(*names):
    """Compose files, one laid over the other."""
    result = {}
    for name in names:
        result = laid_over(result, yaml.load((COMPOSE / name).read_text(encoding="utf-8"), Reader))
    return result


def run(*command):
    """Run one of Prometheus' programs; its status and all that it said."""
    program = shutil.which(command[0])
    assert program, f"{command[0]} is missing; `.ci/programs` installs it"
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("names", [("compose.yaml",), ("compose.yaml", "simulated.yaml")], ids=len)
def test_compose_fits_its_specification(names):
    """With and without a GPU."""
    text = yaml.safe_dump(compose(*names))
    compose_spec.PyCompose.from_yaml(text).validate()


def test_compose_pins_what_others_publish():
    """By a digest, with the version next to it; the exporter's image is built here."""
    text = (COMPOSE / "compose.yaml").read_text(encoding="utf-8")
    images = re.findall(r"^    image: (.*)$", text, re.MULTILINE)
    images.remove(f"{NAME}:{__version__}")
    assert len(images) == 4
    for image in images:
        assert re.fullmatch(r"[a-z/-]+@sha256:[0-9a-f]{64}  # v?\d+\.\d+\.\d+", image), image


def test_compose_would_refuse_a_misspelt_key():
    """The check above can fail."""
    text = yaml.safe_dump(compose("compose.yaml")).replace("mem_limit", "memlimit")
    with pytest.raises(ValueError, match="memlimit"):
        compose_spec.PyCompose.from_yaml(text)


def test_the_simulated_set_up_needs_no_gpu():
    """Its vLLM is the exporter's own image."""
    vllm = compose("compose.yaml", "simulated.yaml")["services"]["vllm"]
    assert vllm["image"] == f"{NAME}:{__version__}"
    assert not {"deploy", "ipc"} & vllm.keys()


def test_what_compose_mounts_is_there():
    """Every file and folder of the repository that a service mounts."""
    services = compose("compose.yaml")["services"].values()
    sources = [mount.split(":")[0] for service in services for mount in service.get("volumes", [])]
    files = [source for source in sources if source.startswith(".")]
    assert len(files) == 6
    for source in files:
        assert (COMPOSE / source).exists(), source
    assert compose("compose.yaml")["services"]["exporter"]["image"] == f"{NAME}:{__version__}"


def test_prometheus_accepts_its_configuration(tmp_path):
    """With the rules where the container has them."""
    text = (COMPOSE / "prometheus.yml").read_text(encoding="utf-8")
    assert "/etc/prometheus/rules/" in text
    path = tmp_path / "prometheus.yml"
    path.write_text(text.replace("/etc/prometheus/rules", str(ROOT / "rules")), encoding="utf-8")
    status, said = run("promtool", "check", "config", str(path))
    assert status == 0, said
    assert "1 rule files found" in said


def test_alertmanager_accepts_its_configuration():
    """The one that compose mounts."""
    status, said = run("amtool", "check-config", str(ROOT / "deploy/alertmanager/alertmanager.yml"))
    assert status == 0, said


def test_the_exporter_accepts_the_configuration_of_several_ports():
    """Of the data parallel example."""
    folder = EXAMPLES / "data-parallel"
    config = load({"config.file": "f"}, {}, lambda _: (folder / "exporter.yaml").read_text(encoding="utf-8"))
    assert [target.url.rpartition(":")[2] for target in config.targets] == ["8000/metrics", "8001/metrics"]
    workload = documents((folder / "vllm.yaml").read_text(encoding="utf-8"))[0]
    served = [
        port["containerPort"]
        for c in workload["spec"]["template"]["spec"]["containers"]
        for port in c["ports"]
    ]
    assert served == [8000, 8001]


def test_the_exporter_accepts_the_central_configuration():
    """Servers by name, by DNS and by file."""
    text = (EXAMPLES / "central" / "exporter.yaml").read_text(encoding="utf-8")
    config = load({"config.file": "f"}, {}, lambda _: text)
    assert config.targets[0].facts == {"max_num_seqs": 64}


def queries():
    """The queries of the autoscalers, with placeholders filled in."""
    (scaled,) = documents((EXAMPLES / "autoscaling/scaledobject.yaml").read_text(encoding="utf-8"))
    yield scaled["spec"]["triggers"][0]["metadata"]["query"]
    adapter = yaml.safe_load(
        (EXAMPLES / "autoscaling/prometheus-adapter-values.yaml").read_text(encoding="utf-8")
    )
    (rule,) = adapter["rules"]["custom"]
    yield rule["seriesQuery"]
    filled = rule["metricsQuery"].replace("<<.GroupBy>>", "namespace, pod")
    yield filled.replace("<<.Series>>", "vllm_pressure_saturation_ratio").replace(
        "<<.LabelMatchers>>", 'pod="a"'
    )


def test_the_autoscalers_ask_for_what_is_exported():
    """Their queries are PromQL, and name one exported metric and its labels."""
    (row,) = [row for row in METRICS if row.name == "saturation_ratio"]
    known = {*row.labels, "namespace", "pod"}
    for query in queries():
        promql_parser.parse(query)
        assert set(re.findall(r"vllm_pressure_\w+", query)) == {row.series}
        assert set(re.findall(r"(\w+)\s*(?:=|!=)\"", query)) <= known


def test_the_scaler_is_right_about_a_fleet(tmp_path):
    """A pod counts by the mean of its engines, an engine by what it is shorter of."""
    query = next(queries())
    labels = 'namespace="llm",model_name="Qwen/Qwen3-8B"'
    values = [
        ("a", "0", "kv", 1.4),
        ("a", "0", "seats", 0.5),
        ("b", "0", "kv", 0.4),
        ("b", "1", "kv", 0.8),
        ("c", "0", "kv", 0.2),
    ]
    series = [
        {
            "series": f"vllm_pressure_saturation_ratio{{{labels},"
            f'pod="{pod}",engine="{engine}",resource="{resource}"}}',
            "values": f"{value}x10",
        }
        for pod, engine, resource, value in values
    ]
    expected = {"expr": query, "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": 2.2}]}
    test = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": [expected]}],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test), encoding="utf-8")
    status, said = run("promtool", "test", "rules", str(path))
    assert status == 0, said
