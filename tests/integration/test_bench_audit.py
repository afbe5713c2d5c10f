"""The audit check against a real PostgreSQL with the real table."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from eventually import eventually
from integration.ledger_fixtures import database_url, db, postgres_server
from scheduler.request_id import created_at, new_request_id
from tierlane.bench.resources import MeasuredRows, read_batches
from tierlane.bench.verification import AnswerIds, AuditResult, AuditWindow, Fate, check_audit

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any

INSERT = """
INSERT INTO requests (id, created_at, api_key_id, tier, customer_id, status, error_code, completed_at)
VALUES ($1, $2, $3, 'paid', $4, $5::text, CASE WHEN $5 = 'failed' THEN 'queue_timeout' END, now())
"""


async def insert(db: Connection, request_id: str, status: str = "completed", key: str = "mine") -> None:
    await db.execute(INSERT, request_id, created_at(request_id), key, uuid4(), status)


def answered(completed: list[str], failed: list[str]) -> AnswerIds:
    ids = AnswerIds()
    for fate, names in ((Fate.COMPLETED, completed), (Fate.FAILED, failed)):
        for name in names:
            ids.add(fate, name.removeprefix("req_").encode())
    return ids


async def check(url: str, ids: AnswerIds, patience_s: float = 0.0) -> AuditResult:
    now = datetime.now(UTC)
    window = AuditWindow(now - timedelta(seconds=30), now + timedelta(seconds=30), ("mine",))
    return await check_audit(url, window, ids, patience_s)


async def test_one_row_for_each_answer_is_agreement(database_url: str, db: Connection) -> None:
    """Rows of other keys are left out."""
    done, bad, other = new_request_id(), new_request_id(), new_request_id()
    await insert(db, done)
    await insert(db, bad, "failed")
    await insert(db, other, key="somebody's")

    result = await check(database_url, answered([done], [bad]))

    assert result.ok
    assert (result.expected, result.rows, result.completed_answers, result.completed_rows) == (2, 2, 1, 1)


async def test_rows_that_come_late_are_waited_for(database_url: str, db: Connection) -> None:
    """The check agrees once the last row is there, long before its patience ends."""
    names = [new_request_id() for _ in range(50)]
    for name in names[:-1]:
        await insert(db, name)
    checking = asyncio.create_task(check(database_url, answered(names, []), patience_s=60.0))
    # The check is connected, hence has begun to look, before the last row is written.
    looking = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tierlane bench'"
    await eventually(lambda: db.fetchval(looking), "the check is connected")
    await insert(db, names[-1])
    result = await checking

    assert result.ok
    assert result.rows == 50
    assert result.waited_s < 30


async def test_a_row_that_never_comes_is_missing(database_url: str, db: Connection) -> None:
    """After its patience the check says how many rows are missing, and which do not belong."""
    here, gone, stranger = new_request_id(), new_request_id(), new_request_id()
    await insert(db, here)
    await insert(db, stranger)

    result = await check(database_url, answered([here, gone], []), patience_s=0.6)

    assert not result.ok
    assert (result.missing, result.unexplained, result.rows) == (1, 1, 2)
    assert result.waited_s >= 0.6


async def test_a_database_that_is_away_is_a_sentence(postgres_server: object) -> None:
    """No exception, and no claim that the audit agrees."""
    result = await check("postgresql+asyncpg://nobody@/nowhere?host=/nonexistent", answered([new_request_id()], []))

    assert result.error.startswith("The audit cannot be read: ")
    assert not result.ok


@pytest.mark.parametrize("url", ["postgresql+asyncpg://h:x/db"])
async def test_a_url_that_cannot_be_read_is_a_sentence(url: str) -> None:
    """As with a database that is away."""
    assert not (await check(url, AnswerIds())).ok


RAN = """
INSERT INTO requests (id, created_at, api_key_id, tier, customer_id, status, completed_at,
                      batch_id, batch_size, gpu_ms, worker_id)
VALUES ($1, $2, $3, 'paid', $4, 'completed', $5, $6, $7, 50.0, $8)
"""


async def test_batches_are_counted_once_and_only_in_the_window(database_url: str, db: Connection) -> None:
    """Members of one batch are one batch; other keys, and batches that ended before or after, do not count."""
    now = datetime.now(UTC)
    rows = [("mine", now, "b1", 2, "w1"), ("mine", now, "b1", 2, "w1"), ("mine", now, "b2", 6, "w2")]
    rows += [("mine", now - timedelta(seconds=9), "b3", 9, "w1"), ("other", now, "b4", 9, "w1")]
    for key, ended, batch, size, worker in rows:
        name = new_request_id()
        await db.execute(RAN, name, created_at(name), key, uuid4(), ended, batch, size, worker)
    second = timedelta(seconds=1)
    span = MeasuredRows(now - 30 * second, now + 30 * second, ("mine",), now - second, now + second)

    use = await read_batches(database_url, span, "", 4)

    assert use is not None
    assert (use.batches, use.requests, use.mean_size, use.workers) == (2, 3, 4.0, 4)
    assert use.sizes == {2: 1, 6: 1}
    assert use.gpu_busy == pytest.approx(0.1 / (4 * 2.0))


async def test_batches_of_a_database_that_is_away_are_not_told(postgres_server: object) -> None:
    """The audit check says why; here it is None and no exception."""
    now = datetime.now(UTC)

    assert (
        await read_batches("postgresql+asyncpg://nobody@/nowhere?host=/x", MeasuredRows(now, now, (), now, now), "", 1)
        is None
    )
