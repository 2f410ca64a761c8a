"""Another configuration without a restart: by SIGHUP or POST; what is not changed by it goes on."""

import asyncio
import json
import logging
import re
import signal
import urllib.error
import urllib.request
from dataclasses import fields, replace

import pytest
from support.process import ANYWHERE, FAST, PATIENCE, Command, until
from support.servers import Server, recorded, servers
from support.servers import until as sooner_or_later

from exporter.config import (
    AnalysisConfig,
    Config,
    ConfigError,
    DnsTargetsConfig,
    PollConfig,
    WebConfig,
    WhatIfConfig,
)
from exporter.config import TargetConfig as Target
from exporter.publish.alerts.push import Notifier
from exporter.publish.metrics.self_metrics import ExporterMetrics
from exporter.runtime.discovery import DnsSource, StaticSource
from exporter.runtime.fleet import Fleet
from exporter.runtime.process import Clocks
from exporter.runtime.reload import PATH as RELOAD
from exporter.runtime.sidecar import Sidecar

GOOD = "vllm_pressure_exporter_config_last_reload_successful"
AT = "vllm_pressure_exporter_config_last_reload_success_timestamp_seconds"
HIDDEN = "hunter2-is-not-shown"


@pytest.fixture
def two():
    """Two servers."""
    with Server(recorded()) as one, Server(recorded()) as other:
        yield one, other


def write(path, *upstreams, more: str = "") -> None:
    """A configuration of these servers."""
    listed = ", ".join(f"{{url: '{one.url}'}}" for one in upstreams)
    path.write_text(f"targets: [{listed}]\n{more}")


def post(command, method: str = "POST") -> tuple[int, str]:
    """Ask for a reload; status and text of the answer."""
    request = urllib.request.Request(command.base() + RELOAD, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


# The command


def test_sighup_reloads_and_what_did_not_change_goes_on(tmp_path, two):
    """A target that stays keeps its counters; one that is new is watched, one that is gone is not."""
    one, other = two
    path = tmp_path / "config.yaml"
    write(path, one)
    with Command(tmp_path, "--config.file", str(path), *ANYWHERE, *FAST) as command:
        until(lambda: (command.metric("vllm_pressure_exporter_polls_total") or 0) >= 5, "some polls")
        before = command.metric(AT)
        assert command.metric(GOOD) == 1.0
        write(path, one, other)
        command.send(signal.SIGHUP)
        name = f'{{target="127.0.0.1:{one.port}"}}'
        polls = until(
            lambda: command.metric(f"vllm_pressure_exporter_polls_total{name}"), "the first among others"
        )
        assert polls >= 5
        until(lambda: f'up{{target="127.0.0.1:{other.port}"}} 1.0' in command.get("/metrics"), "the second")
        assert command.metric(AT) > before
        write(path, other)
        command.send(signal.SIGHUP)
        until(lambda: "target=" not in command.get("/metrics"), "one target again")
        until(lambda: command.metric("vllm_pressure_up") == 1.0, "which is up")
        assert command.stop()[0] == 0
    assert command.err.count('msg="configuration reloaded') == 2
    assert re.search(rf'msg="target gone target=127.0.0.1:{one.port} source=static"', command.err)
    assert "Traceback" not in command.err


def test_a_bad_file_keeps_the_old_configuration_and_says_so(tmp_path, two):
    """In the log, in a metric, and in the answer; the next good one is used."""
    one, other = two
    path = tmp_path / "config.yaml"
    write(path, one)
    arguments = ("--config.file", str(path), *ANYWHERE, *FAST, "--web.enable-lifecycle")
    with Command(tmp_path, *arguments) as command:
        until(lambda: command.metric("vllm_pressure_up"), "a poll")
        before = command.metric(AT)
        path.write_text(
            f"targets: [{{url: '{other.url}', bearer_token: [{HIDDEN}]}}]\npoll: {{intervall: 1s}}\n"
        )
        status, text = post(command)
        assert status == 500
        assert "poll.intervall: unknown key (did you mean interval?)" in text
        assert (command.metric(GOOD), command.metric(AT)) == (0.0, before)
        path.unlink()
        assert post(command)[0] == 500
        polls = len(one.polls)
        until(lambda: len(one.polls) > polls + 2, "polls go on")
        assert other.polls == []
        write(path, one, more="poll: {interval: 100ms}\n")
        assert post(command) == (200, "")
        assert command.metric(GOOD) == 1.0
        assert HIDDEN not in command.err + text
        assert command.stop()[0] == 0
    assert command.err.count("invalid configuration, keeping the previous one") == 2


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_reload_by_http_must_be_allowed(tmp_path, two, method):
    """As in Prometheus: 403 without the flag."""
    path = tmp_path / "config.yaml"
    write(path, two[0])
    with Command(tmp_path, "--config.file", str(path), *ANYWHERE, *FAST) as command:
        assert post(command, method) == (
            403, "Lifecycle API is not enabled (--web.enable-lifecycle).\n",
        )  # fmt: skip
        assert command.stop()[0] == 0
    assert "reloaded" not in command.err


def test_a_reload_is_no_get(tmp_path, two):
    """A link that somebody follows changes nothing."""
    arguments = ("--target.url", two[0].url, *ANYWHERE, *FAST, "--web.enable-lifecycle")
    with Command(tmp_path, *arguments) as command:
        assert post(command, "GET")[0] == 405
        assert post(command)[0] == 200
        assert command.stop()[0] == 0


def test_the_listen_address_stays(tmp_path, two):
    """Scrapes go on where they were; the log says that the new one does not count."""
    path = tmp_path / "config.yaml"
    write(path, two[0], more="web: {listen_address: '127.0.0.1:0'}\n")
    with Command(tmp_path, "--config.file", str(path), *FAST) as command:
        base = command.base()
        write(path, two[0], more="web: {listen_address: '127.0.0.1:1'}\n")
        command.send(signal.SIGHUP)
        until(lambda: "configuration reloaded" in command.err, "the reload")
        assert "changes to web options take effect after a restart" in command.err
        assert command.base() == base
        assert command.get("/-/healthy")
        assert command.stop()[0] == 0


def test_many_signals_are_few_reloads(tmp_path, two):
    """None is lost, none is queued for long; the last one counts."""
    path = tmp_path / "config.yaml"
    write(path, two[0])
    with Command(tmp_path, "--config.file", str(path), *ANYWHERE, *FAST) as command:
        command.base()
        for _ in range(20):
            command.send(signal.SIGHUP)
        write(path, *two)
        command.send(signal.SIGHUP)
        until(lambda: "reloaded targets=2" in command.err, "the last reload")
        assert command.stop()[0] == 0


def test_the_log_obeys_a_reload(tmp_path, two):
    """Level and form."""
    path = tmp_path / "config.yaml"
    write(path, two[0])
    with Command(tmp_path, "--config.file", str(path), *ANYWHERE, *FAST) as command:
        command.base()
        write(path, two[0], more="log: {format: json}\n")
        command.send(signal.SIGHUP)
        until(lambda: '"msg": "configuration reloaded' in command.err, "a line of JSON")
        assert command.stop()[0] == 0


def test_targets_in_files_need_no_reload(tmp_path, two):
    """Through the command, with a file beside the configuration that changes."""
    one, other = two
    (tmp_path / "config.yaml").write_text("targets_file_sd: [{files: ['targets/*.yml'], refresh: 1s}]\n")
    (tmp_path / "targets").mkdir()
    listed = tmp_path / "targets" / "vllm.yml"
    listed.write_text(f"- targets: ['127.0.0.1:{one.port}']\n  labels: {{pod: vllm-0}}\n")
    arguments = ("--config.file", str(tmp_path / "config.yaml"), *ANYWHERE, *FAST)
    with Command(tmp_path, *arguments) as command:
        series = f'vllm_pressure_up{{pod="vllm-0",target="127.0.0.1:{one.port}"}}'
        until(lambda: command.metric(series) == 1.0, "the first")
        new = tmp_path / "targets" / "new"
        new.write_text(f"- targets: ['127.0.0.1:{other.port}']\n")
        new.replace(listed)
        until(lambda: command.metric(f'vllm_pressure_up{{target="127.0.0.1:{other.port}"}}'), "the second")
        assert command.metric(series) is None
        listed.write_text("- targets: [")
        until(
            lambda: command.metric('vllm_pressure_exporter_discovery_failures_total{source="file_sd"}'),
            "a failure",
        )
        assert command.metric(f'vllm_pressure_up{{target="127.0.0.1:{other.port}"}}') == 1.0
        assert command.stop()[0] == 0
    assert command.err.count("cannot read targets") == 1


# The sidecar in this process


def config(*urls: str, **more) -> Config:
    """A configuration of these targets."""
    given = {
        "poll": PollConfig(interval=0.1, timeout=1.0), "web": WebConfig(listen_address="127.0.0.1:0"), **more,
    }  # fmt: skip
    return replace(Config(), targets=tuple(Target(url=url) for url in urls), **given)


def reloading(*configs: Config):
    """What reads a configuration anew: these in turn."""
    left = list(configs)

    def load() -> Config:
        given = left.pop(0)
        if isinstance(given, ConfigError):
            raise given
        return given

    return load


def test_a_target_keeps_its_past_as_long_as_nothing_of_it_changes():
    """Another target or threshold does not end it; other labels make it a new one."""

    async def scenario():
        async with servers(Server(), Server()) as (one, two):
            first = config(one.url)
            both = config(one.url, two.url)
            labelled = replace(both, targets=(Target(one.url, labels={"pod": "a"}), both.targets[1]))
            judged = replace(labelled, analysis=AnalysisConfig(window=30.0))
            sidecar = Sidecar(first, reloading(both, both, labelled, judged))
            await sidecar.start()
            try:
                seen = [sidecar.watched]
                for _ in range(4):
                    await sooner_or_later(lambda: all(w.reading for w in sidecar.watched), "polls")
                    assert await sidecar.reloader.reload() == ()
                    seen.append(sidecar.watched)
            finally:
                await sidecar.stop()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return seen

    alone, both, again, labelled, judged = asyncio.run(scenario())
    assert both[0] is alone[0]
    assert again == both
    assert labelled[1] is not both[0]
    assert both[1] in labelled
    assert judged == labelled


def test_a_reload_while_a_name_server_is_slow_ends_no_target():
    """A source that stays the same stays, with the targets that it knows."""
    entry = DnsTargetsConfig(name="vllm", refresh=3600.0)
    looks = []

    def find(given: Config):
        async def resolve(_name, _family):
            looks.append(1)
            return ["127.0.0.1"]

        yield StaticSource(given.targets, frozenset())
        for one in given.targets_dns:
            yield DnsSource(one, frozenset(), resolve)

    async def scenario():
        own = ExporterMetrics()
        given = config("http://127.0.0.1:9/metrics", targets_dns=(entry,))
        notifier = Notifier(given.alertmanager, own.notified, lambda: 0.0)
        clocks = Clocks(asyncio.get_running_loop().time, lambda: 0.0)
        fleet = Fleet(given, own, notifier, clocks, lambda given: tuple(find(given)))
        fleet.start()
        await sooner_or_later(lambda: len(fleet) == 2, "both sources")
        before = list(fleet)
        await fleet.reload(replace(given, poll=replace(given.poll)), notifier)
        assert list(fleet) == before
        assert len(looks) == 1
        other = replace(given, targets_dns=(replace(entry, port=9000), entry))
        await fleet.reload(other, notifier)
        names = sorted(watched.target.name for watched in fleet)
        assert before[1] in list(fleet)
        await fleet.reload(replace(given, targets_dns=()), notifier)
        gone = [watched.target.name for watched in fleet]
        await fleet.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return names, gone

    names, gone = asyncio.run(scenario())
    assert names == ["127.0.0.1:8000", "127.0.0.1:9", "127.0.0.1:9000"]
    assert gone == ["127.0.0.1:9"]


def test_a_fault_in_looking_does_not_end_it(caplog):
    """It is ours, and logged; the next look may be better."""

    class Faulty(StaticSource):
        every = 0.01
        looks = 0

        async def look(self):
            """Fail at first."""
            self.looks += 1
            if self.looks < 3:
                raise RuntimeError("made up")

    async def scenario():
        own = ExporterMetrics()
        given = config("http://127.0.0.1:9/metrics", "http://127.0.0.1:7/metrics")
        notifier = Notifier(given.alertmanager, own.notified, lambda: 0.0)
        source = Faulty(given.targets, frozenset())
        fleet = Fleet(given, own, notifier, Clocks(lambda: 0.0, lambda: 0.0), lambda _: (source,))
        fleet.start()
        await sooner_or_later(lambda: source.looks > 5, "more looks")
        await fleet.stop()

    asyncio.run(scenario())
    assert sum("cannot discover targets" in message for message in caplog.messages) == 2


def test_what_is_wrong_is_returned_and_logged_once_each(caplog):
    """Every problem of the file."""

    async def scenario():
        sidecar = Sidecar(config("http://127.0.0.1:9/metrics"), reloading(ConfigError(["a: bad", "b: bad"])))
        return await sidecar.reloader.reload()

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(scenario()) == ("a: bad", "b: bad")
    assert [record.getMessage() for record in caplog.records] == [
        "invalid configuration, keeping the previous one problems='a: bad; b: bad'"
    ]


def test_without_a_file_there_is_nothing_to_reload():
    """The demo, for instance."""

    async def scenario():
        return await Sidecar(config("http://127.0.0.1:9/metrics")).reloader.reload()

    assert asyncio.run(scenario()) == ("there is nothing to reload",)


def test_a_reload_is_seen_in_the_state(tmp_path):
    """Of several targets the API tells the names."""

    async def scenario():
        given = config("http://127.0.0.1:9/metrics")
        sidecar = Sidecar(
            given, reloading(config("http://127.0.0.1:9/metrics", "http://127.0.0.1:7/metrics"))
        )
        await sidecar.start()
        try:
            await sidecar.reloader.reload()
            return json.loads(await sidecar.views.status())
        finally:
            await sidecar.stop()

    told = asyncio.run(scenario())
    assert [target["target"] for target in told["targets"]] == ["127.0.0.1:9", "127.0.0.1:7"]


def test_every_section_has_a_user():
    """A section that nobody uses at a reload would be reported as reloaded and have no effect."""

    async def scenario():
        users = Sidecar(config("http://127.0.0.1:9/metrics")).reloader.users
        return {section for user in users for section in user.sections}

    assert asyncio.run(scenario()) == {field.name for field in fields(Config)}


def test_forecasts_obey_a_reload():
    """The next forecast has the new limit."""
    before = config("http://127.0.0.1:9/metrics")
    after = replace(before, whatif=WhatIfConfig(seeds=7, time_limit=5.0))

    async def scenario():
        sidecar = Sidecar(before, reloading(after))
        await sidecar.start()
        try:
            assert await sidecar.reloader.reload() == ()
            return sidecar._forecasts.config
        finally:
            await sidecar.stop()

    assert asyncio.run(scenario()) == after.whatif
