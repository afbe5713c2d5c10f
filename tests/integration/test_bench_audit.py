"""The audit check of `tierlane bench` on a real PostgreSQL with the real table."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from integration.ledger_fixtures import database_url, db, postgres_server
from scheduler.request_id import created_at, new_request_id
from tierlane_tools.bench.measurement.batch_use import MeasuredRows, read_batches
from tierlane_tools.bench.verification.answer_ids import AnswerIds
from tierlane_tools.bench.verification.audit import AuditResult, AuditWindow, check_audit
from tierlane_tools.bench.verification.fate import Fate

__all__ = ["database_url", "db", "postgres_server"]

UNREACHABLE = "postgresql+asyncpg://nobody@/nowhere?host=/nonexistent"
INSERT = """
INSERT INTO requests (id, created_at, api_key_id, tier, customer_id, status, error_code, completed_at,
                      batch_id, batch_size, gpu_ms, worker_id)
VALUES ($1, $2, $3, 'paid', $4, $5::text, CASE WHEN $5 = 'failed' THEN 'queue_timeout' END, $6, $7, $8, 50.0, $9)
"""


async def insert(
    db: Any,
    *,
    status: str = "completed",
    key: str = "mine",
    ended: datetime | None = None,
    batch: str = "b",
    size: int = 1,
) -> str:
    name = new_request_id()
    ended = ended or datetime.now(UTC)
    await db.execute(INSERT, name, created_at(name), key, uuid4(), status, ended, batch, size, "w1")
    return name


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


async def test_one_row_for_each_answer(database_url: str, db: Any) -> None:
    """Rows of other keys are ignored."""
    completed, failed = await insert(db), await insert(db, status="failed")
    await insert(db, key="other")

    result = await check(database_url, answered([completed], [failed]))

    assert result.ok
    assert (result.expected, result.rows, result.completed_answers, result.completed_rows) == (2, 2, 1, 1)


async def test_missing_and_unexplained_rows(database_url: str, db: Any) -> None:
    """They are counted when the time of the check is over."""
    present, _ = await insert(db), await insert(db)

    result = await check(database_url, answered([present, new_request_id()], []), patience_s=0.6)

    assert not result.ok
    assert (result.missing, result.unexplained, result.rows) == (1, 1, 2)
    assert result.waited_s >= 0.6


@pytest.mark.parametrize("url", [UNREACHABLE, "postgresql+asyncpg://h:x/db"])
async def test_an_unreachable_database_is_an_error(url: str) -> None:
    """The check does not pass, and batches are unknown."""
    now = datetime.now(UTC)
    result = await check(url, answered([new_request_id()], []))

    assert result.error
    assert not result.ok
    assert await read_batches(url, MeasuredRows(now, now, (), now, now), "", 1) is None


async def test_batches_of_the_window(database_url: str, db: Any) -> None:
    """Members of one batch are one batch; other keys and batches that ended outside the window do not count."""
    now, second = datetime.now(UTC), timedelta(seconds=1)
    for batch, size in (("b1", 2), ("b1", 2), ("b2", 6)):
        await insert(db, ended=now, batch=batch, size=size)
    await insert(db, ended=now - 9 * second, batch="b3", size=9)
    await insert(db, ended=now, batch="b4", size=9, key="other")
    span = MeasuredRows(now - 30 * second, now + 30 * second, ("mine",), now - second, now + second)

    use = await read_batches(database_url, span, "", 4)

    assert use is not None
    assert (use.batches, use.requests, use.mean_size, use.workers, use.sizes) == (2, 3, 4.0, 4, {2: 1, 6: 1})
    assert use.gpu_busy == pytest.approx(0.1 / (4 * 2.0))
