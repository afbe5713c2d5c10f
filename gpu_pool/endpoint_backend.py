"""`openai:URL`: an endpoint that somebody else runs, as a backend. One event loop is kept for its whole life."""

import asyncio
import socket
from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import Item, ItemResult, Unwell
from gpu_pool.backends.openai_endpoint.backend import Endpoint
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.endpoint.access import take_access
from gpu_pool.endpoint.batch import HandBack
from gpu_pool.endpoint.serving import serve
from scheduler.errors import ErrorCode


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
