"""The words of signals: one row for each, and numbers as people read them."""

from support.scenes import Stage, engine_of

from exporter.analysis.signals import NAMES
from exporter.analysis.words import SIGNALS, WORDS, number


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
        ("kv_free_tokens", 45123.4): "45123",
        ("held_tokens", 12.345): "12.3",
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


def test_every_evidence_with_a_unit_in_its_name_has_a_row():
    """A ratio without one would be shown as a bare fraction."""
    stage = Stage(cache={"kv_cache_size_tokens": 100_000}, max_num_seqs=64)
    stage.play(120, running=20, kv=0.5, tokens=600, finished=1)
    storm = stage.play(60, running=14, waiting=6, kv=0.98, tokens=250, finished=0.3, preemptions=1.5)
    shown = {one.signal for reading in storm for one in engine_of(reading).judgement.evidence}
    assert {name for name in shown if name.endswith(("_ratio", "_share", "_seconds"))} <= WORDS.keys()
