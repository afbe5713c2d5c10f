"""Records for the outbox, and auditors with short intervals."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from msgspec import Raw
from redis.asyncio import Redis

from eventually import eventually
from ledger.audit.auditor import Auditor, AuditPolicy
from ledger.audit.window import HoldPolicy
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.audit_outbox import Outbox
from scheduler.protocol.audit_records import AcceptedRecord, DeadLetterRecord, EndedRecord, encode_records
from scheduler.redis_client.keys import Keys
from scheduler.request_id import created_ms, new_request_id

CUSTOMER = str(UUID(int=1))
KEYS = Keys()
QUICK = AuditPolicy(interval_s=0.01, hold=HoldPolicy(hold_s=0.02), standby_s=0.05)


async def count_requests(connection: Any) -> dict[str, int]:
    """The number of rows of the audit by status."""
    return dict(await connection.fetch("SELECT status, count(*) FROM requests GROUP BY status"))


def accepted(request_id: str, **fields: Any) -> AcceptedRecord:
    values = {"customer_id": CUSTOMER, "api_key_id": "k" * 12, "tier": "paid", "model": "tiny", "gateway_id": "g1"}
    values |= {"endpoint": "/v1/messages"}
    return AcceptedRecord(id=request_id, **values | {"input_bytes": 5, "trace_id": ""} | fields)


def ended(request_id: str, **fields: Any) -> EndedRecord:
    values: dict[str, Any] = {"state": "completed", "error_code": "", "ended_at_ms": created_ms(request_id) + 60}
    values |= {"latency_ms": 60.0, "queue_ms": 5.0, "gpu_ms": 50.0, "batch_id": "b1", "batch_size": 32}
    values |= {"worker_id": "w1", "attempts": 1, "tokens_used": 5, "output_bytes": 5}
    return EndedRecord(id=request_id, **values | fields)


def dead(request_id: str, input_: str = "hello", **fields: Any) -> DeadLetterRecord:
    body = encode_payload(Payload("tiny", input_, {}))
    values: dict[str, Any] = {
        "customer_id": CUSTOMER,
        "tier": "paid",
        "error_code": "worker_lost",
        "attempts": 3,
        "worker_ids": ["w1", "w2", "w3"],
        "body": Raw(b"\xdb" + len(body).to_bytes(4, "big") + body),  # As Lua packs a string.
    }
    return DeadLetterRecord(id=request_id, **values | fields)


def new_ids(count: int, age_ms: int = 0) -> list[str]:
    """New request ids, as if they had been made `age_ms` ago."""
    ids = [new_request_id() for _ in range(count)]
    return ["req_" + f"{int(i[4:16], 16) - age_ms:012x}" + i[16:] for i in ids]


async def put(client: Redis, *entries: Sequence[Any] | bytes) -> None:
    """Add entries to the outbox, the first one first."""
    encoded = [entry if isinstance(entry, bytes) else encode_records(list(entry)) for entry in entries]
    await client.lpush(KEYS.outbox, *encoded)


async def put_requests(client: Redis, ids: Sequence[str], step: int = 50) -> None:
    """Add completed requests, as admission and batches write them: `step` requests in each entry."""
    for at in range(0, len(ids), step):
        part = ids[at : at + step]
        await put(client, [accepted(i) for i in part], [ended(i) for i in part])


async def drained(client: Redis) -> bool:
    """Whether the outbox and the lists of all auditors are empty."""
    return not [key async for key in client.scan_iter("outbox*") if key != KEYS.outbox_bad.encode()]


def auditor_for(
    url: str,
    client: Redis,
    name: str = "a1",
    outbox: Outbox | None = None,
    clock: Callable[[], float] = time.monotonic,
    **policy: Any,
) -> Auditor:
    """An auditor with short intervals; `policy` changes fields of its policy."""
    fields = {name: getattr(QUICK, name) for name in AuditPolicy.__struct_fields__} | policy
    return Auditor(url, outbox or Outbox(client, KEYS, name), AuditPolicy(**fields), clock=clock)


@asynccontextmanager
async def running(auditor: Auditor) -> AsyncIterator[Auditor]:
    """Run an auditor in the background, and stop it at the end."""
    task = asyncio.create_task(auditor.run())
    try:
        yield auditor
        await auditor.stop()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def audit(url: str, client: Redis, **policy: Any) -> Auditor:
    """Run an auditor until the outbox is empty; the stopped auditor."""
    async with running(auditor_for(url, client, **policy)) as auditor:
        await eventually(lambda: drained(client), "the outbox is empty")
    return auditor
