"""JSON that every reader takes, whatever the server's numbers are."""

import ast
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bodies import body, engine

from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig
from exporter.publish.json_text import json_text
from exporter.publish.status import poll_object, status_object

PACKAGE = Path(__file__).parents[2] / "exporter"
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


def strict(text):
    """Read JSON as jq, browsers and Go do."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_infinities_and_nan_become_null():
    """At any depth; all else stays."""
    document = {"a": math.inf, "b": [1.5, -math.inf, {"c": (math.nan, "x")}]}
    assert strict(json_text(document)) == {"a": None, "b": [1.5, None, {"c": [None, "x"]}]}
    assert json_text({"a": 1}, indent=2) == '{\n  "a": 1\n}'


@given(values)
def test_whatever_is_written_can_be_read(value):
    """By a strict reader."""
    strict(json_text(value))


def test_a_hostile_server_cannot_make_the_status_unreadable():
    """Queries of 1e-300 and hits of 1e17 have an infinite ratio, which is no hit ratio at all."""
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    for t in range(5):
        counters = "".join(
            f'vllm:prefix_cache_{name}_total{{engine="0",model_name="demo-7b"}} {value}\n'
            for name, value in (("queries", 1e-300 * t), ("hits", 1e17 * t))
        )
        text = body(engine(running=1e-300, kv=0.5, generation_tokens=t * 1e17)) + counters.encode()
        reading = pipeline.feed(float(t), text)
    (one,) = reading.engines.values()
    assert one.signals.prefix_cache_hit_ratio is None
    for document in (
        status_object("http://a/metrics", reading, 5.0, pipeline.loads()),
        poll_object(5.0, reading),
    ):
        strict(json_text(document))


def test_no_other_place_writes_what_a_server_said_as_json():
    """Elsewhere only texts and constants become JSON, or `allow_nan=False` stands there."""
    texts = {
        "runtime/logs.py",
        "rules/form.py",
        "rules/promql.py",
        "commands/dashboards.py",
        "publish/page/renderer.py",
    }
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"json.dump", "json.dumps"}:
                assert name in texts or any(each.arg == "allow_nan" for each in node.keywords), name
