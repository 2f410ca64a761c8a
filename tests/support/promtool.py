"""Runs unit tests of rules, built in Python, with the real promtool."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = {
    "sidecar": ROOT / "rules/vllm-pressure.rules.yaml",
    "native": ROOT / "rules/vllm-native.rules.yaml",
}
FIRED = 'count by (alertname, severity) (max_over_time(ALERTS{{alertstate="firing"}}[{}s]))'
Alert = dict[str, dict[str, str]]  # labels and annotations


def promtool(*arguments: str) -> tuple[int, str]:
    """Run promtool; returns the exit status and its output."""
    program = shutil.which("promtool")
    assert program, "promtool is missing; `.ci/programs` installs it"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, done.stdout + done.stderr


def alerts_of(rules: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the alerts of a rule file by name and severity."""
    groups = yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]
    rows = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    return {(rule["alert"], rule["labels"]["severity"]): rule for rule in rows}


def seconds(duration: str) -> int:
    """Return the seconds of ``1m`` or ``30s``; 0 for an empty text."""
    found = re.fullmatch(r"(\d+)([smh])", duration or "0s")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def alone(folder: Path, rules: Path, alert: str) -> Path:
    """Write a rule file with one alert's rules and the recording rules that they read: ten times as fast."""
    groups = yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]
    read = " ".join(str(rule) for group in groups for rule in group["rules"] if rule.get("alert") == alert)
    for rule in reversed([rule for group in groups for rule in group["rules"] if "record" in rule]):
        if rule["record"] in read:  # it may read earlier ones
            read += rule["expr"]
    for group in groups:
        group["rules"] = [
            rule
            for rule in group["rules"]
            if rule.get("alert") == alert or rule.get("record", "nothing") in read
        ]
    path = folder / "alone.yaml"
    document = {"groups": [group for group in groups if group["rules"]]}
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def check(folder: Path, cases: Iterable[Mapping[str, Any]], rules: Path) -> tuple[int, str]:
    """Run unit tests, each with ``input_series`` and expectations, on a rule file."""
    tests = [{"interval": "15s", **case} for case in cases]
    document = {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}
    path = folder / "test.yaml"
    path.write_text(yaml.dump(document, sort_keys=False, width=100_000, allow_unicode=True), encoding="utf-8")
    return promtool("test", "rules", str(path))


def at(t: float, alert: str, expected: Iterable[Alert]) -> dict[str, Any]:
    """Expect these alerts, and no others of the name, to fire at a time."""
    alerts = [{"exp_labels": _own(one["labels"]), "exp_annotations": one["annotations"]} for one in expected]
    return {"eval_time": f"{int(t)}s", "alertname": alert, "exp_alerts": alerts}


def _own(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name != "alertname"}


def told(said: str) -> list[Alert]:
    """Parse promtool's report of unexpected alerts."""
    rows = re.findall(r"Labels:\{(.*)\}\n\s*Annotations:\{(.*)\}\n", said.partition("got:[")[2])
    return [{"labels": _pairs(labels), "annotations": _pairs(annotations)} for labels, annotations in rows]


def _pairs(text: str) -> dict[str, str]:
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*")', text)
    return {name: json.loads(value) for name, value in found}


def fired(folder: Path, series: list[dict[str, str]], rules: Path, lasts: float) -> dict[str, str]:
    """Return the alerts that fired at any time of a story: name -> highest severity.

    promtool only compares: expect an impossible result, and parse the actual one from its report.
    """
    wrong = [{"labels": '{impossible="1"}', "value": 0}]
    question = {"expr": FIRED.format(int(lasts) + 60), "eval_time": f"{int(lasts)}s", "exp_samples": wrong}
    _, said = check(folder, [{"input_series": series, "promql_expr_test": [question]}], rules)
    assert "exp: " in said, said
    rows = re.findall(r'alertname="(\w+)", severity="(\w+)"', said.partition("got: ")[2])
    return dict(sorted(rows, key=lambda row: row[1] == "critical"))
