"""The fake server, live: endpoints, several at once, gone while it is down; and the exporter on it."""

import asyncio
import json
import re
import signal
import socket
import urllib.error
import urllib.request

import pytest
from support.process import PATIENCE, Command, free_port, until

from exporter import cli
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
            found = re.findall(r"(http\S+)/metrics", command.out)
            return found if len(found) == 2 else None

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


def test_what_else_vllm_answers(served):
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


def test_it_ends_at_once_on_ctrl_c(tmp_path):
    """With status 0 and without a word."""
    with Command(tmp_path, "simulate", "serve", "--port", "0") as command:
        until(lambda: "simulated vLLM 0.32.0, day" in command.out, "the address")
        status, seconds = command.stop(signal.SIGINT)
    assert (status, command.err) == (0, "")
    assert seconds < 2.0


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--replicas", "0"), 2, "--replicas: wanted at least 1, got 0"),
        (("--scenario", "party"), 2, "invalid choice: 'party'"),
        (("--vllm-version", "0.25.0"), 2, "invalid choice: '0.25.0'"),
        (("--port", "TAKEN"), 1, "address already in use"),
    ],
)
def test_what_cannot_be_served_is_told(capsys, arguments, status, told):
    """Bad flags with status 2, a port that is taken with 1 as every other error of the system."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [port if word == "TAKEN" else word for word in arguments]
        assert cli.main(["simulate", "serve", *given]) == status
    assert told in capsys.readouterr().err


def test_the_scenarios_are_listed(capsys):
    """Each with what it shows."""
    assert cli.main(["simulate", "serve", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"| `{name}` | {story.about} |" in out for name, story in SCENARIOS.items())


def quick(story, factor):
    """A story told so many times as fast."""
    acts = tuple(
        type(act)(**{name: getattr(act, name) for name in act.__slots__}
                  | {"seconds": act.seconds / factor, "down": act.down / factor})
        for act in story.acts
    )  # fmt: skip
    return Scenario(story.about, acts, story.verdict, story.finding)


def test_while_it_is_down_connections_are_refused(monkeypatch):
    """Then it listens on the same port again, as a new process."""
    monkeypatch.setitem(SCENARIOS, "restart", quick(SCENARIOS["restart"], 40))

    async def watch():
        server = FakeServer(
            "restart", host="127.0.0.1", port=free_port(), version="0.32.0", model="m", seed=1
        )
        url = await server.start()
        seen, starts = [], set()
        try:
            async with asyncio.timeout(PATIENCE):
                while len(starts) < 2:
                    try:
                        _, _, body = await asyncio.to_thread(get, f"{url}/metrics")
                    except OSError:
                        seen.append("down")
                    else:
                        seen.append("up")
                        starts.add(Reader().read(body).start_time)
                    await asyncio.sleep(0.05)
        finally:
            await server.stop()
        return seen

    seen = asyncio.run(watch())
    assert seen[0] == seen[-1] == "up"
    assert "down" in seen
