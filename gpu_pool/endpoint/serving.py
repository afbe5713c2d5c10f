"""The model process's end of the socket for an endpoint: batches are answered as they come, each in a task of its own.

Unlike a GPU an endpoint has things to say between batches, too: that it wants none for now, and that it is back.
"""

import asyncio
import os
import socket
import sys
import time
import traceback
from functools import partial

from gpu_pool.backends.backend import ItemResult
from gpu_pool.backends.openai_endpoint.backend import Endpoint
from gpu_pool.deadlines import deadlines, stream_deadlines
from gpu_pool.endpoint.batch import HandBack
from gpu_pool.inputs import read_items, with_late, with_unreadable
from gpu_pool.model_link import ProgressCounter
from gpu_pool.model_process.frame_socket import FrameLine
from gpu_pool.model_process.inputs import Listeners
from gpu_pool.model_process.messages import (
    Asked,
    Available,
    Done,
    Drop,
    FrameTooLarge,
    Refused,
    Run,
    Said,
    pack,
    read_asked,
    too_large,
)

BUG = "The worker failed over this batch."


async def serve(endpoint: Endpoint, connection: socket.socket) -> None:
    """Never returns: the process ends when the supervisor goes."""
    desk = Desk(endpoint)
    await asyncio.get_running_loop().create_unix_connection(lambda: desk.line, sock=connection)
    await asyncio.Event().wait()


class Desk:
    """Takes what the supervisor asks, and says what is to be said."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._running: dict[int, tuple[Listeners, asyncio.Task[None]]] = {}
        self._progress = ProgressCounter(self._send)
        self.line = FrameLine(self._take, _end, read_asked)
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
