"""What all admin verbs share: a dry run changes nothing, every change has a name to it, gateways obey, faults are told."""

import getpass
import json
import re
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from eventually import eventually
from integration.admin_bench import GOLD, Admin, customer, tables
from integration.ledger_fixtures import database_url, db, dsn, postgres_server
from ledger.admin.changes import changing

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any


@pytest.fixture
async def admin(database_url: str, db: Connection) -> Admin:
    """The command line, with a customer `acme` and what else a verb may need."""
    await customer(db)
    return Admin(database_url)


WRITES = [
    ["tier", "set", "free", "--burst", "300"],
    ["tier", "create", "gold", *GOLD],
    ["tier", "delete", "free"],
    ["customer", "create", "beta", "--tier", "free"],
    ["customer", "set", "acme", "--burst", "300"],
    ["customer", "suspend", "acme"],
    ["customer", "delete", "acme"],
    ["key", "create", "acme", "ci"],
    ["key", "rotate", "<key>"],
    ["key", "revoke", "<key>"],
    ["model", "create", "big"],
    ["model", "set", "tiny", "--enabled", "off"],
    ["model", "delete", "tiny"],
    ["quota", "set", "acme", "2/day"],
    ["quota", "set", "--tier", "free", "2/day"],
    ["quota", "remove", "acme", "1/day"],
]


def told(text: str) -> list[str]:
    """What became of which rows, without what is drawn anew each time: ids and times."""
    drawn = r"[0-9a-f]{8}-[0-9a-f-]{27}|\b[a-z0-9]{12}\b|[0-9][0-9:-]*"
    heads = ("created", "changed", "deleted")
    return [re.sub(drawn, "#", line) for line in text.splitlines() if line.startswith("  ") or line.endswith(heads)]


@pytest.mark.parametrize("arguments", WRITES, ids=lambda words: " ".join(words[:2]))
async def test_a_dry_run_says_the_same_and_changes_nothing(admin: Admin, db: Connection, arguments: list[str]) -> None:
    """Whole tables are as before, no gateway is woken; then the real run says the same and changes them."""
    await admin.done("model", "create", "tiny")
    await admin.done("quota", "set", "acme", "1/day")
    key = (await admin.json("key", "create", "acme", "ci"))["key"]
    words = [word.replace("<key>", key[3:15]) for word in arguments]
    before = await tables(db)

    tried = await admin.done(*words, "--dry-run")
    as_json = await admin.json(*words, "--dry-run")
    after = await tables(db)
    real = await admin.done(*words, input="y\n")

    assert after == before
    assert tried.splitlines()[-1] == "Dry run: nothing was changed."
    assert told(tried) == told(real) != []
    assert "\ntl_" not in tried
    assert as_json["dry_run"] is True
    assert as_json.get("key") is None
    changes = [change for change in as_json["changes"] if change["old"] != change["new"]]
    assert changes
    assert real.splitlines()[-1] == "Gateways apply this within one second."
    assert await tables(db) != before


async def test_a_dry_run_hears_what_the_database_refuses(admin: Admin) -> None:
    """Constraints, triggers and keys speak in it."""
    for line, words in (
        ("burst must be 1 to", ["tier", "set", "free", "--burst", "0"]),
        ("The guaranteed shares", ["tier", "set", "free", "--guaranteed-share", "0.9"]),
        ("There is already", ["customer", "create", "acme", "--tier", "free"]),
    ):
        real = await admin.run(*words)
        tried = await admin.run(*words, "--dry-run")
        assert tried.stderr.startswith(line)
        assert (tried.exit_code, tried.stderr) == (real.exit_code, real.stderr)


async def test_every_change_is_put_down_to_somebody(admin: Admin, db: Connection) -> None:
    """The user of this machine, unless another is named."""

    async def by() -> str:
        named: str = await db.fetchval("SELECT changed_by FROM config_changes ORDER BY id DESC LIMIT 1")
        return named

    await admin.done("customer", "suspend", "acme", env={"USER": "", "LOGNAME": "ann"})
    assert await by() == "ann"
    await admin.done("customer", "activate", "acme")
    assert await by() == getpass.getuser()
    await admin.done("customer", "suspend", "acme", "--actor", "Zoë O'Hara")
    assert await by() == "Zoë O'Hara"
    await admin.done("customer", "delete", "acme", "--yes", "--actor", "the cleaner")
    assert await by() == "the cleaner"


async def test_actor_and_output_may_come_from_the_environment(admin: Admin, db: Connection) -> None:
    """As with every option of the kind; a flag wins."""
    env = {"TIERLANE_ACTOR": "night shift", "TIERLANE_ADMIN_OUTPUT": "json", "TIERLANE_ADMIN_LIMIT": "1"}

    said = json.loads(await admin.done("customer", "suspend", "acme", env=env))
    listed = await admin.done("customer", "list", "-o", "table", env=env)

    assert await db.fetchval("SELECT changed_by FROM config_changes ORDER BY id DESC LIMIT 1") == "night shift"
    assert (said["changes"][0]["thing"], said["changes"][0]["new"]["status"]) == ("customer", "suspended")
    assert listed.startswith("NAME")


async def test_an_actor_is_named_for_one_transaction_only(db: Connection) -> None:
    """So that a pooled session does not put the next change down to the same person."""
    async with changing(db, "ann", dry_run=False):
        assert await db.fetchval("SELECT current_setting('tierlane.actor')") == "ann"

    assert await db.fetchval("SELECT current_setting('tierlane.actor', true)") == ""


@pytest.mark.parametrize("actor", ["", "  ", "a\nb", "x" * 201])
async def test_an_actor_has_a_name(admin: Admin, db: Connection, actor: str) -> None:
    """An empty one would be taken for nobody."""
    assert (await admin.fault(2, "customer", "suspend", "acme", "--actor", actor)).startswith("--actor: must be a name")
    assert await db.fetchval("SELECT status FROM customers") == "active"


async def test_a_change_wakes_the_gateways(admin: Admin, database_url: str) -> None:
    """By the notification that every change of the catalog sends; a dry run sends none."""
    heard: list[str] = []
    listener = await asyncpg.connect(dsn(database_url))
    await listener.add_listener("tierlane_catalog", lambda *message: heard.append(str(message[-1])))
    await admin.done("tier", "set", "free", "--burst", "300", "--dry-run")
    await admin.done("tier", "set", "free", "--burst", "301")

    async def is_told() -> bool:
        await listener.fetchval("SELECT 1")
        return bool(heard)

    await eventually(is_told, "the change is told")
    await listener.close()
    assert len(heard) == 1


async def test_text_from_outside_is_harmless_for_a_terminal(admin: Admin, db: Connection) -> None:
    """A name may hold what is no control character for PostgreSQL but turns a line around."""
    await db.execute("INSERT INTO customers (name, tier) VALUES (E'evil\\u202elive', 'free')")

    assert "evil\\u202elive" in await admin.done("customer", "list")
    assert "evil\\u202elive" in (await admin.done("customer", "show", "evil\u202elive"))
    assert "evil\\u202elive" in (await admin.done("customer", "suspend", "evil\u202elive"))


async def test_without_postgres_it_is_one_sentence() -> None:
    """No password, no traceback."""
    url = "postgresql+asyncpg://user:hunter2@/lane?host=/nonexistent"

    line = await Admin(url).fault(1, "tier", "list")

    assert line.startswith("PostgreSQL at ")
    assert "hunter2" not in line


async def test_an_old_schema_is_said_so(admin: Admin, db: Connection) -> None:
    """With what to do."""
    await db.execute("ALTER TABLE tiers DROP COLUMN shadow CASCADE")

    assert (await admin.fault(1, "tier", "list")).endswith("run `tierlane migrate`.")


async def test_the_local_stack_is_the_default(admin: Admin, database_url: str, tmp_path: Path) -> None:
    """Beside `tierlane up` nothing has to be set."""
    stack = {"redis_url": "unix:///nonexistent", "database_url": database_url, "service_token": "t" * 16}
    (tmp_path / "stack.json").write_text(json.dumps(stack))
    here = Admin("")

    assert "acme" in await here.done("customer", "list", "--data-dir", str(tmp_path))
    assert "no local stack runs in /nonexistent" in await here.fault(2, "customer", "list")


async def test_a_transaction_that_is_left_open_is_named(admin: Admin, db: Connection, database_url: str) -> None:
    """A change gives up after seconds and says whose lock it is, and how to end it; nothing is changed."""
    holder = await asyncpg.connect(dsn(database_url), server_settings={"application_name": "psql of bob"})
    try:
        await holder.execute("BEGIN")
        await holder.execute("UPDATE tiers SET burst = burst + 1 WHERE name = 'paid'")
        pid = holder.get_server_pid()
        for verb in (["tier", "set", "paid", "--burst", "7"], ["tier", "set", "free", "--burst", "7"]):
            said = await admin.fault(1, *verb)
            assert said.startswith("An open transaction holds a lock that this change needs (")
            assert f"pid {pid}, user " in said
            assert "application psql of bob, " in said
            assert "state idle in transaction, open for " in said
            assert f"`SELECT pg_terminate_backend({pid})`" in said
    finally:
        await holder.close()

    assert await db.fetchval("SELECT count(*) FROM tiers WHERE burst = 7") == 0
