"""The stand-in server, live: its endpoints, several at once, and its port while it is down."""

import asyncio
import json
import re
import urllib.error
import urllib.request

import pytest
from support.process import PATIENCE, Command, refusing_port, until

from exporter.standin.scenarios import SCENARIOS, Scenario
from exporter.standin.server import FakeServer
from exporter.vllm.exposition import Reader

pytestmark = pytest.mark.usefixtures("own_logging")


def get(url):
    """Status, type and body of an answer."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return answer.status, answer.headers["Content-Type"], answer.read()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two servers in a storm, started by the command; the base URLs, the command still running."""
    folder = tmp_path_factory.mktemp("served")
    arguments = ("--replicas", "2", "--port", "0", "--scenario", "storm", "--model", "some/model")
    with Command(folder, "simulate", "serve", *arguments) as command:

        def addresses():
            urls = re.findall(r"(http\S+)/metrics", command.out)
            return urls if len(urls) == 2 else None

        bases = until(addresses, "two addresses")
        yield bases, command


def test_each_replica_serves_a_page_that_moves(served):
    """Its own: the arrivals differ."""
    bases, _ = served

    def moved(base):
        _, kind, body = get(f"{base}/metrics")
        assert kind.startswith("text/plain; version=")
        (snapshot,) = Reader().read(body).engines.values()
        assert snapshot.key.model == "some/model"
        return snapshot.values["generation_tokens"] > 100 and snapshot.values["requests_running"]

    assert all(until(lambda base=base: moved(base), "tokens") for base in bases)
    first, second = (get(f"{base}/metrics")[2] for base in bases)
    assert first != second


def test_the_other_endpoints_of_vllm(served):
    """Health, version, models with the longest sequence, and the configuration as in development mode."""
    base = served[0][0]
    assert get(f"{base}/health")[::2] == (200, b"")
    assert json.loads(get(f"{base}/version")[2]) == {"version": "0.32.0"}
    (card,) = json.loads(get(f"{base}/v1/models")[2])["data"]
    assert (card["id"], card["max_model_len"]) == ("some/model", 4096)
    config = json.loads(get(f"{base}/server_info?config_format=json")[2])["vllm_config"]
    assert config["scheduler_config"]["max_num_seqs"] == 64
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{base}/nothing")


def quick(story, factor):
    """A scenario that runs `factor` times as fast."""
    acts = tuple(
        type(act)(**{name: getattr(act, name) for name in act.__slots__}
                  | {"seconds": act.seconds / factor, "down": act.down / factor})
        for act in story.acts
    )  # fmt: skip
    return Scenario(story.about, acts, story.verdict, story.finding)


def test_while_it_is_down_connections_are_refused(monkeypatch):
    """Afterwards it listens on the same port again, as a new process."""
    monkeypatch.setitem(SCENARIOS, "restart", quick(SCENARIOS["restart"], 40))

    async def watch(port):
        server = FakeServer("restart", host="127.0.0.1", port=port, version="0.32.0", model="m", seed=1)
        url = await server.start()
        states, starts = [], set()
        try:
            async with asyncio.timeout(PATIENCE):
                while len(starts) < 2:
                    try:
                        _, _, body = await asyncio.to_thread(get, f"{url}/metrics")
                    except OSError:
                        states.append("down")
                    else:
                        states.append("up")
                        starts.add(Reader().read(body).start_time)
                    await asyncio.sleep(0.05)
        finally:
            await server.stop()
        return states

    with refusing_port() as port:
        states = asyncio.run(watch(port))
    assert states[0] == states[-1] == "up"
    assert "down" in states
