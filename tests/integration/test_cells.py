"""`tierlane cell`, and the verbs that read all cells, with real servers."""

from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis

from integration.admin_fixtures import Admin, customer
from integration.dead_letter_fixtures import customer as dead_letter_customer
from integration.dead_letter_fixtures import letter, worker
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.loader import load
from ledger.catalog.snapshot import CellRow
from ledger.jobs import NewJob, count_open_jobs, insert_jobs
from pool import Pool, done
from scheduler.cells.places import cells_of
from scheduler.protocol.audit_outbox import name_of
from scheduler.redis_client.keys import Keys, hash_tag

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
AWAY = "unix:///nonexistent/redis.sock"


@pytest.fixture
def admin(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Admin:
    """Without the pause in which gateways hear of a change: there are none."""
    monkeypatch.setattr("tierlane.operate.cells.KNOWN_AFTER_S", 0.0)
    return Admin(database_url, TIERLANE_REDIS_URL=redis_url, TIERLANE_GONE_MS="60000")


@pytest.fixture
async def west(client: Redis) -> Pool:
    """The default pool in the cell west, with a living gateway `g1`."""
    pool = Pool(client, Keys(tag=f"{hash_tag('west')}:"))
    await pool.gateway_lives("g1")
    return pool


async def states(db: Connection) -> dict[str, str]:
    return {cell.name: cell.state for cell in (await load(db)).cells}


async def audit(pool: Pool) -> None:
    """Take what is in the outbox, and drop it as a scheduler does after the commit."""
    taken = await pool.outbox.take(100)
    await pool.outbox.drop(len(taken.entries), name_of(taken.entries[0]))


async def test_a_cell_is_opened_drained_and_closed(admin: Admin, db: Connection) -> None:
    """Each change is recorded; a dry run changes nothing; what is done already is said."""
    await admin.done("cell", "open", "west", "--dry-run")
    assert await states(db) == {}
    await admin.done("cell", "open", "west", "--weight", "2", "--actor", "Ann")
    assert "nothing to change" in await admin.done("cell", "open", "west")
    await admin.done("cell", "drain", "west", "--actor", "Bob")
    await admin.done("cell", "close", "west", "--actor", "Bob")
    assert await states(db) == {"west": "closed"}
    assert await admin.fault(1, "cell", "drain", "west") == (
        "Cell west is closed; `tierlane cell open` opens it again."
    )
    await admin.done("cell", "open", "west")
    assert await states(db) == {"west": "open"}

    changes = (
        "SELECT changed_by, old ->> 'state', new ->> 'state' FROM config_changes WHERE table_name = 'cells' ORDER BY id"
    )
    assert [tuple(row) for row in await db.fetch(changes)][:3] == [
        ("Ann", None, "open"), ("Bob", "open", "draining"), ("Bob", "draining", "closed"),
    ]  # fmt: skip
    assert "cell west" in await admin.done("config-changes", "--table", "cells")


async def test_the_list_shows_what_is_in_each_cell(admin: Admin, west: Pool, db: Connection) -> None:
    """Customers that name it or are there by their id, requests, GPUs; never a password; a cell that does not respond is named."""
    await admin.done("cell", "open", "west")
    await admin.done("cell", "open", "lost", "--redis-url", AWAY, "--force")
    await admin.done("customer", "create", "acme", "--tier", "paid", "--cell", "west", "--spread", "2")
    for name in ("ann", "bob", "eve"):
        await admin.done("customer", "create", name, "--tier", "paid")
    cells = [CellRow(name, None, "open", 1.0) for name in ("lost", "west")]
    known = [tuple(row) for row in await db.fetch("SELECT id::text, cell, spread FROM customers")]
    living = Counter(home for id_, cell, spread in known for home in cells_of(id_, cells, cell, spread))
    await west.queue(3)
    await west.form([("free", 2)])
    await west.worker_beats("w1")
    away = Admin(admin.database_url, TIERLANE_REDIS_URL="redis://root:secret@127.0.0.1:1/0")

    rows = {row["name"]: row for row in await admin.json("cell", "list")}

    assert list(rows) == ["default", "lost", "west"]
    names = ("state", "customers", "waiting", "running", "healthy_gpus", "problem")
    assert [rows["west"][name] for name in names] == ["open", living["west"], 1, 2, 1, None]
    assert [rows["default"][name] for name in names] == ["open", living["default"], 0, 0, 0, None]
    assert [rows["lost"][name] for name in names] == ["open", living["lost"], None, None, None, "not responding"]
    assert living.total() == 5
    assert rows["lost"]["server"] == AWAY
    shown = await away.done("cell", "list")
    assert "redis://127.0.0.1:1/0" in shown
    assert "secret" not in shown


async def test_a_server_is_checked_before_a_cell_is_opened(admin: Admin, db: Connection, database_url: str) -> None:
    """Unless it is forced. The row has no password: a URL with one is rejected, and not repeated."""
    refused = await admin.fault(1, "cell", "open", "west", "--redis-url", AWAY)
    assert refused.startswith("The server of cell west cannot be used: Redis did not respond")
    assert refused.endswith("--force opens the cell nevertheless.")
    bad = await admin.fault(2, "cell", "open", "west", "--redis-url", "redis://ann:secret@host:6379/0")
    assert bad.startswith("redis_url must be the URL of a server without user, password and #")
    assert "secret" not in bad
    bad = await admin.fault(
        1, "cell", "open", "west", "--redis-url", "redis+sentinel://h:1/a?sentinel_user=n&sentinel_password=secret"
    )
    assert bad.startswith("redis_url must not have sentinel_user and sentinel_password: the Sentinels of all cells")
    assert "secret" not in bad
    assert "name must begin with a letter" in await admin.fault(2, "cell", "open", "{x}")
    without = Admin(database_url)
    assert (await without.fault(1, "cell", "open", "west")).startswith("TIERLANE_REDIS_URL is not set")
    assert await states(db) == {}

    await admin.done("cell", "open", "west", "--redis-url", AWAY, "--force")
    assert await admin.fault(1, "cell", "open", "west", "--redis-url", "none", "--force") == (
        "Cell west is open at another server: drain and close it first."
    )


async def test_one_cell_stays_open(admin: Admin, db: Connection) -> None:
    """The default one counts, also without a row; it can be drained, not closed."""
    only = "is the only open one: open another first, for its customers."
    assert await admin.fault(1, "cell", "drain", "default") == f"Cell default {only}"
    await admin.done("cell", "open", "west")
    await admin.done("cell", "drain", "default")
    assert await states(db) == {"default": "draining", "west": "open"}
    for words in (("drain", "west"), ("close", "west", "--force")):
        assert await admin.fault(1, "cell", *words) == f"Cell west {only}"
    assert (await admin.fault(1, "cell", "close", "default")).startswith("The cell default, at TIERLANE_REDIS_URL,")
    assert await admin.fault(1, "cell", "drain", "north") == "There is no cell named north."


async def test_a_cell_is_closed_when_nothing_remains(admin: Admin, west: Pool, db: Connection) -> None:
    """Not while it is open, a customer names it, a request waits or runs, a record is not in the audit, or a job is open."""
    await admin.done("cell", "open", "west")
    await admin.done("customer", "create", "acme", "--tier", "paid", "--cell", "west")
    assert await admin.fault(1, "cell", "close", "west") == "Cell west is open: `tierlane cell drain west` first."
    await west.queue(2)
    drained = await admin.done("cell", "drain", "west")
    assert "It has 2 waiting requests, 0 running requests and 1 record for the audit, which end there." in drained

    begin = "Cell west cannot be closed"
    assert (await admin.fault(1, "cell", "close", "west")).startswith(
        f"{begin} yet: it has 2 waiting requests, 0 running"
    )
    await west.form([("free", 2)])
    assert "0 waiting requests, 2 running requests" in await admin.fault(1, "cell", "close", "west")
    claimed = await west.claim_next()
    await west.batches.finish(claimed.batch_id, "token", [done(each.id) for each in claimed.requests])
    assert "0 running requests and 2 records for the audit" in await admin.fault(1, "cell", "close", "west")
    await audit(west)
    assert await admin.fault(1, "cell", "close", "west") == (
        f"{begin}: 1 customer names it; give them another with `tierlane customer set`."
    )
    await admin.done("customer", "set", "acme", "--cell", "none")
    await admin.done("cell", "close", "west")
    assert await states(db) == {"west": "closed"}


async def test_a_forced_close_names_what_is_lost(admin: Admin, west: Pool, db: Connection) -> None:
    """Jobs are not: they continue in an open cell. A cell that does not respond can only be closed in this way."""
    acme = await customer(db)
    await admin.done("cell", "open", "west")
    await west.queue(2)
    for pool in ("default@west", "other@west", "default"):
        await insert_jobs(db, [NewJob(west.submission("paid", customer_id=acme), 60.0)], pool)
    await admin.done("cell", "drain", "west")
    assert "; 2 jobs without a result. " in await admin.fault(1, "cell", "close", "west")

    closed = await admin.done("cell", "close", "west", "--force")

    assert "Lost: 2 waiting requests, 0 running requests and 1 record for the audit." in closed
    assert "2 jobs moved to another cell." in closed
    assert await count_open_jobs(db, "west") == 0
    pools = await db.fetch("SELECT pool FROM jobs ORDER BY pool")
    assert [row["pool"] for row in pools] == ["default", "default", "other"]

    await admin.done("cell", "open", "lost", "--redis-url", AWAY, "--force")
    assert "It does not respond: what waits there is unknown." in await admin.done("cell", "drain", "lost")
    unknown = await admin.fault(1, "cell", "close", "lost")
    assert unknown.startswith("Cell lost cannot be closed: what remains there is unknown. Redis did not respond")
    assert "is unknown, and is lost." in await admin.done("cell", "close", "lost", "--force")


async def test_verbs_read_all_cells_or_one(admin: Admin, pool: Pool, west: Pool) -> None:
    """A cell that does not respond is a warning. `explain` reads the cell of the customer, and finds requests in any."""
    await admin.done("cell", "open", "west")
    await admin.done("customer", "create", "acme", "--tier", "paid", "--cell", "west")
    await pool.worker_beats("w1")
    await west.worker_beats("w2")
    (waiting,) = await west.queue(1, "paid")

    workers = [(row["worker"], row["pool"]) for row in await admin.json("gpu", "list")]
    assert workers == [("w1", "default"), ("w2", "default@west")]
    assert [row["worker"] for row in await admin.json("gpu", "list", "--cell", "west")] == ["w2"]
    depths = {(row["tier"], row["pool"]): row["depth"] for row in await admin.json("queue", "list")}
    assert (depths["paid", "default"], depths["paid", "default@west"], len(depths)) == (0, 1, 6)
    assert "--cell: must be one of default, west, got 'east'" in await admin.fault(2, "queue", "list", "--cell", "east")
    assert "1 request waits in tier paid." in await admin.done("queue", "pause", "paid", "--dry-run")
    assert (await admin.json("explain", "acme"))["cells"] == ["west"]
    assert (await admin.json("explain", waiting))["found"] == "accepted"

    await admin.done("cell", "open", "lost", "--redis-url", AWAY, "--force")
    result = await admin.run("gpu", "list", "-o", "json")
    assert result.exit_code == 0
    assert "Warning: Cell lost cannot be read: Redis did not respond" in result.stderr
    assert (await admin.json("explain", waiting))["found"] == "accepted"


async def test_a_dead_letter_is_requeued_where_a_worker_is(
    admin: Admin, pool: Pool, west: Pool, db: Connection
) -> None:
    """Or in a named cell. It leaves the lists that health counts in every cell, as a purged one does."""
    await admin.done("cell", "open", "west")
    acme = await dead_letter_customer(db)
    old, other = await letter(db, customer_id=acme), await letter(db, customer_id=acme)
    for place in (pool, west):
        await place.client.lpush(place.keys.dlq, old, other)
    fault = await admin.fault(1, "dlq", "requeue", old, "--cell", "default")
    assert fault.startswith("No worker of pool default is healthy")
    async with worker(west, done):
        output = await admin.done("dlq", "requeue", old)
    assert " completed after " in output
    for place in (pool, west):
        assert await place.client.lrange(place.keys.dlq, 0, -1) == [other.encode()]
    await admin.done("dlq", "purge", other)
    assert await client_keys(pool.client, "*dlq") == []


async def client_keys(client: Redis, pattern: str) -> list[bytes]:
    return [key async for key in client.scan_iter(pattern)]
