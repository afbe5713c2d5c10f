"""Repeated log lines: the first at once, then one a second with a count, in bounded memory."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import structlog

from eventually import eventually
from tierlane.roles.log_repeats import MAX_EVENTS, RepeatFilter


class Lines:
    """Writes lines through a filter whose clock is `now`, and keeps those that are written."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.now = 0.0
        self.written: list[dict[str, Any]] = []
        self.filter = RepeatFilter(lambda _logger, _method, line: json.dumps(line), clock or (lambda: self.now))
        self._logger = structlog.wrap_logger(self, processors=[self.filter], wrapper_class=structlog.BoundLogger)

    def warning(self, line: str) -> None:
        self.written.append(json.loads(line))

    info = warning

    def say(self, event: str, level: str = "warning", **fields: Any) -> None:
        getattr(self._logger, level)(event, **fields)


def test_a_repeated_line_is_one_line_a_second_with_a_count() -> None:
    """Numbers and ids may differ, the last ones are written. After a second without the event, it is a first one again."""
    lines = Lines()
    for number in range(1000):
        lines.now = number / 400
        lines.say("batch failed", batch=f"b{number}", size=number, cause="timeout")
    lines.now = 4.0
    lines.filter.write_counts()
    lines.now = 6.0
    lines.filter.write_counts()
    lines.say("batch failed", batch="b", size=1, cause="timeout")

    batches = [(line["batch"], line.get("repeated", 0)) for line in lines.written]
    assert batches == [("b0", 0), ("b399", 399), ("b799", 400), ("b999", 200), ("b", 0)]


def test_the_first_line_of_every_event_is_written() -> None:
    """Another level or another text is another event; a line for each request is never counted."""
    lines = Lines()
    for pool in ("a", "b", "a"):
        lines.say("pool served", pool=pool)
    lines.say("pool served", "info", pool="a")
    for _ in range(3):
        lines.say("request", "info", outcome="completed")

    texts = [line.get("pool", line["event"]) for line in lines.written]
    assert texts == ["a", "b", "a", "request", "request", "request"]


def test_different_texts_without_end_are_bounded() -> None:
    """Beyond so many different lines in a second, those of one event count as the same; the end writes all counts."""
    lines = Lines()
    for number in range(10 * MAX_EVENTS):
        lines.say("refused", reason=f"reason {number}")
    assert len(lines.written) <= MAX_EVENTS + 1

    lines.filter.write_counts(everything=True)
    assert sum(line.get("repeated", 1) for line in lines.written) == 10 * MAX_EVENTS


async def test_the_count_is_written_without_a_further_line() -> None:
    """By a timer of the loop that exists only while lines are counted."""
    lines = Lines(asyncio.get_running_loop().time)
    for _ in range(3):
        lines.say("redis_away", error="refused")

    await eventually(lambda: len(lines.written) == 2, "the count is written")
    assert lines.written[1]["repeated"] == 2
