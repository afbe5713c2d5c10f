"""A gateway on loopback for tests: a literal catalog with real keys, and a worker that completes queued requests."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import openai
import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from configs import GONE_MS, LEASE_MS, gateway_config
from customer_limits import with_values
from eventually import eventually
from gateway.app import Gateway
from gateway.inference.traces import RequestTraces
from gateway.standby_scheduler import Schedule
from ledger.audit.queries import RequestRow
from ledger.catalog.api_key import NewKey, mint, verify
from ledger.catalog.snapshot import Identity, Key, Model, Snapshot, Tier
from ledger.postgres import Connection, closing, connect
from scheduler.chat_document import DOCUMENT
from scheduler.errors import ErrorCode, RequestError
from scheduler.payload import Task, decode_payload
from scheduler.protocol.batches import Batches, ClaimedRequest, Outcome
from scheduler.protocol.pool_view import WorkerReport, with_background
from scheduler.protocol.presence import Presence
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all
from scheduler.vectors import write_vector

SERVICE_TOKEN = "service-token-of-the-tests"
TIERS = ("enterprise", "paid", "free")
INFINITY = float("inf")


def tier(name: str, priority: int, share: float, **changes: Any) -> Tier:
    """A tier whose limits are out of reach, unless `changes` sets them."""
    fields: dict[str, Any] = {
        "name": name,
        "priority": priority,
        "guaranteed_share": share,
        "requests_per_second": 1000.0,
        "burst": 1000.0,
        "max_concurrency": 1000,
        "tokens_per_minute": None,
        "max_queue_depth": 1000,
        "max_queue_ms": 2000,
        "shed_depth": None,
        "shed_wait_ms": None,
    }
    return Tier(**with_values(fields | changes))


def model(name: str = "tiny", **changes: Any) -> Model:
    """A model of the default pool."""
    fields: dict[str, Any] = {
        "name": name,
        "pool": "default",
        "max_batch_size": 32,
        "max_batch_tokens": None,
        "max_wait_ms": 40,
        "rps_per_gpu": 1000.0,
        "target_utilization": 0.8,
        "cache_ttl_s": 0,
        "cache_scope": "customer",
        "capabilities": None,
        "enabled": True,
    }
    return Model(**fields | changes)


class LiteralCatalog:
    """A catalog with a literal snapshot; keys are minted and verified as in production."""

    def __init__(self) -> None:
        self.keys: dict[str, NewKey] = {}
        self.fresh = True
        self.problem: str | None = None
        self.bad_row = False
        self.left_s = 900.0
        self.snapshot: Snapshot | None = None
        self.set()

    def set(
        self,
        tiers: tuple[Tier, ...] | None = None,
        models: tuple[Model, ...] | None = None,
        key: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace the snapshot. `key` changes the identity of every key, or its `revoked` and `suspended`."""
        tiers = tiers or (tier("enterprise", 1, 0.05), tier("paid", 2, 0.25), tier("free", 3, 0.1))
        models = (model(),) if models is None else models
        rows = dict(self._key(each, dict(key or {})) for each in tiers)
        self.snapshot = Snapshot(1, tiers, {}, rows, {each.name: each for each in models}, ())

    def _key(self, row: Tier, changes: dict[str, Any]) -> tuple[str, Key]:
        new = self.keys.setdefault(row.name, mint())
        revoked, suspended = changes.pop("revoked", False), changes.pop("suspended", False)
        fields: dict[str, Any] = {
            "key_id": new.id,
            "customer_id": f"customer-{row.name}",
            "customer_name": row.name,
            "tier": row.name,
            "limits": row.limits,
            "max_queue_ms": row.max_queue_ms,
        }
        return new.id, Key(Identity(**with_values(fields | changes)), new.secret_hash, INFINITY, revoked, suspended)

    def age_s(self) -> float:
        return 0.0

    def identify(self, presented: str, wall_now: float) -> Identity:
        if self.snapshot is None:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE)
        return verify(presented, self.snapshot, wall_now, fresh=self.fresh)


Answerer = Callable[[ClaimedRequest], Outcome]


def reverse(member: ClaimedRequest) -> Outcome:
    """Return the input reversed."""
    text = decode_payload(member.body).input
    return Outcome(member.id, "", 1.5, len(text), "v1", text[::-1])


def reverse_or_vector(member: ClaimedRequest) -> Outcome:
    """Return a vector for an embedding, a server's response for a chat that is passed on, else the input reversed."""
    task = decode_payload(member.body).task
    if task is Task.CHAT_DOCUMENT:
        message = {"role": "assistant", "content": "hello", "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return Outcome(member.id, "", 1.5, 8, "v1", json.dumps({"choices": [choice]}) + "\n", 3, DOCUMENT)
    if task is not Task.EMBED:
        return reverse(member)
    return Outcome(member.id, "", 1.5, 4, "v1", write_vector([0.5, -1.0]))


class TestWorker:
    """Forms a batch of the queued requests and completes it with `answerer`; with `hold` it takes none."""

    __test__ = False

    def __init__(self, client: Redis, keys: Keys, answerer: Answerer = reverse) -> None:
        self.batches = Batches(client, keys, lease_ms=LEASE_MS)
        self.presence = Presence(client, keys, gone_ms=GONE_MS)
        self.answerer = answerer
        self.hold = False
        self.reaps = True  # As a scheduler does, so that the gateway does not.
        self.most = 32  # Requests of a tier in a batch.
        self.direct = ""  # The address of its direct endpoint.
        self.backend = "simulated"
        self.context_tokens = 0
        self.seen: list[str] = []
        self._client = client
        self._keys = keys
        self._count = 0

    async def heartbeat(self, worker_id: str = "worker-1", status: str = "ready") -> None:
        """Report a worker."""
        heartbeat = WorkerReport(
            worker_id,
            status,
            0.5,
            0,
            1000.0,
            5.0,
            self.backend,
            "v1",
            self.direct,
            context_tokens=self.context_tokens,
        )
        await self.presence.worker_beat(heartbeat)
        if not self.reaps:
            return
        with contextlib.suppress(OutOfMemoryError):  # A scheduler's script may write this to a full Redis.
            await self._client.set(self._keys.reaped_at, int(time.time() * 1000), px=60_000)

    async def run(self) -> None:
        while True:
            await self.heartbeat()
            if not self.hold:
                await self.turn()
            await asyncio.sleep(0.005)

    async def turn(self) -> None:
        """Form, claim and finish one batch."""
        self._count += 1
        queues = with_background(TIERS)
        await self.batches.form(f"batch-{self._count}", [(name, self.most) for name in queues], 1, queues)
        popped: bytes | None = await self._client.lpop(self._keys.batch_queue)  # type: ignore[assignment]
        claimed = await self.batches.claim(popped.decode(), "worker-1", f"token-{self._count}") if popped else None
        if claimed is not None and claimed.requests:
            self.seen += [member.id for member in claimed.requests]
            outcomes = [self.answerer(member) for member in claimed.requests]
            await self.batches.finish(claimed.batch_id, claimed.token, outcomes)


@dataclass
class Stack:
    """A running gateway with its catalog, worker, Redis and an HTTP client."""

    gateway: Gateway
    catalog: LiteralCatalog
    worker: TestWorker
    redis: Redis
    http: aiohttp.ClientSession
    stored: dict[str, RequestRow] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    def key(self, tier_name: str = "free") -> dict[str, str]:
        """Return the Authorization header of the tier's customer."""
        return {"Authorization": f"Bearer {self.catalog.keys[tier_name].text}"}

    async def infer(
        self, body: Any = None, tier_name: str = "free", **headers: str
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """POST an inference; return status, document and headers with lower-case names. `body` may be bytes."""
        raw = body if isinstance(body, bytes) else json.dumps({"input": "hello"} if body is None else body).encode()
        sent = {"Content-Type": "application/json", **self.key(tier_name), **headers}
        async with self.http.post(f"{self.url}/v1/inference", data=raw, headers=sent) as response:
            return response.status, await response.json(), lower(response.headers)

    async def internal(self, path: str, token: str = SERVICE_TOKEN) -> tuple[int, dict[str, Any]]:
        """GET with the service token."""
        headers = {"Authorization": f"Bearer {token}"}
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def raw(self, data: bytes, *, wait_s: float = 5.0) -> bytes:
        """Send bytes on a new connection and read until the server closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        writer.write(data)
        await writer.drain()
        try:
            async with asyncio.timeout(wait_s):
                return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def connected(database_url: str) -> AsyncIterator[Connection]:
    """A connection, opened as the gateway's role opens it."""
    connection = await connect(database_url, name="tests", connect_timeout_s=1.0, statement_timeout_ms=5000)
    async with closing(connection):
        yield connection


@contextlib.asynccontextmanager
async def running_stack(
    client: Redis,
    redis_url: str,
    *,
    worker: bool = True,
    direct_workers: Mapping[str, str] = {},
    catalog: LiteralCatalog | None = None,
    database_url: str = "",
    traces: RequestTraces | None = None,
    schedule: Schedule | None = None,
    **changes: Any,
) -> AsyncIterator[Stack]:
    """A ready gateway. `changes` set its configuration, `direct_workers` are workers with a direct endpoint.

    The dashboard's actions use the database at `database_url`.
    """
    settings: dict[str, Any] = {"redis_url": redis_url, "service_token": SERVICE_TOKEN, "notice_ms": 0}
    keys = Keys.at(redis_url)
    catalog = catalog or LiteralCatalog()
    test_worker = TestWorker(client, keys)
    await test_worker.heartbeat()
    for worker_id, address in direct_workers.items():
        test_worker.direct = address
        await test_worker.heartbeat(worker_id)
    test_worker.direct = direct_workers.get("worker-1", "")
    stored: dict[str, RequestRow] = {}

    async def find_stored(request_id: str) -> RequestRow | None:
        return stored.get(request_id)

    transaction = partial(connected, database_url) if database_url else None
    config = gateway_config(**settings | changes)
    gateway = Gateway(config, catalog, find_stored, connect=transaction, traces=traces, schedule=schedule)
    await gateway.start()
    tasks = [asyncio.create_task(test_worker.run())] if worker else []
    try:
        async with aiohttp.ClientSession() as http:
            await gateway.ready()
            yield Stack(gateway, catalog, test_worker, client, http, stored)
    finally:
        await end_all(tasks)
        await gateway.stop()


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker."""
    async with running_stack(client, redis_url) as running:
        running.worker.answerer = reverse_or_vector
        yield running


def openai_client(stack: Stack, *, retries: int = 0) -> openai.AsyncOpenAI:
    """OpenAI's client with the key of the free customer, and `retries` retries of its own."""
    key = stack.catalog.keys["free"].text
    return openai.AsyncOpenAI(api_key=key, base_url=f"{stack.url}/v1", max_retries=retries)


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client without retries."""
    async with openai_client(stack) as made:
        yield made


def lower(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with lower-case names."""
    return {name.lower(): value for name, value in headers.items()}


def head_of(raw: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return status, headers with lower-case names, and JSON body of one raw HTTP response."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    return int(status.split(" ")[1]), lower(dict(line.partition(": ")[::2] for line in lines)), json.loads(body)


def request_bytes(stack: Stack, *lines: bytes, body: bytes = b'{"input":"hello"}', length: int | None = None) -> bytes:
    """Return a valid POST /v1/inference with these header lines added."""
    head = [
        b"POST /v1/inference HTTP/1.1",
        b"Host: gateway",
        b"Authorization: " + stack.key()["Authorization"].encode(),
        b"Content-Length: %d" % (len(body) if length is None else length),
        *lines,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def accepted(stack: Stack, count: int = 1) -> None:
    """Wait until Redis has accepted so many requests that are pending at the gateway."""
    pending = stack.gateway.pending_requests
    await eventually(lambda: sum(each.accepted for each in pending.all()) == count, f"{count} requests are accepted")


async def served(stack: Stack, task: "asyncio.Task[Any]") -> bool:
    """Whether the response has arrived, after one more batch of the worker."""
    await stack.worker.turn()
    return task.done()
