"""Joins requests that arrive while calls run into one call, since a batch of rows costs a GPU little more than one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gpu_pool.backends.backend import Item
from gpu_pool.backends.open_inference.tensors import ItemTensors
from gpu_pool.backends.openai_endpoint.errors import CallResult


class TensorItem:
    """A request with its tensors. `result` is used and `call` set by the Joiner."""

    def __init__(self, item: Item, tensors: ItemTensors) -> None:
        self.item = item
        self.tensors = tensors
        self.result: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self.call: asyncio.Task[None] | None = None


class Joiner:
    """`send` makes a call and returns a result for each request. At most `calls` of them run at a time, each with at most
    `most_rows` rows; a request with more is sent alone.
    """

    def __init__(self, send: Callable[[Sequence[TensorItem]], Awaitable[Sequence[CallResult]]]) -> None:
        self._send = send
        self._waiting: list[TensorItem] = []
        self._groups: dict[asyncio.Task[None], Sequence[TensorItem]] = {}
        self.calls = self.most_rows = 1

    async def run(self, request: TensorItem) -> CallResult:
        """The result of a request. If it is cancelled, a call without other requests is cancelled."""
        self._waiting.append(request)
        asyncio.get_running_loop().call_soon(self._start)  # The requests of one read of the socket are joined too.
        try:
            return await request.result
        finally:
            if request in self._waiting:
                self._waiting.remove(request)
            if request.call and all(each.result.done() for each in self._groups.get(request.call, ())):
                request.call.cancel()

    def _start(self) -> None:
        while self._waiting and len(self._groups) < self.calls:
            # The first waiting request, and others that can be joined to it.
            kind, rows = self._waiting[0].tensors.kind, 0
            group, left = list[TensorItem](), list[TensorItem]()
            for each in self._waiting:
                fits = not group or (rows + each.tensors.rows <= self.most_rows and each.tensors.kind == kind)
                (group if fits else left).append(each)
                rows += each.tensors.rows if fits else 0
            self._waiting = left
            call = asyncio.create_task(self._run(group), name="joined call")
            call.add_done_callback(self._ended)
            self._groups[call] = group
            for each in group:
                each.call = call

    def _ended(self, call: "asyncio.Task[None]") -> None:
        del self._groups[call]
        self._start()

    async def _run(self, group: Sequence[TensorItem]) -> None:
        try:
            for each, result in zip(group, await self._send(group), strict=True):
                if not each.result.done():
                    each.result.set_result(result)
        except Exception as error:  # noqa: BLE001 - raised in the tasks of the requests
            for each in group:
                if not each.result.done():
                    each.result.set_exception(error)
