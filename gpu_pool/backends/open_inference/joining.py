"""Joins requests that arrive while calls run into one call, since a batch of rows costs a GPU little more than one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from gpu_pool.backends.backend import Item
from gpu_pool.backends.open_inference.tensors import ItemTensors
from gpu_pool.backends.openai_endpoint.errors import CallResult


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A request with its tensors; `tensors.rows` is not 0 if it may be joined."""

    item: Item
    tensors: ItemTensors


@dataclass(eq=False, slots=True)
class _Waiting:
    request: TensorItem
    result: "asyncio.Future[CallResult]"
    call: "_JoinedCall | None" = None


@dataclass(eq=False, slots=True)
class _JoinedCall:
    members: Sequence[_Waiting]
    task: "asyncio.Task[None] | None" = field(default=None)


class Joiner:
    """`send` makes a call and returns a result for each request. At most `calls` of them run at a time, each with at most
    `most_rows` rows; a request with more is sent alone.
    """

    def __init__(self, send: Callable[[Sequence[TensorItem]], Awaitable[Sequence[CallResult]]]) -> None:
        self._send = send
        self._waiting: list[_Waiting] = []
        self._calls: set[_JoinedCall] = set()
        self.calls = self.most_rows = 1

    async def run(self, request: TensorItem) -> CallResult:
        """The result of a request. If it is cancelled, a call without other requests is cancelled."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.create_future())
        self._waiting.append(waiting)
        loop.call_soon(self._start)  # The requests of one read of the socket are joined too.
        try:
            return await waiting.result
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            if (call := waiting.call) is not None and call.task and all(each.result.done() for each in call.members):
                call.task.cancel()

    def _start(self) -> None:
        while self._waiting and len(self._calls) < self.calls:
            call = _JoinedCall(self._take())
            for each in call.members:
                each.call = call
            self._calls.add(call)
            call.task = asyncio.create_task(self._run(call), name="joined call")

    def _take(self) -> list[_Waiting]:
        """The first waiting request and others that can be joined to it."""
        kind, rows, taken = self._waiting[0].request.tensors.kind, 0, list[_Waiting]()
        for each in self._waiting:
            tensors = each.request.tensors
            if taken and (rows + tensors.rows > self.most_rows or tensors.kind != kind):
                continue
            rows += tensors.rows
            taken.append(each)
        self._waiting = [each for each in self._waiting if each not in taken]
        return taken

    async def _run(self, call: _JoinedCall) -> None:
        try:
            results = await self._send([each.request for each in call.members])
            for each, result in zip(call.members, results, strict=True):
                if not each.result.done():
                    each.result.set_result(result)
        except Exception as error:  # noqa: BLE001 - raised in the tasks of the requests
            for each in call.members:
                if not each.result.done():
                    each.result.set_exception(error)
        finally:
            self._calls.discard(call)
            self._start()
