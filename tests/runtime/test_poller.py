"""Nothing ends the loop that polls, and its log says what changed."""

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support import bodies

from exporter.analysis.pipeline import Pipeline
from exporter.config import AnalysisConfig
from exporter.runtime.pace import SLOWEST_SECONDS, Pace
from exporter.runtime.poller import Watcher
from exporter.vllm.client import Answer

BODY = bodies.body(bodies.engine(running=3, waiting=0, kv=0.4, preemptions=0))


class World:
    """A clock that moves only when somebody waits, and a server whose answers are known.

    An answer is a body, the word of an error, or something to call. After the last one the watcher is
    cancelled.
    """

    def __init__(self, *answers: bytes | str | Callable[[], Answer], took: float = 0.02) -> None:
        self.now = 0.0
        self.asked: list[float] = []
        self.outcomes = []
        self._answers = list(answers)
        self._took = took

    def clock(self) -> float:
        """The time."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    async def fetch(self) -> Answer:
        """Give the next answer."""
        if not self._answers:
            raise asyncio.CancelledError
        self.asked.append(self.now)
        self.now += self._took
        answer = self._answers.pop(0)
        if callable(answer):
            return answer()
        if isinstance(answer, bytes):
            return Answer(answer, None, seconds=self._took)
        return Answer(None, answer, "a detail", self._took)

    def watch(self, pipeline=None, on_outcome=None) -> None:
        """Run a watcher until there are no answers left."""
        watcher = Watcher(
            self,
            pipeline or Pipeline(AnalysisConfig(), {}, 1.0),
            Pace(1.0, lambda: 0.0),
            on_outcome or self.outcomes.append,
            self.clock,
            self.sleep,
        )
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(watcher.run())


@pytest.fixture
def lines(caplog):
    """Level and text of each line that the watcher logs."""
    caplog.set_level(logging.INFO, "exporter.runtime.poller")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_every_poll_becomes_an_outcome():
    """With the answer, what was made of it, and when."""
    world = World(BODY, "timeout", BODY)
    world.watch()
    assert world.asked == [0.0, 1.0, 2.0]
    assert [one.reading.error for one in world.outcomes] == [None, "timeout", None]
    assert [one.reading.t for one in world.outcomes] == pytest.approx([0.02, 1.02, 2.02])
    assert [one.interval for one in world.outcomes] == [1.0] * 3


def test_a_process_that_is_late_itself_does_not_blame_the_server():
    """It began 0.3 s late and so read the answer late: the server is asked as often as ever."""

    class Busy(World):
        async def sleep(self, seconds: float) -> None:
            """Wake up late."""
            self.now += seconds + 0.3

    busy = Busy(*[BODY] * 40, took=0.32)
    busy.watch()
    assert {one.interval for one in busy.outcomes} == {1.0}
    slow = World(*[BODY] * 40, took=0.32)
    slow.watch()
    assert slow.outcomes[-1].interval == SLOWEST_SECONDS


def test_skipped_starts_are_told_once():
    """By the poll that took too long."""
    world = World(BODY, BODY, took=2.5)
    world.watch()
    assert [one.skipped for one in world.outcomes] == [2, 2]
    assert world.asked == [0.0, 3.0]


def test_one_line_is_logged_per_change_of_state(lines):
    """Not one per poll: a server that is down for a night is two lines."""
    world = World(BODY, BODY, *["timeout"] * 20, *["http_503"] * 20, BODY, BODY)
    world.watch()
    assert lines() == [
        ("INFO", "target up engines=1 seconds=0.020"),
        ("WARNING", "target down error=timeout detail='a detail'"),
        ("WARNING", "target down error=http_503 detail='a detail'"),
        ("INFO", "target up engines=1 seconds=0.020"),
    ]


def test_a_body_that_is_no_metrics_text_is_down_with_a_name(lines):
    """A login page with status 200, say."""
    world = World(b"<html></html>", b"<html></html>")
    world.watch()
    assert [one.reading.error for one in world.outcomes] == ["unreadable_body"] * 2
    assert lines() == [("WARNING", "target down error=unreadable_body detail=''")]


def test_a_change_of_pace_is_logged_and_lengthens_how_long_a_reading_holds(lines):
    """Polled every five seconds a reading holds for fifteen, or it would vanish between polls."""
    world = World(*[BODY] * 12, took=0.3)
    world.watch()
    assert ("WARNING", "server answers slowly, polling less often interval=5s") in lines()
    assert [one.reading.max_age for one in world.outcomes][-1] == 15.0
    assert world.asked[-1] - world.asked[-2] == pytest.approx(5.0)


def test_answers_that_take_long_to_read_are_asked_for_less_often_and_logged(lines):
    """Whose fault it is is said; and when it is over."""
    reads = [0.3] * 12 + [0.001] * 20
    world = World(*[BODY] * len(reads))
    pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
    left = iter(reads)

    def feed(t, body, error, answers):
        world.now += next(left)
        return pipeline.feed(t, body, error, answers)

    world.watch(SimpleNamespace(feed=feed, set_interval=pipeline.set_interval))
    assert ("WARNING", "answers take long to read, polling less often interval=5s") in lines()
    assert lines()[-1] == ("INFO", "answers are read fast again interval=1s")
    assert world.asked[12] - world.asked[11] == pytest.approx(5.0)


def test_lines_that_are_left_out_are_logged_once(lines):
    """Until a body has none of them: then they are news again."""
    bad = BODY + b"vllm:num_requests_running 1_0\n" * 3
    many = BODY + b"vllm:num_requests_running 7\n" * 30_000
    world = World(BODY, bad, bad, "timeout", bad, BODY, many, many)
    world.watch()
    assert [text for level, text in lines() if "rejected" in text] == [
        "lines with known names rejected lines=3",
        "lines with known names rejected lines=10004",
    ]
    assert [one.reading.unreadable for one in world.outcomes] == [0, 3, 3, 0, 3, 0, 10_004, 10_004]


def test_a_server_that_is_fast_again_is_logged(lines):
    """As information: nobody has to look."""
    world = World(*[BODY] * 10, took=0.3)
    fast = [lambda: Answer(BODY, None, seconds=0.01)] * 10
    world._answers += fast
    world.watch()
    assert lines()[-1] == ("INFO", "server answers fast again interval=1s")


def test_a_fault_in_the_pipeline_costs_its_poll_only(lines):
    """And is logged once, with where it came from, however often it comes."""
    real = Pipeline(AnalysisConfig(), {}, 1.0)
    broken = [True]

    def feed(t, body, error, answers):
        if broken[0]:
            raise KeyError("a bug")
        return real.feed(t, body, error, answers)

    def mended():
        broken[0] = False
        return Answer(BODY, None)

    world = World(BODY, BODY, BODY, mended, BODY)
    world.watch(SimpleNamespace(feed=feed, set_interval=real.set_interval))
    assert len(world.asked) == 5
    assert len(world.outcomes) == 2
    assert [level for level, _ in lines()] == ["ERROR", "INFO"]


def test_a_fault_of_whoever_takes_the_outcomes_costs_its_poll_only(lines, caplog):
    """It is logged once, beside the one line that the target is up."""

    def take(_outcome):
        raise ValueError("a bug")

    world = World(*[BODY] * 6)
    world.watch(on_outcome=take)
    assert len(world.asked) == 6
    assert [level for level, _ in lines()] == ["INFO", "ERROR"]
    assert "a bug" in caplog.text


def test_a_watcher_is_cancelled_in_the_middle_of_a_poll():
    """At once, without an outcome of the poll that was under way."""
    outcomes = []

    class Hanging:
        async def fetch(self):
            await asyncio.get_running_loop().create_future()

    async def scenario():
        pipeline = Pipeline(AnalysisConfig(), {}, 1.0)
        task = asyncio.create_task(Watcher(Hanging(), pipeline, Pace(1.0), outcomes.append).run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert outcomes == []
