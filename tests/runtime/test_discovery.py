"""Where targets come from: the configuration, DNS, files; and what of it may stand on series."""

import asyncio
import json
import logging
import socket

import pytest

from exporter.config import DnsTargetsConfig, FileTargetsConfig, Secret, TargetConfig, TlsConfig
from exporter.runtime import discovery
from exporter.runtime.discovery import DnsSource, FileSource, StaticSource, name_of

RESERVED = frozenset({"target", "verdict", "model_name", "engine"})
HIDDEN = "hunter2-is-not-shown"


def named(source) -> list[str]:
    """The names of a source's targets."""
    return [target.name for target in source.targets]


def warnings(caplog) -> list[str]:
    """What was warned of."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Names


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (TargetConfig("http://vllm:8000/metrics"), "vllm:8000"),
        (TargetConfig("http://vllm/metrics"), "vllm:80"),
        (TargetConfig("https://vllm/a/metrics?token=x"), "vllm:443"),
        (TargetConfig("http://[fd00::1]:8000/metrics"), "[fd00::1]:8000"),
        (TargetConfig("http://user:secret@vllm:1/metrics"), "vllm:1"),
        (TargetConfig("http://localhost/metrics", unix_socket="/run/vllm.sock"), "unix:/run/vllm.sock"),
    ],
)
def test_a_target_is_named_by_host_and_port(config, name):
    """Never with credentials, always with a port."""
    assert name_of(config) == name


# Labels


def labels_of(labels, caplog) -> tuple:
    """What is left of labels, and what is said of the others."""
    source = StaticSource([TargetConfig(labels=labels)], RESERVED)
    return dict(source.targets[0].labels), warnings(caplog)


def test_labels_of_a_target_are_kept_in_order(caplog):
    """An empty one is none."""
    kept, told = labels_of({"pod": "vllm-0", "namespace": "prod", "zone": ""}, caplog)
    assert list(kept.items()) == [("namespace", "prod"), ("pod", "vllm-0")]
    assert told == []


@pytest.mark.parametrize("name", ["verdict", "target", "a-b", "", "ключ", "x" * 129])
def test_a_label_that_cannot_be_used_is_left_out_with_a_line(caplog, name):
    """The exporter's own ones, and names that no label may have."""
    kept, told = labels_of({name: "x", "pod": "p"}, caplog)
    assert kept == {"pod": "p"}
    assert len(told) == 1


@pytest.mark.parametrize("value", ["x" * 513, "a\nb", "\ud800"])
def test_a_value_that_cannot_be_used_is_left_out(caplog, value):
    """Too long, or no text that can be shown."""
    assert labels_of({"pod": value}, caplog)[0] == {}
    assert len(warnings(caplog)) == 1


def test_labels_are_bounded_in_number(caplog):
    """Whoever writes the file does not decide how large a scrape is."""
    kept, told = labels_of({f"l{number:02}": "x" for number in range(100)}, caplog)
    assert len(kept) == discovery.MOST_LABELS
    assert 0 < len(told) <= discovery._MOST_LOGGED


# DNS


def dns(resolve, **options) -> DnsSource:
    """A source of a name."""
    return DnsSource(DnsTargetsConfig(name="vllm.prod.svc", **options), RESERVED, resolve)


def answers(*given):
    """A resolver that gives these answers in turn; an exception is raised."""
    left = list(given)

    async def resolve(_name, _family):
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return resolve


def looked(source, times: int = 1) -> list[list[str]]:
    """The names after each look."""

    async def scenario():
        seen = []
        for _ in range(times):
            await source.look()
            seen.append(named(source))
        return seen

    return asyncio.run(scenario())


def test_every_address_of_a_name_is_a_target():
    """With port, path, facts and credentials of the entry; the group's labels are attached."""
    source = dns(
        answers(["10.0.0.1", "10.0.0.2"]),
        port=9,
        path="/m",
        facts={"max_num_seqs": 8},
        bearer_token=Secret(HIDDEN),
        labels={"namespace": "prod", "verdict": "x"},
    )
    assert looked(source) == [["10.0.0.1:9", "10.0.0.2:9"]]
    first = source.targets[0]
    assert first.config.url == "http://10.0.0.1:9/m"
    assert first.config.facts == {"max_num_seqs": 8}
    assert first.config.bearer_token == Secret(HIDDEN)
    assert (first.labels, first.source) == ((("namespace", "prod"),), "dns")


def test_an_ipv6_address_stands_in_brackets():
    """In the url and in the name."""
    source = dns(answers(["fd00::1"]), type="aaaa")
    assert looked(source) == [["[fd00::1]:8000"]]
    assert source.targets[0].config.url == "http://[fd00::1]:8000/metrics"


def test_a_certificate_must_bear_the_name_that_was_looked_up():
    """Hardly any bears an address; another name may be given."""
    source = dns(answers(["10.0.0.1"]), scheme="https")
    looked(source)
    assert source.targets[0].config.tls == TlsConfig(server_name="vllm.prod.svc")
    source = dns(answers(["10.0.0.1"]), scheme="https", tls=TlsConfig(server_name="other"))
    looked(source)
    assert source.targets[0].config.tls.server_name == "other"


def test_addresses_come_and_go():
    """As they are answered."""
    source = dns(answers(["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2"]))
    assert looked(source, 3)[1:] == [["10.0.0.1:8000", "10.0.0.2:8000"], ["10.0.0.2:8000"]]


@pytest.mark.parametrize("problem", [OSError("x"), socket.gaierror(socket.EAI_AGAIN, "try again")])
def test_a_name_server_in_trouble_ends_no_target(caplog, problem):
    """It is counted each time, and logged once; and once that it is over."""
    source = dns(answers(["10.0.0.1"], problem, problem, ["10.0.0.1"]))
    with caplog.at_level(logging.INFO):
        assert looked(source, 4) == [["10.0.0.1:8000"]] * 4
    assert source.failures == 2
    assert len(warnings(caplog)) == 1
    assert "looking a name up again" in caplog.messages[-1]


def test_a_name_that_cannot_be_one_is_trouble_and_no_fault(caplog):
    """Two dots in a row, for instance, which the system's resolver refuses in its own way."""
    source = DnsSource(DnsTargetsConfig(name="a..b"), RESERVED)
    assert looked(source) == [[]]
    assert source.failures == 1
    assert len(warnings(caplog)) == 1


def test_a_name_without_addresses_has_no_targets():
    """A headless service whose pods are all gone."""
    source = dns(answers(["10.0.0.1"], socket.gaierror(socket.EAI_NONAME, "unknown")))
    assert looked(source, 2) == [["10.0.0.1:8000"], []]
    assert source.failures == 1


def test_a_name_server_that_does_not_answer_is_not_asked_again_meanwhile(monkeypatch):
    """A look-up in a thread cannot be stopped; its answer counts whenever it comes."""
    monkeypatch.setattr(discovery, "LOOK_UP_SECONDS", 0.02)
    asked = []

    async def scenario():
        release = asyncio.Event()

        async def resolve(_name, _family):
            asked.append(1)
            await release.wait()
            return ["10.0.0.1"]

        source = dns(resolve)
        await source.look()
        await source.look()
        assert (len(asked), source.failures, named(source)) == (1, 2, [])
        release.set()
        await source.look()
        return named(source)

    assert asyncio.run(scenario()) == ["10.0.0.1:8000"]
    assert len(asked) == 1


def test_the_system_resolver_knows_this_machine():
    """Each address once, whatever protocols it is offered for."""
    source = DnsSource(DnsTargetsConfig(name="localhost", port=1), RESERVED)
    assert looked(source) == [["127.0.0.1:1"]]


# Files

GROUPS = [
    {"targets": ["vllm-0:8000", "vllm-1:8000"], "labels": {"namespace": "prod", "pod": "x", "__meta": "y"}},
    {"targets": ["vllm-2"], "labels": {"__scheme__": "https", "__metrics_path__": "/a/metrics"}},
]
YAML = """\
- targets: ["vllm-0:8000", vllm-1:8000]
  labels: {namespace: prod, pod: x, __meta: y}
- targets: [vllm-2]
  labels:
    __scheme__: https
    __metrics_path__: /a/metrics
"""


def files(folder, pattern: str = "*.json", **options) -> FileSource:
    """A source of files."""
    return FileSource(FileTargetsConfig(files=(str(folder / pattern),), **options), RESERVED)


@pytest.mark.parametrize(
    ("name", "text"), [("t.json", json.dumps(GROUPS)), ("t.yml", YAML), ("t.yaml", YAML)]
)
def test_a_file_is_read_as_prometheus_reads_it(tmp_path, name, text):
    """Both forms; labels with two underscores are for the discovery itself."""
    (tmp_path / name).write_text(text)
    source = files(tmp_path, name)
    assert looked(source) == [["vllm-0:8000", "vllm-1:8000", "vllm-2:443"]]
    first, _, last = source.targets
    assert first.labels == (("namespace", "prod"), ("pod", "x"))
    assert first.config.url == "http://vllm-0:8000/metrics"
    assert (last.config.url, last.labels) == ("https://vllm-2:443/a/metrics", ())


def test_a_number_in_yaml_stays_the_text_that_it_is(tmp_path):
    """A version of 1.10 is not 1.1, and no label is true."""
    (tmp_path / "t.yml").write_text("[{targets: [a:1], labels: {version: 1.10, on: yes}}]")
    source = files(tmp_path, "t.yml")
    looked(source)
    assert source.targets[0].labels == (("on", "yes"), ("version", "1.10"))


def test_files_come_change_and_go(tmp_path):
    """Each by its own content."""
    source = files(tmp_path)
    one, two = tmp_path / "1.json", tmp_path / "2.json"

    async def scenario():
        await source.look()
        seen = [named(source)]
        one.write_text('[{"targets": ["a:1"]}]')
        two.write_text('[{"targets": ["b:1"]}]')
        await source.look()
        seen.append(named(source))
        one.write_text('[{"targets": ["a:1", "c:1"]}]')
        await source.look()
        seen.append(named(source))
        two.unlink()
        await source.look()
        return [*seen, named(source)]

    assert asyncio.run(scenario()) == [[], ["a:1", "b:1"], ["a:1", "c:1", "b:1"], ["a:1", "c:1"]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "[{",
        "{}",
        "null",
        "[1]",
        "[{}]",
        '[{"targets": "a:1"}]',
        '[{"targets": [1]}]',
        '[{"targets": ["a:1"], "labels": {"x": 1}}]',
        '[{"targets": ["a:1"], "labels": []}, {"targets": 1}]',
        '[{"targets": ["a:1"], "label": {}}]',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_broken_file_keeps_what_it_said_last(tmp_path, caplog, text):
    """Whoever writes it may not have finished. It is counted at each look, and logged once."""
    path = tmp_path / "t.json"
    path.write_text('[{"targets": ["a:1"]}]')
    source = files(tmp_path)

    async def scenario():
        await source.look()
        path.write_bytes(text.encode("latin-1"))
        await source.look()
        await source.look()
        seen = named(source), source.failures
        path.write_text('[{"targets": ["b:1"]}]')
        await source.look()
        return seen, named(source)

    assert asyncio.run(scenario()) == ((["a:1"], 2), ["b:1"])
    assert len(warnings(caplog)) == 1
    assert str(path) in warnings(caplog)[0]


@pytest.mark.parametrize("known", ["[]", YAML[: YAML.rindex("- targets")], YAML])
def test_no_cut_of_a_yaml_file_changes_a_target(tmp_path, known):
    """Wherever its writer has come to, what was known stays until two looks find the same."""
    path = tmp_path / "t.yml"
    whole = YAML + "- targets: [127.0.0.1:8000]\n- targets:\n  - 127.0.0.2:8000\n"

    async def scenario():
        path.write_text(known)
        source = files(tmp_path, "t.yml")
        await source.look()
        before = source.targets
        for cut in range(1, len(whole) + 1):
            path.write_text(whole[:cut])
            await source.look()
            assert source.targets == before, whole[:cut]
        await source.look()
        return named(source)

    assert asyncio.run(scenario()) == [
        "vllm-0:8000", "vllm-1:8000", "vllm-2:443", "127.0.0.1:8000", "127.0.0.2:8000",
    ]  # fmt: skip


def test_a_new_yaml_file_that_ends_within_a_line_counts_at_the_second_look(tmp_path):
    """Its last address may be half of one: a token for the whole one must not go there."""
    path = tmp_path / "t.yml"
    path.write_text("- targets:\n  - 127.0.0.1:80")
    source = files(tmp_path, "t.yml", refresh=600.0)
    assert looked(source) == [[]]
    assert source.every == 5.0
    assert looked(source) == [["127.0.0.1:80"]]
    assert source.every == 600.0


def test_an_empty_list_has_no_targets(tmp_path):
    """That is how all of them are taken away."""
    (tmp_path / "t.json").write_text("[]")
    source = files(tmp_path)
    assert looked(source) == [[]]
    assert source.failures == 0


def test_a_file_that_may_not_be_read_is_broken(tmp_path):
    """A folder of that name, for instance."""
    (tmp_path / "t.json").mkdir()
    source = files(tmp_path)
    looked(source)
    assert source.failures == 1


@pytest.mark.parametrize(
    "address",
    [
        "http://a:1",
        "a:b",
        "a:",
        "a:1:2",
        "a/x:1",
        f"user:{HIDDEN}@a:1",
        ":1",
        "",
        "a:0",
        "a:65536",
        "[::1",
        "a b:1",
        "\ud800:1",
    ],
)
def test_an_address_that_makes_no_sense_costs_itself_only(tmp_path, caplog, address):
    """And is not repeated: it may hold a password."""
    (tmp_path / "t.json").write_text(json.dumps([{"targets": [address, "good:1"]}]))
    source = files(tmp_path)
    assert looked(source) == [["good:1"]]
    assert len(warnings(caplog)) == 1
    assert HIDDEN not in caplog.text


def test_labels_that_spoil_the_url_cost_their_targets_only(tmp_path):
    """An unknown scheme."""
    (tmp_path / "t.json").write_text(
        json.dumps([{"targets": ["a:1"], "labels": {"__scheme__": "ftp"}}, {"targets": ["b:1"]}])
    )
    assert looked(files(tmp_path)) == [["b:1"]]


def test_tls_is_for_those_that_are_asked_by_it(tmp_path):
    """A file may name both kinds."""
    (tmp_path / "t.json").write_text(json.dumps(GROUPS))
    source = files(tmp_path, tls=TlsConfig(ca_file="/ca"))
    looked(source)
    assert [target.config.tls.ca_file for target in source.targets] == [None, None, "/ca"]


def test_a_hostile_file_costs_little(tmp_path):
    """Aliases of aliases in YAML would be a billion labels."""
    bomb = "".join(f"- &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9))
    (tmp_path / "t.yml").write_text(f"- &a0 x\n{bomb}")
    source = files(tmp_path, "t.yml")
    assert looked(source) == [[]]
    assert source.failures == 1
