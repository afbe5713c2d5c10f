"""Requests and workers for tests of direct mode: a pending request of any tier, and a worker's direct endpoint."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from customer_limits import submission_of
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
    """A request of a customer with wide limits."""
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
    return submission_of(fields | changes)


def waiting(request_id: str, started: float = 0.0, **changes: Any) -> PendingRequest:
    """A pending request; `changes` set fields of its submission."""
    return PendingRequest(submission(request_id, **changes), started)


Serve = Callable[[DirectItem], Outcome | None]


def reverse(item: DirectItem) -> Outcome:
    """Return the input reversed."""
    text = decode_payload(item.body).input
    return Outcome(item.id, "", 2.5, len(text), "v1", text[::-1])


class FakeEndpoint:
    """A worker's direct endpoint. `behaviour` is what it does with a batch.

    "serve", "busy", "slow", "hang up", "silent", "nonsense" (an invalid frame), "another" (results of another batch), or
    "unfriendly" (the hello is rejected).
    """

    def __init__(self, worker_id: str = "worker-1", serve: Serve = reverse, max_batch: int = 8) -> None:
        self.worker_id = worker_id
        self.serve = serve
        self.max_batch = max_batch
        self.behaviour = "serve"
        self.seconds = 0.0  # The time that a batch takes.
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
        """Close the listener and all connections."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, EOFError):
            await self._serve(reader, writer)
        self._writers.discard(writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            response = await self._response(batch)
            if response is None:
                return
            writer.write(response)

    async def _response(self, batch: DirectBatch) -> bytes | None:
        """Return the frame to send, or None to disconnect."""
        if self.behaviour == "hang up":
            return None
        if self.behaviour == "busy":
            return pack(DirectBusy(batch.seq, "The queue is full."))
        if self.behaviour == "slow":
            slow = [Outcome(item.id, "model_too_slow", -1.0, 0, "", "") for item in batch.items]
            return pack(DirectResults(batch.seq, slow))
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
    """One endpoint for each behaviour."""
    async with contextlib.AsyncExitStack() as stack:
        direct_workers = [
            await stack.enter_async_context(FakeEndpoint(f"worker-{n + 1}")) for n in range(len(behaviours))
        ]
        for endpoint, behaviour in zip(direct_workers, behaviours, strict=True):
            endpoint.behaviour = behaviour
        yield direct_workers
