"""Why a server cannot be read: the plain cause and the next step; and whose page it is."""

from exporter.commands._diagnosis import explain_error, explain_page
from exporter.net.errors import REASONS


def test_every_error_has_a_cause_and_a_next_step():
    """Statuses too, and words that are not known."""
    errors = [*REASONS, "http_401", "http_403", "http_404", "http_500", "unreadable_body"]
    explained = {error: explain_error(error) for error in errors}
    assert [error for error, (cause, step) in explained.items() if not (cause and step)] == []
    assert "404" in explained["http_404"][0]
    assert "/metrics" in explained["http_404"][1]


def test_a_page_that_is_not_vllms_is_named():
    """By the names of its series."""
    pages = {
        b"<!DOCTYPE html><html>": "HTML",
        b"# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 1\n": "SGLang",
        b"tgi_queue_size 0\n": "Text Generation",
        b"# HELP node_cpu_seconds_total x\n": "node_exporter",
        b"vllm_pressure_up 1\n": "exporter's own",
    }
    named = {body: explain_page(body) for body in pages}
    assert [body for body, word in pages.items() if word not in (named[body] or ("",))[0]] == []


def test_vllms_page_and_an_unknown_one_are_not_named():
    """Nothing is reported where nothing is known."""
    assert explain_page(b"vllm:num_requests_running 1\nsglang:x 1\n") is None
    assert explain_page(b"ray_vllm_num_requests_running 1\n") is None
    assert explain_page(b"python_info 1\n") is None
    assert explain_page(None) is None
