"""The section `alertmanager` of the configuration: lists, labels from the environment, what does not fit."""

import pytest

from exporter.config import AlertmanagerConfig, ConfigError, Secret, describe, load

FILE = """
alertmanager:
  urls: ["http://am-0:9093/", "https://am-1.example:9093/base"]
  path_prefix: /alertmanager/
  tenant: team-a
  headers: {X-Extra: abcdef}
  bearer_token: hush
  hold: 45s
  page_by: engine
  external_labels:
    cluster: eu-${REGION}
    namespace: ${NAMESPACE}
    pod: ${POD}
    price: 5$
"""
ENVIRON = {"REGION": "1", "NAMESPACE": "prod", "POD": ""}


def loaded(text: str = "", environ: dict[str, str] | None = None, **flags: str) -> AlertmanagerConfig:
    """The section as it is loaded from a file, the environment and flags."""
    given = {f"alertmanager.{name}": value for name, value in flags.items()}
    file = {"config.file": "f"} if text else {}
    return load(given | file, environ or {}, lambda _: text).alertmanager


def problems(text: str, environ: dict[str, str] | None = None, **flags: str) -> tuple[str, ...]:
    """What is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        loaded(text, environ, **flags)
    return caught.value.problems


def test_it_is_off_by_default():
    """Nobody is told anything who was not named."""
    assert loaded().urls == ()


def test_a_whole_section_is_read():
    """Slashes at the ends go, texts become what they stand for."""
    section = loaded(FILE, ENVIRON)
    assert section.urls == ("http://am-0:9093", "https://am-1.example:9093/base")
    assert section.path_prefix == "/alertmanager"
    assert (section.tenant, section.hold, section.page_by) == ("team-a", 45.0, "engine")
    assert section.headers == {"X-Extra": Secret("abcdef")}


def test_labels_take_values_from_the_environment():
    """One that is set to nothing is left out; a lone dollar sign is one."""
    assert loaded(FILE, ENVIRON).external_labels == {
        "cluster": "eu-1",
        "namespace": "prod",
        "price": "5$",
    }


def test_flags_and_variables_hold_lists_and_labels_too():
    """Separated by commas; a pod needs no file."""
    environ = {
        "VLLM_PRESSURE_ALERTMANAGER_URLS": "http://a:9093, http://b:9093",
        "VLLM_PRESSURE_ALERTMANAGER_EXTERNAL_LABELS": "cluster=eu,pod=${POD_NAME}",
        "POD_NAME": "vllm-0",
    }
    section = loaded(environ=environ)
    assert section.urls == ("http://a:9093", "http://b:9093")
    assert section.external_labels == {"cluster": "eu", "pod": "vllm-0"}
    assert loaded(urls="http://c:9093").urls == ("http://c:9093",)


def test_secrets_are_never_shown():
    """Not in what `--config.check` prints."""
    shown = describe(load({"config.file": "f"}, ENVIRON, lambda _: FILE))
    assert "hush" not in shown
    assert "abcdef" not in shown
    assert "http://am-0:9093" in shown


WRONG = {
    "no list": ("urls: {a: b}", "alertmanager.urls: expected a list of urls"),
    "no url": ("urls: [am:9093]", "alertmanager.urls[0]: expected a url that begins with http://"),
    "credentials": ("urls: ['http://u:hush@am']", "alertmanager.urls[0]: expected a url without credentials"),
    "a query": ("urls: ['http://am/?x=1']", "alertmanager.urls[0]: expected a url without a query"),
    "twice": ("urls: ['http://am', 'http://am/']", "alertmanager.urls: expected each url once"),
    "a prefix without a slash": ("path_prefix: x", "alertmanager.path_prefix: expected a path"),
    "an own label": ("external_labels: {severity: x}", "alertmanager.external_labels.severity: expected"),
    "a bad label": ("external_labels: {a-b: x}", "alertmanager.external_labels.a-b: expected"),
    "labels in a list": ("external_labels: [a]", "alertmanager.external_labels: expected a mapping"),
    "a variable that is not set": (
        "external_labels: {pod: '${POD_NAME}'}",
        "alertmanager.external_labels.pod: expected POD_NAME in the environment, got nothing",
    ),
    "two authorizations": (
        "{bearer_token: hush, basic_auth: {username: u, password: hush}}",
        "alertmanager.bearer_token: expected one authorization, got basic_auth too",
    ),
    "a name without a password": (
        "basic_auth: {username: u}",
        "alertmanager.basic_auth.username: expected a username with password",
    ),
    "two passwords": (
        "basic_auth: {username: u, password: hush, password_file: f}",
        "alertmanager.basic_auth.password: expected either password or password_file, got both",
    ),
    "two tenants": (
        "{tenant: a, headers: {x-scope-orgid: b}}",
        "alertmanager.tenant: expected one tenant, got an X-Scope-OrgID header too",
    ),
    "tls without https": (
        "{urls: ['http://am'], tls: {insecure_skip_verify: true}}",
        "alertmanager.tls: has no effect",
    ),
    "nobody to page": ("page_by: team", "alertmanager.page_by: expected one of model, engine"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_its_key(case):
    """One problem each, which never repeats a secret."""
    text, wanted = WRONG[case]
    (problem,) = problems(f"alertmanager: {text if text[0] == '{' else '{' + text + '}'}")
    assert problem.startswith(wanted)
    assert "hush" not in problem


@pytest.mark.parametrize(
    ("value", "wanted"), [("a\nb", "printable"), ("\x1b[2J", "printable"), ("x" * 1025, "got 1025")]
)
def test_a_label_from_the_environment_is_checked_like_one_of_the_file(value, wanted):
    """After its variable was replaced; the value is not repeated."""
    with pytest.raises(ConfigError) as caught:
        loaded("alertmanager: {external_labels: {pod: '${POD_NAME}'}}", {"POD_NAME": value})
    (problem,) = caught.value.problems
    assert problem.startswith("alertmanager.external_labels.pod: expected")
    assert wanted in problem
    assert value not in problem


def test_labels_without_an_equals_sign_are_refused():
    """In a flag."""
    (problem,) = problems("", external_labels="cluster")
    assert "expected a mapping of labels" in problem
