"""Dead letters, and a worker that completes whatever is queued."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pool import Pool
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import Outcome
from scheduler.request_id import new_request_id

Connection = Any


async def customer(db: Connection, name: str = "acme", tier: str = "paid") -> str:
    """A customer, and the enabled model `tiny`; the customer's id."""
    await db.execute("INSERT INTO models (name) VALUES ('tiny') ON CONFLICT DO NOTHING")
    row_id: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ($1, $2) RETURNING id::text", name, tier)
    return row_id


async def letter(db: Connection, age_s: float = 0.0, text: str = "hello", **fields: Any) -> str:
    """A dead letter; its request id."""
    row: dict[str, Any] = {
        "request_id": new_request_id(),
        "customer_id": None,
        "tier": "paid",
        "model": "tiny",
        "error_code": "worker_lost",
        "attempts": 3,
        "worker_ids": ["w1", "w2", "w3"],
        "body": encode_payload(Payload("tiny", text, {"n": 1})),
    } | fields
    places = ", ".join(f"${n + 2}" for n in range(len(row)))
    await db.execute(
        f"INSERT INTO dead_letters (dead_at, {', '.join(row)}) VALUES (now() - make_interval(secs => $1), {places})",
        age_s,
        *row.values(),
    )
    request_id: str = row["request_id"]
    return request_id


@asynccontextmanager
async def worker(pool: Pool, answer: Callable[[str], Outcome]) -> AsyncIterator[None]:
    """A healthy worker with its own scheduler: it finishes each waiting request with the outcome of `answer`."""

    async def work() -> None:
        while True:
            await pool.worker_beats("w1")
            for tier in ("enterprise", "paid", "free"):
                if depth := await pool.depth(tier):
                    batch_id = await pool.form([(tier, depth)])
                    await pool.pop()
                    claimed = await pool.batches.claim(batch_id, "w1", "token")
                    if claimed:
                        await pool.batches.finish(batch_id, "token", [answer(r.id) for r in claimed.requests])
            await asyncio.sleep(0.01)

    await pool.worker_beats("w1")
    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
