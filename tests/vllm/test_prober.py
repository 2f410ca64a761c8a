"""What a server tells beside its metrics is asked for once per start, and only the facts are kept."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import PollConfig, Secret, TargetConfig, parse_facts
from exporter.vllm.client import JsonAnswer, MetricsClient
from exporter.vllm.prober import (
    AGAIN_AFTER_POLLS,
    TRIES,
    Probed,
    Prober,
    ask,
    base_of,
    from_header,
    probe,
    read_models,
    read_server_info,
    read_version,
    to_header,
)

HIDDEN = "sk-s3cr3t"
VERSION = {"version": "0.32.0"}
CARD = {"id": "demo", "object": "model", "root": "/models/demo", "parent": None, "max_model_len": 4096}
ADAPTER = {"id": "sql", "object": "model", "root": "/loras/sql", "parent": "demo"}
MODELS = {"object": "list", "data": [CARD, ADAPTER]}
SERVER_INFO = {
    "vllm_config": {
        "model_config": {"model": "demo", "max_model_len": 4096, "hf_token": HIDDEN},
        "cache_config": {
            "block_size": 16,
            "gpu_memory_utilization": 0.92,
            "cache_dtype": "fp8",
            "num_gpu_blocks": 3000,
            "num_gpu_blocks_override": None,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": None,
            "kv_offloading_size": None,
        },
        "scheduler_config": {
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 256,
            "enable_chunked_prefill": True,
            "policy": "fcfs",
            "long_prefill_token_threshold": 0,
            "scheduler_reserve_full_isl": True,
            "watermark": 0.0,
            "async_scheduling": True,
            "max_num_active_seqs": None,
        },
        "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 4},
        "kv_transfer_config": {"kv_role": "kv_consumer", "kv_connector_extra_config": {"key": HIDDEN}},
        "speculative_config": {"num_speculative_tokens": 3, "model": HIDDEN},
        "lora_config": None,
    },
    "vllm_env": {"VLLM_API_KEY": HIDDEN, "max_num_seqs": 7},
    "system_env": {"HF_TOKEN": HIDDEN},
}
INFO_FACTS = {
    "max_model_len": 4096,
    "block_size": 16,
    "gpu_memory_utilization": 0.92,
    "kv_cache_dtype": "fp8",
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "enable_chunked_prefill": True,
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "async_scheduling": True,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 4,
    "role": "decode",
    "num_speculative_tokens": 3,
}
WHOLE = {
    "/version": VERSION,
    "/v1/models": MODELS,
    "/server_info?config_format=json": SERVER_INFO,
}
PATHS = list(WHOLE)


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
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


async def settled():
    """Lets everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


# Reading answers


def test_server_info_tells_the_facts():
    """And nothing else of it is kept: it holds the environment with its keys."""
    assert read_server_info(SERVER_INFO) == INFO_FACTS


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "vllm_config",
        {},
        {"vllm_config": "model='demo', max_seq_len=4096"},
        {"vllm_config": {"cache_config": "block_size=16", "scheduler_config": [], "model_config": None}},
        {"vllm_config": {"scheduler_config": {"max_num_seqs": True, "watermark": 7, "policy": {"a": 1}}}},
        {"vllm_config": {"cache_config": {"cache_dtype": HIDDEN, "block_size": -1}}},
        {"scheduler_config": {"max_num_seqs": 8}},
    ],
)
def test_a_server_info_of_another_shape_tells_nothing(value):
    """As a text, half of it, or with values that make no sense."""
    assert read_server_info(value) == {}


@pytest.mark.parametrize(
    ("value", "longest"),
    [
        (MODELS, 4096),
        ({"data": [ADAPTER, CARD]}, 4096),
        ({"data": [CARD, {**CARD, "id": "alias"}]}, 4096),
        ({"max_model_len": 131072}, 131072),
        ({"data": [{**ADAPTER, "max_model_len": 64}, CARD]}, 4096),
        ({"data": [CARD, {**CARD, "max_model_len": 8192}]}, None),
        ({"data": [{**CARD, "max_model_len": None}]}, None),
        ({"data": [{**CARD, "max_model_len": -1}, 3, None, []]}, None),
        ({"data": [ADAPTER]}, None),
        ({"data": {"max_model_len": 5}}, None),
        ({"data": None}, None),
        ([CARD], None),
        (404, None),
    ],
)
def test_models_tell_the_longest_request(value, longest):
    """Adapters do not count, and of two models that differ nothing is known."""
    assert read_models(value) == ({} if longest is None else {"max_model_len": longest})


@pytest.mark.parametrize(
    ("value", "version"),
    [
        (VERSION, "0.32.0"),
        ({"version": "0.11.1rc2.dev41+g1234abc.d20251129"}, "0.11.1rc2.dev41+g1234abc.d20251129"),
        ("0.26.0", "0.26.0"),
        ({"version": "main"}, None),
        ({"version": HIDDEN}, None),
        ({"version": "0.26.0\n"}, None),
        ({"version": 26}, None),
        ({"version": "0." + "1" * 99}, None),
        ({}, None),
        (200, None),
    ],
)
def test_a_version_is_a_release_or_a_build_of_one(value, version):
    """Anything else is unknown."""
    assert read_version(value) == version


# Recordings


def test_a_header_holds_answers_or_short_forms_of_them():
    """As the server gave them, or as they were kept; a status in place of one tells nothing."""
    assert from_header(WHOLE) == Probed(INFO_FACTS, {"max_model_len": 4096}, "0.32.0")
    short = {"/health": 200, "/version": {"version": "0.19.0"}, "/v1/models": {"max_model_len": 90000}}
    assert from_header(short) == Probed({}, {"max_model_len": 90000}, "0.19.0")
    assert from_header({"/version": 404, "/v1/models": 401, "/server_info": 404}) == Probed()
    assert from_header({}) == Probed()


def test_a_header_gives_back_what_was_put_into_it():
    """And holds nothing else."""
    probed = from_header(WHOLE)
    header = to_header(probed)
    assert from_header(json.loads(json.dumps(header))) == probed
    assert HIDDEN not in json.dumps(header)
    assert to_header(Probed()) == {}


def test_a_recording_asks_for_what_is_quickly_answered():
    """Version and models; an old server that has neither is no trouble."""
    asked = Asked({"version": VERSION, "v1/models": MODELS})
    assert asyncio.run(ask(asked)) == {"/version": VERSION, "/v1/models": {"max_model_len": 4096}}
    assert asked.paths == ["version", "v1/models"]
    assert asyncio.run(ask(Asked({}))) == {}


def test_a_recording_does_not_wait_for_a_server_that_is_not_there():
    """One question shows it."""
    asked = Asked({}, default="timeout")
    assert asyncio.run(ask(asked)) == {}
    assert asked.paths == ["version"]


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


def test_a_server_is_asked_for_all_it_can_tell():
    """Three questions."""
    asked = Asked()
    assert asyncio.run(probe(asked)) == from_header(WHOLE)
    assert asked.paths == PATHS


@pytest.mark.parametrize("error", ["http_401", "http_404", "http_503", "timeout", "protocol"])
def test_errors_are_normal(error):
    """They mean that nothing is known from there."""
    assert asyncio.run(probe(Asked({"/version": VERSION}, default=error))) == Probed({}, {}, "0.32.0")


def test_a_real_server_is_asked_once_per_start():
    """Polls without number, and then a restart with other flags; under a prefix, with the token."""

    async def scenario():
        seen = []
        answers = {"/a" + path: value for path, value in WHOLE.items()}
        async with server(answers, seen=seen) as port:
            url = f"http://127.0.0.1:{port}/a/metrics"
            prober = Prober.of(TargetConfig(url, bearer_token=Secret("t0ken")), PollConfig())
            assert prober.probed == Probed()
            async with running(prober):
                for _ in range(5):
                    prober.seen(0)
                    await until(lambda: prober.probed == from_header(WHOLE))
                for _ in range(3 * AGAIN_AFTER_POLLS):
                    prober.seen(0)
                    await asyncio.sleep(0)
                assert seen == [("/a" + path, "Bearer t0ken") for path in PATHS]
                answers["/a/v1/models"] = {"max_model_len": 5}
                prober.seen(1)
                assert prober.probed == Probed()
                await until(lambda: prober.probed.server_info)
                assert prober.probed.models == {"max_model_len": 5}
            assert len(seen) == 6

    asyncio.run(scenario())


def test_a_server_without_the_endpoints_is_left_alone():
    """What is refused once is refused until the next start."""

    async def scenario():
        asked = Asked({})
        prober = Prober(asked)
        async with running(prober):
            for _ in range(3 * AGAIN_AFTER_POLLS):
                prober.seen(0)
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
            prober.seen(0)
            await settled()
            assert prober.probed == Probed(INFO_FACTS, {}, "0.32.0")
            asked.answers["/v1/models"] = MODELS
            for _ in range(AGAIN_AFTER_POLLS):
                assert asked.paths == PATHS
                prober.seen(0)
                await settled()
            assert asked.paths == [*PATHS, "/v1/models"]
            assert prober.probed == from_header(WHOLE)

    asyncio.run(scenario())


def test_a_server_that_never_answers_is_given_up():
    """Until its next start."""

    async def scenario():
        asked = Asked({}, default="timeout")
        prober = Prober(asked)
        async with running(prober):
            for start in (0, 1):
                for _ in range(2 * TRIES * AGAIN_AFTER_POLLS):
                    prober.seen(start)
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
                prober.seen(1)

        asked.on_ask = restart
        async with running(prober):
            prober.seen(0)
            await settled()
        assert asked.paths == ["/version", "/v1/models", *PATHS]
        assert prober.probed.version == "0.33.0"

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
            prober.seen(0)
            await settled()
            prober.seen(0)
            assert prober.probed == Probed({}, {"max_model_len": 4096}, "0.32.0")
            release.set()
            await settled()
            assert prober.probed == from_header(WHOLE)

    asyncio.run(scenario())


def test_refresh_without_a_start_asks_nothing():
    """Nobody has seen the server yet."""
    asked = Asked()
    assert asyncio.run(Prober(asked).refresh()) == Probed()
    assert asked.paths == []


def test_the_client_of_a_prober_is_patient():
    """The first answer may take seconds, longer than a poll may."""
    client = Prober.of(TargetConfig(), PollConfig(timeout=1.0))._client
    assert isinstance(client, MetricsClient)
    assert client._timeout == 30.0


def test_no_key_of_the_server_is_kept_or_logged(caplog):
    """Neither in what is known, nor in how it prints, nor in the log; the names of facts are."""

    async def scenario():
        prober = Prober(Asked())
        async with running(prober):
            prober.seen(0)
            await settled()
        return prober

    with caplog.at_level(logging.DEBUG):
        prober = asyncio.run(scenario())
    assert "max_num_seqs" in caplog.text
    assert "version=0.32.0" in caplog.text
    for text in (caplog.text, repr(prober.probed), repr(vars(prober))):
        assert HIDDEN not in text


# Whatever the answer

NAMES = st.sampled_from(
    [
        *("vllm_config", "cache_config", "scheduler_config", "model_config", "kv_transfer_config", "kv_role"),
        *("max_model_len", "max_num_seqs", "cache_dtype", "policy", "data", "parent", "version", "watermark"),
    ]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["fp8", "0.1.2"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
CONFIG = st.dictionaries(NAMES, st.dictionaries(NAMES, SCALARS, max_size=8), max_size=5)


@given(JSON | st.fixed_dictionaries({"vllm_config": CONFIG}))
def test_any_answer_is_read_without_an_error(value):
    """And what is read is within the ranges of the configuration."""
    for told in (read_server_info(value), read_models(value)):
        assert parse_facts(told, strict=True) == (told, [])
    version = read_version(value)
    assert version is None or len(version) < 80
    probed = from_header({"/server_info": value, "/v1/models": value, "/version": value})
    assert from_header(to_header(probed)) == probed


@given(st.dictionaries(st.sampled_from([*PATHS, "/server_info"]) | st.text(), JSON, max_size=4))
def test_any_header_is_read_without_an_error(probes):
    """A recording may come from anybody."""
    assert isinstance(from_header(probes), Probed)
