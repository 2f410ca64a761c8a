"""Bodies without names: what is replaced, and what stays."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from exporter.vllm.anonymise import anonymise, anonymise_probes

EXPOSITIONS = Path(__file__).parents[1] / "expositions"
RECORDINGS = Path(__file__).parents[1] / "recordings"


CLASSIC = rb"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="acme/secret-7b"} 3.0
vllm:num_requests_running{engine="1",model_name="say \"hi\"\\now\n, {x}"} 4.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="acme/secret-7b"} 12.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql-adapter,stop",waiting_lora_adapters=""} 1e9
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters="chat, sql-adapter"} 2e9
vllm:cache_config_info{block_size="16",cache_dtype="auto",off="/data/acme/kv cache",spec="acme/secret-7b@4"} 1
vllm:other_info{drafts="sql-adapter+v2",dirs="kv=/mnt/nfs/acme,hf://acme/x",route="text/plain",share="1/2"} 1
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 7.0
vllm:kv_cache_usage_perc{ engine = "0" , model_name = "acme/secret-7b" } NaN 1700000000000
"""

OPENMETRICS = rb"""# HELP vllm:num_preemptions Preemptions.
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{model_name="acme/secret-7b",engine="0"} 3.0 # {trace_id="abc"} 1.0 1700000000.0
vllm:num_preemptions_created{model_name="acme/secret-7b",engine="0"} 1.7e+09
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{running_lora_adapters="sql-adapter,chat"} 1.7e+09
# EOF
"""

# What no anonymised body may hold. ("stop" is also a finished_reason, which must stay.)
SECRETS = [b"acme", b"secret", b"sql-adapter", b"chat", b"say", b"hi\\", b"kv cache", b"nfs"]


def classic(body):
    """Return prometheus_client's samples of a classic body."""
    return [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]


def open_metrics(body):
    """Return prometheus_client's samples of an OpenMetrics body."""
    return [s for family in openmetrics.text_string_to_metric_families(body.decode()) for s in family.samples]


def without_names(samples):
    """Return samples with the labels' values blotted out, except those that hold no names."""
    kept = {
        "engine",
        "le",
        "finished_reason",
        "block_size",
        "cache_dtype",
        "max_lora",
        "handler",
        "method",
        "status",
    }
    return [
        (
            s.name,
            {k: v if k in kept else None for k, v in s.labels.items()},
            repr(s.value),
            s.timestamp,
            s.exemplar and (s.exemplar.value, s.exemplar.timestamp),
        )
        for s in samples
    ]


@pytest.mark.parametrize(("body", "parse"), [(CLASSIC, classic), (OPENMETRICS, open_metrics)])
def test_no_name_is_left_and_the_samples_are_the_same(body, parse):
    """In both dialects every name, adapter and path is gone, and prometheus_client reads the same samples."""
    made = anonymise(body)
    assert [secret for secret in SECRETS if secret in made] == []
    assert without_names(parse(made)) == without_names(parse(body))


def test_only_names_are_changed():
    """With the hashes put back, the anonymised body is the original byte for byte, but for its help."""
    made = anonymise(OPENMETRICS)
    for original, word in [
        (b"acme/secret-7b", b"model"),
        (b"sql-adapter", b"adapter"),
        (b"chat", b"adapter"),
        (b"abc", b"trace_id"),
    ]:
        hashed = re.escape(word) + b"-[0-9a-f]{6}"
        made = re.sub(hashed, original, made, count=2 if word == b"model" else 1)
    assert made == OPENMETRICS.split(b"\n", 1)[1]


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:x{deployment="acme",application="acme",SessionName="session_2026_acme",pod="acme-0"} 1',
        b'vllm:x{namespace="acme",instance="10.20.30.40:8000",node="acme17",ip="10.20.30.40",user="20304"} 1',
        b'vllm:x{lora_name="acme-sql",remote_host="acme",engine="acme/0",reason="acme.com"} 1',
        b'http_requests_total{handler="/v1/models/acme",method="GET"} 1',
        b'http_requests_total{handler="/v1/chat/completions/acme-secret"} 1',
        b'vllm:x{model_name="ACME-SECRET-7B",spec="acme_secret_7b"} 1',
        b'{"vllm:x","model_name"="acme","who is it"="acme"} 1',
        b"# HELP vllm:x Requests of acme.",
        b"# acme made this",
        b"<html>acme</html>",
        b"acme is down",
        b'python_info{version="3.12.1+acme"} 1',
        b'vllm:cache_config_info{block_size="16",served="20.30.40",by="acme"} 1',
    ],
)
def test_whatever_is_not_known_to_be_harmless_goes(line):
    """Labels that Ray, Kubernetes and others add, other spellings, comments, addresses and user numbers."""
    made = anonymise(line + b"\n")
    assert [word for word in (b"acme", b"secret", b"20.30.40", b"20304") if word in made.lower()] == []


def test_what_vllm_says_of_itself_stays():
    """Its settings, even those of a new release, its reasons and buckets, and the type of each family."""
    body = (
        b'vllm:cache_config_info{block_size="16",cache_dtype="fp8_e4m3",new="0.25",other="True"} 1.0\n'
        b"# TYPE vllm:num_requests_waiting_by_reason gauge\n"
        b'vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 3.0\n'
        b'vllm:request_prompt_tokens_bucket{engine="1",le="+Inf"} 3.0\n'
        b'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 7.0\n'
        b'python_info{implementation="CPython",major="3",version="3.12.1"} 1.0\n'
    )
    assert anonymise(body) == body


def test_the_header_s_version_is_the_release():
    """A version's local part often names who built it."""
    probes = {"/version": {"version": "0.26.0rc1+acme.gpu17"}, "/v1/models": {"max_model_len": 4096}}
    assert anonymise_probes(probes) == {**probes, "/version": {"version": "0.26.0rc1"}}
    assert anonymise_probes({}) == {}


def labels(body, metric):
    """Return the labels of a metric's samples in the anonymised body."""
    return [s.labels for s in classic(anonymise(body)) if s.name == metric]


def test_a_model_keeps_one_hash_everywhere():
    """The same name is the same hash in every series, in other labels and at every poll."""
    model = labels(CLASSIC, "vllm:request_success_total")[0]["model_name"]
    assert re.fullmatch("model-[0-9a-f]{6}", model)
    assert labels(CLASSIC, "vllm:num_requests_running")[0]["model_name"] == model
    assert model.encode() in anonymise(OPENMETRICS)


def test_two_models_stay_two():
    """Different names become different hashes, so no two series fall together."""
    one, two = labels(CLASSIC, "vllm:num_requests_running")
    assert one["model_name"] != two["model_name"]


def test_an_adapter_list_keeps_its_commas():
    """Each adapter of a list is hashed by itself, an empty list stays empty."""
    running, waiting = labels(CLASSIC, "vllm:lora_requests_info")
    assert re.fullmatch("adapter-[0-9a-f]{6},adapter-[0-9a-f]{6}", running["running_lora_adapters"])
    assert running["waiting_lora_adapters"] == ""
    sql = running["running_lora_adapters"].split(",")[0]
    assert waiting["waiting_lora_adapters"].split(", ")[1] == sql


def test_a_model_with_a_word_of_vllm_s_own_breaks_nothing():
    """An adapter called `stop`, a model called `0`: what a sample is about and its numbers stay."""
    body = (
        b'a{engine="0",model_name="0",finished_reason="stop"} 1.0\n'
        b'b{running_lora_adapters="stop,16",block_size="16",enable="True"} 1.0\n'
    )
    made = anonymise(body)
    assert b'engine="0"' in made
    assert b'model_name="0"' not in made
    assert b'finished_reason="stop"' in made
    assert b'block_size="16",enable="True"' in made


@pytest.mark.parametrize("length", range(1, 60))
def test_a_body_cut_off_inside_a_name_gives_nothing_away(length):
    """The beginning of a name at the end of a truncated body is hashed like a name."""
    body = rb'a{b="c"} 1' + b"\n" + rb'x{model_name="acme\\secret\"7b",engine="0"} 1'
    made = anonymise(body[:length])
    assert b"acm" not in made
    assert b"secret" not in made


def test_a_salt_changes_the_hashes():
    """With a salt of its own a recording's names cannot be found by hashing a list of guesses."""
    assert anonymise(CLASSIC, salt=b"1") != anonymise(CLASSIC, salt=b"2")
    assert anonymise(CLASSIC, salt=b"1") == anonymise(CLASSIC, salt=b"1")


printable = st.characters(exclude_categories=["C", "Z"], include_characters=" ", exclude_characters=",")
names = st.text(printable, min_size=3, max_size=20)


def escaped(name):
    """Return a label's value as it stands in an exposition."""
    return name.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@given(names.map(lambda name: f"<{name}>"), st.lists(names.map(lambda name: f"<{name}>"), max_size=3))
@settings(max_examples=80, deadline=None)
def test_any_name_goes(model, adapters):
    """Whatever the characters of model and adapters, none is left and all still parses."""
    body = (
        f'vllm:x{{engine="0",model_name="{escaped(model)}",other="{escaped(model)}"}} 1.5\n'
        f'vllm:y{{running_lora_adapters="{escaped(",".join(adapters))}"}} 2.5\n'
    ).encode()
    made = anonymise(body)
    assert [name for name in [model, *adapters] if escaped(name).encode() in made] == []
    assert without_names(classic(made)) == without_names(classic(body))
    before, after = classic(body)[1].labels, classic(made)[1].labels
    assert before["running_lora_adapters"].count(",") == after["running_lora_adapters"].count(",")


@given(st.binary(max_size=200) | st.from_regex(rb'([a-z]=?"?\\?[\n,/]?){1,60}', fullmatch=True))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_taken(data):
    """No body raises, and what was anonymised has nothing left to hide."""
    made = anonymise(data)
    assert made.count(b"=") <= data.count(b"=")


def test_a_long_garbage_body_takes_no_long_time():
    """A body of nothing but half-open labels and long words is passed in a moment."""
    start = time.process_time()
    anonymise(b'a="\\' * 200_000)
    anonymise(b"a" * 1_000_000 + b'="' + b"/" * 1_000_000)
    anonymise(b"a " * 500_000 + b'b="' + b"a+b:" * 200_000)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.txt")), ids=lambda path: path.name)
def test_real_bodies_differ_in_the_model_only(path):
    """A body of every recorded version is the same but for the model's name and the help."""
    body = path.read_bytes()
    made = anonymise(body)
    assert b"tiny-llama" not in made
    without_help = re.sub(rb"(?m)^# HELP .*\n", b"", body)
    assert re.sub(rb"model-[0-9a-f]{6}", b"tiny-llama", made) == without_help
