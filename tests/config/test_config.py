"""The configuration is read strictly, all that is wrong is said at once, and no secret is ever shown."""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import traceback

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import (
    FACTS,
    OPTIONS,
    AnalysisConfig,
    Config,
    ConfigError,
    EngineConfig,
    PollConfig,
    Secret,
    TargetConfig,
    TlsConfig,
    WebConfig,
    add_flags,
    describe,
    flags_given,
    load,
    parse_facts,
    reference,
)

HIDDEN = "s3cr3t-Value"


def no_file(path):
    """Stand for a disk that must not be touched."""
    raise AssertionError(f"nobody asked for {path}")


def from_file(text, flags=None, environ=None):
    """Load a configuration whose file holds `text`."""
    files = {"/etc/exporter.yaml": text}
    return load({"config.file": "/etc/exporter.yaml", **(flags or {})}, environ or {}, files.__getitem__)


def problems_of(text, flags=None, environ=None):
    """Return what is wrong with a configuration."""
    with pytest.raises(ConfigError) as caught:
        from_file(text, flags, environ)
    return list(caught.value.problems)


def target_of(lines):
    """Load a file with one target, described by one line of YAML."""
    return from_file(f"targets: [{{{lines}}}]").targets[0]


# Right values


def test_without_any_configuration_the_local_vllm_is_watched():
    """No flag, no variable, no file: the defaults."""
    config = load({}, {}, no_file)
    assert config == Config()
    assert config.targets == (TargetConfig(),)
    assert config.targets[0].url == "http://127.0.0.1:8000/metrics"
    assert config.web.listen_address == "[::]:21900"
    assert config.poll == PollConfig(interval=1.0, timeout=3.0, max_body_bytes=8 * 1024 * 1024)
    assert (config.log.level, config.log.format) == ("info", "logfmt")
    analysis = config.analysis
    assert (analysis.window, analysis.long_window, analysis.max_age) == (60.0, 300.0, 5.0)
    assert (analysis.startup_grace, analysis.stall_after) == (900.0, 60.0)


@pytest.mark.parametrize(
    "text", ["", "# nothing yet\n", "---\n", "web:\n", "web:\n  listen_address:\n", "{}"]
)
def test_what_is_left_empty_in_the_file_is_not_given(text):
    """A section with all its lines commented out is no error."""
    assert from_file(text) == Config()


def test_a_whole_file_is_read():
    """Every section and every kind of value arrives typed."""
    config = from_file(
        """
        targets:
          - url: https://vllm.example:8443/metrics
            config: {max_num_seqs: 64, gpu_memory_utilization: 0.9, kv_cache_dtype: fp8, role: decode,
                     enable_prefix_caching: false, kv_cache_memory_bytes: 24GiB, kv_lease_seconds: 30}
            headers: {X-Scope: tenant 1, X-Number: 0123}
            bearer_token_file: /run/token
            tls: {ca_file: /ca.pem, cert_file: /cert.pem, key_file: /key.pem, server_name: vllm,
                  insecure_skip_verify: true}
            unix_socket: /run/vllm.sock
        web: {listen_address: "127.0.0.1:9000"}
        poll: {interval: 500ms, timeout: 2.5, max_body_bytes: 16MiB}
        log: {level: debug, format: json}
        analysis: {window: 30s, long_window: 2m, max_age: 10, startup_grace: 1h, stall_after: 1.5m}
        """
    )
    assert config.targets == (
        TargetConfig(
            url="https://vllm.example:8443/metrics",
            facts={
                "max_num_seqs": 64,
                "gpu_memory_utilization": 0.9,
                "kv_cache_dtype": "fp8",
                "role": "decode",
                "enable_prefix_caching": False,
                "kv_cache_memory_bytes": 24 << 30,
                "kv_lease_seconds": 30.0,
            },
            headers={"X-Scope": Secret("tenant 1"), "X-Number": Secret("0123")},
            bearer_token_file="/run/token",
            tls=TlsConfig("/ca.pem", "/cert.pem", "/key.pem", "vllm", insecure_skip_verify=True),
            unix_socket="/run/vllm.sock",
        ),
    )
    assert config.web == WebConfig("127.0.0.1:9000")
    assert config.poll == PollConfig(0.5, 2.5, 16 << 20)
    assert (config.log.level, config.log.format) == ("debug", "json")
    assert config.analysis == AnalysisConfig(
        window=30.0, long_window=120.0, max_age=10.0, startup_grace=3600.0, stall_after=90.0
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1", 1.0), ("0.25", 0.25), ("250ms", 0.25), ("2s", 2.0), ("1.5s", 1.5), ("1m", 60.0), ("5e-1s", 0.5)],
)
def test_durations_have_units_or_are_seconds(text, seconds):
    """A bare number is seconds, as Prometheus clients are used to."""
    assert load({"poll.interval": text}, {}, no_file).poll.interval == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1s", "61s", "1d", "1 s", "s", ".", "1.2.3", "nan", "inf", "1e999", "9" * 500, "¹s", "true"],
)
def test_other_durations_are_refused(text):
    """Neither nonsense nor what is out of range gets through."""
    with pytest.raises(ConfigError, match=r"--poll.interval: expected a duration from 100ms to 1m .*, got '"):
        load({"poll.interval": text}, {}, no_file)


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("4KiB", 4096), ("1GiB", 1 << 30), ("2048B", 2048)]
)
def test_sizes_are_bytes_or_have_binary_units(text, count):
    """8MiB and 8388608 are the same."""
    assert load({"poll.max_body_bytes": text}, {}, no_file).poll.max_body_bytes == count


@pytest.mark.parametrize("text", ["", "1023", "2GiB", "8MB", "1.5MiB", "-4096", "MiB", "9" * 30])
def test_other_sizes_are_refused(text):
    """Decimal units would be a guess."""
    with pytest.raises(ConfigError, match=r"--poll.max-body-bytes: expected a size from 1KiB to 1GiB"):
        load({"poll.max_body_bytes": text}, {}, no_file)


@pytest.mark.parametrize("text", ["true", "True", "TRUE"])
def test_booleans_are_true_or_false(text):
    """Upper case is YAML's other spelling of the same."""
    assert from_file(f"targets: [{{config: {{async_scheduling: {text}}}}}]").targets[0].facts == {
        "async_scheduling": True
    }


@pytest.mark.parametrize("text", ["yes", "on", "1", "no", ""])
def test_other_booleans_are_refused(text):
    """YAML 1.1's `yes` and `on` are not taken for true."""
    found = problems_of(f"targets: [{{config: {{async_scheduling: '{text}'}}}}]")
    assert found == [f"targets[0].config.async_scheduling: expected true or false, got {text!r}"]


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("[::]:21900", "::", 21900),
        (":21900", "::", 21900),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("[fe80::1]:80", "fe80::1", 80),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_a_listen_address_is_split(address, host, port):
    """Prometheus's `:port` means every address."""
    web = load({"web.listen_address": address}, {}, no_file).web
    assert (web.listen_address, web.host, web.port) == (address, host, port)


@pytest.mark.parametrize(
    "address",
    ["", "21900", "localhost", "::1:80", "[::1]", "[x]:80", "h:65536", "h:-1", "h:x", "a b:1", "h:²"],
)
def test_other_listen_addresses_are_refused(address):
    """An IPv6 address needs its brackets, or its end is taken for the port."""
    with pytest.raises(ConfigError, match=r"^--web.listen-address: expected host:port such as"):
        load({"web.listen_address": address}, {}, no_file)


# Precedence


def test_flags_go_before_environment_before_file_before_defaults():
    """Each source is seen where no better one speaks."""
    text = "poll: {interval: 2s, timeout: 2s}\nlog: {level: debug}"
    environ = {"VLLM_PRESSURE_POLL_INTERVAL": "5s", "VLLM_PRESSURE_POLL_TIMEOUT": "5s"}
    config = from_file(text, {"poll.interval": "10s", "log.format": None}, environ)
    assert config.poll.interval == 10.0
    assert config.poll.timeout == 5.0
    assert config.log.level == "debug"
    assert config.log.format == "logfmt"


def test_a_bad_value_is_an_error_even_where_a_better_source_goes_before_it():
    """It would come to light on the day the flag is removed."""
    found = problems_of(
        "poll: {interval: soon}", {"poll.interval": "1s"}, {"VLLM_PRESSURE_POLL_INTERVAL": "x"}
    )
    assert [problem.partition(":")[0] for problem in found] == [
        "VLLM_PRESSURE_POLL_INTERVAL",
        "poll.interval",
    ]


def test_the_file_may_be_named_by_the_environment():
    """A flag that names another goes before it."""
    files = {"/env": "log: {level: debug}", "/flag": "log: {level: error}"}
    environ = {"VLLM_PRESSURE_CONFIG_FILE": "/env"}
    assert load({}, environ, files.__getitem__).log.level == "debug"
    assert load({"config.file": "/flag"}, environ, files.__getitem__).log.level == "error"


def test_a_variable_that_is_set_to_nothing_is_not_set():
    """Templates write `NAME=` for what they leave out."""
    environ = {row.env: "" for row in OPTIONS} | {"VLLM_PRESSURE_CONFIG_FILE": ""}
    assert load({}, environ, no_file) == Config()


def test_flags_and_environment_describe_the_target():
    """One target needs no file; sections within it have flags too."""
    flags = {"target.url": "https://vllm:8000", "target.tls.insecure_skip_verify": "true"}
    target = load(flags, {"VLLM_PRESSURE_TARGET_UNIX_SOCKET": "/run/x"}, no_file).targets[0]
    assert target == TargetConfig(
        url="https://vllm:8000/metrics", tls=TlsConfig(insecure_skip_verify=True), unix_socket="/run/x"
    )


def test_a_target_described_in_two_places_is_refused():
    """Mixing the file's target with flags would leave open which of them is meant."""
    found = problems_of(
        "targets: [{url: 'http://a'}]", {"target.url": "http://b"}, {"VLLM_PRESSURE_TARGET_UNIX_SOCKET": "/s"}
    )
    names = "VLLM_PRESSURE_TARGET_UNIX_SOCKET, --target.url"
    assert found == [f"targets: the target is also given by {names}; expected one place only"]


# Errors


def test_all_that_is_wrong_is_said_at_once():
    """Every source and every depth, each with the path of its key, in one exception."""
    text = """
        targets:
          - url: vllm:8000
            tls: {cert_fle: x, key_file: ''}
            config: {max_num_seq: 64, block_size: big}
            headers: {X-A: [1]}
        web: {listen_adress: ":1"}
        poll: 5
        pol: {}
        log: {level: loud}
    """
    found = problems_of(text, {"analysis.window": "never"}, {"VLLM_PRESSURE_POLL_TIME_OUT": "1s"})
    assert found == [
        "VLLM_PRESSURE_POLL_TIME_OUT: unknown key (did you mean VLLM_PRESSURE_POLL_TIMEOUT?)",
        "--analysis.window: expected a duration from 5s to 1h (such as 500ms, 10s, 2m, 1h), got 'never'",
        "targets[0].url: expected a url that begins with http:// or https://, got 'vllm:8000'",
        "targets[0].config.max_num_seq: unknown key (did you mean max_num_seqs?)",
        "targets[0].config.block_size: expected a whole number from 1 to 1048576, got 'big'",
        "targets[0].headers.X-A: expected a printable ASCII text that is not empty, got a list",
        "targets[0].tls.cert_fle: unknown key (did you mean cert_file?)",
        "targets[0].tls.key_file: expected a printable text that is not empty, got ''",
        "pol: unknown key (did you mean poll?)",
        "web.listen_adress: unknown key (did you mean listen_address?)",
        "poll: expected a mapping of options, got text",
        "log.level: expected one of debug, info, warning, error, got 'loud'",
    ]


def test_the_error_is_one_problem_per_line():
    """So that a command can print it as it is."""
    with pytest.raises(ConfigError) as caught:
        load({"log.level": "a\nb", "log.format": "c"}, {"VLLM_PRESSURE_A\nB": "x"}, no_file)
    assert len(caught.value.problems) == 3
    assert str(caught.value).splitlines() == list(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- 1", "/etc/exporter.yaml: expected a mapping of options, got a list"),
        ("hello", "/etc/exporter.yaml: expected a mapping of options, got text"),
        ("a: b: c", "/etc/exporter.yaml: line 1, column 5: bad yaml: mapping values are not allowed here"),
        (
            "\n\n[1, 2",
            "/etc/exporter.yaml: line 3, column 6: bad yaml: expected ',' or ']', but got '<stream end>'",
        ),
        ("a: 1\n---\nb: 2", "/etc/exporter.yaml: line 2, column 1: bad yaml: but found another document"),
        ("a: \x00", "/etc/exporter.yaml: line 1: bad yaml: a character that yaml does not allow"),
        ("\nweb: \ud800", "/etc/exporter.yaml: line 2: bad yaml: a character that yaml does not allow"),
        ('"\\UFFFFFFFF": 1', "/etc/exporter.yaml: bad yaml: an escape or number that is out of range"),
        ("[" * 5000, "/etc/exporter.yaml: bad yaml: nested too deeply"),
        ("web: !!python/name:os.system {}", "web: line 1: a tag that is not supported"),
        ("web:\n  [a, b]: 1", "web: line 2: a key that is not a plain word"),
        ("web: {}\nlog: {}\nweb: {}", "web: duplicated key (lines 1 and 3)"),
        ("poll:\n  timeout: 1\n  timeout: 1", "poll.timeout: duplicated key (lines 2 and 3)"),
        ("targets:\n- url: http://a\n  url: http://b", "targets[0].url: duplicated key (lines 2 and 3)"),
        ("target: {}", "target: unknown key (did you mean targets?)"),
        ("<<: {log: {level: debug}}", "line 1: a key that is not a plain word"),
    ],
)
def test_bad_yaml_is_told_with_its_place(text, problem):
    """Also what YAML would take without a word: a key that is there twice, an object of Python's."""
    assert problem in problems_of(text)


def test_aliases_are_read_once():
    """Nine aliases of nine aliases, ten levels deep, are not 9^10 values; a list within itself ends too."""
    levels = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 11)]
    assert len(problems_of("\n".join(levels))) == 11
    assert problems_of("web: &a {listen_address: *a}") == [
        "web.listen_address: line 1: an alias within what it stands for"
    ]
    assert (
        from_file("targets: [{url: &u 'http://h/m', unix_socket: *u}]").targets[0].unix_socket == "http://h/m"
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(2, "No such file or directory"), "a readable file, got no such file or directory"),
        (PermissionError(13, "Permission denied"), "a readable file, got permission denied"),
        (OSError(), "a readable file, got an error"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "a readable file of utf-8 text"),
        (ValueError("embedded null byte"), "a readable file of utf-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(error, told):
    """And what is wrong elsewhere is told with it."""

    def read_file(path):
        raise error

    with pytest.raises(ConfigError) as caught:
        load({"config.file": "/x.yaml", "log.level": "loud"}, {}, read_file)
    first, second = caught.value.problems
    assert second.startswith(f"/x.yaml: expected {told}")
    assert first.startswith("--log.level: ")


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("targets: []", ["targets: expected a target, got none (without the key the default is watched)"]),
        (
            "targets: [{url: 'http://a'}, {url: b}]",
            ["targets[1].url: expected a url that begins with http:// or https://, got 'b'"],
        ),
        (
            "targets: [{url: 'http://a'}, {url: 'http://b'}, {url: 'http://a'}]",
            ["targets[2]: the same as targets[0]; expected each once"],
        ),
        ("targets: {url: 'http://a'}", ["targets: expected a list such as [{url: ...}], got a mapping"]),
        ("targets: ['http://a']", ["targets[0]: expected a mapping of options, got text"]),
        ("targets: [~]", ["targets[0]: expected a mapping of options, got nothing"]),
        ("targets_dns: {name: x}", ["targets_dns: expected a list such as [{name: ...}], got a mapping"]),
        ("targets_dns: [{}]", ["targets_dns[0].name: expected a name to look up, got nothing"]),
        (
            "targets_dns: [{name: x, tls: {ca_file: /c}}]",
            ["targets_dns[0].tls: has no effect without scheme https"],
        ),
        (
            "targets_dns: [{name: 'a b'}]",
            [
                "targets_dns[0].name: expected a name that DNS knows,"  # noqa: ISC004 (one problem)
                " such as vllm.prod.svc.cluster.local, got 'a b'"
            ],
        ),
        (
            "targets_dns: [{name: x, typ: a}]",
            ["targets_dns[0].typ: unknown key (did you mean type?)"],
        ),
        (
            f"targets_dns: [{{name: x, bearer_token: {HIDDEN}, bearer_token_file: /t}}]",
            [
                "targets_dns[0].bearer_token: expected either bearer_token or bearer_token_file, got both",
            ],
        ),
        ("targets_file_sd: [{}]", ["targets_file_sd[0].files: expected a list of file names, got nothing"]),
        (
            "targets_file_sd: [{files: x.yml}]",
            ["targets_file_sd[0].files: expected a list of file names, which may hold *, got text"],
        ),
        (
            "targets_file_sd: [{files: [x.yml, /etc/passwd]}]",
            ["targets_file_sd[0].files[1]: expected a name that ends in .json, .yml or .yaml"],
        ),
        (
            "targets: [{url: 'http://a', labels: {a-b: x}}]",
            ["targets[0].labels.a-b: expected the name of a label, which does not begin with __"],
        ),
    ],
)
def test_lists_of_targets_are_checked(text, problems):
    """Whether named or found; secrets are repeated nowhere."""
    assert problems_of(text) == problems


def test_several_targets_and_ways_to_find_more():
    """With what each entry says of how they are asked."""
    config = from_file(
        "targets: [{url: 'http://a'}, {url: 'http://b', labels: {pod: b}}]\n"
        "targets_dns: [{name: vllm.prod.svc, port: 9, type: AAAA, refresh: 10s, config: {max_num_seqs: 8},"
        f" headers: {{X-Key: {HIDDEN}}}}}]\n"
        "targets_file_sd: [{files: [/etc/vllm/*.json, more.yml]}]\n"
    )
    assert [target.url for target in config.targets] == ["http://a/metrics", "http://b/metrics"]
    (dns,) = config.targets_dns
    assert (dns.name, dns.port, dns.type, dns.refresh) == ("vllm.prod.svc", 9, "aaaa", 10.0)
    assert dns.target("http://1.2.3.4:9/metrics") == TargetConfig(
        url="http://1.2.3.4:9/metrics", facts={"max_num_seqs": 8}, headers={"X-Key": Secret(HIDDEN)}
    )
    assert config.targets_file_sd[0].files[0] == "/etc/vllm/*.json"
    assert HIDDEN not in describe(config)
    assert not config.alone
    assert from_file("targets_dns: [{name: x}]").targets == ()
    assert from_file("targets: []\ntargets_dns: [{name: x}]").targets == ()


def test_files_count_from_the_folder_of_the_configuration():
    """As in Prometheus; absolute names stay."""
    text = "targets_file_sd: [{files: [a/*.yml, /b.json]}]"
    config = load({"config.file": "/etc/vllm/config.yaml"}, {}, lambda _: text)
    assert config.targets_file_sd[0].files == ("/etc/vllm/a/*.yml", "/b.json")


def test_one_target_is_single_until_it_has_labels():
    """Then it is one of several, as far as its series are concerned."""
    assert Config().is_single
    assert not from_file("targets: [{url: 'http://a', labels: {pod: x}}]").is_single
    assert from_file("targets: [{url: 'http://a', labels: {pod: x}}]").alone
    assert not from_file("targets: [{url: 'http://a'}, {url: 'http://b'}]").alone
    assert not from_file("targets: [{url: 'http://a'}]\ntargets_dns: [{name: x}]").alone


def test_the_one_server_that_is_meant_goes_before_all_that_the_file_names():
    """With what the file says of it, or without."""
    text = (
        "targets: [{url: 'http://a', config: {max_num_seqs: 8}}, {url: 'http://b'}]\ntargets_dns: [{name: x}]"
    )
    read = {"config.file": "/c"}
    config = load(read, {}, lambda _: text, "http://a/metrics")
    assert config.targets == (TargetConfig(url="http://a/metrics", facts={"max_num_seqs": 8}),)
    assert config.is_single
    assert load(read, {}, lambda _: text, "http://c").targets == (TargetConfig(url="http://c/metrics"),)
    with pytest.raises(ConfigError, match=r"--target\.url: expected a url"):
        load(read, {}, lambda _: text, "c")


def test_a_switch_needs_no_value():
    """As in Prometheus; with one it may be switched off."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    for ending, value in (([], True), (["false"], False)):
        flags = flags_given(parser.parse_args(["--web.enable-lifecycle", *ending]))
        assert load(flags, {}, no_file).web.enable_lifecycle is value


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://vllm:8000", "http://vllm:8000/metrics"),
        ("http://vllm:8000/", "http://vllm:8000/metrics"),
        ("https://[::1]:8000?a=b", "https://[::1]:8000/metrics?a=b"),
        ("http://vllm/v1/metrics", "http://vllm/v1/metrics"),
        ("http://vllm/metrics/", "http://vllm/metrics/"),
    ],
)
def test_a_url_without_a_path_gets_metrics(url, read):
    """A path that is there stays as it is."""
    assert load({"target.url": url}, {}, no_file).targets[0].url == read


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("vllm:8000/metrics", "begins with http:// or https://, got 'vllm:8000/metrics'"),
        ("", "begins with http:// or https://, got ''"),
        ("ftp://vllm", "begins with http:// or https://, got 'ftp://vllm'"),
        ("http+unix://%2Frun%2Fx", "unix sockets go into unix_socket"),
        ("unix:/run/x", "unix sockets go into unix_socket"),
        ("http://", "expected a url such as http://127.0.0.1:8000/metrics, got 'http://'"),
        ("http://:8000/", "expected a url such as"),
        ("http://vllm:port/", "expected a url such as"),
        ("http://vllm:99999/", "expected a url such as"),
        ("http://[::1/", "expected a url such as"),
        ("http://vllm/#a", "expected a url such as"),
        ("http://vllm/a b", "without spaces and control characters"),
        ("http://vllm/\n", "without spaces and control characters"),
    ],
)
def test_other_urls_are_refused(url, told):
    """Each with a hint at what was expected."""
    with pytest.raises(ConfigError) as caught:
        load({"target.url": url}, {}, no_file)
    (problem,) = caught.value.problems
    assert problem.startswith("--target.url: ")
    assert told in problem


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("tls: {key_file: /k}, url: 'https://a'", "tls.key_file: a key without cert_file has no effect"),
        ("tls: {ca_file: /c}", "tls: has no effect on a url that does not begin with https://"),
        (
            "bearer_token: a, bearer_token_file: /b",
            "bearer_token: expected either bearer_token or bearer_token_file, got both",
        ),
        (
            "bearer_token_file: /b, headers: {authorization: x}",
            "bearer_token_file: expected one authorization, got an Authorization header too",
        ),
        (
            "headers: {X-a: '1', x-A: '2'}",
            "headers.x-A: duplicated header (upper and lower case are the same)",
        ),
        (
            "config: [max_num_seqs]",
            "config: expected a mapping of what is known about the server, got a list",
        ),
        ("unix_socket: {}", "unix_socket: expected a printable text that is not empty, got a mapping"),
    ],
)
def test_values_that_do_not_go_together_are_refused(target, problem):
    """What would be ignored without a word is an error."""
    assert problems_of(f"targets: [{{{target}}}]") == [f"targets[0].{problem}"]


def test_a_default_in_place_of_a_bad_value_makes_up_no_conflict():
    """The url that was refused may well have been https."""
    assert len(problems_of("targets: [{url: 'https://', tls: {ca_file: /c}}]")) == 1
    with pytest.raises(ConfigError) as caught:
        load({"target.url": "https://", "target.tls.ca_file": "/c"}, {}, no_file)
    assert len(caught.value.problems) == 1


def test_the_long_window_is_at_least_the_window():
    """Ratios over less than the rates would contradict them."""
    assert problems_of("analysis: {window: 10m}") == [
        "analysis.long_window: expected at least analysis.window, got less"
    ]


def test_what_kubernetes_sets_for_a_service_is_no_unknown_key():
    """A service named vllm-pressure puts seven variables with our prefix into every pod beside it."""
    links = {
        "VLLM_PRESSURE_SERVICE_HOST": "10.0.0.1",
        "VLLM_PRESSURE_SERVICE_PORT": "21900",
        "VLLM_PRESSURE_SERVICE_PORT_HTTP": "21900",
        "VLLM_PRESSURE_PORT": "tcp://10.0.0.1:21900",
        "VLLM_PRESSURE_EXPORTER_PORT_21900_TCP": "tcp://10.0.0.1:21900",
        "VLLM_PRESSURE_PORT_21900_TCP_ADDR": "10.0.0.1",
    }
    assert load({}, links, no_file) == Config()
    with pytest.raises(ConfigError, match=r"^VLLM_PRESSURE_PORT: unknown key"):
        load({}, {"VLLM_PRESSURE_PORT": "9000"}, no_file)


@pytest.mark.parametrize(
    ("flags", "environ", "problem"),
    [
        ({"target.headers": "x"}, {}, "--target.headers: expected targets[0].headers in the file"),
        (
            {},
            {"VLLM_PRESSURE_TARGET_CONFIG": "x"},
            "VLLM_PRESSURE_TARGET_CONFIG: expected targets[0].config in",
        ),
        ({"web.listen": ":1"}, {}, "web.listen: unknown key"),
    ],
)
def test_what_only_the_file_can_hold_is_refused_elsewhere(flags, environ, problem):
    """A mapping does not fit into a flag."""
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, no_file)
    assert caught.value.problems[0].startswith(problem)


# Facts


def test_facts_of_a_recording_are_read_from_json():
    """Its header holds numbers and booleans, and may hold keys of a later version."""
    header = json.loads(
        '{"max_num_seqs": 64, "watermark": 1e-05, "async_scheduling": true, "role": null, "new": [1]}'
    )
    facts, problems = parse_facts(header, strict=False)
    assert facts == {"max_num_seqs": 64, "watermark": 0.00001, "async_scheduling": True}
    assert problems == []


def test_facts_of_an_operator_are_read_strictly():
    """The same names, but a slip is told."""
    facts, problems = parse_facts({"max_num_seqs": 64, "max_seqs": 1, "block_size": 0.5}, strict=True)
    assert facts == {"max_num_seqs": 64}
    assert problems == [
        "max_seqs: unknown key (did you mean max_num_seqs?)",
        "block_size: expected a whole number from 1 to 1048576, got '0.5'",
    ]


@pytest.mark.parametrize(
    "raw", [True, 0, -1, 1.0, float("nan"), "many", [], {}, "1_000", "٣", pytest.param(10**5000, id="huge")]
)
def test_a_fact_that_is_no_whole_number_is_refused(raw):
    """Bad values are problems whether the names are read strictly or not."""
    facts, problems = parse_facts({"max_num_seqs": raw}, strict=False)
    assert facts == {}
    assert len(problems) == 1


@given(
    st.dictionaries(
        st.sampled_from(sorted(FACTS)) | st.text(),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
    ),
    st.booleans(),
)
def test_facts_are_read_or_told_whatever_they_are(given_facts, strict):
    """Each known fact is either read or a problem, and what was read reads the same again."""
    facts, problems = parse_facts(given_facts, strict=strict)
    told = {name for name, raw in given_facts.items() if name in FACTS and raw is not None}
    strangers = given_facts.keys() - FACTS.keys()
    assert len(facts) + len(problems) == len(told) + (len(strangers) if strict else 0)
    assert parse_facts(facts, strict=True) == (facts, [])


# vLLM's argument line

ARGS = "vllm serve m --max-num-seqs 64 --kv-cache-dtype fp8 --no-enable-prefix-caching --max-model-len 32k"
ARGS_FACTS = {
    "max_num_seqs": 64,
    "kv_cache_dtype": "fp8",
    "enable_prefix_caching": False,
    "max_model_len": 32000,
}


def test_the_argument_line_is_read_wherever_it_stands():
    """Flag, environment, file; in the file as a line, a folded one, or a list as in a manifest."""
    assert load({"engine.args": ARGS}, {}, no_file).engine.args == ARGS_FACTS
    assert load({}, {"VLLM_PRESSURE_ENGINE_ARGS": ARGS}, no_file).engine.args == ARGS_FACTS
    assert from_file(f"engine: {{args: '{ARGS}'}}").engine.args == ARGS_FACTS
    folded = ARGS.replace(" --", "\n    --")
    assert from_file(f"engine:\n  args: >-\n    {folded}").engine.args == ARGS_FACTS
    assert from_file(f"engine: {{args: {json.dumps(ARGS.split())}}}").engine.args == ARGS_FACTS


def test_the_argument_line_is_no_flag_of_this_program():
    """It begins with dashes, which argparse takes for a value where it holds a space, or follows ``=``."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    line = "--max-num-seqs=64 --api-key=x"
    for given_flags in (["--engine.args", line], [f"--engine.args={line}"]):
        flags = flags_given(parser.parse_args(given_flags))
        assert load(flags, {}, no_file).engine.args == {"max_num_seqs": 64}


def test_an_argument_line_without_facts_is_a_line():
    """Other than none at all it was given; neither is an error."""
    assert from_file("engine: {args: vllm serve m}").engine == EngineConfig({})
    assert Config().engine.args is None


def test_an_argument_line_stands_beside_what_is_told_of_the_target():
    """The two are merged later, the target's `config` first."""
    config = from_file("targets: [{config: {max_num_seqs: 8}}]\nengine: {args: --max-num-seqs=64}")
    assert config.targets[0].facts == {"max_num_seqs": 8}
    assert config.engine.args == {"max_num_seqs": 64}


@given(st.lists(st.sampled_from(["--api-key", HIDDEN, "--max-num-seqs", "8", "--max-loras=2", "'", "-tp"])))
def test_an_argument_line_is_kept_without_its_secrets(words):
    """Whatever order the words come in: not in the configuration, its description, or an error."""
    try:
        config = load({"engine.args": " ".join(words)}, {}, no_file)
    except ConfigError as error:
        shown = "".join(traceback.format_exception(error)) + repr(error)
    else:
        shown = repr(config) + describe(config) + str(dataclasses.asdict(config))
        assert from_file(describe(config)) == config
    assert HIDDEN not in shown


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (f'engine: {{args: "--api-key \'{HIDDEN}"}}', "got a quotation without its end"),
        (f"engine: {{args: {{api-key: {HIDDEN}}}}}", "got a mapping"),
        (f"engine: {{args: [[--api-key, {HIDDEN}]]}}", "got a list of something else"),
    ],
)
def test_no_error_of_an_argument_line_repeats_it(text, got):
    """It says what was expected."""
    (problem,) = problems_of(text)
    assert problem.startswith("engine.args: expected ")
    assert problem.endswith(got)
    assert HIDDEN not in problem


def test_a_described_argument_line_gives_the_same_facts():
    """Written as vLLM's flags, those it has no flag of its own for too, and without the rest."""
    line = "--api-key x -tp 2 --kv-transfer-config.kv_role kv_producer --async-scheduling --watermark 1e-5"
    config = from_file(f"engine: {{args: '{line}'}}")
    assert yaml.safe_load(describe(config))["engine"]["args"] == (
        "--tensor-parallel-size 2 --kv-transfer-config.kv_role kv_producer --async-scheduling "
        "--watermark 1e-05"
    )
    assert from_file(describe(config)) == config


# Secrets: the one side


def test_a_secret_shows_a_mask():
    """In every way in which Python makes a text of a value."""
    secret = Secret(HIDDEN)
    assert {repr(secret), str(secret), f"{secret}", "%s" % secret, f"{secret!r}"} == {"<secret>"}  # noqa: UP031
    assert repr([secret]) == "[<secret>]"
    assert not hasattr(secret, "__dict__")


def test_what_a_query_holds_is_not_shown():
    """A proxy may want a token there; the names tell what it is about."""
    config = from_file(f"targets: [{{url: 'http://vllm/metrics?user=x&token={HIDDEN}&all'}}]")
    (shown,) = yaml.safe_load(describe(config))["targets"]
    assert shown["url"] == "http://vllm/metrics?user=<secret>&token=<secret>&all"
    assert config.targets[0].url.endswith(f"token={HIDDEN}&all")


def test_secrets_are_told_apart_by_value():
    """A changed token is a changed configuration."""
    assert Secret("a") == Secret("a") != Secret("b")
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2
    assert Secret("a") != "a"


def test_a_configuration_with_secrets_shows_none():
    """Neither printed, described, turned into a dict, nor logged."""
    config = from_file(f"targets: [{{bearer_token: {HIDDEN}, headers: {{X-Key: {HIDDEN}}}}}]")
    record = logging.LogRecord("exporter", logging.INFO, "", 0, "loaded config=%s", (config,), None)
    shown = [
        repr(config),
        str(config),
        describe(config),
        str(dataclasses.asdict(config)),
        record.getMessage(),
    ]
    for text in shown:
        assert HIDDEN not in text
    assert yaml.safe_load(describe(config))["targets"][0]["headers"] == {"X-Key": "<secret>"}


@pytest.mark.parametrize(
    "text",
    [
        f"targets: [{{url: 'http://user:{HIDDEN}@vllm'}}]",
        f"targets: [{{url: 'user:{HIDDEN}@vllm'}}]",
        f"targets: [{{url: 'http://user:{HIDDEN}/x@vllm'}}]",
        f"targets: [{{url: 'vllm?token={HIDDEN}'}}]",
        f"targets: [{{bearer_token: 'Bearer {HIDDEN}'}}]",
        f"targets: [{{bearer_token: [{HIDDEN}]}}]",
        f"targets: [{{bearer_token: {{token: {HIDDEN}}}}}]",
        f'targets: [{{headers: {{X-Key: "{HIDDEN}\\n"}}}}]',
        f"targets: [{{headers: {{X-Key: [{HIDDEN}]}}}}]",
        f"targets: [{{headers: 'X-Key: {HIDDEN}'}}]",
        f"targets: [{{headers: {{'X-Key: {HIDDEN}': ''}}}}]",
        f"targets: [{{headers: {{X-Key: {HIDDEN}, X-Key: {HIDDEN}}}}}]",
        f"targets: [{{bearer_token: {HIDDEN}, bearer_token_file: /x}}]",
        f"targets: [{{bearer_token: {HIDDEN}, headers: {{Authorization: {HIDDEN}}}}}]",
        f"targets: [{{bearer_tokn: {HIDDEN}}}]",
        f"targets: [{{bearer_token: *{HIDDEN}}}]",
        f"targets: [{{bearer_token: !{HIDDEN} x}}]",
        f"targets: [{{bearer_token: !a!{HIDDEN} x}}]",
        f"targets: [{{bearer_token: '{HIDDEN}}}]",
        f"bearer_token: {HIDDEN}: {HIDDEN}",
        f"bearer_token: @{HIDDEN}",
        f"bearer_token: {HIDDEN}\x01",
        f"? {HIDDEN} is odd\n: x",
        f"- {HIDDEN}",
        HIDDEN,
    ],
)
def test_no_error_of_the_file_repeats_a_secret(text):
    """Neither in its problems nor in the exceptions behind it, which a traceback prints."""
    with pytest.raises(ConfigError) as caught:
        from_file(text)
    assert HIDDEN not in "".join(traceback.format_exception(caught.value)).replace("from_file(text)", "")
    assert HIDDEN not in repr(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ({"target.bearer_token": HIDDEN}, {}),
        ({"target.headers": HIDDEN}, {}),
        ({"target.url": f"http://a:{HIDDEN}@b"}, {}),
        ({}, {"VLLM_PRESSURE_TARGET_BEARER_TOKEN": f"{HIDDEN}\n"}),
        ({}, {"VLLM_PRESSURE_TARGET_HEADERS": HIDDEN}),
        ({}, {"VLLM_PRESSURE_BEARER_TOKEN": HIDDEN}),
    ],
)
def test_no_error_of_a_flag_or_variable_repeats_a_secret(flags, environ):
    """Wherever it was put by mistake."""
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, no_file)
    assert HIDDEN not in repr(caught.value)


def test_a_secret_among_the_arguments_is_refused():
    """Every user of the machine sees the arguments of a process; the message says where it belongs."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        flags = flags_given(parser.parse_args(["--target.bearer-token", HIDDEN, "--target.headers", HIDDEN]))
    with pytest.raises(ConfigError) as caught:
        load(flags, {}, no_file)
    where = "expected it in VLLM_PRESSURE_TARGET_BEARER_TOKEN"
    problems = caught.value.problems
    assert f"--target.bearer-token: a secret among arguments is seen by all; {where}" in problems
    assert len(problems) == 2
    assert HIDDEN not in stderr.getvalue() + str(caught.value)
    assert "--target.bearer-token " not in parser.format_help()


# Secrets: the other side


def test_the_secret_itself_is_what_will_be_sent():
    """The mask is only for eyes: the poller gets every character."""
    target = target_of(f"bearer_token: {HIDDEN}, headers: {{X-Key: '{HIDDEN} 0'}}")
    assert target.bearer_token.reveal() == HIDDEN
    assert {name: value.reveal() for name, value in target.headers.items()} == {"X-Key": f"{HIDDEN} 0"}


@pytest.mark.parametrize("token", ["0123", "1e3", "true", "2024-01-01", "0x1F", "1:30", "yes", "a=b/+~."])
def test_a_secret_that_looks_like_another_type_stays_as_it_was_written(token):
    """YAML would make 83 of an unquoted 0123."""
    assert target_of(f"bearer_token: {token}").bearer_token.reveal() == token
    environ = {"VLLM_PRESSURE_TARGET_BEARER_TOKEN": token}
    assert load({}, environ, no_file).targets[0].bearer_token == Secret(token)


# Flags, reference, description


def test_flags_are_told_from_defaults():
    """What was not given stays out, so that environment and file can speak."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config.check", action="store_true")
    add_flags(parser)
    assert flags_given(parser.parse_args([])) == {}
    given_flags = flags_given(
        parser.parse_args(["--config.check", "--config.file=/x", "--web.listen-address", ":1"])
    )
    assert given_flags == {"config.file": "/x", "web.listen_address": ":1"}


def test_flags_are_not_abbreviated():
    """`--target.bearer` would else be the token's file, or become ambiguous with the next option."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
        parser.parse_args(["--poll.int", "1s"])


def test_the_help_names_default_and_variable_of_each_flag():
    """With argparse's own percent signs escaped."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    usage = " ".join(parser.format_help().split())
    assert "--poll.interval DURATION time between polls" in usage
    assert "(default: 1s; environment: VLLM_PRESSURE_POLL_INTERVAL)" in usage
    assert "--log.level debug|info|warning|error" in usage


def test_each_option_has_its_own_flag_and_variable():
    """Dots and underscores become one in a variable: two options must not meet there."""
    assert len({row.key for row in OPTIONS}) == len({row.flag for row in OPTIONS}) == len(OPTIONS)
    assert len({row.env for row in OPTIONS}) == len(OPTIONS)
    listen = next(row for row in OPTIONS if row.key == "web.listen_address")
    assert (listen.flag, listen.env) == ("--web.listen-address", "VLLM_PRESSURE_WEB_LISTEN_ADDRESS")


@pytest.mark.parametrize("row", [*OPTIONS, *FACTS.values()], ids=lambda row: row.key)
def test_each_default_is_a_good_value_with_a_reason(row):
    """A default that the checks refuse could not be written into a file."""
    assert len(row.help) > 10
    if row.default is not None:
        assert row.kind.read(row.kind.show(row.default)) == row.default


def test_the_reference_is_a_table_of_all_options():
    """One line each, as many cells in each."""
    head, rule, *lines = reference().splitlines()
    assert rule == "|---|---|---|---|---|---|"
    assert {line.replace("\\|", "").count("|") for line in [head, *lines]} == {7}
    found = [line for line in lines if line.startswith(("| `targets_dns[0].", "| `targets_file_sd[0]."))]
    assert len(lines) == len(OPTIONS) + len(FACTS) + len(found)
    assert len(found) > 20
    assert (
        "| `poll.interval` | `--poll.interval` | `VLLM_PRESSURE_POLL_INTERVAL` | 1s | time between polls; "
        "a storm builds up in seconds | a duration from 100ms to 1m (such as 500ms, 10s, 2m, 1h) |"
    ) in lines


def test_a_description_is_a_file_that_gives_the_same_configuration():
    """It shows every value in the form in which it may be written."""
    config = from_file(
        "targets: [{url: 'https://h/é', config: {watermark: 0.00001, role: both, kv_lease_seconds: 0}}]\n"
        "poll: {interval: 1.0001, timeout: 333ms, max_body_bytes: 1025}\n"
        "analysis: {window: 90s, startup_grace: 0}"
    )
    assert from_file(describe(config)) == config
    assert yaml.safe_load(describe(config))["poll"] == {
        "interval": "1.0001s",
        "timeout": "333ms",
        "max_body_bytes": 1025,
        "concurrency": 256,
        "max_targets": 1000,
    }


@given(st.floats(0.1, 60) | st.integers(100, 60000).map(lambda count: count * 0.001))
def test_a_described_duration_is_exact(seconds):
    """Whatever unit it is shown in."""
    config = Config(poll=PollConfig(interval=seconds))
    assert from_file(describe(config)) == config


# Whatever the input

WORDS = sorted({part for row in OPTIONS for part in row.key.split(".")} | {"targets"} | set(FACTS))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["1s", "8MiB", "info", "json", "http://h", "https://h/m", "/x", ":80", "true", "64", HIDDEN]
    )
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)
SECTION = st.dictionaries(st.sampled_from(WORDS), TREES, max_size=6)
MAPPINGS = st.dictionaries(
    st.sampled_from(WORDS) | st.text(max_size=5), TREES, max_size=5
) | st.fixed_dictionaries(
    {},
    optional={"targets": st.lists(SECTION, max_size=2), "web": SECTION, "poll": SECTION, "analysis": SECTION},
)
KEYS = [row.key for row in OPTIONS]
ENVS = [row.env for row in OPTIONS]
VALUES = st.text(max_size=8) | st.sampled_from(["1s", "8MiB", "info", "http://h", "/x", ":80", "true"])


def assert_config_or_config_error(text, flags, environ):
    """Load, and check what came out."""
    problems = None
    try:
        config = from_file(text, flags, environ)
    except ConfigError as error:
        problems = error.problems
    if problems is None:
        assert isinstance(config, Config)
        assert len(config.targets) == 1
        assert describe(config)
    else:
        assert problems
        assert all(problem.isprintable() for problem in problems)


@given(
    MAPPINGS,
    st.dictionaries(st.sampled_from(KEYS), st.none() | VALUES, max_size=3),
    st.dictionaries(st.sampled_from(ENVS) | st.text().map("VLLM_PRESSURE_".__add__), VALUES, max_size=3),
)
def test_any_mapping_is_a_configuration_or_a_configuration_error(tree, flags, environ):
    """And any flags and environment with it; nothing else ever comes out."""
    assert_config_or_config_error(yaml.safe_dump(tree), flags, environ)


@given(st.text() | st.text(alphabet="aé:-[]{}&*!|>%'\"\\\n \t#?,~<0x", max_size=60))
def test_any_text_is_a_configuration_or_a_configuration_error(text):
    """A broken file is told, never a crash."""
    assert_config_or_config_error(text, {}, {})
