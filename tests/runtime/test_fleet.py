"""Several targets in one process: who is watched, what their series bear, and that none waits for another."""

import asyncio
import gc
import json
import logging
import re
import weakref
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.registry import Collector
from support import bodies, real_recordings
from support.servers import BODY, Server, got, servers, until
from support.servers import silent as silence

from exporter.analysis.pipeline import Pipeline
from exporter.config import (
    AlertmanagerConfig,
    AnalysisConfig,
    Config,
    FileTargetsConfig,
    PollConfig,
    TargetConfig,
    WebConfig,
)
from exporter.publish.metrics.scrape import Scrape
from exporter.publish.metrics.self_metrics import ExporterMetrics, PollCounts
from exporter.publish.metrics.table import EXPORTER_METRICS, METRICS, PREFIX, ReadingCollector
from exporter.runtime.fleet import RESERVED
from exporter.runtime.pace import phase
from exporter.runtime.sidecar import Sidecar

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
FAST = PollConfig(interval=0.1, timeout=1.0)


def config(*urls: str, **more) -> Config:
    """A configuration that serves on any free port and polls fast."""
    given = {"poll": FAST, "web": WebConfig(listen_address="127.0.0.1:0"), **more}
    return replace(Config(), targets=tuple(TargetConfig(url=url) for url in urls), **given)


def of_file(path, **more) -> Config:
    """A configuration whose targets stand in a file that is looked at often."""
    files = FileTargetsConfig(files=(str(path),), refresh=0.05)
    return config(targets_file_sd=(files,), **more)


@asynccontextmanager
async def running(given: Config):
    """A sidecar, and the base URL of its server."""
    sidecar = Sidecar(given)
    base = await sidecar.start()
    try:
        yield sidecar, base
    finally:
        await sidecar.stop()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a text by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read_text(text)
        for sample in family.samples
    }


def of_target(text: str, name: str) -> dict[str, float]:
    """The samples of a target without further labels, by name."""
    return {
        sample.removeprefix(PREFIX): value
        for (sample, labels), value in samples(text).items()
        if labels == (("target", name),)
    }


# What series bear


def test_every_series_of_several_targets_tells_whose_it_is():
    """Host and port; what is of the exporter as a whole has no target."""

    async def scenario():
        async with servers(Server(), Server()) as (one, two), running(config(one.url, two.url)) as (s, base):
            await until(lambda: all(each.reading for each in s.watched), "both polled")
            return await got(base), {one.name, two.name}

    text, names = asyncio.run(scenario())
    of_targets = {row.name for row in METRICS} | {
        row.name
        for row in EXPORTER_METRICS
        if "poll" in row.name or row.name in {"exporter_body_bytes", "exporter_unreadable_lines"}
    }
    seen = set()
    for name, labels in samples(text):
        short = re.sub(r"_(total|info|bucket|sum|count)$", "", name.removeprefix(PREFIX))
        if name.startswith(PREFIX) and short in of_targets:
            assert dict(labels)["target"] in names, name
            seen.add(dict(labels)["target"])
        else:
            assert "target" not in dict(labels), name
    assert seen == names
    assert samples(text)[f"{PREFIX}exporter_targets", (("source", "static"),)] == 2
    assert samples(text)[f"{PREFIX}exporter_targets_left_out", ()] == 0


def test_one_target_has_no_label_and_nothing_of_discovery():
    """As ever."""

    async def scenario():
        async with servers(Server()) as (one,), running(config(one.url)) as (s, base):
            await until(lambda: s.reading, "a poll")
            return await got(base)

    text = asyncio.run(scenario())
    assert "target=" not in text
    assert "exporter_targets" not in text
    assert "discovery" not in text


def test_the_labels_of_a_group_stand_on_its_series(tmp_path):
    """Those of a static target do too; the exporter's own names are left out."""
    path = tmp_path / "t.json"

    async def scenario():
        async with servers(Server(), Server()) as (one, two):
            labels = {"pod": "vllm-0", "verdict": "x", "__meta": "y"}
            path.write_text(json.dumps([{"targets": [one.name], "labels": labels}]))
            given = of_file(path)
            given = replace(given, targets=(TargetConfig(two.url, labels={"zone": "a"}),))
            async with running(given) as (s, base):
                await until(lambda: [w for w in s.watched if w.reading][1:], "both polled")
                return samples(await got(base)), one.name, two.name

    shown, one, two = asyncio.run(scenario())
    assert shown[f"{PREFIX}up", (("pod", "vllm-0"), ("target", one))] == 1
    assert shown[f"{PREFIX}up", (("target", two), ("zone", "a"))] == 1
    engine = (("engine", "0"), ("model_name", "demo-7b"), ("pod", "vllm-0"), ("target", one))
    assert shown[f"{PREFIX}requests_running", engine] == 3
    assert shown[f"{PREFIX}exporter_targets", (("source", "file_sd"),)] == 1


def test_the_labels_that_are_reserved_are_those_of_the_tables():
    """And what histograms and targets have."""
    assert {"target", "le", "model_name", "engine", "verdict", "reason", "source"} <= RESERVED


# The text


def families(collector):
    """The samples of a collector as prometheus-client's families."""
    if not collector.begin():
        return
    for row in collector.rows:
        samples = collector.samples(row)
        if samples is not None:
            family = Metric(PREFIX + row.name, row.help, row.type)
            for ending, labels, name, value, number in samples:
                every = dict(labels.pairs) | ({name: value} if name else {})
                family.add_sample(PREFIX + row.name + ending, every, number)
            yield family


class Merged(Collector):
    """The families of several collectors, those of one name made one, as a reference writes them."""

    def __init__(self, *tables) -> None:
        self.tables = tables

    def collect(self):
        """The families, row by row."""
        for rows, collectors in self.tables:
            merged = {}
            for one in collectors:
                for family in families(one):
                    kept = merged.setdefault(family.name, family)
                    if kept is not family:
                        kept.samples += family.samples
            yield from (merged[PREFIX + row.name] for row in rows if PREFIX + row.name in merged)


def readings():
    """Readings of all kinds: a storm, several engines, a server that is down, a hostile one, none yet."""
    yield real_recordings.replayed(real_recordings.EXHAUSTION)[100]
    yield real_recordings.replayed(real_recordings.TWO_ENGINES)[20]
    yield real_recordings.replayed(real_recordings.RESTART)[-1]
    hostile = 'a\\"} 1\\nx \\\\ключ'
    body = f'vllm:num_requests_running{{engine="0",model_name="{hostile}"}} 12345678.0\n'.encode()
    for given in ((body, None), (None, "timeout")):
        yield Pipeline(AnalysisConfig(), {}, 1.0).feed(0.0, *given)
    yield None


def tables():
    """Collectors of these readings, with labels of several targets."""
    shown, counts = [], []
    for number, reading in enumerate(readings()):
        labels = (("target", f"h:{number}"), ("pod", 'p"\\\n'), ("zzz", "é"), ("a", "1"))
        shown.append(
            ReadingCollector(
                lambda r=reading: r, lambda r=reading: r.t if r else 0, lambda: 1.7e9, labels=labels
            )
        )
        counts.append(PollCounts(labels))
        if reading is not None:
            size = 1_234_567 if reading.up else None
            counts[-1].poll(0.3, size, reading.error, interval=1.0, skipped=3)
    own = ExporterMetrics()
    own.reloaded(1.7e9)
    own.collect_error("up")
    own.targets, own.discovery_failures = {"dns": 2}, {"dns": 1}
    return (METRICS, shown), (EXPORTER_METRICS, [own, *counts])


@pytest.mark.parametrize("accept", [OPENMETRICS, "text/plain;version=0.0.4", "text/plain;version=1.0.0", ""])
def test_the_text_is_what_prometheus_client_would_write(accept):
    """Byte for byte, in every form that it knows."""
    made = tables()
    encode, content_type = choose_encoder(accept)
    empty = CollectorRegistry()
    text, told = asyncio.run(Scrape(lambda: made, empty).text(accept))
    assert text.decode() == encode(Merged(*made)).decode()
    assert told == content_type
    assert len(text) > 20_000


def test_other_tasks_have_their_turn_while_a_scrape_is_made():
    """Many times: a scrape of hundreds of targets takes longer than a poll may wait."""
    (rows, shown), _ = tables()
    many = ((rows, shown * 100),)

    async def scenario():
        turns = 0
        making = asyncio.create_task(Scrape(lambda: many, CollectorRegistry()).text(""))
        while not making.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(scenario()) > 20


def test_those_who_scrape_at_the_same_time_share_the_work():
    """Two Prometheus servers ask in step; who comes later gets a new text."""
    made = 0

    def given():
        nonlocal made
        made += 1
        return tables()

    async def scenario():
        scrape = Scrape(given, CollectorRegistry())
        first = await asyncio.gather(*(scrape.text("") for _ in range(5)))
        await scrape.text("")
        gone = asyncio.create_task(scrape.text(""))
        stays = asyncio.create_task(scrape.text(""))
        await asyncio.sleep(0)
        gone.cancel()
        return first, await stays

    first, stays = asyncio.run(scenario())
    assert len({text for text, _ in first}) == 1
    assert stays == first[0]
    assert made == 3


# Coming and going


def write(path, *given: Server) -> None:
    """Name these servers in a file."""
    path.write_text(json.dumps([{"targets": [one.name for one in given]}]))


def test_targets_come_and_go_without_a_restart(tmp_path, caplog):
    """The series, the connections and the tasks of one that is gone are gone too."""
    path = tmp_path / "t.json"

    def polling() -> int:
        """Return how many tasks poll or ask a target; others come and go with each request."""
        ran = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        return sum(name in {"Watcher.run", "Prober.run", "Watched.stop"} for name in ran)

    async def scenario():
        async with servers(Server(), Server()) as (one, two):
            write(path, one)
            async with running(of_file(path)) as (_, base):
                await until(lambda: one.polls, "the first is polled")
                tasks = polling()
                write(path, one, two)
                await until(lambda: two.polls, "the second is polled")
                assert polling() == 2 * tasks == 4
                assert two.name in await got(base)
                write(path, one)
                await until(lambda: not two.open_connections, "the second is left alone")
                text = await got(base)
                await until(lambda: polling() == tasks, "its tasks have ended")
                assert two.name not in text
                assert one.name in text
                polls = len(two.polls)
                await until(lambda: len(one.polls) > 20, "the first goes on")
                assert len(two.polls) == polls
                return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO, logger="exporter.runtime.fleet"):
        messages = asyncio.run(scenario())
    assert [message.partition(" t")[0] for message in messages if "127" in message].count("target found") == 2
    assert sum("target gone" in message for message in messages) == 1


def test_a_namesake_that_returns_begins_at_zero(tmp_path):
    """It is another server by now, or may be: its counters are its own."""
    path = tmp_path / "t.json"

    async def scenario():
        async with servers(Server()) as (one,):
            write(path, one)
            async with running(of_file(path)) as (s, base):

                def polls():
                    return s.watched[0].counts.polls if s.watched else 0

                await until(lambda: polls() > 5, "some polls")
                one.body = BODY.replace(b"preemptions_total", b"preemptions_total").replace(
                    b"} 2.0", b"} 9.0"
                )
                await until(lambda: polls() > 8, "more polls")
                before = await got(base)
                path.write_text("[]")
                await until(lambda: not s.watched, "it is gone")
                empty = await got(base)
                write(path, one)
                await until(lambda: polls() > 1, "it is back")
                return before, empty, await got(base), one.name

    before, empty, after, name = asyncio.run(scenario())
    key = (("engine", "0"), ("model_name", "demo-7b"), ("target", name))
    assert samples(before)[f"{PREFIX}preemptions_total", key] == 7
    assert name not in empty
    assert samples(after)[f"{PREFIX}preemptions_total", key] == 0
    assert of_target(after, name)["exporter_polls_total"] < of_target(before, name)["exporter_polls_total"]


def test_what_is_gone_is_freed(tmp_path):
    """Memory too: nothing remembers a target that is not watched."""
    path = tmp_path / "t.json"

    async def scenario():
        async with servers(*(Server() for _ in range(5))) as given:
            write(path, *given)
            async with running(of_file(path)) as (s, _):
                await until(lambda: len([w for w in s.watched if w.reading]) == 5, "all polled")
                known = [weakref.ref(part) for w in s.watched for part in (w, w.pipeline, w.timeline)]
                write(path, given[0])
                await until(lambda: len(s.watched) == 1, "four are gone")
                await until(lambda: not s._fleet._ending, "they have ended")
                gc.collect()
                return sum(one() is not None for one in known)

    assert asyncio.run(scenario()) == 3


def test_no_more_targets_than_may_be_are_watched(tmp_path, caplog):
    """It is said once, counted, and those that are watched already stay."""
    path = tmp_path / "t.json"

    def named(*names):
        path.write_text(json.dumps([{"targets": [f"127.0.0.1:{name}" for name in names]}]))

    async def scenario():
        named(7, 8)
        async with running(of_file(path, poll=replace(FAST, max_targets=3))) as (s, base):
            await until(lambda: len(s.watched) == 2, "two")
            named(5, 6, 7, 8, 9)
            await until(lambda: len(s.watched) == 3, "three")
            await asyncio.sleep(0.2)
            return {w.target.name[-1] for w in s.watched}, await got(base)

    names, text = asyncio.run(scenario())
    assert {"7", "8"} < names
    assert f"{PREFIX}exporter_targets_left_out 2.0" in text
    assert sum("too many targets" in message for message in caplog.messages) == 1


def test_two_targets_that_could_not_be_told_apart_are_one(tmp_path, caplog):
    """The same address and labels under two paths: a scrape with both would be refused as a whole."""
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps(
            [
                {"targets": ["127.0.0.1:7", "127.0.0.1:7"]},
                {"targets": ["127.0.0.1:7"], "labels": {"__metrics_path__": "/b"}},
                {"targets": ["127.0.0.1:7"], "labels": {"__metrics_path__": "/b", "pod": "b"}},
            ]
        )
    )

    async def scenario():
        async with running(of_file(path)) as (s, base):
            await until(lambda: len(s.watched) == 2, "two")
            await got(base)
            return [w.target.config.url for w in s.watched]

    assert asyncio.run(scenario()) == ["http://127.0.0.1:7/metrics", "http://127.0.0.1:7/b"]
    assert sum("the same address and labels" in message for message in caplog.messages) == 1


# Time


def test_polls_are_spread_over_the_interval():
    """By the name, so that a restart does not change it: every tenth of a second has its share."""
    phases = [phase(f"10.0.{n // 256}.{n % 256}:8000", 1.0) for n in range(500)]
    shares = [sum(tenth <= 10 * one < tenth + 1 for one in phases) for tenth in range(10)]
    assert min(shares) > 25
    assert max(shares) < 80
    assert phases == [phase(f"10.0.{n // 256}.{n % 256}:8000", 1.0) for n in range(500)]


def test_polls_really_start_at_their_place():
    """Those of two servers are as far apart as their names say, whenever they were found."""

    async def scenario():
        async with servers(*(Server() for _ in range(6))) as given:
            poll = PollConfig(interval=0.5)
            async with running(config(*(one.url for one in given), poll=poll)):
                await until(lambda: all(len(one.polls) > 3 for one in given), "four polls of each")
            return [(one.name, [poll.at for poll in one.polls]) for one in given]

    for name, polls in asyncio.run(scenario()):
        late = [(at - phase(name, 0.5) + 0.01) % 0.5 - 0.01 for at in polls]
        assert min(late) < 0.1  # others may be later, where the machine is busy


def test_so_many_polls_are_under_way_at_once():
    """The others wait for their turn; beside them a quarter as many that did not answer last time."""

    async def scenario():
        async with servers(*(Server(mode=silence) for _ in range(8))) as given:
            poll = PollConfig(interval=0.1, timeout=0.5, concurrency=3)
            async with running(config(*(one.url for one in given), poll=poll)):
                under_way = []

                def again() -> bool:
                    readers = (reader for one in given for reader in one.open_connections.values())
                    under_way.append(sum(not reader.at_eof() for reader in readers))
                    return sum(len(one.polls) for one in given) >= 8

                await until(again, "eight polls")
                return max(under_way)

    assert asyncio.run(scenario()) in {3, 4}


def test_servers_that_are_gone_do_not_hold_up_the_others():
    """They wait at a gate of their own; at a common one a good server would be asked after all of them."""

    async def scenario():
        async with servers(Server(), *(Server(mode=silence) for _ in range(12))) as (good, *silent):
            poll = PollConfig(interval=0.1, timeout=0.5, concurrency=4)
            async with running(config(good.url, *(one.url for one in silent), poll=poll)):
                await until(lambda: all(one.polls for one in silent), "all of them have failed")
                before, asked = len(good.polls), sum(len(one.polls) for one in silent)
                await until(lambda: len(good.polls) >= before + 10, "ten polls of the good one")
                return sum(len(one.polls) for one in silent) - asked

    assert asyncio.run(scenario()) < 40  # at a common gate 120, ten of each


# Alerts, page, state


def test_an_alert_names_its_target_and_the_labels_of_its_group(tmp_path):
    """They override the external labels. An alert of a target that is gone has ended."""
    path = tmp_path / "t.json"
    pushed: list[dict] = []

    class Taker(asyncio.Protocol):
        def __init__(self):
            self.data = b""

        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.data += data
            head, _, body = self.data.partition(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
            if len(body) >= length:
                pushed.extend(json.loads(body[:length]))
                self.data = body[length:]
                self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def scenario():
        taker = await asyncio.get_running_loop().create_server(Taker, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{taker.sockets[0].getsockname()[1]}"
        told = AlertmanagerConfig(urls=(url,), hold=0.0, external_labels={"cluster": "eu", "pod": "exporter"})
        down = [{"targets": ["127.0.0.1:9"], "labels": {"pod": "vllm-0", "namespace": "prod"}}]
        path.write_text(json.dumps(down))
        given = of_file(path, alertmanager=told, analysis=AnalysisConfig(startup_grace=0.0))
        async with running(given):
            await until(lambda: pushed, "an alert")
            raised = len(pushed)
            path.write_text("[]")
            await until(lambda: len(pushed) > raised, "its end")
        taker.close()

    asyncio.run(scenario())
    labels = pushed[0]["labels"]
    place = {name: labels[name] for name in ("cluster", "namespace", "pod", "target")}
    assert place == {"cluster": "eu", "namespace": "prod", "pod": "vllm-0", "target": "127.0.0.1:9"}
    assert pushed[-1]["labels"] == labels
    assert pushed[-1]["endsAt"] <= pushed[0]["endsAt"]


def test_the_page_lists_all_targets_and_shows_the_worst(tmp_path):
    """One that is chosen is shown alone; the charts of the others are not sent."""

    async def scenario():
        async with servers(*(Server() for _ in range(5))) as given:
            urls = [*(one.url for one in given), "http://127.0.0.1:9/metrics"]
            async with running(config(*urls, analysis=AnalysisConfig(startup_grace=0.0))) as (s, base):
                await until(lambda: all(w.reading for w in s.watched), "all polled")
                page = await got(base, "/")
                chosen = await got(base, f"/?target={given[3].name}")
                history = json.loads(await got(base, f"/api/v1/history?target={given[3].name}"))
                unknown = await got(base, "/?target=nobody:1")
            return [one.name for one in given], page, chosen, history, unknown

    names, page, chosen, history, unknown = asyncio.run(scenario())
    assert all(name in page for name in [*names, "127.0.0.1:9"])
    assert page.count('<section class="target"') == 3
    assert page.index("127.0.0.1:9</bdi>") < page.index(names[0])
    assert chosen.count('<section class="target"') == 1
    assert f'aria-label="Target http://{names[3]}/metrics"' in chosen
    assert [bool(one["engines"]) for one in history["targets"]] == [False] * 3 + [True] + [False] * 2
    assert unknown.count('<section class="target"') == 3


def test_the_state_has_all_targets_or_the_one_that_is_asked_for():
    """With their names and labels."""

    async def scenario():
        async with servers(Server(), Server()) as (one, two), running(config(one.url, two.url)) as (s, base):
            await until(lambda: all(w.reading for w in s.watched), "both polled")
            whole = json.loads(await got(base, "/api/v1/status"))
            single = json.loads(await got(base, f"/api/v1/status?target={two.name}"))
            return one.name, two.name, whole, single

    one, two, whole, single = asyncio.run(scenario())
    assert [target["target"] for target in whole["targets"]] == [one, two]
    assert [target["target"] for target in single["targets"]] == [two]
    assert whole["targets"][0]["engines"]["0"]["model"] == "demo-7b"
    assert (whole["targets"][0]["source"], whole["targets"][0]["labels"]) == ("static", {})


def test_without_any_target_it_serves_all_the_same(tmp_path):
    """They may come later."""

    async def scenario():
        async with running(of_file(tmp_path / "none.json")) as (_, base):
            assert "No target is known" in await got(base, "/")
            assert json.loads(await got(base, "/api/v1/status"))["targets"] == []
            assert await got(base, "/-/ready")
            return await got(base)

    text = asyncio.run(scenario())
    assert f'{PREFIX}exporter_targets{{source="file_sd"}} 0.0' in text
    assert f"{PREFIX}up" not in text


def test_a_forecast_asks_for_one_of_several_targets():
    """Which one nobody can guess."""

    async def scenario():
        async with running(config("http://127.0.0.1:9/metrics", "http://127.0.0.1:7/metrics")) as (s, _):
            with pytest.raises(LookupError, match=r"\?target=HOST:PORT, one of 2"):
                s.views.status_of_one()
            return s.views.status_of_one("127.0.0.1:7")["targets"][0]["url"]

    assert asyncio.run(scenario()) == "http://127.0.0.1:7/metrics"


def test_engines_of_hundreds_of_targets_are_remembered_as_one_text(monkeypatch):
    """Pods of one model print the same series, and there is room for those of many."""
    from exporter.vllm import series  # noqa: PLC0415

    monkeypatch.setattr(series, "_KNOWN_LIMIT", series._KNOWN_LIMIT)
    series.expect(1)
    assert series._KNOWN_LIMIT == 20_000
    series.expect(1000)
    assert series._KNOWN_LIMIT == 100_000


def test_bodies_of_many_engines_are_fine_too():
    """Data-parallel engines behind one target among several."""
    body = bodies.body(*(bodies.engine(str(number), kv=0.1, running=1) for number in range(16)))

    async def scenario():
        async with (
            servers(Server(body), Server()) as (one, two),
            running(config(one.url, two.url)) as (s, base),
        ):
            await until(lambda: all(w.reading for w in s.watched), "both polled")
            return of_target(await got(base), one.name)

    assert asyncio.run(scenario())["engines"] == 16
