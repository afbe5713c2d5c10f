"""Asynchronous jobs over HTTP: submit, read, cancel, repeat, expire, share runs, and recover from losses."""

import asyncio
from urllib.parse import urlsplit

import asyncpg
import msgspec
import pytest
from redis.asyncio import Redis

from configs import job_config
from eventually import eventually
from gateway.direct.mode import Direct
from integration.gateway_fixtures import model, running_stack
from integration.jobs_fixtures import JobBench, JobCatalog, StartJobs, bench, running_jobs, start_jobs
from integration.ledger_fixtures import database_url, db, dsn, own_server, postgres_server
from ledger.audit.rows import to_row
from ledger.audit.writer import prepare, write_rows
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord, decode_entry
from scheduler.protocol.batches import Outcome
from scheduler.protocol.cancellation import STORED_KEEP_MS
from scheduler.redis_client.keys import JOBS_GATEWAY, Keys
from scheduler.request_id import new_request_id
from scheduler.states import background_of
from tierlane_local.embedded.postgres import EmbeddedPostgres

__all__ = ["bench", "database_url", "db", "own_server", "postgres_server", "start_jobs"]

HELLO = {"status": "SUCCESS", "output": "olleh"}
Db = asyncpg.Connection
KEY = {"Idempotency-Key": "order-80"}
END_LEADER = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()"
)


async def test_a_job_is_accepted_and_its_result_is_read(bench: JobBench) -> None:
    """A submission gets a 202 with the location of the result; any text survives, also NUL.

    Until its end, responses say when to read it again; then the result says what it used.
    """
    bench.stack.worker.hold = True
    status, document, headers = await bench.submit({"input": "a\0b\u00e9\U0001f600"})
    task_id = document["task_id"]

    assert (status, document) == (202, {"task_id": task_id, "status": "PENDING"})
    assert headers["location"] == f"/v1/result/{task_id}"
    assert (headers["preference-applied"], headers["x-request-id"]) == ("respond-async", task_id)
    assert "x-ratelimit-remaining-requests" in headers
    assert headers["retry-after"] == "1"
    row = await bench.row(task_id)
    assert (row["status"], row["tier"], row["model"]) == ("queued", "free", "tiny")
    status, document, headers = await bench.get(task_id)
    assert (document, headers["retry-after"]) == ({"status": "PENDING"}, "1")

    bench.stack.worker.hold = False
    assert await bench.ended(task_id) == {"status": "SUCCESS", "output": "\U0001f600\u00e9b\0a"}
    status, _, headers = await bench.get(task_id)
    assert (status, headers["cache-control"]) == (200, "no-store")
    assert "retry-after" not in headers
    assert bench.metadata is not None
    ended = await bench.row(task_id)
    elapsed_ms = (ended["completed_at"] - ended["created_at"]).total_seconds() * 1000
    assert bench.metadata == {
        "tokens_used": ended["tokens_used"] or 0,
        "latency_ms": pytest.approx(elapsed_ms, abs=0.01),
        "model": "tiny",
        "tier": "free",
    }
    assert "x-ratelimit-remaining-requests" in headers
    assert bench.stack.worker.seen == [task_id]


async def test_another_customer_cannot_read_or_cancel_a_job(bench: JobBench) -> None:
    """The job of another customer returns the same 404 as an unknown task."""
    task_id = await bench.accepted()
    await bench.ended(task_id)

    for method in ("GET", "DELETE"):
        theirs, unknown = [await bench.call(method, each, "paid") for each in (task_id, new_request_id())]
        assert (theirs[0], unknown[0]) == (404, 404)
        assert theirs[1]["error"]["code"] == "not_found"
        assert theirs[1]["error"]["message"] == unknown[1]["error"]["message"]
    assert (await bench.get("req_nonsense"))[0] == 404
    assert (await bench.get(task_id))[1] == HELLO


async def test_only_the_async_preference_on_the_inference_endpoint_makes_a_job(
    bench: JobBench, client: Redis, redis_url: str
) -> None:
    """Other endpoints and a gateway without a database ignore it; that gateway returns 404 for results."""
    url, headers = f"{bench.stack.url}/api/inference", {**bench.stack.key(), "Prefer": "respond-async"}
    async with bench.stack.http.post(url, json={"input": "hello"}, headers=headers) as response:
        assert (response.status, (await response.json())["output"]) == (200, "olleh")
    async with running_stack(client, redis_url, gateway_id="g2") as stack:
        status, document, _ = await stack.infer(Prefer="respond-async")
        assert (status, document["output"]) == (200, "olleh")
        async with stack.http.get(f"{stack.url}/v1/result/{document['request_id']}", headers=stack.key()) as response:
            assert response.status == 404


async def test_a_failed_job_has_the_error_of_a_synchronous_request(bench: JobBench) -> None:
    """`error` has code, message and param, and the task id as the request id."""
    for code, message, param in (
        ("poison_request", "The model cannot process this input.", None),
        ("invalid_request", "top_p is too large", "parameters"),
    ):
        reported = message if param else ""
        bench.stack.worker.answerer = lambda member, c=code, m=reported: Outcome(member.id, c, 1.5, 0, "v1", m)
        task_id = await bench.accepted()
        document = await bench.ended(task_id)
        error = document["error"]
        assert document["status"] == "FAILURE"
        assert (error["code"], error["message"], error["param"]) == (code, message, param)
        assert error["request_id"] == task_id


async def test_a_waiting_job_is_cancelled(bench: JobBench) -> None:
    """It never runs, and a second call returns the same; cancelling an ended job keeps its result."""
    bench.stack.worker.hold = True
    task_id = await bench.accepted()
    for _ in range(2):
        status, document, _ = await bench.call("DELETE", task_id)
        assert (status, document["status"], document["error"]["code"]) == (200, "FAILURE", "cancelled")
    bench.stack.worker.hold = False
    after = await bench.accepted()
    await bench.ended(after)

    assert bench.stack.worker.seen == [after]
    assert (await bench.call("DELETE", after))[1] == HELLO


async def test_an_idempotency_key_selects_one_task(bench: JobBench) -> None:
    """The same key returns the same task before and after its end; another body is rejected.

    The model runs once. The key of a synchronous request returns its response, and no job is created.
    """
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

    synchronous = await bench.stack.infer(**{"Idempotency-Key": "order-79"})
    again = await bench.submit(**{"Idempotency-Key": "order-79"})
    assert (again[0], again[1]["output"], again[2]["idempotent-replayed"]) == (200, "olleh", "true")
    assert again[1]["request_id"] == synchronous[1]["request_id"]


async def test_redis_keeps_a_stored_job_for_a_short_time(bench: JobBench, client: Redis) -> None:
    """Redis keeps a job until its deadline and an outage are over, and shortly once its end is committed.

    With an Idempotency-Key it keeps the row for a day.
    """
    bench.stack.worker.hold = True
    plain, keyed = await bench.accepted(), await bench.accepted(**{"Idempotency-Key": "order-80"})
    names = [Keys().request(task_id) for task_id in (plain, keyed)]
    assert min([await client.pttl(name) for name in names]) > 1_000_000  # 10 minutes, and 10 more for an outage.
    bench.stack.worker.hold = False
    await bench.ended(plain)
    await bench.ended(keyed)

    async def is_short() -> bool:
        return await client.pttl(names[0]) <= STORED_KEEP_MS

    await eventually(is_short, "the row expires soon")
    assert await client.pttl(names[1]) > 80_000_000
    assert (await bench.get(plain))[0] == 200


async def test_a_job_rejected_by_limits_does_not_reach_postgresql(bench: JobBench) -> None:
    """A job that exceeds the concurrency limit gets a 429 and causes no insert."""
    bench.stack.catalog.set(key={"max_concurrency": 1})
    bench.stack.worker.hold = True
    task_id = await bench.accepted()
    inserts = bench.serving.store._inserts
    calls = inserts.calls
    status, document, headers = await bench.submit()

    assert (status, document["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "retry-after" in headers
    assert inserts.calls == calls
    assert [row["id"] for row in await bench.db.fetch("SELECT id FROM jobs")] == [task_id]


async def test_a_job_that_cannot_be_stored_is_not_accepted(bench: JobBench) -> None:
    """A job whose customer was deleted gets a 500 and its request is ended; jobs in the same statement are accepted."""
    await bench.db.execute("DELETE FROM customers WHERE name = 'paid'")
    bench.stack.worker.hold = True
    (status, document, _), task_id = await asyncio.gather(bench.submit(tier_name="paid"), bench.accepted())

    assert (status, document["error"]["code"]) == (500, "internal_error")
    key = Keys().request(document["error"]["request_id"])

    async def is_ended() -> bool:
        return await bench.stack.redis.hget(key, "state") == b"failed"

    await eventually(is_ended, "the request without a row is ended")
    bench.stack.worker.hold = False
    await bench.ended(task_id)
    assert bench.stack.worker.seen == [task_id]


async def test_expired_results_are_deleted(start_jobs: StartJobs) -> None:
    """They return 404, and then their rows are deleted."""
    async with start_jobs(jobs={"kept_ms": 300}) as bench:
        bench.serving.reconciler._audit_after_s = 0.0
        task_id = await bench.accepted()

        async def is_gone() -> bool:
            return (await bench.get(task_id))[0] == 404

        async def is_deleted() -> bool:
            bench.serving.reconciler._maintenance_due = 0.0
            return not await bench.db.fetchval("SELECT count(*) FROM jobs")

        await eventually(is_gone, "the result has expired")
        await eventually(is_deleted, "its row is deleted")


async def test_a_job_has_its_own_deadline(start_jobs: StartJobs) -> None:
    """The queue time of its tier does not apply; at its deadline it fails."""
    async with start_jobs(jobs={"total_ms": 3000}) as bench:
        bench.stack.catalog.set(key={"max_queue_ms": 1})
        bench.stack.worker.hold = True
        task_id = await bench.accepted()
        row = await bench.row(task_id)
        bench.stack.worker.hold = False

        assert (await bench.ended(task_id))["status"] == "SUCCESS"
        assert 2.0 < (row["deadline"] - row["created_at"]).total_seconds() < 3.5

        bench.stack.worker.hold = True
        late = await bench.ended(await bench.accepted(), timeout_s=15.0)
        assert late["error"]["code"] == ErrorCode.DEADLINE_EXCEEDED


@pytest.fixture
async def cached(bench: JobBench) -> JobBench:
    """Results of the model are cached for a minute."""
    bench.stack.catalog.set(models=(model(cache_ttl_s=60),))
    await eventually(lambda: bench.stack.gateway.heartbeat.model_version, "the model version is known")
    return bench


async def test_a_cached_result_serves_jobs_and_synchronous_requests(cached: JobBench) -> None:
    """The model runs once for equal inputs."""
    first = await cached.accepted({"input": "hello"})
    assert await cached.ended(first) == HELLO
    assert await cached.ended(await cached.accepted({"input": "hello"})) == HELLO
    status, document, _ = await cached.stack.infer()

    assert (status, document["output"], document["metadata"]["cached"]) == (200, "olleh", True)
    assert cached.stack.worker.seen == [first]


async def test_equal_jobs_and_synchronous_requests_share_one_run(cached: JobBench) -> None:
    """After the first of them is cancelled, the others still get the result."""
    cached.stack.worker.hold = True
    first, *others = [await cached.accepted({"input": "hello"}) for _ in range(3)]
    waiting = asyncio.create_task(cached.stack.infer())
    await eventually(lambda: len(cached.stack.gateway.pending_requests) == 1, "the synchronous request waits")
    status, document, _ = await cached.call("DELETE", first)
    assert (status, document["status"]) == (200, "FAILURE")
    cached.stack.worker.hold = False

    status, document, _ = await waiting
    assert (status, document["output"]) == (200, "olleh")
    assert [await cached.ended(job) for job in others] == [HELLO] * 2
    assert len(cached.stack.worker.seen) == 1


async def test_jobs_are_queued_again_after_redis_lost_everything(bench: JobBench) -> None:
    """All pages are scanned at once; jobs keep ids, Idempotency-Keys and endpoint, without another charge."""
    bench.serving.scan._page = 4
    bench.stack.worker.hold = True
    ids = [await bench.accepted({"input": f"job {n}"}) for n in range(20)]
    keyed = await bench.accepted(**KEY)
    await bench.stack.redis.flushall()
    await eventually(lambda: bench.serving.scan.requeued >= 21, "all are queued again", timeout_s=4.0)

    status, document, headers = await bench.submit(**KEY)
    assert (status, document["task_id"], headers["idempotent-replayed"]) == (202, keyed, "true")
    bench.stack.worker.hold = False
    for number, task_id in enumerate(ids):
        assert (await bench.ended(task_id))["output"] == f"job {number}"[::-1]
    await bench.ended(keyed)
    assert sorted(bench.stack.worker.seen) == sorted([*ids, keyed])
    records = [r for e in await bench.stack.redis.lrange(Keys().outbox, 0, -1) for r in decode_entry(e)[0]]
    assert [r.endpoint for r in records if isinstance(r, AcceptedRecord)] == ["/v1/inference"] * 21
    assert {row["attempts"] for row in await bench.db.fetch("SELECT attempts FROM jobs")} == {1}


async def test_a_job_may_ask_for_the_priority_of_interactive_requests(bench: JobBench) -> None:
    """If its tier allows it, the job waits in the tier queue, also when it is queued again; else it gets a 400."""
    interactive = {"input": "hello", "priority": "interactive"}
    status, document, _ = await bench.submit(interactive)
    assert (status, document["error"]["code"], document["error"]["param"]) == (400, "invalid_request", "priority")

    assert bench.catalog.snapshot is not None
    rows = bench.catalog.snapshot.tiers
    bench.catalog.set(tiers=tuple(msgspec.structs.replace(row, interactive_jobs=row.name == "free") for row in rows))
    bench.stack.worker.hold = True
    assert (await bench.submit(interactive, "paid"))[0] == 400
    first, second = await bench.accepted(interactive, **KEY), await bench.accepted()

    async def waiting(queue: str) -> int:
        redis, keys = bench.stack.redis, Keys()
        return await redis.llen(keys.queue(queue)) + int(await redis.get(keys.waiting(queue)) or 0)

    assert (await waiting("free"), await waiting(background_of("free"))) == (1, 1)
    assert (await bench.submit(interactive, **KEY))[1]["task_id"] == first
    assert (await bench.submit({"input": "hello"}, **KEY))[1]["error"]["code"] == "idempotency_key_reused"
    await bench.stack.redis.flushall()
    await eventually(lambda: bench.serving.scan.requeued >= 2, "both are queued again", timeout_s=4.0)
    assert (await waiting("free"), await waiting(background_of("free"))) == (1, 1)
    bench.stack.worker.hold = False
    assert [await bench.ended(task_id) for task_id in (first, second)] == [HELLO] * 2


async def test_a_missed_reply_is_found(bench: JobBench) -> None:
    """A reply that was missed on the channel is found in the stored replies."""
    bench.serving.inbox.resolve_all = lambda _replies: None  # type: ignore[method-assign]
    task_id = await bench.accepted()

    assert await bench.ended(task_id) == {"status": "SUCCESS", "output": "olleh"}


async def test_another_reconciler_takes_over(
    bench: JobBench, client: Redis, redis_url: str, database_url: str, db: Db
) -> None:
    """One of two reconcilers is active. When its session ends, one becomes active again, and jobs end."""
    config = job_config(database_url)
    second = running_stack(client, redis_url, catalog=JobCatalog(), jobs=config, gateway_id="g2", worker=False)
    async with second as other:
        serving = other.gateway.jobs.serving
        assert serving is not None
        reconcilers = [bench.serving.reconciler, serving.reconciler]
        assert [each.active for each in reconcilers] == [True, False]
        await bench.accepted()
        await db.execute(END_LEADER)
        await eventually(lambda: not reconcilers[0].active, "the first has lost its session")
        await eventually(lambda: sum(each.active for each in reconcilers) == 1, "one is active again")

        assert (await bench.ended(await bench.accepted()))["status"] == "SUCCESS"


async def test_lost_audit_entries_are_replaced(bench: JobBench) -> None:
    """A job whose audit entries were lost gets its audit row from the job, once; rows of the auditor are kept."""
    reconciler = bench.serving.reconciler
    reconciler._audit_after_s, reconciler._maintenance_due = 0.0, float("inf")
    lost, abandoned, audited = [await bench.accepted() for _ in range(3)]
    for task_id in (lost, abandoned, audited):
        await bench.ended(task_id)
    records = [r for e in await bench.stack.redis.lrange(Keys().outbox, 0, -1) for r in decode_entry(e)[0]]
    begun = {r.id: r for r in records if isinstance(r, AcceptedRecord)}
    ends = {r.id: r for r in records if isinstance(r, EndedRecord)}
    assert begun[lost].gateway_id == JOBS_GATEWAY
    await bench.db.execute("SET synchronous_commit = on")
    await prepare(bench.db)
    await write_rows(bench.db, [to_row(audited, begun[audited], ends[audited])], 5.0)
    await write_rows(bench.db, [to_row(abandoned, begun[abandoned], None)], 5.0)
    await bench.db.execute(
        "UPDATE requests SET status = 'failed', error_code = 'abandoned', http_status = 504 WHERE id = $1", abandoned
    )
    reconciler._maintenance_due = 0.0
    await eventually(lambda: reconciler.audited >= 2, "two rows are written")

    rows = {row["id"]: row for row in await bench.db.fetch("SELECT * FROM requests")}
    assert {task_id: (row["status"], row["http_status"], row["error_code"]) for task_id, row in rows.items()} == (
        dict.fromkeys((lost, abandoned, audited), ("completed", 200, None))
    )
    assert (rows[lost]["output_bytes"], rows[lost]["gateway_id"], rows[lost]["mode"]) == (5, "jobs", "queue")
    assert {row["endpoint"] for row in rows.values()} == {"/v1/inference"}
    assert rows[audited]["worker_id"] == "worker-1"
    await write_rows(bench.db, [to_row(lost, begun[lost], ends[lost])], 5.0)  # The auditor is late.
    assert await bench.db.fetchval("SELECT count(*) FROM requests WHERE id = $1", lost) == 1


async def test_without_postgresql_jobs_are_rejected(
    client: Redis, redis_url: str, own_server: EmbeddedPostgres
) -> None:
    """Jobs and results get a 503 and synchronous requests are served; health says so. Afterwards accepted jobs end."""
    db = await asyncpg.connect(dsn(own_server.url))
    async with running_jobs(client, redis_url, own_server.url, db) as bench:
        bench.stack.worker.hold = True
        task_id = await bench.accepted()
        await own_server.stop()

        for status, document, headers in (await bench.submit(), await bench.get(task_id)):
            assert (status, document["error"]["code"]) == (503, "catalog_unavailable")
            assert int(headers["retry-after"]) >= 1
            assert "x-ratelimit-remaining-requests" in headers
        stored = await stored_jobs(bench)
        assert (stored["status"], stored["code"]) == ("warn", "jobs_not_stored")
        assert "cannot be stored and get 503: PostgreSQL is not available" in stored["output"]
        bench.stack.worker.hold = False
        assert (await bench.stack.infer())[0] == 200

        await own_server.start()

        async def has_ended() -> bool:
            return (await bench.get(task_id))[1].get("status") == "SUCCESS"

        await eventually(lambda: is_accepted(bench), "jobs are accepted again")
        assert (await stored_jobs(bench))["status"] == "pass"
        await eventually(has_ended, "the earlier job has ended")
    db.terminate()


async def stored_jobs(bench: JobBench) -> dict[str, str]:
    """The check of health."""
    _, health = await bench.stack.internal("/internal/health")
    found: dict[str, str] = health["checks"]["jobs:stored"][0]
    return found


async def test_jobs_that_cannot_be_stored_are_in_health_although_the_catalog_is_read(
    bench: JobBench, db: Db, database_url: str
) -> None:
    """As on a standby. The check passes after a job was stored."""
    set_mode = f"ALTER DATABASE {urlsplit(database_url).path[1:]} SET default_transaction_read_only = "
    await db.execute(f"{set_mode} on")
    await db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tierlane-jobs-in'"
    )
    assert (await bench.submit())[0] == 503
    assert "read-only transaction" in (await stored_jobs(bench))["output"]

    await db.execute("SET default_transaction_read_only = off")
    await db.execute(f"{set_mode} off")
    await db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tierlane-jobs-in'"
    )
    await eventually(lambda: is_accepted(bench), "jobs are accepted again")
    assert (await stored_jobs(bench))["status"] == "pass"


async def is_accepted(bench: JobBench) -> bool:
    return (await bench.submit())[0] == 202


async def test_without_redis_jobs_are_rejected(bench: JobBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In direct mode jobs get a 503, and results can be read."""
    bench.stack.worker.hold = True
    task_id = await bench.accepted()
    with monkeypatch.context() as patch:  # A property: the gateway's next heartbeat would write an attribute again.
        patch.setattr(Direct, "active", property(lambda _: True, lambda _, value: None), raising=False)
        status, document, headers = await bench.submit()

    assert (status, document["error"]["code"]) == (503, "no_capacity")
    assert "retry-after" in headers
    assert (await bench.get(task_id))[1] == {"status": "PENDING"}


async def test_a_client_that_disconnects_before_the_insert_leaves_no_request(bench: JobBench) -> None:
    """Its request is cancelled, and recorded once as such."""
    bench.stack.worker.hold = True
    begun = asyncio.Event()
    counters = bench.stack.gateway._shared.counters
    failed, recorded = counters.failed, list[ErrorCode]()

    def record(tier: str, endpoint: str, code: ErrorCode, verdict: Verdict | None = None) -> None:
        recorded.append(code)
        failed(tier, endpoint, code, verdict)

    counters.failed = record  # type: ignore[method-assign]

    async def never(_jobs: object) -> list[None]:
        begun.set()
        await asyncio.Event().wait()
        return []

    bench.serving.store._inserts._call = never  # type: ignore[assignment]
    submitting = asyncio.create_task(bench.submit())
    await begun.wait()
    (key,) = await bench.stack.redis.keys("request:*")
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)

    async def is_cancelled() -> bool:
        return await bench.stack.redis.hget(key, "code") == b"cancelled"

    await eventually(is_cancelled, "the request is cancelled")
    await eventually(lambda: bench.stack.gateway.jobs.under_way == 0, "no submission is under way")
    assert recorded == [ErrorCode.CANCELLED]
