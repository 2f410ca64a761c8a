"""``check``: its report, its JSON, and its exit status for monitoring."""

import json
import re
from dataclasses import replace

import pytest
from support.real_recordings import EXHAUSTION, polls, replayed
from support.servers import Server

from exporter.analysis import catalogue
from exporter.analysis.catalogue import Severity
from exporter.analysis.fixes import Advice, FixAdvice
from exporter.analysis.relief import paid
from exporter.commands import check
from exporter.config import AnalysisConfig
from exporter.publish.terminal import coloured, headline, plain, report
from exporter.runtime import process

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture(scope="module")
def storm():
    """The reading in the middle of a storm."""
    return next(
        reading
        for t, reading in zip((p.t for p in polls(EXHAUSTION)), replayed(EXHAUSTION), strict=True)
        if t > 60
    )


def test_a_calm_server_is_exit_status_0(run):
    """An idle engine is healthy."""
    body = polls("0.26.0-calm")[0].body
    with Server(body) as upstream:
        status, out, _ = run("check", upstream.url, "--for", "1s", "--poll.interval", "0.2")
    assert status == 0
    assert "engine 0: healthy (none)" in out
    assert out.rstrip().endswith("--disable-access-log-for-endpoints /metrics")


def test_a_server_that_refuses_is_exit_status_3(run):
    """Unknown, not healthy."""
    status, out, _ = run("check", "http://127.0.0.1:9/metrics", "--for", "0.5s", "--poll.interval", "0.2")
    assert status == 3
    assert "connection_refused" in out


def test_a_server_without_statistics_is_exit_status_3(run):
    """Without the metrics its state is unknown."""
    with Server(b"# TYPE python_info gauge\npython_info 1.0\n") as upstream:
        status, out, _ = run("check", upstream.url, "--for", "0.5s", "--poll.interval", "0.2")
    assert status == 3
    assert "metrics missing" in out
    assert "--disable-log-stats" in out


def test_a_headline_names_the_engine_s_verdict_where_the_target_is_reachable(storm):
    """Also where both are of no severity."""
    calm = replayed("0.26.0-calm")[-1]
    assert headline(calm) == "healthy (none)"
    assert headline(storm) == "preemption thrash (critical)"
    assert headline(replace(calm, engines={})) == "reachable (none)"


def test_json_is_one_object(run):
    """The same as in the API, with the exit status."""
    body = polls("0.26.0-calm")[0].body
    with Server(body) as upstream:
        status, out, _ = run("check", upstream.url, "--for", "0.5s", "--json", "--poll.interval", "0.2")
    document = json.loads(out)
    assert status == document["exit_status"] == 0
    assert document["engines"]["0"]["verdict"] == "healthy"


def test_a_storm_is_reported_with_evidence_and_ranked_flags(storm):
    """What is wrong, why, what to change and what will not help."""
    text = "\n".join(report(storm))
    assert "preemption thrash (critical)" in text
    assert re.search(
        r"^  Preemptions per finished request lately: [0-9.]+ \(threshold 0\.80, ends below 0\.40\)$",
        text,
        re.MULTILINE,
    )
    assert re.search(r"Computed from KV cache capacity 6400, KV demand / capacity [0-9.]+, ", text)
    assert "1. Keep some blocks free when admitting   --watermark 0.05" in text
    assert "Ordered by cost, without gains" in text
    assert "What will not help" in text
    assert "Compute fewer tokens per step" in text
    assert check.exit_status(storm) == 2


def test_a_fix_without_a_flag_shows_its_title_alone(storm):
    """No dash in the place of the flag; a flag without its number has a placeholder."""
    engine = next(iter(storm.engines.values()))
    fixes = catalogue.load().fixes
    advice = Advice(tuple(FixAdvice(name, flag=fix.flag_with(None)) for name, fix in fixes.items()))
    lines = list(report(replace(storm, engines={engine.key: replace(engine, advice=advice)})))
    expected = [
        f"  {rank}. {fix.title}"
        + (f"   {advised.flag}" if advised.flag else "")
        + (f"  ({paid(fix)})" if rank > 3 else "")
        for rank, (fix, advised) in enumerate(zip(fixes.values(), advice.fixes, strict=True), start=1)
    ]
    assert [line for line in expected if line not in lines] == []
    assert [line for line in lines if line.endswith("-")] == []


def test_colour_is_only_an_addition(storm):
    """The coloured report says the same."""
    painted = "\n".join(report(storm, coloured))
    assert "\x1b[1;31m" in painted
    bare = painted
    for severity in Severity:
        bare = bare.replace(coloured("", severity)[: -len("\x1b[0m")], "")
    assert bare.replace("\x1b[0m", "") == "\n".join(report(storm, plain))


def test_windows_shrink_to_the_time_of_the_check():
    """In 12 s nothing can last for a minute; long checks keep the usual windows."""
    usual = AnalysisConfig()
    short = check.shrink_windows(usual, 12)
    assert short.stall_after == short.deadlock_after == short.queue_window == 9
    assert check.shrink_windows(usual, 300).stall_after == usual.stall_after


def test_control_characters_of_the_server_are_inert(storm):
    """A model's name cannot move the cursor."""
    key, engine = next(iter(storm.engines.items()))
    hostile = replace(engine, key=key._replace(model="\x1b[2Jm"))
    assert "\x1b" not in "\n".join(report(replace(storm, engines={hostile.key: hostile})))


def test_the_loop_ends_with_its_work():
    """Even while threads still look up names."""

    async def work():
        return 7

    assert process.run(work()) == 7
