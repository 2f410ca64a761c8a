"""``whatif`` from every source, ``check --what-if``, and the forecast of a running exporter."""

import asyncio
import io
import json
import math
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from support import real_recordings
from support.process import Command, until

from exporter import cli
from exporter.commands import whatif
from exporter.commands._progress import progress_bar
from exporter.config import Config, PollConfig, TargetConfig, WebConfig, WhatIfConfig
from exporter.publish.web import forecasts
from exporter.runtime import pace
from exporter.runtime.sidecar import Sidecar
from exporter.standin.server import FakeServer

STORM = real_recordings.RECORDINGS / f"{real_recordings.EXHAUSTION}.jsonl.gz"
WORKLOAD = "tests/simulation/truth/workload.json"
ENGINE = ("--num-gpu-blocks", "200", "--block-size", "32", "--max-num-seqs", "32")
LOOP = ("--clients", "32", "--prompt-tokens", "50-300", "--output-tokens", "400-1000", *ENGINE)
# Enough for a test, and in this process.
QUICK = ("--duration", "30", "--whatif.seeds", "1", "--jobs", "1")

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture
def run(capsys):
    """A function that runs the command; returns its status, output and errors."""

    def command(*arguments):
        status = cli.main(["whatif", *map(str, arguments)])
        return (status, *capsys.readouterr())

    return command


def test_a_recording_is_simulated_and_forecast(run):
    """The present of a real storm first, then every change."""
    status, out, err = run(STORM, *QUICK)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("engine 0: 32 requests at a time, prompts of 17")
    assert any(
        line.startswith("the simulated present matches the server: preemptions per finished request")
        for line in lines
    )
    table = lines[lines.index("") + 1 :]
    assert table[1].endswith("  now")
    pool = next(line for line in table if line.startswith("pool x2"))
    assert pool.endswith("helps")
    assert any(line.startswith("max_num_seqs ") for line in table)
    assert any(line == "assumed: max_num_batched_tokens = 2048 (unknown)" for line in lines)


def test_the_worst_moment_has_half_a_window_of_load_before_it(run, tmp_path):
    """In a recording that starts in a storm the first second is no load."""
    storm = [poll for poll in real_recordings.polls(real_recordings.EXHAUSTION) if 60 <= poll.t < 100]
    path = real_recordings.write_recording(tmp_path / "storm.jsonl.gz", *storm)
    status, out, _ = run(path, *QUICK)
    assert status == 0
    assert int(re.search(r"as seen in (\d+) s;", out)[1]) >= 30


def test_a_recording_that_began_in_the_storm_is_read_over_a_full_window(run, tmp_path):
    """Not over its first seconds, in which only short answers finished."""
    storm = [poll for poll in real_recordings.polls(real_recordings.EXHAUSTION) if 20 <= poll.t < 95]
    path = real_recordings.write_recording(tmp_path / "storm.jsonl.gz", *storm)
    _, out, _ = run(path, *QUICK)
    assert int(re.search(r"as seen in (\d+) s;", out)[1]) >= 30
    assert 640 < int(re.search(r"answers of (\d+)", out)[1]) < 740


def test_a_recording_as_json(run):
    """The table for programs; with a chosen moment and a combination."""
    status, out, _ = run(STORM, *QUICK, "--json", "--at", "90", "--try", "seats=16+pool=x2")
    assert status == 0
    document = json.loads(out)
    assert document["engine"] == "0"
    assert document["calibration"]["trusted"] is True
    assert "seats=16+pool=x2" in [row["change"] for row in document["candidates"]]
    scores = [row["score"] for row in document["candidates"] if not row["stuck"]]
    assert scores == sorted(scores, reverse=True)
    assert set(document["now"]["figures"]) >= {
        "preemptions_per_minute", "preemptions_per_request", "recomputed_ratio", "kv_peak_ratio",
        "queue_seconds", "output_tokens_per_second", "e2e_p50_seconds", "e2e_p95_seconds",
    }  # fmt: skip


def test_a_load_by_flags(run):
    """Without a server nothing checks the simulation, unless --observed gives a number."""
    _, out, _ = run(*LOOP, *QUICK)
    assert "cannot be compared" in out
    _, out, _ = run(*LOOP, *QUICK, "--observed", "5")
    assert "do not trust this forecast: preemptions per minute 5.0, simulated" in out


def test_a_trace(run, tmp_path):
    """At the times in the file, repeatedly."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i / 2},{100 + i},{50 + i}\n" for i in range(40))
    path.write_text("arrival,prompt_tokens,output_tokens\n" + rows)
    status, out, _ = run(path, *QUICK, *ENGINE)
    assert status == 0
    assert out.startswith("2 requests/s, prompts of 120 tokens, answers of 70; 200 blocks of 32")


def test_a_workload_file_with_clients(run):
    """In a closed loop, with the lengths of its requests."""
    status, out, _ = run(WORKLOAD, "--clients", "16", *QUICK, *ENGINE)
    assert status == 0
    assert out.startswith("16 requests at a time, prompts of 233 tokens, answers of 478")


def test_all_cores_give_the_same_answer(run):
    """Runs are spread over processes, and put together in order."""
    few = ("--duration", "20", "--whatif.seeds", "2", "--json")
    one, two = (json.loads(run(*LOOP, *few, "--jobs", jobs)[1]) for jobs in ("1", "2"))
    assert one == two


FAILURES = {
    ("no-such.jsonl",): (1, "no-such.jsonl: no such file or directory"),
    (WORKLOAD, *ENGINE): (1, "no arrival times: pass --rate or --clients"),
    ("--rate", "2"): (1, "missing --num-gpu-blocks"),
    ("--rate", "2", *ENGINE): (1, "missing --prompt-tokens and --output-tokens"),
    # A part that may hold a password is not repeated.
    ("http://me:pw@127.0.0.1:9/x?key=pw",): (
        1,
        "http://127.0.0.1:9/x/api/v1/status: refused; expected a running exporter",
    ),
    (STORM, "--engine", "7"): (1, "one of the engines 0, got 7"),
    (*LOOP, "--try", "wings=2"): (2, "candidate 'wings=2'"),
    (*LOOP, "--jobs", "0"): (2, "--jobs: expected at least 1"),
    (*LOOP, "--duration", "-1"): (2, "--duration: expected seconds above 0"),
    (*LOOP, "--watermark", "2"): (2, "a share from 0 to below 1"),
    ("--rate", "1", "--prompt-tokens", "9-3"): (2, "expected N or LEAST-MOST tokens"),
    (*LOOP, "--whatif.seeds", "0"): (2, "--whatif.seeds: expected a whole number from 1 to 100"),
}


def test_a_failure_has_a_status_and_a_reason(run):
    """In a line or two; 1 is a source that lacks something, 2 bad usage."""
    failures = []
    for words, (expected, reason) in FAILURES.items():
        status, out, err = run(*words)
        if (status, out) != (expected, "") or reason not in err or "Traceback" in err:
            failures.append((words, status, out, err))
    assert not failures


HOSTILE = "\x1b]0;owned\x07\x1b[2J"


def test_no_answer_of_a_foreign_server_reaches_the_terminal(run, monkeypatch):
    """Neither in the forecast nor in an error, and each answer that is no status is one line."""
    status = json.loads((Path(__file__).parent.parent / "fuzz/corpus/status/storm").read_bytes())
    (target,) = status["targets"]
    target["engines"][HOSTILE] = engine = target["engines"].pop("0")
    engine["limits"]["max_num_seqs"] = {"value": 32, "source": HOSTILE}

    def answers(document, *options):
        answer = SimpleNamespace(json=lambda: document, raise_for_status=lambda: None)
        monkeypatch.setattr(whatif.requests, "get", lambda *_arguments, **_options: answer)
        return run("http://127.0.0.1:9", *QUICK, *options)

    status_code, out, err = answers(status)
    assert (status_code, err, "\x1b" in out, r"engine \x1b]0;owned\x07\x1b[2J: 32 req" in out) == (
        0,
        "",
        False,
        True,
    )
    _, _, err = answers(status, "--engine", "zz")
    assert r"one of the engines \x1b]0;owned\x07\x1b[2J, got zz" in err
    for load in ({"steps": "none"}, {"steps": [[1]]}, [], 7, {**engine["load"], "inter_token_seconds": []}):
        code, out, err = answers({"targets": [{"engines": {"0": {**engine, "load": load}}}]})
        assert (code, out, err.count("\n")) == (1, "", 1)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        """It is."""
        return True


def test_a_terminal_gets_a_bar_and_a_pipe_nothing():
    """By tqdm; it is removed at the end."""
    with progress_bar(io.StringIO()) as silence:
        assert silence is None
    stream = Terminal()
    with progress_bar(stream) as progress:
        for done in range(1, 5):
            progress(done, 4)
            time.sleep(0.05)  # tqdm draws ten times a second at the most
    assert "simulating" in stream.getvalue()
    assert "4/4" in stream.getvalue() or "3/4" in stream.getvalue()


def test_without_the_extra_there_is_a_plain_line(monkeypatch):
    """The bar is optional."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    stream = Terminal()
    with progress_bar(stream) as progress:
        progress(3, 9)
    assert "3 of 9 runs" in stream.getvalue()


# A running exporter.


@pytest.fixture(scope="module")
def watched():
    """The base URL of an exporter, in a thread, that has polled a storm for some seconds, and its sidecar."""
    ready, done, running = threading.Event(), threading.Event(), {}

    async def live():
        server = FakeServer("storm", host="127.0.0.1", port=0, version="0.32.0", model="m", seed=1)
        url = await server.start()
        config = Config(
            targets=(TargetConfig(url=f"{url}/metrics"),),
            web=WebConfig(listen_address="127.0.0.1:0"),
            poll=PollConfig(interval=0.25),
            whatif=WhatIfConfig(seeds=1),
        )
        sidecar = Sidecar(config)
        running["base"], running["sidecar"] = await sidecar.start(), sidecar
        try:
            while not done.is_set() and not any(  # noqa: ASYNC110 (no event announces it)
                load.prompt_tokens and load.prompt_tokens.count > 10
                for load in sidecar.watched[0].pipeline.loads().values()
            ):
                await asyncio.sleep(0.1)
            ready.set()
            await asyncio.to_thread(done.wait)
        finally:
            await sidecar.stop()
            await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine every server answers slowly; the slower pace has tests of its own.
        patch.setattr(pace, "MOST_SHARE", math.inf)
        thread.start()
        try:
            assert ready.wait(120), "no request of the storm has finished"
            yield running["base"], running["sidecar"]
        finally:
            done.set()
            thread.join()


async def request(base, *paths):
    """Request several paths at once; returns the status and the object of each response."""

    async def one(session, path):
        async with session.get(base + path) as answer:
            return answer.status, await answer.json()

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(one(session, path) for path in paths))


@pytest.mark.long
def test_the_status_has_what_a_simulation_needs(watched):
    """Of each engine: arrivals, lengths, steps, capacity."""
    ((status, document),) = asyncio.run(request(watched[0], "/api/v1/status"))
    assert status == 200
    load = document["targets"][0]["engines"]["0"]["load"]
    assert load["requests_running_mean"] + load["requests_waiting_mean"] == pytest.approx(48, abs=4)
    assert load["prompt_tokens"]["buckets"][-1][0] is None
    assert 50 < load["prompt_tokens"]["mean"] < 550
    assert load["steps"]
    assert (load["num_gpu_blocks"], load["block_size"]) == (901, 16)


@pytest.mark.long
def test_whatif_reads_a_running_exporter(watched, run):
    """By its base URL or that of the status."""
    for url in (watched[0], f"{watched[0]}/api/v1/status"):
        status, out, err = run(url, *QUICK)
        assert (status, err) == (0, "")
        assert re.match(r"engine 0: 4\d requests at a time", out)
        assert "(unknown)" not in out  # the server exposes its settings


@pytest.mark.long
def test_the_api_forecasts_while_polls_go_on(watched):
    """In a separate process, one at a time: the second of two requests is rejected."""
    base, sidecar = watched
    before = sidecar.reading.t
    answers = asyncio.run(request(base, forecasts.PATH, forecasts.PATH))
    assert sorted(status for status, _ in answers) == [200, 429]
    document = next(body for status, body in answers if status == 200)
    assert document["engine"] == "0"
    assert document["now"]["figures"]["preemptions_per_minute"]["mean"] > 0
    assert document["simulated"]["seeds"] == 1
    assert {"suffices", "does not help"} & {row["verdict"] for row in document["candidates"]}
    assert sidecar.reading.t > before
    refused = next(body for status, body in answers if status == 429)
    assert "another forecast is under way" in refused["error"]


REQUEST = SimpleNamespace(query={}, transport="open")


@pytest.mark.long
def test_an_unknown_engine_is_404(watched):
    """With the names of the known ones."""
    ((status, document),) = asyncio.run(request(watched[0], f"{forecasts.PATH}?engine=9"))
    assert (status, document["error"]) == (404, "wanted one of the engines 0, got 9")


def made_of(document, **limits):
    """The answer to a request, and the forecasts, of an exporter with this status."""
    own = forecasts.Forecasts(lambda: document, WhatIfConfig(**limits), lambda: 7.0)
    return asyncio.run(own.answer(REQUEST)), own


@pytest.mark.long
def test_a_forecast_that_takes_too_long_is_stopped(watched):
    """504 after the time limit; the process is gone."""
    _, sidecar = watched
    answer, own = made_of(sidecar.views.status_of_one(), time_limit=0.05)
    assert answer.status == 504
    assert "whatif.time_limit" in json.loads(answer.body)["error"]
    assert own._process is None


def test_without_data_there_is_no_forecast():
    """Before the first poll, and while nothing has finished."""
    assert made_of({"targets": [{"engines": {}}]})[0].status == 404
    answer, _ = made_of({"targets": [{"engines": {"0": {"load": None}}}]})
    assert answer.status == 409
    assert "has not seen it at work yet" in json.loads(answer.body)["error"]


def test_a_forecast_that_fails_is_logged(caplog):
    """500, with the end of the process's errors in the log."""
    answer, _ = made_of({"targets": [{"engines": {"0": {"load": {"steps": "none"}}}}]})
    assert answer.status == 500
    assert "forecast failed" in caplog.text
    assert "ValueError" in caplog.text


def test_the_last_forecast_is_shown_with_its_age_and_given_to_whom_it_concerns(monkeypatch):
    """No second process starts for it."""
    times, runs, told = iter([0.0, 10.0, 40.0, 40.0]), [], []

    async def simulated(self, question):
        runs.append(json.loads(question))
        return {"engine": "0", "candidates": []}

    monkeypatch.setattr(forecasts.Forecasts, "_run", simulated)
    own = forecasts.Forecasts(
        lambda: {"targets": [{"engines": {"0": {"load": {}, "limits": {}, "fixes": []}}}]},
        WhatIfConfig(),
        lambda: next(times),
    )
    own.made = lambda *what: told.append(what[:2])
    answers = [asyncio.run(own.answer(REQUEST)) for _ in range(2)]
    ages = [json.loads(answer.body)["age_seconds"] for answer in answers]
    assert ages == [0.0, 30.0]
    assert len(runs) == 1
    assert told == [("", "0")]


def test_the_process_leaves_the_working_directory_alone(tmp_path, monkeypatch):
    """A file of the name of a module there is not run."""
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert made_of({"targets": [{"engines": {"0": {"load": None}}}]})[0].status == 409


@pytest.mark.long
def test_check_simulates_each_fix(tmp_path):
    """After its report, with the same status; as JSON too."""
    with Command(tmp_path, "simulate", "serve", "--port", "0", "--scenario", "storm") as server:
        url = until(lambda: re.search(r"(http\S+/metrics)", server.out), "the address")[1]
        folder = tmp_path / "check"
        folder.mkdir()
        words = ("check", url, "--for", "3s", "--poll.interval", "250ms", "--whatif.seeds", "1")
        with Command(folder, *words, "--what-if", "--json") as check:
            assert check.end() in (0, 1, 2)
    document = json.loads(check.out)
    assert document["what_if"]["engine"] == "0"
    assert document["what_if"]["candidates"] or document["what_if"]["error"]


def test_check_without_a_load_has_no_forecast(capsys):
    """But its report."""
    status = cli.main(
        ["check", "http://127.0.0.1:9/metrics", "--for", "300ms", "--poll.interval", "0.2", "--what-if"]
    )
    assert status == 3
    assert "no engine is known" in capsys.readouterr().out
