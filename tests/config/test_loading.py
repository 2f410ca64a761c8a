"""The configuration is read strictly, and all problems are reported at once."""

import argparse

import pytest
from support.configuration import HIDDEN, from_file, no_file, problems_of

from exporter.config import (
    OPTIONS,
    Config,
    ConfigError,
    Secret,
    TargetConfig,
    TlsConfig,
    add_flags,
    describe,
    flags_given,
    load,
)

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
          - url: vllm
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
        "targets[0].url: expected a url that begins with http:// or https://, got 'vllm'",
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
        "web.listen_address: line 1: an alias inside the value that it refers to"
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
        ("targets: []", ["targets: expected a target, got none (remove the key to watch the default)"]),
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
        ("vllm:8000", "http://vllm:8000/metrics"),
        ("127.0.0.1:8000/metrics", "http://127.0.0.1:8000/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
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
        ("vllm/metrics", "begins with http:// or https://, got 'vllm/metrics'"),
        ("vllm:port", "begins with http:// or https://, got 'vllm:port'"),
        ("vllm:800000", "begins with http:// or https://, got 'vllm:800000'"),
        ("", "begins with http:// or https://, got ''"),
        ("ftp://vllm", "begins with http:// or https://, got 'ftp://vllm'"),
        ("http+unix://%2Frun%2Fx", "put the path of a unix socket into unix_socket"),
        ("unix:/run/x", "put the path of a unix socket into unix_socket"),
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
            "config: expected a mapping of settings of the server, got a list",
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
