"""The words of signals: one row for each, and numbers as people read them."""

import ast
from pathlib import Path

from exporter.analysis import conditions
from exporter.analysis.conditions.data import NEEDED
from exporter.analysis.signals import NAMES
from exporter.analysis.words import SIGNALS, WORDS, number
from exporter.config.facts import FACTS

CONDITIONS = sorted(Path(conditions.__file__).parent.glob("*.py"))


def test_every_signal_has_its_words_once():
    """Title, short form and help; evidence needs no help, because it is no metric."""
    assert len(WORDS) == len(SIGNALS)
    assert [name for name in NAMES if name not in WORDS] == []
    assert [one.name for one in SIGNALS if not one.title or not one.short] == []
    assert [name for name in NAMES if not WORDS[name].help.endswith(".")] == []


def test_a_number_has_the_digits_and_the_unit_of_its_row():
    """A value of which no digit would be left keeps two; a name without a row is a plain number."""
    expected = {
        ("kv_usage_ratio", 0.953): "95%",
        ("need_ratio", 1.5): "1.50",
        ("inter_token_latency_mean_seconds", 0.0139): "0.014 s",
        ("inter_token_latency_mean_seconds", 0.00021): "0.00021 s",
        ("queue_time_mean_seconds", 63.2): "63 s",
        ("requests_running", 8.0): "8",
        ("preemptions_per_second", 5.1834): "5.18",
        ("preemptions_per_second", 0.0): "0.00",
        ("gpu_memory_gib", 45123.4): "45123",
        ("weights_gib", 12.345): "12.3",
        ("kv_usage_ratio", None): "unknown",
    }
    assert {key: number(*key) for key in expected} == expected


def test_a_phrase_has_the_value_where_english_wants_it():
    """Before the noun that it counts, behind the name of what was measured."""
    phrases = [WORDS["kv_usage_ratio"].phrase(0.5), WORDS["requests_waiting"].phrase(3)]
    assert [*phrases, WORDS["queue_time_mean_seconds"].phrase("-")] == [
        "KV usage 50%",
        "3 waiting",
        "queue time -",
    ]


def test_all_evidence_has_a_row_unless_it_is_a_setting():
    """Without one people would read a name of the program's own."""
    evidence = {*NEEDED, *(name for path in CONDITIONS for name in _evidence_in(path))}
    assert "preemptions_in_burst" in evidence
    assert evidence - WORDS.keys() - FACTS.keys() == set()


def _evidence_in(path):
    """The names in `some(("name", value), ...)`, and those that a constant or a loop holds."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    in_calls = [
        pair.elts[0]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "some"
        for pair in call.args
    ]
    held = {node.id for node in in_calls if isinstance(node, ast.Name)}
    values = [
        node.value if isinstance(node, ast.AnnAssign) else node.iter
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign | ast.For)
        and isinstance(node.target, ast.Name)
        and node.target.id in held
    ]
    texts = [text for node in (*in_calls, *values) for text in ast.walk(node)]
    return {text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)}
