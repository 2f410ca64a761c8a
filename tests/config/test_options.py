"""Values of options: which are accepted, and which are rejected."""

import pytest
from support.configuration import from_file, no_file, problems_of

from exporter.config import (
    AnalysisConfig,
    Config,
    ConfigError,
    PollConfig,
    Secret,
    TargetConfig,
    TlsConfig,
    WebConfig,
    load,
)


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
