"""The sweep over the open responses of an endpoint: when it reads, and what ends a response."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
import uvloop
from aiohttp.base_protocol import BaseProtocol

from gpu_pool.backends.openai_endpoint.client import CallTimeout, ResponseAborted
from gpu_pool.backends.openai_endpoint.stream_sweep import StreamSweep

LONG_S = 60.0


class Bench:
    """A sweep, and bodies of responses that a test feeds."""

    def __init__(self, silence_s: float = LONG_S) -> None:
        self.sweeps = 0
        self.sweep = StreamSweep(self._swept, silence_s)

    def _swept(self) -> None:
        self.sweeps += 1

    def body(self) -> aiohttp.StreamReader:
        """An empty body."""
        return aiohttp.StreamReader(Mock(spec=BaseProtocol), 1 << 16, loop=asyncio.get_running_loop())

    def read(
        self, body: aiohttp.StreamReader, take: Callable[[bytes], bool], wait_s: float = LONG_S
    ) -> "asyncio.Task[bool]":
        """Read a body until `take` returns True."""
        until = asyncio.get_running_loop().time() + wait_s
        return asyncio.create_task(self.sweep.read(body, take, until, until))


def on_uvloop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in the loop of a model process, whose timers differ from those of asyncio's own."""

    @functools.wraps(test)
    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test())

    return run


@on_uvloop
async def test_one_sweep_reads_what_several_responses_received() -> None:
    """They wait without a timer for each of them, and each gets its own data."""
    bench, received = Bench(), list[bytes]()
    bodies = [bench.body() for _ in range(20)]
    tasks = [bench.read(body, lambda data: received.append(data) or True) for body in bodies]
    await asyncio.sleep(0)
    for number, body in enumerate(bodies):
        body.feed_data(b"%d" % number)

    assert await asyncio.gather(*tasks) == [True] * 20
    assert sorted(received, key=int) == [b"%d" % number for number in range(20)]
    assert bench.sweeps == 1


@on_uvloop
async def test_data_that_arrives_all_the_time_does_not_postpone_a_sweep() -> None:
    """The first response is read while others still begin."""
    bench = Bench()
    bodies = [bench.body() for _ in range(2000)]
    first, *others = bodies
    task, tasks = bench.read(first, lambda _: True), list[asyncio.Task[bool]]()
    first.feed_data(b"a")
    for body in others:
        tasks.append(bench.read(body, lambda _: True))
        body.feed_data(b"b")
        await asyncio.sleep(0)
        if task.done():
            break
    await asyncio.gather(task, *tasks)

    assert len(tasks) < len(others)


@on_uvloop
async def test_a_body_that_was_received_before_it_is_read() -> None:
    """It is read at once; its end without what was expected is reported."""
    bench, parts = Bench(), list[bytes]()
    body = bench.body()
    body.feed_data(b"all")
    body.feed_eof()

    assert await bench.read(body, lambda data: parts.append(data) or False) is False
    assert parts == [b"all"]


@on_uvloop
async def test_a_lost_connection_ends_its_response_alone() -> None:
    """Another response of the same endpoint continues."""
    bench = Bench()
    lost, other = bench.body(), bench.body()
    task, continues = bench.read(lost, lambda _: True), bench.read(other, lambda _: True)
    await asyncio.sleep(0)
    lost.set_exception(aiohttp.ClientPayloadError())
    with pytest.raises(ResponseAborted, match="ClientPayloadError"):
        await task
    other.feed_data(b"text")

    assert await continues is True


@on_uvloop
async def test_a_silent_response_times_out() -> None:
    """Before its first part by the time given, after it by the silence; a response that has data meanwhile continues."""
    bench = Bench(silence_s=0.1)
    never, silent = bench.body(), bench.body()
    tasks = [bench.read(never, lambda _: True, 0.1), bench.read(silent, lambda _: False)]
    await asyncio.sleep(0)
    silent.feed_data(b"part")

    for task in tasks:
        with pytest.raises(CallTimeout):
            await task
