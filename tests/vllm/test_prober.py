"""A server is asked for its configuration once per start."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web
from support.server_answers import HIDDEN, INFO_FACTS, MODELS, PATHS, VERSION, WHOLE

from exporter.config import PollConfig, Secret, TargetConfig
from exporter.vllm.answers import ServerAnswers, from_header
from exporter.vllm.client import JsonAnswer, MetricsClient
from exporter.vllm.prober import AGAIN_AFTER_POLLS, TRIES, Prober, base_of, header_of


class Asked:
    """Stands for a client: answers by path, notes what was asked."""

    def __init__(self, answers=WHOLE, default="http_404"):
        """Takes JSON or, as texts, errors by path; the default is the error of all other paths."""
        self.answers = dict(answers)
        self.default = default
        self.paths = []
        self.closed = False
        self.on_ask = self.paths.count

    async def get_json(self, path):
        """Answers at once."""
        self.paths.append(path)
        self.on_ask(path)
        answer = self.answers.get(path, self.default)
        return JsonAnswer(None, answer) if isinstance(answer, str) else JsonAnswer(answer, None)

    async def close(self):
        """Is noted."""
        self.closed = True


@asynccontextmanager
async def server(answers, *, seen):
    """Serves JSON by path on a free port; `seen` gets every request's path, query and authorization."""

    async def answer(request):
        seen.append((request.path_qs, request.headers.get("Authorization")))
        if request.path_qs not in answers:
            raise web.HTTPNotFound
        return web.json_response(answers[request.path_qs])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def running(prober):
    """Runs a prober's task while the block runs."""
    task = asyncio.create_task(prober.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await prober.close()


async def until(condition):
    """Waits for what a real server's answer brings."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


async def settled():
    """Lets everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


# Recordings


def test_a_recording_asks_for_what_is_quickly_answered():
    """Version and models; an old server that has neither is no trouble."""
    asked = Asked({"version": VERSION, "v1/models": MODELS})
    assert asyncio.run(header_of(asked, Asked({}))) == {
        "/version": VERSION, "/v1/models": {"max_model_len": 4096},
    }  # fmt: skip
    assert asked.paths == ["version", "v1/models"]
    assert asyncio.run(header_of(Asked({}), Asked({}))) == {}


def test_a_recording_keeps_the_configuration_and_no_key():
    """Of ``/server_info``, which prints the environment too, only the facts."""
    info = {
        "vllm_config": {
            "scheduler_config": {"max_num_seqs": 48, "api_key": "sk-hidden"},
            "model_config": {"model": "acme/secret-model"},
        },
        "vllm_env": {"VLLM_API_KEY": "sk-hidden"},
    }
    patient = Asked({"server_info?config_format=json": info})
    header = asyncio.run(header_of(Asked({"version": VERSION}), patient))
    kept = json.dumps(header)
    assert "max_num_seqs" in kept
    assert "48" in kept
    assert not {word for word in ("sk-hidden", "secret", "key", "env") if word in kept}


def test_a_recording_does_not_wait_for_a_server_that_is_not_there():
    """One question shows it."""
    asked = Asked({}, default="timeout")
    patient = Asked({}, default="timeout")
    assert asyncio.run(header_of(asked, patient)) == {}
    assert asked.paths == ["version"]
    assert patient.paths == []


# Asking


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h/metrics", "/"),
        ("http://h:8000/metrics/", "/"),
        ("http://h", "/"),
        ("http://h/a/b/metrics", "/a/b/"),
        ("http://h/a/metrics?x=/y/z", "/a/"),
        ("http://h//other/metrics", "/other/"),
    ],
)
def test_the_endpoints_lie_beside_the_metrics(url, base):
    """Under a proxy's prefix too, and never on another host."""
    assert base_of(url) == base


def test_a_real_server_is_asked_once_per_start():
    """Polls without number, and then a restart with other flags; under a prefix, with the token."""

    async def scenario():
        seen = []
        answers = {"/a" + path: value for path, value in WHOLE.items()}
        async with server(answers, seen=seen) as port:
            url = f"http://127.0.0.1:{port}/a/metrics"
            prober = Prober.for_target(TargetConfig(url, bearer_token=Secret("t0ken")), PollConfig())
            assert prober.answers == ServerAnswers()
            async with running(prober):
                for _ in range(5):
                    prober.note_good_poll(0)
                    await until(lambda: prober.answers == from_header(WHOLE))
                for _ in range(3 * AGAIN_AFTER_POLLS):
                    prober.note_good_poll(0)
                    await asyncio.sleep(0)
                assert seen == [("/a" + path, "Bearer t0ken") for path in PATHS]
                answers["/a/v1/models"] = {"max_model_len": 5}
                prober.note_good_poll(1)
                assert prober.answers == ServerAnswers()
                await until(lambda: prober.answers.server_info)
                assert prober.answers.models == {"max_model_len": 5}
            assert len(seen) == 6

    asyncio.run(scenario())


def test_a_server_without_the_endpoints_is_left_alone():
    """What is refused once is refused until the next start."""

    async def scenario():
        asked = Asked({})
        prober = Prober(asked)
        async with running(prober):
            for _ in range(3 * AGAIN_AFTER_POLLS):
                prober.note_good_poll(0)
                await settled()
        assert asked.paths == PATHS
        assert asked.closed

    asyncio.run(scenario())


def test_what_was_cut_off_is_asked_again_after_a_while():
    """That endpoint alone; the others were answered."""

    async def scenario():
        asked = Asked({**WHOLE, "/v1/models": "timeout"})
        prober = Prober(asked)
        async with running(prober):
            prober.note_good_poll(0)
            await settled()
            assert prober.answers == ServerAnswers(INFO_FACTS, {}, "0.32.0")
            asked.answers["/v1/models"] = MODELS
            for _ in range(AGAIN_AFTER_POLLS):
                assert asked.paths == PATHS
                prober.note_good_poll(0)
                await settled()
            assert asked.paths == [*PATHS, "/v1/models"]
            assert prober.answers == from_header(WHOLE)

    asyncio.run(scenario())


def test_a_server_that_never_answers_is_given_up():
    """Until its next start."""

    async def scenario():
        asked = Asked({}, default="timeout")
        prober = Prober(asked)
        async with running(prober):
            for start in (0, 1):
                for _ in range(2 * TRIES * AGAIN_AFTER_POLLS):
                    prober.note_good_poll(start)
                    await settled()
                assert len(asked.paths) == (start + 1) * TRIES * len(PATHS)

    asyncio.run(scenario())


def test_the_answer_of_the_server_before_is_not_kept():
    """It restarted while it was asked: its flags may be others now, and it is asked again."""

    async def scenario():
        asked = Asked()
        prober = Prober(asked)

        def restart(path):
            if path == "/v1/models" and asked.paths.count(path) == 1:
                asked.answers["/version"] = {"version": "0.33.0"}
                prober.note_good_poll(1)

        asked.on_ask = restart
        async with running(prober):
            prober.note_good_poll(0)
            await settled()
        assert asked.paths == ["/version", "/v1/models", *PATHS]
        assert prober.answers.version == "0.33.0"

    asyncio.run(scenario())


def test_a_slow_answer_holds_nothing_up():
    """What is known is there already, and polls go on."""

    async def scenario():
        release = asyncio.Event()

        class Slow(Asked):
            async def get_json(self, path):
                if path.startswith("/server_info"):
                    await release.wait()
                return await super().get_json(path)

        prober = Prober(Slow())
        async with running(prober):
            prober.note_good_poll(0)
            await settled()
            prober.note_good_poll(0)
            assert prober.answers == ServerAnswers({}, {"max_model_len": 4096}, "0.32.0")
            release.set()
            await settled()
            assert prober.answers == from_header(WHOLE)

    asyncio.run(scenario())


def test_refresh_without_a_start_asks_nothing():
    """Nobody has seen the server yet."""
    asked = Asked()
    prober = Prober(asked)
    asyncio.run(prober.refresh())
    assert (prober.answers, asked.paths) == (ServerAnswers(), [])


def test_the_client_of_a_prober_is_patient():
    """The first answer may take seconds, longer than a poll may."""
    client = Prober.for_target(TargetConfig(), PollConfig(timeout=1.0))._client
    assert isinstance(client, MetricsClient)
    assert client._timeout == 30.0


def test_no_key_of_the_server_is_kept_or_logged(caplog):
    """Neither in what is known, nor in how it prints, nor in the log; the names of facts are."""

    async def scenario():
        prober = Prober(Asked())
        async with running(prober):
            prober.note_good_poll(0)
            await settled()
        return prober

    with caplog.at_level(logging.DEBUG):
        prober = asyncio.run(scenario())
    assert "max_num_seqs" in caplog.text
    assert "version=0.32.0" in caplog.text
    for text in (caplog.text, repr(prober.answers), repr(vars(prober))):
        assert HIDDEN not in text
