"""A connection to a worker's direct endpoint, which runs one batch at a time.

It starts with a hello (scheduler/protocol/direct.py has the wire format).
"""

import asyncio
from collections.abc import Sequence

from gateway.circuit_breaker import Breaker
from scheduler.errors import TierlaneError
from scheduler.protocol.batches import Outcome
from scheduler.protocol.direct import (
    HEADER,
    DirectBatch,
    DirectBusy,
    DirectError,
    DirectItem,
    Hello,
    ToGateway,
    Welcome,
    body_length,
    pack,
    read_by_gateway,
)

CONNECT_S = 0.25
"""For the connection, and again for the worker's welcome."""

NO_WELCOME = (
    "closed the connection without a welcome: its TIERLANE_DIRECT_TOKEN differs from this gateway's, it has an older "
    "version, or it is shutting down."
)


class WorkerBusy(TierlaneError):
    """The worker did not run the batch; it may be sent to another worker."""


class WorkerConnection:
    """A connection and its circuit breaker. An error closes the connection, and the next call opens another."""

    def __init__(self, worker_id: str, address: str, hello: Hello) -> None:
        self.worker_id = worker_id
        self.address = address
        self.breaker = Breaker(max_failures=1, silence_s=None)
        self.max_batch = 1
        self.slow = False  # In its last response, the worker reported that its model is too slow.
        self._hello = pack(hello)
        self._seq = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """Connect, and receive the welcome. Raises DirectError."""
        if self._streams is not None and not self._streams[0].at_eof():
            return
        self.close()
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S):
                self._streams = await asyncio.open_connection(host.strip("[]"), int(port))
            async with asyncio.timeout(CONNECT_S):
                welcome = await self._exchange(self._hello)
        except asyncio.IncompleteReadError as error:
            self.close()
            raise DirectError(f"The worker at {self.address} {NO_WELCOME}") from error
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.close()
            raise DirectError(f"The worker at {self.address} cannot be called: {type(error).__name__}.") from error
        except BaseException:
            self.close()
            raise
        if not isinstance(welcome, Welcome):
            self.close()
            raise DirectError(f"The worker at {self.address} sent no welcome.")
        self.max_batch = max(1, welcome.max_batch)

    async def call(self, items: Sequence[DirectItem], timeout_s: float) -> list[Outcome]:
        """Run a batch. Raises WorkerBusy if it did not run, DirectError if its result is not known."""
        self._seq += 1
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(pack(DirectBatch(self._seq, list(items))))
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise DirectError(f"The worker at {self.address} was lost: {type(error).__name__}.") from error
        except BaseException:  # After a cancelled call, the next response on this connection belongs to that call.
            self.close()
            raise
        if isinstance(answer, Welcome) or answer.seq != self._seq:
            self.close()
            raise DirectError(f"The worker at {self.address} sent a response to another request.")
        if isinstance(answer, DirectBusy):
            raise WorkerBusy(answer.reason)
        return answer.outcomes

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _exchange(self, frame: bytes) -> ToGateway:
        if self._streams is None:
            raise DirectError(f"There is no connection to {self.address}.")
        reader, writer = self._streams
        writer.write(frame)
        await writer.drain()
        length = body_length(await reader.readexactly(HEADER.size))
        return read_by_gateway(await reader.readexactly(length))
