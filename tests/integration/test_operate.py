"""`tierlane gpu` and `tierlane queue` on a real Redis and PostgreSQL: what they show, change, refuse and write down."""

import json
from typing import Any

import pytest
from typer.testing import Result

from integration.admin_bench import Admin
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.loader import load
from pool import Pool

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


class Operator(Admin):
    """Knows the test's Redis, too."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        super().__init__(database_url)
        self._env |= {"TIERLANE_REDIS_URL": redis_url, "TIERLANE_GONE_MS": "60000"}  # A busy machine is slow.


@pytest.fixture
def operator(database_url: str, redis_url: str) -> Operator:
    return Operator(database_url, redis_url)


def end_of(result: Result) -> tuple[int, str]:
    """Exit code, and the last line of what was said to people."""
    return result.exit_code, (result.stderr.strip().splitlines() or [""])[-1]


async def test_gpus_are_listed_with_how_they_are(operator: Operator, pool: Pool) -> None:
    """All that Redis knows of, and those that are cordoned and not here."""
    await pool.worker_beats("w1")
    await pool.worker_beats("w2", "starting")
    await operator.done("gpu", "cordon", "gone", "--reason", "ticket 4711")

    rows = await operator.json("gpu", "list")
    shown = await operator.done("gpu", "list")

    assert [(row["worker"], row["pool"], row["status"], row["healthy"], row["cordoned"]) for row in rows] == [
        ("w1", "default", "ready", True, False),
        ("w2", "default", "starting", False, False),
        ("gone", None, "not seen", False, True),
    ]
    assert "ticket 4711" in shown
    assert [row["worker"] for row in json.loads(await operator.done("gpu", "list", "--pool", "x", "-o", "json"))] == []


async def test_cordoning_is_in_the_catalog_and_on_record(operator: Operator, pool: Pool, db: Connection) -> None:
    """Schedulers read it there; who did it and why is kept; what it leaves is said."""
    await pool.worker_beats("w1")
    await pool.worker_beats("w2")

    said = await operator.done("gpu", "cordon", "w1", "--reason", "ECC", "--actor", "Ann")
    assert "pool default keeps 1 healthy GPU." in said
    assert (await load(db)).cordoned == {"w1"}
    await operator.done("gpu", "cordon", "w1", "--reason", "ECC again", "--actor", "Ann")

    assert "deleted" in await operator.done("gpu", "uncordon", "w1", "--actor", "Bob")
    assert (await load(db)).cordoned == frozenset()
    assert "nothing to change" in await operator.done("gpu", "uncordon", "w1")
    rows = await db.fetch(
        "SELECT changed_by, row_key, new ->> 'reason' FROM config_changes WHERE table_name = 'cordons'"
    )
    assert [tuple(row) for row in rows] == [("Ann", "w1", "ECC"), ("Ann", "w1", "ECC again"), ("Bob", "w1", None)]


async def test_the_last_healthy_gpu_is_asked_about(operator: Operator, pool: Pool, db: Connection) -> None:
    """Without an answer nothing happens; a dry run changes nothing either; --yes does not ask."""
    await pool.worker_beats("w1")

    assert (await operator.run("gpu", "cordon", "w1")).exit_code == 1
    assert "Dry run" in await operator.done("gpu", "cordon", "w1", "--dry-run")
    assert (await load(db)).cordoned == frozenset()

    await operator.done("gpu", "cordon", "w1", "--yes")
    assert (await load(db)).cordoned == {"w1"}


async def test_queues_are_listed_and_paused(operator: Operator, pool: Pool, db: Connection) -> None:
    """Depth, age and what is paused, of each tier in its order; pausing says how many wait, asks, and is on record."""
    await pool.queue(3, "free")

    assert (await operator.run("queue", "pause", "free")).exit_code == 1
    dry = await operator.done("queue", "pause", "free", "--dry-run")
    assert dry.startswith("tier free: changed\n  paused  off -> on\n3 requests wait in tier free.")
    assert not (await load(db)).tier("free").paused

    said = await operator.done("queue", "pause", "free", "--yes", "--actor", "Ann")
    assert "3 requests wait in tier free. Requests that wait for more than 2,000 ms get queue_timeout." in said
    assert (await load(db)).tier("free").paused
    rows = await operator.json("queue", "list")
    assert [(row["tier"], row["depth"], row["paused"]) for row in rows] == [
        ("enterprise", 0, False),
        ("paid", 0, False),
        ("free", 3, True),
    ]
    assert rows[2]["oldest_ms"] > 0

    assert "paused  on -> off" in await operator.done("queue", "resume", "free")
    assert await operator.done("queue", "resume", "free") == "tier free: nothing to change\n"
    changed = "SELECT changed_by FROM config_changes WHERE table_name = 'tiers' AND new ->> 'paused' = 'true'"
    assert [row[0] for row in await db.fetch(changed)] == ["Ann"]


async def test_what_cannot_be_is_one_sentence(operator: Operator, database_url: str) -> None:
    """An unknown tier, a name that is none, a Redis that is away."""
    assert await operator.fault(1, "queue", "pause", "gold", "--yes") == "There is no tier named gold."
    assert "--pool: must be" in await operator.fault(2, "gpu", "list", "--pool", "{x}")
    assert "worker must have 1 to 200 characters" in await operator.fault(2, "gpu", "cordon", "", "--yes")
    away = Operator(database_url, "unix:///nonexistent")
    assert (await away.fault(1, "gpu", "list")).startswith("Redis did not respond")
    assert (await Admin(database_url).fault(1, "queue", "list")).startswith("TIERLANE_REDIS_URL is not set")


async def test_without_redis_they_still_work(database_url: str, db: Connection) -> None:
    """The wish is kept in PostgreSQL, and obeyed when Redis is back."""
    away = Operator(database_url, "unix:///nonexistent")

    assert "unknown" in await away.done("gpu", "cordon", "w1")
    assert "unknown" in await away.done("queue", "pause", "paid", "--yes")

    seen = await load(db)
    assert (seen.cordoned, seen.tier("paid").paused) == ({"w1"}, True)
