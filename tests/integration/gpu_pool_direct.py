"""A worker in the test's process, and a client of its direct endpoint."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from configs import worker_config
from eventually import eventually
from gpu_pool.worker.worker import Worker
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import Outcome
from scheduler.protocol.direct import (
    HEADER,
    DirectBatch,
    DirectBusy,
    DirectItem,
    DirectResults,
    Hello,
    ToGateway,
    ToWorker,
    body_length,
    pack,
    read_by_gateway,
)
from scheduler.tracing import Spans

TOKEN = "the token of this service"

StartHere = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start_here(tmp_path: Path) -> AsyncIterator[StartHere]:
    """Start workers in this process, by default without a Redis; they end with the test."""
    started: list[tuple[Worker, asyncio.Task[int]]] = []

    async def start(
        backend: str = "simulated:20", *, loads: bool = True, spans: Spans | None = None, **changes: Any
    ) -> Worker:
        values = {"redis_url": f"unix://{tmp_path}/nobody", "worker_id": "w1", "service_token": TOKEN} | changes
        config = worker_config(backend=backend, **values)
        worker = Worker(config, spans=spans)
        task = asyncio.create_task(worker.run())
        await eventually(lambda: task.done() or worker._supervisor.ready.is_set() or not loads, "the model loads", 30.0)
        if task.done():
            task.result()  # Raises the StartError.
        started.append((worker, task))
        return worker

    yield start
    await DirectClient.close_all()
    for worker, task in started:
        worker.drain()
        assert await task == int(worker._broken)


class DirectClient:
    """One connection to a worker's direct endpoint; `start_here` closes those that a test leaves open."""

    _open: ClassVar[list["DirectClient"]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._seq = 0
        self._open.append(self)

    @classmethod
    async def open(cls, worker: Worker) -> "DirectClient":
        host, _, port = worker._endpoint.address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    @classmethod
    async def connected(cls, worker: Worker) -> "DirectClient":
        """A connection after the hello."""
        client = await cls.open(worker)
        client.send(Hello("g1", TOKEN))
        await client.receive()
        return client

    def send(self, message: ToWorker) -> None:
        self.send_bytes(pack(message))

    def send_bytes(self, frame: bytes) -> None:
        self._writer.write(frame)

    async def receive(self) -> ToGateway:
        length = body_length(await self._reader.readexactly(HEADER.size))
        return read_by_gateway(await self._reader.readexactly(length))

    async def closed(self) -> bool:
        """Whether the worker closes this connection without another message."""
        try:
            return await self._reader.read() == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._writer.close()

    @classmethod
    async def close_all(cls) -> None:
        while cls._open:
            writer = cls._open.pop()._writer
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def run(self, *items: DirectItem) -> DirectResults | DirectBusy:
        self._seq += 1
        self.send(DirectBatch(self._seq, list(items)))
        response = await self.receive()
        assert isinstance(response, DirectResults | DirectBusy)
        assert response.seq == self._seq
        return response

    async def outcomes(self, *items: DirectItem) -> dict[str, Outcome]:
        response = await self.run(*items)
        while (
            isinstance(response, DirectBusy) and "stalled" in response.reason
        ):  # On a busy machine: again, as gateways do.
            response = await self.run(*items)
        assert isinstance(response, DirectResults), response
        assert len(response.outcomes) == len(items)
        return {outcome.id: outcome for outcome in response.outcomes}

    async def outputs(self, *items: DirectItem) -> dict[str, str]:
        """By id: the error code, else the output."""
        outcomes = await self.outcomes(*items)
        return {name: outcome.error_code or outcome.output for name, outcome in outcomes.items()}


def item(text: str, ms_left: int = 10_000, body: bytes | None = None) -> DirectItem:
    """A request whose id is its text."""
    return DirectItem(text, ms_left, encode_payload(Payload("m", text, {})) if body is None else body)
