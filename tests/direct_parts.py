"""Requests and workers for tests of direct mode: a waiter of any tier, and a worker's direct endpoint that does as told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from customer_limits import with_limits
from gateway.inference.pending import PendingRequest
from scheduler.payload import decode_payload
from scheduler.protocol.admission import Submission
from scheduler.protocol.batches import Outcome
from scheduler.protocol.direct import (
    HEADER,
    DirectBatch,
    DirectBusy,
    DirectItem,
    DirectResults,
    Hello,
    Welcome,
    body_length,
    pack,
    read_by_worker,
)


def submission(request_id: str = "req", **changes: Any) -> Submission:
    """A request of a customer that no limit of its own stops soon."""
    fields: dict[str, Any] = {
        "id": request_id,
        "tier": "free",
        "customer_id": "c",
        "api_key_id": "k",
        "nonce": "n",
        "model": "m",
        "input_bytes": 1,
        "total_ms": 4000,
        "queue_ms": 2000,
        "rate": 100.0,
        "burst": 100.0,
        "body": b"",
    }
    return Submission(**with_limits(fields | changes))


def waiting(request_id: str, started: float = 0.0, **changes: Any) -> PendingRequest:
    """A request that waits for its answer; `changes` go into its submission."""
    return PendingRequest(submission(request_id, **changes), started)


Serve = Callable[[DirectItem], Outcome | None]


def reverse(item: DirectItem) -> Outcome:
    """The input backwards."""
    text = decode_payload(item.body).input
    return Outcome(item.id, "", 2.5, len(text), "v1", text[::-1])


class FakeEndpoint:
    """A worker's door. What happens to each batch is in `behaviour`: serve, busy, hang up, be silent, answer nonsense."""

    def __init__(self, worker_id: str = "worker-1", serve: Serve = reverse, max_batch: int = 8) -> None:
        self.worker_id = worker_id
        self.serve = serve
        self.max_batch = max_batch
        self.behaviour = "serve"
        self.seconds = 0.0  # That a batch takes.
        self.hellos: list[Hello] = []
        self.batches: list[list[str]] = []
        self.address = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """No new connections, and none of the old ones."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, EOFError):
            await self._talk(reader, writer)
        self._writers.discard(writer)
        writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = read_by_worker(await _frame(reader))
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        if self.behaviour == "unfriendly":
            return
        writer.write(pack(Welcome(self.worker_id, self.max_batch)))
        while True:
            batch = read_by_worker(await _frame(reader))
            assert isinstance(batch, DirectBatch)
            self.batches.append([item.id for item in batch.items])
            answer = await self._answer(batch)
            if answer is None:
                return
            writer.write(answer)

    async def _answer(self, batch: DirectBatch) -> bytes | None:
        """The frame to send; None to hang up."""
        if self.behaviour == "hang up":
            return None
        if self.behaviour == "busy":
            return pack(DirectBusy(batch.seq, "Too many wait."))
        if self.behaviour == "nonsense":
            return HEADER.pack(3) + b"abc"
        if self.behaviour == "silent":
            await asyncio.Event().wait()
        await asyncio.sleep(self.seconds)
        outcomes = [self.serve(item) for item in batch.items]
        seq = batch.seq + (self.behaviour == "another")
        return pack(DirectResults(seq, [outcome for outcome in outcomes if outcome is not None]))


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(body_length(await reader.readexactly(HEADER.size)))


@contextlib.asynccontextmanager
async def endpoints(*behaviours: str) -> AsyncIterator[list[FakeEndpoint]]:
    """One door for each behaviour."""
    async with contextlib.AsyncExitStack() as stack:
        direct_workers = [
            await stack.enter_async_context(FakeEndpoint(f"worker-{n + 1}")) for n in range(len(behaviours))
        ]
        for door, behaviour in zip(direct_workers, behaviours, strict=True):
            door.behaviour = behaviour
        yield direct_workers
