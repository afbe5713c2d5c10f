"""Asynchronous jobs through a real gateway, Redis and PostgreSQL: submit, read, cancel, repeat, expire."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import running_stack
from integration.jobs_bench import JobBench, running_jobs
from integration.ledger_fixtures import database_url, db, postgres_server
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import Outcome
from scheduler.protocol.cancellation import STORED_KEEP_MS
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id

__all__ = ["database_url", "db", "postgres_server"]

Db = asyncpg.Connection


@pytest.fixture
async def bench(client: Redis, redis_url: str, database_url: str, db: Db) -> AsyncIterator[JobBench]:
    """A gateway with jobs, and a worker behind it."""
    async with running_jobs(client, redis_url, database_url, db) as running:
        yield running


async def test_a_job_is_promised_and_then_found(bench: JobBench) -> None:
    """A submission gets a 202 with the location of the result. The request, its row and its audit row have the same id."""
    bench.stack.worker.hold = True
    status, document, headers = await bench.submit({"input": "hello"})
    task_id = document["task_id"]

    assert (status, document) == (202, {"task_id": task_id, "status": "PENDING"})
    assert headers["location"] == f"/v1/result/{task_id}"
    assert (headers["preference-applied"], headers["x-request-id"]) == ("respond-async", task_id)
    assert "x-ratelimit-remaining-requests" in headers
    row = await bench.row(task_id)
    assert (row["status"], row["tier"], row["model"]) == ("queued", "free", "tiny")
    assert (await bench.get(task_id))[1] == {"status": "PENDING"}

    bench.stack.worker.hold = False
    assert await bench.ended(task_id) == {"status": "SUCCESS", "output": "olleh"}
    status, _, headers = await bench.get(task_id)
    assert (status, headers["cache-control"]) == (200, "no-store")
    assert "x-ratelimit-remaining-requests" in headers
    assert bench.stack.worker.seen == [task_id]


async def test_another_customer_does_not_see_it(bench: JobBench) -> None:
    """Reading and cancelling a job of another customer returns the same 404 as an unknown task."""
    task_id = await bench.accepted()
    await bench.ended(task_id)

    for method in ("GET", "DELETE"):
        theirs, unknown = [await bench.call(method, each, "paid") for each in (task_id, new_request_id())]
        assert (theirs[0], unknown[0]) == (404, 404)
        assert theirs[1]["error"]["message"] == unknown[1]["error"]["message"]
        assert theirs[1]["error"]["code"] == "not_found"
        assert "x-ratelimit-remaining-requests" in theirs[2]
    assert (await bench.get("req_nonsense"))[0] == 404
    assert (await bench.get(task_id))[1]["status"] == "SUCCESS"


@pytest.mark.parametrize("prefer", ["wait=3"])
async def test_what_is_not_understood_is_passed_over(bench: JobBench, prefer: str) -> None:
    """Another preference is ignored: the response has the output."""
    status, document, headers = await bench.stack.infer(Prefer=prefer)

    assert (status, document["output"]) == (200, "olleh")
    assert "preference-applied" not in headers


async def test_other_doors_answer_at_once(bench: JobBench) -> None:
    """Other endpoints ignore the preference."""
    headers = {**bench.stack.key(), "Prefer": "respond-async"}
    async with bench.stack.http.post(
        f"{bench.stack.url}/api/inference", json={"input": "hello"}, headers=headers
    ) as answer:
        assert (answer.status, (await answer.json())["output"]) == (200, "olleh")


@pytest.mark.parametrize(
    ("code", "sentence", "told"),
    [
        ("poison_request", "", ("poison_request", "The model cannot process this input.", None)),
        ("invalid_request", "top_p is too large", ("invalid_request", "top_p is too large", "parameters")),
    ],
)
async def test_a_failure_is_told_as_it_would_have_been_answered(
    bench: JobBench, code: str, sentence: str, told: tuple[str, str, str | None]
) -> None:
    """`error` has the form of all errors."""
    bench.stack.worker.answerer = lambda member: Outcome(member.id, code, 1.5, 0, "v1", sentence)
    task_id = await bench.accepted()
    document = await bench.ended(task_id)

    assert document["status"] == "FAILURE"
    error = document["error"]
    assert (error["code"], error["message"], error["param"]) == told
    assert error["request_id"] == task_id


async def test_any_text_survives(bench: JobBench) -> None:
    """An output may contain NUL, which the text type of PostgreSQL cannot store."""
    task_id = await bench.accepted({"input": "a\0b\u00e9\U0001f600"})

    assert (await bench.ended(task_id))["output"] == "\U0001f600\u00e9b\0a"


async def test_cancelling_ends_what_waits(bench: JobBench) -> None:
    """A cancelled job is returned with a 200 and never runs; a second call returns the same."""
    bench.stack.worker.hold = True
    task_id = await bench.accepted()

    for _ in range(2):
        status, document, _ = await bench.call("DELETE", task_id)
        assert (status, document["status"], document["error"]["code"]) == (200, "FAILURE", "cancelled")
    bench.stack.worker.hold = False
    after = await bench.accepted()
    await bench.ended(after)
    assert bench.stack.worker.seen == [after]


async def test_cancelling_what_has_ended_changes_nothing(bench: JobBench) -> None:
    """The result is kept."""
    task_id = await bench.accepted()
    await bench.ended(task_id)

    assert (await bench.call("DELETE", task_id))[1] == {"status": "SUCCESS", "output": "olleh"}


async def test_the_same_key_is_the_same_task(bench: JobBench) -> None:
    """The same key returns the same task before and after its end; another body is rejected, and the model runs once."""
    key = {"Idempotency-Key": "order-78"}
    bench.stack.worker.hold = True
    first = await bench.submit(**key)
    running = await bench.submit(**key)
    bench.stack.worker.hold = False
    await bench.ended(first[1]["task_id"])
    ended = await bench.submit(**key)
    other = await bench.submit({"input": "other"}, **key)

    assert [each[0] for each in (first, running, ended)] == [202, 202, 202]
    assert first[1] == running[1] == ended[1]
    assert "idempotent-replayed" not in first[2]
    assert (running[2]["idempotent-replayed"], ended[2]["idempotent-replayed"]) == ("true", "true")
    assert (other[0], other[1]["error"]["code"]) == (422, "idempotency_key_reused")
    assert len(bench.stack.worker.seen) == 1


async def test_redis_does_not_keep_what_postgres_has(bench: JobBench, client: Redis) -> None:
    """Once its end is committed, Redis keeps a job's row as long as that of other requests; with an Idempotency-Key, a day."""
    bench.stack.worker.hold = True
    plain = await bench.accepted()
    keyed = await bench.accepted(**{"Idempotency-Key": "order-80"})
    names = [Keys().request(task_id) for task_id in (plain, keyed)]
    waiting = [await client.pttl(name) for name in names]
    bench.stack.worker.hold = False
    await bench.ended(plain)
    await bench.ended(keyed)

    assert min(waiting) > 1_000_000  # Its 10 minutes, and 10 more for an outage of PostgreSQL.

    async def short() -> bool:
        return await client.pttl(names[0]) <= STORED_KEEP_MS

    await eventually(short, "the row is not kept for long")
    assert await client.pttl(names[1]) > 80_000_000
    assert (await bench.get(plain))[0] == 200


async def test_a_key_of_one_who_waited_gives_its_answer(bench: JobBench) -> None:
    """The key of a synchronous request returns its response, and no job is created."""
    key = {"Idempotency-Key": "order-79"}
    first = await bench.stack.infer(**key)
    again = await bench.submit(**key)

    assert (again[0], again[1]["output"], again[2]["idempotent-replayed"]) == (200, "olleh", "true")
    assert again[1]["request_id"] == first[1]["request_id"]


async def test_what_limits_refuse_never_reaches_postgres(bench: JobBench) -> None:
    """A job that the concurrency limit rejects causes no query."""
    bench.stack.catalog.set(key={"max_concurrency": 1})
    bench.stack.worker.hold = True
    task_id = await bench.accepted()
    asked = bench.serving.submit.store._inserts.calls
    status, document, headers = await bench.submit()

    assert (status, document["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "retry-after" in headers
    assert bench.serving.submit.store._inserts.calls == asked
    assert [row["id"] for row in await bench.db.fetch("SELECT id FROM jobs")] == [task_id]


async def test_jobs_of_one_moment_share_a_statement(bench: JobBench) -> None:
    """Jobs that arrive during an insert share the next one, and reads are shared in the same way."""
    ids = await asyncio.gather(*(bench.accepted({"input": f"n {n}"}) for n in range(60)))
    calls = bench.serving.submit.store._inserts.calls
    reads = bench.serving.submit.store._reads.calls
    await asyncio.gather(*(bench.get(task_id) for task_id in ids))

    assert len(set(ids)) == 60
    assert calls < 40
    assert bench.serving.submit.store._reads.calls - reads < 40
    for number, task_id in enumerate(ids):
        assert (await bench.ended(task_id))["output"] == f"n {number}"[::-1]


async def test_a_job_that_cannot_be_stored_is_not_promised(bench: JobBench) -> None:
    """A job whose customer was deleted gets a 500 and its request is ended; jobs in the same statement are accepted."""
    await bench.db.execute("DELETE FROM customers WHERE name = 'paid'")
    bench.stack.worker.hold = True
    (status, document, _), task_id = await asyncio.gather(
        bench.submit(tier_name="paid"), bench.accepted(tier_name="free")
    )

    assert (status, document["error"]["code"]) == (500, "internal_error")
    refused = document["error"]["request_id"]

    async def ended() -> bool:
        return await bench.stack.redis.hget(Keys().request(refused), "state") == b"failed"

    await eventually(ended, "the request without a row is ended")
    bench.stack.worker.hold = False
    await bench.ended(task_id)
    assert bench.stack.worker.seen == [task_id]


async def test_results_are_forgotten(client: Redis, redis_url: str, database_url: str, db: Db) -> None:
    """Expired results are not found, and their rows are deleted."""
    async with running_jobs(client, redis_url, database_url, db, jobs={"kept_ms": 300}) as bench:
        bench.serving.reconciler._audit_after_s = 0.0
        task_id = await bench.accepted()

        async def gone() -> bool:
            return (await bench.get(task_id))[0] == 404

        await eventually(gone, "the result is forgotten")

        async def deleted() -> bool:
            bench.serving.reconciler._maintenance_due = 0.0
            return not await db.fetchval("SELECT count(*) FROM jobs")

        await eventually(deleted, "its row is deleted")


async def test_a_job_ends_at_its_deadline(client: Redis, redis_url: str, database_url: str, db: Db) -> None:
    """A job fails at its own deadline; the queue time of its tier does not apply."""
    async with running_jobs(client, redis_url, database_url, db, jobs={"total_ms": 3000}) as bench:
        bench.stack.catalog.set(key={"max_queue_ms": 1})
        bench.stack.worker.hold = True
        task_id = await bench.accepted()
        row = await bench.row(task_id)
        bench.stack.worker.hold = False  # Past the tier's patience, which is not a job's.

        assert (await bench.ended(task_id))["status"] == "SUCCESS"
        assert 2.0 < (row["deadline"] - row["created_at"]).total_seconds() < 3.5

        bench.stack.worker.hold = True
        late = await bench.accepted()
        document = await bench.ended(late, timeout_s=15.0)
        assert document["error"]["code"] == ErrorCode.DEADLINE_EXCEEDED


async def test_without_jobs_nobody_hears_the_preference(client: Redis, redis_url: str) -> None:
    """A gateway without a database ignores the preference and returns 404 for results."""
    async with running_stack(client, redis_url) as stack:
        status, document, _ = await stack.infer(Prefer="respond-async")
        assert (status, document["output"]) == (200, "olleh")
        async with stack.http.get(f"{stack.url}/v1/result/{document['request_id']}", headers=stack.key()) as answer:
            assert answer.status == 404
