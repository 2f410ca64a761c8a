"""``serve --config.check``: the configuration as it would be used."""

import pytest

pytestmark = pytest.mark.usefixtures("own_logging")

HIDDEN = "hunter2-is-not-shown"


def test_a_valid_configuration_is_printed_with_secrets_masked(run, tmp_path):
    """As the file that would give it."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"targets: [{{url: 'http://vllm:8000', headers: {{X-Key: {HIDDEN}}}, bearer_token: {HIDDEN}}}]\n"
    )
    status, out, err = run("--config.check", "--config.file", path)
    assert (status, err) == (0, "")
    assert "url: http://vllm:8000/metrics" in out
    assert out.count("<secret>") == 2
    assert HIDDEN not in out
    again = tmp_path / "again.yaml"
    again.write_text(out.replace("<secret>", HIDDEN))
    assert run("--config.check", "--config.file", again)[1] == out


def test_a_secret_of_the_environment_is_masked_too(run, monkeypatch):
    """`--config.check` is what people paste into reports."""
    monkeypatch.setenv("VLLM_PRESSURE_TARGET_BEARER_TOKEN", HIDDEN)
    status, out, err = run("--config.check")
    assert status == 0
    assert "bearer_token: <secret>" in out
    assert HIDDEN not in out + err


def test_several_targets_are_printed(run, tmp_path):
    """As the file that would give them."""
    path = tmp_path / "several.yaml"
    path.write_text("targets: [{url: 'http://a'}, {url: 'http://b'}]\ntargets_dns: [{name: x}]\n")
    status, out, _ = run("--config.check", "--config.file", path)
    assert status == 0
    assert "name: x" in out
    assert out.count("url: http") == 2


def test_every_file_that_is_named_is_opened(run, tmp_path):
    """All that cannot be used are reported with their keys; a path may be private, and is not repeated."""
    good, bad = tmp_path / "token", tmp_path / "bad.pem"
    good.write_text(HIDDEN)
    bad.write_text("no certificate")
    path = tmp_path / "config.yaml"
    path.write_text(
        "targets:\n"
        f"- {{url: 'http://a', bearer_token_file: {good}}}\n"
        f"- {{url: 'https://b', tls: {{ca_file: {bad}}}}}\n"
        f"alertmanager: {{urls: ['http://c'], bearer_token_file: {tmp_path}/none}}\n"
    )
    status, out, err = run("--config.check", "--config.file", path)
    assert (status, out) == (2, "")
    assert "alertmanager.bearer_token_file: cannot read the file: no such file" in err.lower()
    assert "targets[1].tls: cannot load ca_file" in err
    assert err.count("cannot") == 2
    assert str(tmp_path) not in err
    bad.unlink()
    path.write_text(f"targets: [{{url: 'http://a', bearer_token_file: {good}}}]\n")
    assert run("--config.check", "--config.file", path)[0] == 0
