"""One connection to one worker's direct endpoint: a hello, then one batch at a time (scheduler.protocol.direct has the wire)."""

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
"""For the connection, and once more for the worker's welcome."""


REFUSED = (
    "closed the connection without a welcome: its TIERLANE_DIRECT_TOKEN is not the one of this gateway, it is of an older version, "
    "or it is shutting down."
)


class WorkerBusy(TierlaneError):
    """The worker did not run the batch; another one may take it."""


class DirectLine:
    """The connection and its breaker; what breaks a call closes the connection, and the next call makes another."""

    def __init__(self, worker_id: str, address: str, hello: Hello) -> None:
        self.worker_id = worker_id
        self.address = address
        self.breaker = Breaker(max_failures=1, silence_s=None)
        self.max_batch = 1
        self._hello = pack(hello)
        self._seq = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """Be connected and welcome. Raises DirectError."""
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
            raise DirectError(f"The worker at {self.address} {REFUSED}") from error
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.close()
            raise DirectError(f"The worker at {self.address} cannot be called: {type(error).__name__}.") from error
        except BaseException:
            self.close()
            raise
        if not isinstance(welcome, Welcome):
            self.close()
            raise DirectError(f"The worker at {self.address} did not say welcome.")
        self.max_batch = max(1, welcome.max_batch)

    async def call(self, items: Sequence[DirectItem], timeout_s: float) -> list[Outcome]:
        """Run a batch. Raises WorkerBusy where it did not run, DirectError where what became of it is not known."""
        self._seq += 1
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(pack(DirectBatch(self._seq, list(items))))
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise DirectError(f"The worker at {self.address} was lost: {type(error).__name__}.") from error
        except BaseException:  # A cancelled call, too, leaves a connection whose next answer is not ours.
            self.close()
            raise
        if isinstance(answer, Welcome) or answer.seq != self._seq:
            self.close()
            raise DirectError(f"The worker at {self.address} answered something that was not asked.")
        if isinstance(answer, DirectBusy):
            raise WorkerBusy(answer.reason)
        return answer.outcomes

    def close(self) -> None:
        """Hang up."""
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
