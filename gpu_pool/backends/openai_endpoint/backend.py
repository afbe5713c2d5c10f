"""`openai:URL`: an external endpoint as the model of one worker. Batches run concurrently, each in its own task.

One event loop is kept for the whole life of the backend. Unlike a GPU, an endpoint also reports between batches: that
it accepts none for now, and that it is back.
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
    PRIORITY_OWNER,
    EndpointAvailability,
    EndpointCapabilities,
    Pauses,
    ProbeResult,
    probe,
    takes_priority,
)
from gpu_pool.backends.openai_endpoint.client import Transport
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, CallResult
from gpu_pool.backends.openai_endpoint.requests import (
    ABORTED,
    TOO_SLOW,
    EndpointBatch,
    EndpointContext,
    HandBack,
    batch_result,
    reason_of,
    requested_wait_s,
)
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl, read_address
from gpu_pool.config import Access, take_access
from gpu_pool.model_process.frame_socket import FrameConnection
from gpu_pool.model_process.inputs import Listeners, deadlines, read_items, stream_deadlines, with_late, with_unreadable
from gpu_pool.model_process.messages import (
    Available,
    Done,
    Drop,
    FrameTooLarge,
    ModelMessage,
    ProgressCounter,
    Refused,
    Run,
    WorkerMessage,
    decode_worker_message,
    pack,
    too_large,
)
from scheduler.errors import ErrorCode, StartError, TierlaneError

TICK_S = 0.05  # How soon a reader that left is noticed.
MARGIN_S = 0.1  # Part of a batch's time that is kept for returning results.
LONGEST_S = 600.0  # Without any limit.
LOAD_S = 60.0
_FAILED_CALLS = (TOO_SLOW, ABORTED)


class EndpointAway(TierlaneError):
    """The endpoint did not answer while the model was loading; a retry may succeed."""


class Endpoint:
    """Used in one event loop. `availability` decides whether batches are accepted."""

    def __init__(self, address: EndpointUrl, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises StartError for certificates that cannot be used."""
        self._address = address
        self._clock = clock
        self._transport = Transport(address, access)
        self._probed = ProbeResult()
        call_slots = asyncio.Semaphore(access.max_calls)
        self._context = EndpointContext(
            self._transport, call_slots, EndpointCapabilities(), lambda: self._probed.model, access.body_dir, clock
        )
        self.availability = EndpointAvailability(self.probe)
        self.replaced: Callable[[], Any] = lambda: None
        """Called when a probe finds another model than was loaded."""

    @property
    def model(self) -> str:
        """The endpoint's name for its model; "" before `load`."""
        return self._probed.model

    async def load(self, within_s: float = LOAD_S) -> None:
        """Wait for the endpoint. Raises StartError if only other settings can help, EndpointAway after `within_s`."""
        await self._transport.open()
        pauses, until = Pauses(), self._clock() + within_s
        while (seen := await probe(self._transport, self._address)).fault:
            if seen.ours:
                raise StartError(f"{seen.fault} ({self._address.base})")
            if self._clock() >= until:
                raise EndpointAway(seen.fault)
            await asyncio.sleep(pauses.probe_s())
        self._probed = seen
        if seen.owner == PRIORITY_OWNER:
            self._context.capabilities.takes_priority = await takes_priority(self._transport, seen.model, seen.tasks)

    async def answer(self, items: Sequence[Item], step: Callable[[], None]) -> list[ItemResult] | HandBack:
        """Run one batch, at most until its items' deadlines. `step` is called at every step, and at intervals."""
        if self.availability.closed:
            return HandBack(self.availability.closed, counted=False)
        now = self._clock()
        timed = [replace(item, until=_in_time(item.until, now)) for item in items]
        batch = EndpointBatch(self._context, self._probed.tasks, timed, step)
        ticks = asyncio.create_task(_tick(batch, step))
        try:
            call_results = await self._verify_rejections(await batch.run(), batch.until)
        finally:
            ticks.cancel()
        self._update_availability(batch.sent(call_results))
        return batch_result(call_results, streamed=batch.calls.streamed)

    async def close(self) -> None:
        """Close all connections."""
        await self.availability.close()
        await self._transport.close()

    async def _verify_rejections(self, call_results: list[CallResult], until: float) -> list[CallResult]:
        """A proxy may reject one text with the status of a wrong key: if a probe succeeds, it was the text.

        The probe is limited to the batch's time: beyond it the watchdog would kill the process with all other batches.
        """
        if not any(isinstance(result, Broken) for result in call_results) or await self._probe_fails(until):
            return call_results
        forbidden = ItemResult("The model does not accept this request.", 0, ErrorCode.INVALID_REQUEST)
        return [forbidden if isinstance(result, Broken) and not result.key else result for result in call_results]

    async def _probe_fails(self, until: float) -> bool:
        try:
            async with asyncio.timeout(until - self._clock()):
                return bool(await self.probe())
        except TimeoutError:
            return True

    def _update_availability(self, call_results: Sequence[CallResult]) -> None:
        """Update the availability from the results of the items that were sent."""
        broken = next((result for result in call_results if isinstance(result, Broken)), None)
        if broken is not None:
            self.availability.broken(broken.reason)
        elif any(isinstance(result, Busy) for result in call_results):
            self.availability.busy(requested_wait_s(call_results))
        elif any(isinstance(result, ItemResult) and result not in _FAILED_CALLS for result in call_results):
            self.availability.worked()
        elif call_results:
            output = next((result.output for result in call_results if isinstance(result, ItemResult)), "")
            self.availability.failed(reason_of(call_results) or output)

    async def probe(self) -> str:
        """Why the endpoint cannot be used; "" if it can."""
        seen = await probe(self._transport, self._address, self._probed.model)
        if seen.fault:
            return seen.fault
        if (
            not self._probed.tasks <= seen.tasks
        ):  # A proxy in front of restarting servers; this is not the client's error.
            return "The endpoint lacks a route that it had before."
        before, self._probed = self._probed, seen
        if seen.model != before.model:
            self.replaced()
        return ""


def _in_time(until: float, now: float) -> float:
    """When an item's calls must be over, so that its result arrives in time."""
    left_s = min(until - now, LONGEST_S)
    return now + left_s - min(MARGIN_S, 0.1 * left_s)


async def _tick(batch: EndpointBatch, step: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        batch.calls.end_abandoned()
        step()


BUG = "The worker failed on this batch."


async def serve(endpoint: Endpoint, connection: socket.socket) -> None:
    """Never returns: the process exits when the worker is gone."""
    serving = EndpointServing(endpoint)
    await asyncio.get_running_loop().create_unix_connection(lambda: serving.connection, sock=connection)
    await asyncio.Event().wait()


class EndpointServing:
    """Receives the worker's messages and sends the results."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._running: dict[int, tuple[Listeners, asyncio.Task[None]]] = {}
        self._progress = ProgressCounter(self._send)
        self.connection = FrameConnection(self._take, _end, decode_worker_message)
        endpoint.availability.report = lambda *state: self._send(Available(*state))
        endpoint.replaced = partial(_end, "The endpoint serves another model now; restarting to load it.")

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, Drop):
            if message.seq in self._running:
                self._running[message.seq][0].drop(message.seq, message.places)
            return
        listeners = Listeners(self._send)
        listeners.begin(message.seq)
        self._progress.begin()
        task = asyncio.create_task(self._answer(message, listeners), name="batch")
        self._running[message.seq] = listeners, task
        task.add_done_callback(lambda _: self._running.pop(message.seq))

    async def _answer(self, run: Run, listeners: Listeners) -> None:
        started = time.perf_counter()
        try:
            results = await self._results(run, listeners)
        except Exception:  # noqa: BLE001 - reported to the worker
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

    def _send(self, message: ModelMessage) -> None:
        if not self.connection.send(pack(message)):
            _end()


def _end(why: str = "") -> None:
    """The end of a model process, past hooks that could hang."""
    if why:
        sys.stderr.write(why + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class EndpointBackend:
    """`spec` is the value of `--backend`; credentials come from the environment."""

    def __init__(self, spec: str) -> None:
        """Raises StartError for an address or certificates that cannot be used."""
        access = take_access()
        self._endpoint = Endpoint(read_address(spec), access)
        self.most = access.max_batches
        self._loop = asyncio.Runner()

    @property
    def version(self) -> str:
        """The endpoint's name for its model."""
        return self._endpoint.model

    def load(self) -> None:
        """Wait for the endpoint. Raises StartError for a rejected key or a missing model, EndpointAway after a while."""
        self._loop.run(self._endpoint.load())

    def warmup(self) -> None:
        """Nothing: the endpoint's operator keeps it warm, and every request may cost money."""

    def health(self) -> None:
        """A probe. Raises Unwell with the reason."""
        if fault := self._loop.run(self._endpoint.probe()):
            raise Unwell(fault)

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Answer every item. A batch that could be handed back fails here."""
        found = self._loop.run(self._endpoint.answer(items, progress))
        if not isinstance(found, HandBack):
            return found
        code = ErrorCode.WORKER_LOST if found.counted else ErrorCode.NO_CAPACITY
        return [ItemResult(found.reason, 0, code)] * len(items)

    def serve(self, connection: socket.socket) -> None:
        """Answer batches of the worker until it is gone; never returns."""
        self._loop.run(serve(self._endpoint, connection))

    def close(self) -> None:
        """Close all connections and the event loop."""
        self._loop.run(self._endpoint.close())
        self._loop.close()
