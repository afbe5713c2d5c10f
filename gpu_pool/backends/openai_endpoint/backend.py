"""`openai:URL`: an external endpoint as the model of one worker. Batches run concurrently, each in a task of its own.

One event loop is kept for the whole life of the backend. Unlike a GPU an endpoint reports between batches too: that it
wants none for now, and that it is back.
"""

import asyncio
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpu_pool.backends.backend import Item, ItemResult, Unwell
from gpu_pool.backends.openai_endpoint.availability import (
    ORDERS,
    EndpointAvailability,
    EndpointCapabilities,
    Look,
    Pauses,
    look,
    takes_priority,
)
from gpu_pool.backends.openai_endpoint.client import Transport
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, End
from gpu_pool.backends.openai_endpoint.requests import (
    BROKE_OFF,
    TOO_SLOW,
    EndpointBatch,
    EndpointCall,
    HandBack,
    reason_of,
    settled,
    wait_asked_s,
)
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl, read_address
from gpu_pool.config import Access, take_access
from gpu_pool.model_process.frame_socket import FrameConnection
from gpu_pool.model_process.inputs import Listeners, deadlines, read_items, stream_deadlines, with_late, with_unreadable
from gpu_pool.model_process.messages import (
    Asked,
    Available,
    Done,
    Drop,
    FrameTooLarge,
    ProgressCounter,
    Refused,
    Run,
    Said,
    pack,
    read_asked,
    too_large,
)
from scheduler.errors import ErrorCode, StartError, TierlaneError

TICK_S = 0.05  # How soon a reader who left is noticed.
MARGIN_S = 0.1  # Of a batch's time, for the way back.
LONGEST_S = 600.0  # For whoever sets no limit at all.
LOAD_S = 60.0
_NO_ANSWERS = (TOO_SLOW, BROKE_OFF)


class EndpointAway(TierlaneError):
    """The endpoint did not answer while the model was to be loaded; it may do later."""


class Endpoint:
    """Used in one event loop. `door` says whether batches are wanted."""

    def __init__(self, address: EndpointUrl, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises StartError for certificates that cannot be used."""
        self._address = address
        self._clock = clock
        self._transport = Transport(address, access)
        self._seen = Look()
        turns = asyncio.Semaphore(access.max_calls)
        self._line = EndpointCall(self._transport, turns, EndpointCapabilities(), lambda: self._seen.model, clock)
        self.door = EndpointAvailability(self.look_again)
        self.replaced: Callable[[], Any] = lambda: None
        """Called when a look finds another model than was loaded."""

    @property
    def model(self) -> str:
        """What the endpoint calls its model; "" before `load`."""
        return self._seen.model

    async def load(self, within_s: float = LOAD_S) -> None:
        """Wait until it is there. Raises StartError where another setting is needed, EndpointAway when it does not come."""
        await self._transport.open()
        pauses, until = Pauses(), self._clock() + within_s
        while (seen := await look(self._transport, self._address)).fault:
            if seen.ours:
                raise StartError(f"{seen.fault} ({self._address.base})")
            if self._clock() >= until:
                raise EndpointAway(seen.fault)
            await asyncio.sleep(pauses.look_s())
        self._seen = seen
        if seen.owner == ORDERS:
            self._line.habits.takes_priority = await takes_priority(self._transport, seen.model, seen.tasks)

    async def answer(self, items: Sequence[Item], step: Callable[[], None]) -> list[ItemResult] | HandBack:
        """Run one batch, at the latest until its items' time is over. `step` is called at every step, and now and then."""
        if self.door.shut:
            return HandBack(self.door.shut, counted=False)
        now = self._clock()
        timed = [replace(item, until=_in_time(item.until, now)) for item in items]
        batch = EndpointBatch(self._line, self._seen.tasks, timed, step)
        ticks = asyncio.create_task(_tick(batch, step))
        try:
            ends = await self._without_false_alarms(await batch.run(), batch.until)
        finally:
            ticks.cancel()
        self._judge(batch.asked(ends))
        return settled(ends, said=batch.calls.said)

    async def close(self) -> None:
        """Hang up."""
        await self.door.close()
        await self._transport.close()

    async def _without_false_alarms(self, ends: list[End], until: float) -> list[End]:
        """A proxy may forbid one text with the status of a wrong key: where a look finds all well, it was that.

        The look has the batch's time and no more: past it the watchdog would end the process, with all other batches.
        """
        if not any(isinstance(end, Broken) for end in ends) or await self._ill(until):
            return ends
        forbidden = ItemResult("The model does not accept this request.", 0, ErrorCode.INVALID_REQUEST)
        return [forbidden if isinstance(end, Broken) and not end.key else end for end in ends]

    async def _ill(self, until: float) -> bool:
        try:
            async with asyncio.timeout(until - self._clock()):
                return bool(await self.look_again())
        except TimeoutError:
            return True

    def _judge(self, ends: Sequence[End]) -> None:
        """What the items that the endpoint was asked for say of it."""
        broken = next((end for end in ends if isinstance(end, Broken)), None)
        if broken is not None:
            self.door.broken(broken.reason)
        elif any(isinstance(end, Busy) for end in ends):
            self.door.busy(wait_asked_s(ends))
        elif any(isinstance(end, ItemResult) and end not in _NO_ANSWERS for end in ends):
            self.door.worked()
        elif ends:
            said = next((end.output for end in ends if isinstance(end, ItemResult)), "")
            self.door.failed(reason_of(ends) or said)

    async def look_again(self) -> str:
        """Why the endpoint cannot be used; "" where it can."""
        seen = await look(self._transport, self._address, self._seen.model)
        if seen.fault:
            return seen.fault
        if not self._seen.tasks <= seen.tasks:  # A proxy before servers that restart; callers must not be told of it.
            return "The endpoint lacks a route that it had."
        before, self._seen = self._seen, seen
        if seen.model != before.model:
            self.replaced()
        return ""


def _in_time(until: float, now: float) -> float:
    """When an item's calls must be over, so that its end arrives while it is of use."""
    left_s = min(until - now, LONGEST_S)
    return now + left_s - min(MARGIN_S, 0.1 * left_s)


async def _tick(batch: EndpointBatch, step: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        batch.calls.let_go()
        step()


BUG = "The worker failed over this batch."


async def serve(endpoint: Endpoint, connection: socket.socket) -> None:
    """Never returns: the process ends when the supervisor goes."""
    transaction = EndpointServing(endpoint)
    await asyncio.get_running_loop().create_unix_connection(lambda: transaction.line, sock=connection)
    await asyncio.Event().wait()


class EndpointServing:
    """Takes what the supervisor asks, and says what is to be said."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._running: dict[int, tuple[Listeners, asyncio.Task[None]]] = {}
        self._progress = ProgressCounter(self._send)
        self.line = FrameConnection(self._take, _end, read_asked)
        endpoint.door.tell = lambda *told: self._send(Available(*told))
        endpoint.replaced = partial(_end, "The endpoint serves another model now; it is loaded anew.")

    def _take(self, asked: Asked) -> None:
        if isinstance(asked, Drop):
            if asked.seq in self._running:
                self._running[asked.seq][0].drop(asked.seq, asked.places)
            return
        listeners = Listeners(self._send)
        listeners.begin(asked.seq)
        self._progress.begin()
        task = asyncio.create_task(self._answer(asked, listeners), name="batch")
        self._running[asked.seq] = listeners, task
        task.add_done_callback(lambda _: self._running.pop(asked.seq))

    async def _answer(self, run: Run, listeners: Listeners) -> None:
        started = time.perf_counter()
        try:
            results = await self._results(run, listeners)
        except Exception:  # noqa: BLE001 - whatever it is, the supervisor is told
            traceback.print_exc()
            results = HandBack(BUG, counted=True)
        if isinstance(results, HandBack):
            self._send(Refused(run.seq, results.reason, results.counted))
            return
        done = Done(run.seq, (time.perf_counter() - started) * 1000, results)
        try:
            self._send(done)
        except FrameTooLarge:
            self._send(too_large(done))

    async def _results(self, run: Run, listeners: Listeners) -> list[ItemResult] | HandBack:
        now = time.monotonic()
        items = read_items(run.bodies, listeners.listen, deadlines(run, now), stream_deadlines(run, now))
        readable = [item for item in items if item is not None]

        def step() -> None:
            self._progress()
            listeners.flush()

        found = await self._endpoint.answer(readable, step) if readable else []
        return found if isinstance(found, HandBack) else with_unreadable(items, with_late(readable, found))

    def _send(self, message: Said) -> None:
        if not self.line.send(pack(message)):
            _end()


def _end(why: str = "") -> None:
    """The way out of a model process: past hooks that could hang."""
    if why:
        sys.stderr.write(why + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class EndpointBackend:
    """`spec` is the text of `--backend`; how to get in is in the environment."""

    def __init__(self, spec: str) -> None:
        """Raises StartError for an address or certificates that cannot be used."""
        access = take_access()
        self._endpoint = Endpoint(read_address(spec), access)
        self.most = access.max_batches
        self._loop = asyncio.Runner()

    @property
    def version(self) -> str:
        """What the endpoint calls its model."""
        return self._endpoint.model

    def load(self) -> None:
        """Wait for the endpoint. Raises StartError where it refuses our key or lacks the model, EndpointAway later."""
        self._loop.run(self._endpoint.load())

    def warmup(self) -> None:
        """Nothing: it is kept warm by whoever runs it, and every text may cost."""

    def health(self) -> None:
        """A look at the endpoint. Raises Unwell with what is wrong."""
        if fault := self._loop.run(self._endpoint.look_again()):
            raise Unwell(fault)

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Answer every item. What could be handed back and run again is here the end of the batch."""
        found = self._loop.run(self._endpoint.answer(items, progress))
        if not isinstance(found, HandBack):
            return found
        code = ErrorCode.WORKER_LOST if found.counted else ErrorCode.NO_CAPACITY
        return [ItemResult(found.reason, 0, code)] * len(items)

    def serve(self, connection: socket.socket) -> None:
        """Answer batches from the supervisor until it goes; never returns."""
        self._loop.run(serve(self._endpoint, connection))

    def close(self) -> None:
        """Hang up, and end the event loop."""
        self._loop.run(self._endpoint.close())
        self._loop.close()
