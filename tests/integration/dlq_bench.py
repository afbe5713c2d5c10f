"""Dead letters in a test's hands: rows to look at, the command line on the test's own servers, and a worker that answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from typer.testing import CliRunner, Result

from pool import Pool
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import Outcome
from scheduler.request_id import new_request_id
from tierlane.operate.commands import dlq_app as app

Connection = Any


async def command(*arguments: str, redis_url: str = "", database_url: str = "", **options: Any) -> Result:
    """Run `tierlane dlq` with these arguments; a file of its own settings and a stack of this machine are out of reach."""
    env = {
        "TIERLANE_REDIS_URL": redis_url,
        "TIERLANE_DATABASE_URL": database_url,
        "TIERLANE_DATA_DIR": "/nonexistent",
        "TIERLANE_TOTAL_REQUEST_MS": "3100",
    }
    env |= options.pop("env", {})
    result: Result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments], env=env, **options)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


async def customer(db: Connection, name: str = "acme", tier: str = "paid") -> str:
    """A customer of a tier whose model `tiny` is served; its id."""
    await db.execute("INSERT INTO models (name) VALUES ('tiny') ON CONFLICT DO NOTHING")
    made: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ($1, $2) RETURNING id::text", name, tier)
    return made


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
    columns = ", ".join(row)
    places = ", ".join(f"${n + 2}" for n in range(len(row)))
    await db.execute(
        f"INSERT INTO dead_letters (dead_at, {columns}) VALUES (now() - make_interval(secs => $1), {places})",
        age_s,
        *row.values(),
    )
    request_id: str = row["request_id"]
    return request_id


@asynccontextmanager
async def worker(pool: Pool, answer: Callable[[str], Outcome]) -> AsyncIterator[None]:
    """A healthy worker with a scheduler of its own: whatever waits is run and answered."""

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
