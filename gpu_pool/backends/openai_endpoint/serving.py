"""Serves the requests of a worker on an endpoint: each in a task of its own, so that each starts and ends by itself."""

import asyncio
import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.endpoint import Endpoint, HandBack
from gpu_pool.backends.openai_endpoint.faults import cause_of
from gpu_pool.backends.openai_endpoint.requests import CallProgress
from gpu_pool.model_process.frame_socket import FrameConnection
from gpu_pool.model_process.inputs import UNREADABLE, in_time, read_items
from gpu_pool.model_process.listeners import Listeners
from gpu_pool.model_process.messages import (
    Available,
    Done,
    Drop,
    ModelMessage,
    Progress,
    Refused,
    Slots,
    TokenObjective,
    Withdraw,
    WorkerMessage,
    decode_worker_message,
    pack,
    send_done,
)

BUSY_TICK_S, IDLE_TICK_S = 0.25, 2.0
"""How often the engine's load is read and the number of slots adapted, while requests run and while none does."""
BUG = "The worker failed on this request."
WITHDRAWN = "The request was withdrawn, so that another one can run first."


@dataclass(eq=False, slots=True)
class _Request:
    """One request that runs. `dropped`: its client has left; `withdrawn`: the worker wants it back."""

    item: Item | None
    progress: CallProgress
    task: "asyncio.Task[None] | None" = None
    begun: bool = False
    dropped: bool = False
    withdrawn: bool = False

    def stop(self) -> None:
        """Cancel its task, which answers. One that has not begun would end without an answer: it stops by itself."""
        if self.begun and self.task is not None:
            self.task.cancel()


class EndpointServing:
    """Receives the worker's messages and sends the results. `most`: the most slots, 0 without a limit."""

    def __init__(self, endpoint: Endpoint, listeners: Listeners, most: int) -> None:
        self._endpoint = endpoint
        self._listeners = listeners
        self._most = most
        self._running: dict[int, _Request] = {}
        self._ticks = 0
        self._reported = (0, "")
        self._began = asyncio.Event()
        self.connection = FrameConnection(self._take, end_process, decode_worker_message)
        endpoint.availability.report = lambda wanted, reason, brief: self.send(
            Available(wanted, str(reason), brief, cause_of(reason))
        )
        endpoint.replaced = partial(end_process, "The endpoint serves another model now; restarting to load it.")

    @property
    def slots(self) -> int:
        """Requests that may run at a time."""
        count = self._endpoint.policy.count
        return min(count, self._most) if self._most else count

    async def run(self) -> None:
        """Adapt the number of slots; never returns."""
        while True:
            self._began.clear()
            if self._running:
                await asyncio.sleep(BUSY_TICK_S)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_TICK_S):
                        await self._began.wait()
            try:
                load, policy = await self._endpoint.read_load(), self._endpoint.policy
                policy.tick(time.monotonic(), load)
                self._endpoint.watch()
                if self._running:
                    self._ticks += 1
                    self.send(Progress(self._ticks))  # The endpoint may be silent; this process is not hung.
                self._report()
                waiting = [seq for seq, each in self._running.items() if not each.progress.has_sent]
                self._withdraw(waiting[len(waiting) - policy.excess :] if policy.excess else [])
            except Exception:  # noqa: BLE001 - no fault may end this loop
                traceback.print_exc()

    def _report(self) -> None:
        """Tell the worker the number of slots, if it has changed."""
        if (state := (self.slots, self._endpoint.policy.source)) != self._reported:
            self._reported = state
            self.send(Slots(*state))

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, Withdraw):
            self._withdraw(message.seqs)
        elif isinstance(message, Drop):
            request = self._running.get(message.seq)
            if request is not None and not request.withdrawn:
                request.dropped = True
                self._listeners.drop(0, [message.seq])
                request.stop()
        elif isinstance(message, TokenObjective):
            self._endpoint.policy.set_objective(message.tpot_ms)
        else:
            if not self._running:
                self._began.set()
            (item,) = read_items(message, self._listeners.listen_to(message.seq), time.monotonic())
            request = self._running[message.seq] = _Request(item, CallProgress())
            request.task = asyncio.create_task(self._answer(message.seq, request), name="request")

    def _withdraw(self, seqs: list[int]) -> None:
        for seq in seqs:
            request = self._running.get(seq)
            if request is not None and not request.progress.has_sent and not request.dropped:
                request.withdrawn = True
                self._listeners.drop(0, [seq])  # Or output could be sent before its task ends.
                request.stop()

    async def _answer(self, seq: int, request: _Request) -> None:
        started, request.begun = time.perf_counter(), True
        try:
            if request.dropped or request.withdrawn:
                raise asyncio.CancelledError  # noqa: TRY301 - as if it had begun
            answer: ItemResult | HandBack = UNREADABLE
            if (item := request.item) is not None:
                answer = await self._endpoint.answer(item, request.progress)
                if isinstance(answer, ItemResult):
                    answer = in_time(item, answer)
        except asyncio.CancelledError:
            if not (request.withdrawn or request.dropped):
                raise
            answer = (
                HandBack(WITHDRAWN, counted=False)
                if request.withdrawn
                else self._endpoint.left(request.item, request.progress)
            )
        except Exception:  # noqa: BLE001 - reported to the worker
            traceback.print_exc()
            answer = HandBack(BUG, counted=True)
        self._listeners.end(seq)
        del self._running[seq]
        if isinstance(answer, HandBack):
            self._report()  # First: if the engine refused it, its slot must not be filled again at once.
            self.send(Refused(seq, str(answer.reason), answer.counted))
            return
        send_done(self.send, Done(seq, (time.perf_counter() - started) * 1000, [answer]))

    def send(self, message: ModelMessage) -> None:
        """Send a message to the worker; the process ends if the worker is gone. Raises FrameTooLarge."""
        if not self.connection.send(pack(message)):
            end_process()


def end_process(why: str = "") -> None:
    """The end of a model process, past hooks that could hang."""
    if why:
        sys.stderr.write(why + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
