"""`tierlane gpu` and `tierlane queue` with real servers."""

from typing import Any

import pytest

from integration.admin_fixtures import Admin
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.loader import load
from ledger.catalog.snapshot import WorkerCordon
from pool import Pool

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


def operator(database_url: str, redis_url: str) -> Admin:
    return Admin(database_url, TIERLANE_REDIS_URL=redis_url, TIERLANE_GONE_MS="60000")  # A busy machine is slow.


@pytest.fixture
def admin(database_url: str, redis_url: str) -> Admin:
    return operator(database_url, redis_url)


async def test_a_cordon_is_recorded(admin: Admin, pool: Pool, db: Connection) -> None:
    """It is in the catalog, which schedulers read, in the list, also if the worker was not seen, and recorded."""
    await pool.worker_beats("w1")
    await pool.worker_beats("w2", "starting")
    await admin.done("gpu", "cordon", "w1", "--reason", "ECC", "--actor", "Ann", "--yes")
    await admin.done("gpu", "cordon", "gone", "--actor", "Ann")
    assert (await load(db)).cordons == {"w1": WorkerCordon("ECC", "Ann"), "gone": WorkerCordon("", "Ann")}
    rows = await admin.json("gpu", "list")
    assert [(row["worker"], row["status"], row["healthy"], row["reason"]) for row in rows] == [
        ("w1", "ready", True, "ECC"), ("w2", "starting", False, None), ("gone", "not seen", False, "no reason given"),
    ]  # fmt: skip
    assert await admin.json("gpu", "list", "--pool", "x") == []
    assert (await admin.done("gpu", "uncordon", "w1", "--actor", "Bob")).startswith("w1 uncordoned\n")
    assert (await load(db)).cordoned == {"gone"}
    assert "nothing to change" in await admin.done("gpu", "uncordon", "w1")

    rows = await db.fetch(
        "SELECT changed_by, row_key, new ->> 'reason' FROM config_changes WHERE table_name = 'cordons'"
    )
    assert [tuple(row) for row in rows] == [("Ann", "w1", "ECC"), ("Ann", "gone", ""), ("Bob", "w1", None)]


async def test_cordoning_the_last_healthy_gpu_needs_a_confirmation(admin: Admin, pool: Pool, db: Connection) -> None:
    """Without an answer and in a dry run nothing changes; --yes confirms."""
    await pool.worker_beats("w1")

    assert (await admin.run("gpu", "cordon", "w1")).exit_code == 1
    assert (await admin.done("gpu", "cordon", "w1", "--dry-run")).startswith("w1 would be cordoned\n")
    assert (await load(db)).cordoned == frozenset()
    await admin.done("gpu", "cordon", "w1", "--yes")
    assert (await load(db)).cordoned == {"w1"}


async def test_a_queue_is_paused_and_resumed(admin: Admin, pool: Pool, db: Connection) -> None:
    """Pausing needs a confirmation and is recorded; the list shows depth, age and paused queues."""
    await pool.queue(3, "free")

    assert (await admin.run("queue", "pause", "free")).exit_code == 1
    assert "3 requests wait in tier free." in await admin.done("queue", "pause", "free", "--dry-run")
    assert not (await load(db)).tier("free").paused

    await admin.done("queue", "pause", "free", "--yes", "--actor", "Ann")
    assert (await load(db)).tier("free").paused
    rows = await admin.json("queue", "list")
    assert [(row["tier"], row["depth"], row["paused"]) for row in rows] == [
        ("enterprise", 0, False),
        ("paid", 0, False),
        ("free", 3, True),
    ]
    assert rows[2]["oldest_ms"] > 0

    await admin.done("queue", "resume", "free")
    assert await admin.done("queue", "resume", "free") == "tier free: nothing to change\n"
    changed = "SELECT changed_by FROM config_changes WHERE table_name = 'tiers' AND new ->> 'paused' = 'true'"
    assert [row[0] for row in await db.fetch(changed)] == ["Ann"]


async def test_without_redis_changes_are_stored(admin: Admin, database_url: str, db: Connection) -> None:
    """Cordons and pauses are in PostgreSQL and apply when Redis is back; lists need Redis. Errors are one line."""
    away = operator(database_url, "unix:///nonexistent")

    await away.done("gpu", "cordon", "w1", "--yes")
    await away.done("queue", "pause", "paid", "--yes")

    snapshot = await load(db)
    assert (snapshot.cordoned, snapshot.tier("paid").paused) == ({"w1"}, True)
    assert (await away.fault(1, "gpu", "list")).startswith("Redis did not respond")
    assert (await Admin(database_url).fault(1, "queue", "list")).startswith("TIERLANE_REDIS_URL is not set")
    assert await admin.fault(1, "queue", "pause", "gold", "--yes") == "There is no tier named gold."
    assert "--pool: must be" in await admin.fault(2, "gpu", "list", "--pool", "{x}")
    assert "worker must have 1 to 200 characters" in await admin.fault(2, "gpu", "cordon", "", "--yes")
