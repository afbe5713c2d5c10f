"""Jobs during the loss of PostgreSQL, Redis, the reconciler and the channel."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.config import JobConfig
from integration.gateway_fixtures import running_stack
from integration.jobs_bench import JobBench, JobCatalog, running_jobs
from integration.ledger_fixtures import database_url, db, dsn, own_server, postgres_server
from ledger.audit.rows import to_row
from ledger.audit.writer import prepare, write_rows
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord, decode_entry
from scheduler.redis_client.keys import JOBS_GATEWAY, Keys
from tierlane.embedded.postgres import EmbeddedPostgres

__all__ = ["database_url", "db", "own_server", "postgres_server"]

Db = asyncpg.Connection
KEY = {"Idempotency-Key": "order-80"}


@pytest.fixture
async def bench(client: Redis, redis_url: str, database_url: str, db: Db) -> AsyncIterator[JobBench]:
    """A gateway with jobs, and a worker behind it."""
    async with running_jobs(client, redis_url, database_url, db) as running:
        yield running


async def test_a_redis_that_comes_back_empty_gets_its_jobs_again(bench: JobBench) -> None:
    """Jobs are queued again under their ids, with their Idempotency-Keys, without another charge."""
    bench.stack.worker.hold = True
    ids = [await bench.accepted({"input": f"job {n}"}) for n in range(20)]
    held = await bench.accepted(**KEY)
    await bench.stack.redis.flushall()
    await eventually(lambda: bench.serving.scan.requeued >= 21, "all are queued again")

    status, document, headers = await bench.submit(**KEY)
    assert (status, document["task_id"], headers["idempotent-replayed"]) == (202, held, "true")
    bench.stack.worker.hold = False
    for number, task_id in enumerate(ids):
        assert (await bench.ended(task_id))["output"] == f"job {number}"[::-1]
    await bench.ended(held)
    assert sorted(bench.stack.worker.seen) == sorted([*ids, held])
    assert {row["attempts"] for row in await bench.db.fetch("SELECT attempts FROM jobs")} == {1}


async def test_more_than_a_page_is_queued_again(bench: JobBench) -> None:
    """After a loss all pages are scanned without a pause."""
    bench.serving.scan._page = 4
    bench.stack.worker.hold = True
    ids = [await bench.accepted({"input": f"job {n}"}) for n in range(30)]
    await bench.stack.redis.flushall()
    await eventually(lambda: bench.serving.scan.requeued >= 30, "all are queued again", timeout_s=4.0)
    bench.stack.worker.hold = False

    for task_id in ids:
        assert (await bench.ended(task_id))["status"] == "SUCCESS"


async def test_a_reply_that_nobody_heard_is_found(bench: JobBench) -> None:
    """A reply that was missed on the channel is found in the stored replies."""
    bench.serving.inbox.resolve_all = lambda _replies: None  # type: ignore[method-assign]
    task_id = await bench.accepted()

    assert await bench.ended(task_id) == {"status": "SUCCESS", "output": "olleh"}


async def test_another_keeper_goes_on(
    bench: JobBench, client: Redis, redis_url: str, database_url: str, db: Db
) -> None:
    """One of two reconcilers is active. When its session ends, one becomes active again, and jobs end."""
    config = JobConfig(database_url=database_url)
    second = running_stack(client, redis_url, catalog=JobCatalog(), jobs=config, gateway_id="g2", worker=False)
    async with second as other:
        serving = other.gateway.jobs.serving
        assert serving is not None
        keepers = [bench.serving.reconciler, serving.reconciler]
        assert [supervisor.active for supervisor in keepers] == [True, False]
        await bench.accepted()
        await db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()"
        )
        await eventually(lambda: not keepers[0].active, "the first keeper has lost its session")
        await eventually(lambda: sum(supervisor.active for supervisor in keepers) == 1, "there is a keeper again")

        task_id = await bench.accepted()
        assert (await bench.ended(task_id))["status"] == "SUCCESS"


async def audit_of(bench: JobBench) -> "tuple[dict[str, AcceptedRecord], dict[str, EndedRecord]]":
    """The records that the auditor would read."""
    records = [r for e in await bench.stack.redis.lrange(Keys().outbox, 0, -1) for r in decode_entry(e)[0]]
    begun = {r.id: r for r in records if isinstance(r, AcceptedRecord)}
    return begun, {r.id: r for r in records if isinstance(r, EndedRecord)}


async def test_the_audit_has_what_redis_lost(bench: JobBench) -> None:
    """A job whose audit entries were lost gets its audit row from the job; rows of the auditor are kept."""
    bench.serving.reconciler._audit_after_s = 0.0
    bench.serving.reconciler._maintenance_due = float("inf")
    lost, guessed, audited = [await bench.accepted() for _ in range(3)]
    for task_id in (lost, guessed, audited):
        await bench.ended(task_id)
    begun, over = await audit_of(bench)
    assert begun[lost].gateway_id == JOBS_GATEWAY
    await bench.db.execute("SET synchronous_commit = on")
    await prepare(bench.db)
    await write_rows(bench.db, [to_row(audited, begun[audited], over[audited])], 5.0)
    await write_rows(bench.db, [to_row(guessed, begun[guessed], None)], 5.0)
    await bench.db.execute(
        "UPDATE requests SET status = 'failed', error_code = 'abandoned', http_status = 504 WHERE id = $1", guessed
    )
    bench.serving.reconciler._maintenance_due = 0.0
    await eventually(lambda: bench.serving.reconciler.audited >= 2, "two rows are written")

    rows = {row["id"]: row for row in await bench.db.fetch("SELECT * FROM requests")}
    assert {task_id: rows[task_id]["status"] for task_id in rows} == dict.fromkeys(
        (lost, guessed, audited), "completed"
    )
    assert {row["http_status"] for row in rows.values()} == {200}
    assert {row["error_code"] for row in rows.values()} == {None}
    assert (rows[lost]["output_bytes"], rows[lost]["gateway_id"], rows[lost]["mode"]) == (5, "jobs", "queue")
    assert rows[audited]["worker_id"] == "worker-1"
    # And the auditor comes late with what it has.
    await write_rows(bench.db, [to_row(lost, begun[lost], over[lost])], 5.0)
    assert await bench.db.fetchval("SELECT count(*) FROM requests WHERE id = $1", lost) == 1


async def test_without_postgres_nothing_is_promised(
    client: Redis, redis_url: str, own_server: EmbeddedPostgres
) -> None:
    """Without PostgreSQL, jobs and results get a 503 and synchronous requests are served. Afterwards accepted jobs end."""
    db = await asyncpg.connect(dsn(own_server.url))
    async with running_jobs(client, redis_url, own_server.url, db) as bench:
        bench.stack.worker.hold = True
        task_id = await bench.accepted()
        await own_server.stop()

        for status, document, headers in (await bench.submit(), await bench.get(task_id)):
            assert (status, document["error"]["code"]) == (503, "catalog_unavailable")
            assert int(headers["retry-after"]) >= 1
            assert "x-ratelimit-remaining-requests" in headers
        bench.stack.worker.hold = False
        assert (await bench.stack.infer())[0] == 200

        await own_server.start()

        async def taken() -> bool:
            return (await bench.submit())[0] == 202

        await eventually(taken, "jobs are taken again")

        async def found() -> bool:
            return (await bench.get(task_id))[1].get("status") == "SUCCESS"

        await eventually(found, "the job from before has ended")
    db.terminate()


async def test_without_redis_nothing_is_promised(bench: JobBench) -> None:
    """In direct mode jobs are rejected, and results can be read."""
    bench.stack.worker.hold = True
    task_id = await bench.accepted()
    bench.stack.gateway.direct.active = True
    status, document, headers = await bench.submit()
    bench.stack.gateway.direct.active = False

    assert (status, document["error"]["code"]) == (503, "no_capacity")
    assert "retry-after" in headers
    assert (await bench.get(task_id))[1] == {"status": "PENDING"}


async def test_a_client_that_leaves_early_leaves_nothing_running(bench: JobBench) -> None:
    """If the client leaves before the insert, the request is cancelled."""
    bench.stack.worker.hold = True
    inserts = bench.serving.submit.store._inserts
    begun = asyncio.Event()

    async def never(_jobs: object) -> list[None]:
        begun.set()
        await asyncio.Event().wait()
        return []

    inserts._call = never  # type: ignore[assignment]
    asking = asyncio.create_task(bench.submit())
    await begun.wait()
    (request_id,) = [key.decode()[8:] for key in await bench.stack.redis.keys("request:*")]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    async def ended() -> bool:
        return await bench.stack.redis.hget(Keys().request(request_id), "code") == b"cancelled"

    await eventually(ended, "the request is ended")
    await eventually(lambda: bench.serving.submit.under_way == 0, "nobody is under way")
