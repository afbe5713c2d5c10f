"""`openai:URL`, `oip:URL`: an external server as the model of one worker, with slots: requests start and end by themselves.

One event loop is kept for the whole life of the backend. Unlike a GPU, an endpoint also reports between requests: that it
accepts none for now, that it is back, and how many may run at a time.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence

import uvloop

from gpu_pool.backends.backend import Item, ItemResult, Unwell
from gpu_pool.backends.openai_endpoint.endpoint import Endpoint
from gpu_pool.backends.openai_endpoint.faults import cause_of
from gpu_pool.backends.openai_endpoint.requests import CallProgress
from gpu_pool.backends.openai_endpoint.serving import EndpointServing
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.config import take_access
from gpu_pool.model_process.listeners import AT_ONCE_S, Listeners
from scheduler.errors import ErrorCode


class EndpointBackend:
    """`spec` is the value of `--backend`, `kind` the endpoint of its protocol; credentials come from the environment."""

    def __init__(self, spec: str, kind: type[Endpoint] = Endpoint) -> None:
        """Raises StartError for an address or certificates that cannot be used."""
        self._access = take_access()
        self._serving: EndpointServing | None = None
        self._listeners = Listeners(lambda pieces: self._serving.send(pieces) if self._serving else None, AT_ONCE_S)
        self._endpoint = kind(read_address(spec), self._access, self._listeners.flush)
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    @property
    def version(self) -> str:
        """The endpoint's name for its model."""
        return self._endpoint.model

    @property
    def slots(self) -> int:
        """The most requests at a time, at first."""
        count = self._endpoint.policy.count
        return min(count, self._access.max_calls) if self._access.max_calls else count

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and output together, once loaded; 0: not known."""
        return self._endpoint.context_tokens

    def resume(self, slots: int) -> None:
        """Begin with as many slots as an earlier process of the worker had."""
        self._endpoint.policy.resume(slots)

    def report_waiting(self, report: Callable[[str, str], None]) -> None:
        """Call `report` while loading, with the reason for which that waits and its cause, and with "" twice at the end."""
        self._endpoint.waiting = lambda reason: report(str(reason), cause_of(reason))

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
        """Answer every item. One that could be handed back fails here."""
        return self._loop.run(self._answers(items, progress))

    async def _answers(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        async def answer(item: Item) -> ItemResult:
            found = await self._endpoint.answer(item, CallProgress())
            progress()
            if isinstance(found, ItemResult):
                return found
            return ItemResult(str(found.reason), 0, ErrorCode.WORKER_LOST if found.counted else ErrorCode.NO_CAPACITY)

        return await asyncio.gather(*map(answer, items))

    def serve(self, connection: socket.socket) -> None:
        """Answer requests of the worker until it is gone; never returns."""
        self._loop.run(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        serving = self._serving = EndpointServing(self._endpoint, self._listeners, self._access.max_calls)
        await asyncio.get_running_loop().create_unix_connection(lambda: serving.connection, sock=connection)
        await serving.run()

    def close(self) -> None:
        """Close all connections and the event loop."""
        self._loop.run(self._endpoint.close())
        self._loop.close()
