"""The migrations, run from an empty database: they equal the metadata, and running them again or twice is harmless."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from integration.ledger_fixtures import database_url, db, dsn, empty_url, postgres_server
from ledger import migration
from ledger.migration import is_compared, split_statements, upgrade_to_head
from ledger.revision import current_revision, head_revision, known_revisions, migrations_dir
from ledger.schema import metadata
from scheduler.errors import StartError
from tierlane.roles import migrate

__all__ = ["database_url", "db", "empty_url", "postgres_server"]

# What two databases must agree on, as PostgreSQL itself writes it: so CHECKs and partial indexes are compared whole.
SHAPE = {
    "columns": """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
               pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum)
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relname = ANY($1) AND c.relnamespace = 'public'::regnamespace ORDER BY 1, 2""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid), condeferrable, condeferred
        FROM pg_constraint WHERE conrelid::regclass::text = ANY($1) AND contype <> 't' ORDER BY 1, 2""",
    "indexes": """
        SELECT tablename, indexname, indexdef FROM pg_indexes
        WHERE tablename = ANY($1) AND schemaname = 'public' ORDER BY 1, 2""",
    "tables": """
        SELECT relname, relkind, pg_get_partkeydef(oid), obj_description(oid) FROM pg_class
        WHERE relname = ANY($1) AND relnamespace = 'public'::regnamespace ORDER BY 1""",
}


@dataclass
class OnlyDatabase:
    """Settings of which a migration needs one."""

    database_url: str


async def shape_of(url: str) -> dict[str, list[tuple[object, ...]]]:
    connection = await asyncpg.connect(dsn(url))
    try:
        tables = list(metadata.tables)
        return {what: [tuple(row) for row in await connection.fetch(sql, tables)] for what, sql in SHAPE.items()}
    finally:
        await connection.close()


async def test_migrations_from_empty_make_what_the_metadata_says(database_url: str, empty_url: str) -> None:
    """Columns, types, defaults, comments, keys, checks and indexes: all the same, and none without a comment."""
    engine = create_async_engine(empty_url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()

    migrated, declared = await shape_of(database_url), await shape_of(empty_url)

    assert migrated == declared
    assert len(migrated["tables"]) == len(metadata.tables)
    assert [column[:2] for column in migrated["columns"] if not column[-1]] == []


async def test_alembic_finds_nothing_to_generate(database_url: str) -> None:
    """`alembic revision --autogenerate` would be empty."""

    def differences(connection: Connection) -> object:
        options = {"compare_type": True, "compare_server_default": True, "include_name": is_compared}
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)

    engine = create_async_engine(database_url)
    async with engine.connect() as connection:
        found = await connection.run_sync(differences)
    await engine.dispose()

    assert found == []


async def test_an_empty_database_has_no_revision(empty_url: str) -> None:
    """The start checks can tell it from a current one."""
    assert await current_revision(empty_url) is None
    assert await current_revision(empty_url) != head_revision()


async def test_two_processes_may_migrate_at_once(empty_url: str) -> None:
    """The second waits for the first, then finds nothing to do."""
    program = f"import sys; from ledger.migration import *; import asyncio; asyncio.run(upgrade_to_head({empty_url!r}))"
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-W", "error", "-c", program, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = [await process.communicate() for process in processes]

    assert [(process.returncode, output[1]) for process, output in zip(processes, outputs, strict=True)] == [
        (0, b"")
    ] * 3
    assert await current_revision(empty_url) == head_revision()


async def test_the_audit_is_migrated_with_its_rows(empty_url: str) -> None:
    """Rows of before `mode` stay what they are, in every partition, and days are still taken out of the default one."""
    engine = create_async_engine(empty_url)
    async with engine.connect() as connection:
        await connection.run_sync(lambda c: upgrade_to(c, "0006_pre_default_tiers"))
    await engine.dispose()
    db = await asyncpg.connect(dsn(empty_url))
    for n, days in enumerate((0, 9)):
        await db.execute(
            "INSERT INTO requests (id, created_at, status) VALUES ($1, now() + make_interval(days => $2), 'completed')",
            f"req_{n:032x}",
            days,
        )

    await upgrade_to_head(empty_url)

    await db.execute("SELECT ensure_request_partitions(9)")
    rows = await db.fetch("SELECT id, status, mode, delivered, tableoid::regclass::text LIKE '%default' FROM requests")
    assert sorted(tuple(row)[1:] for row in rows) == [("completed", None, None, False)] * 2
    await db.close()


async def test_token_limits_that_somebody_set_are_kept(empty_url: str) -> None:
    """Only what was null gets a default, only of the default tiers; changes of before are still there."""
    engine = create_async_engine(empty_url)
    async with engine.connect() as connection:
        await connection.run_sync(lambda c: upgrade_to(c, "0007_pre_delivery"))
    await engine.dispose()
    db = await asyncpg.connect(dsn(empty_url))
    await db.execute("UPDATE tiers SET tokens_per_minute = 5 WHERE name = 'paid'")
    await db.execute("DELETE FROM tiers WHERE name = 'free'")
    await db.execute("INSERT INTO tiers SELECT 'gold', 9, 0, 1, 1, 1, NULL, 1, 1")
    changes = await db.fetchval("SELECT count(*) FROM config_changes")

    await upgrade_to_head(empty_url)

    rows = await db.fetch("SELECT name, tokens_per_minute FROM tiers ORDER BY priority")
    assert [tuple(row) for row in rows] == [("enterprise", 60_000_000), ("paid", 5), ("gold", None)]
    assert await db.fetchval("SELECT count(*) FROM config_changes") == changes + 1
    assert await db.fetchval("SELECT count(*) FROM config_changes WHERE xact > 0") == changes + 1
    await db.close()


def upgrade_to(connection: Connection, revision: str) -> None:
    """As `upgrade_to_head`, but not so far."""
    config = migration._config()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


async def test_migrations_stop_short_of_nothing(empty_url: str) -> None:
    """They run in one transaction: where one fails, nothing is left behind."""
    connection = await asyncpg.connect(dsn(empty_url))
    await connection.execute("CREATE VIEW tier_slo AS SELECT 1")  # In the way of 0005.

    with pytest.raises(StartError, match="tier_slo"):
        await upgrade_to_head(empty_url)
    left = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    await connection.close()

    assert left == []


def test_the_role_says_in_one_line_why_it_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and no password in the sentence."""
    code = migrate.run(OnlyDatabase(f"postgresql+asyncpg://user:hunter2@/lane?host={tmp_path}"))
    said = capsys.readouterr().err

    assert code == 1
    assert said.count("\n") == 1
    assert "Cannot migrate PostgreSQL at" in said
    assert "hunter2" not in said


def test_the_role_needs_a_database(capsys: pytest.CaptureFixture[str]) -> None:
    """The missing variable is named."""
    assert migrate.run(OnlyDatabase("")) == 1
    assert "TIERLANE_DATABASE_URL" in capsys.readouterr().err


def test_revisions_are_one_line_and_carry_order_and_phase() -> None:
    """The file names sort in the order in which they run, and each has its phase."""
    names = sorted(path.stem for path in (migrations_dir() / "versions").glob("*.py"))

    assert [name[:4] for name in names] == [f"{n + 1:04}" for n in range(len(names))]
    assert all(name[5:].startswith(("pre_", "post_")) for name in names)
    assert names == known_revisions()
    assert names[-1] == head_revision()
    walked = ScriptDirectory.from_config(migration._config()).walk_revisions()
    assert [script.revision for script in walked] == names[::-1]


def test_statements_are_split_outside_of_bodies() -> None:
    """A semicolon inside a function's body or a comment ends nothing."""
    sql = "-- one;\nSELECT 1;\nCREATE FUNCTION f() AS $$\nBEGIN;\nEND\n$$;\nSELECT\n 2;\n"

    assert [statement.count(";") for statement in split_statements(sql)] == [2, 2, 1]
    with pytest.raises(ValueError, match="semicolon"):
        list(split_statements("SELECT 1"))


async def at_revision(url: str, revision: str) -> None:
    """As if a newer version had migrated this database."""
    db = await asyncpg.connect(dsn(url))
    await db.execute("UPDATE alembic_version SET version_num = $1", revision)
    await db.close()


async def test_a_database_of_a_newer_version_is_left_alone(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A version that is rolled back runs on the schema that is there: `pre` migrations are made to be borne."""
    await at_revision(database_url, "9999_pre_things")

    assert await asyncio.to_thread(migrate.run, OnlyDatabase(database_url)) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out == (
        f"The database is at revision 9999_pre_things, which is newer than this version's {head_revision()}: "
        "nothing to do, this version can run on it.\n"
    )
    assert await current_revision(database_url) == "9999_pre_things"


@pytest.mark.parametrize(
    ("revision", "why"),
    [
        ("9999_post_things", "which requires a newer version of Tierlane: install that version again"),
        ("1975ea83b712", "which is not a revision of Tierlane: is this the database of another application?"),
    ],
)
async def test_a_database_that_this_version_cannot_run_on_is_refused_in_a_sentence(
    database_url: str, capsys: pytest.CaptureFixture[str], revision: str, why: str
) -> None:
    """And left as it is."""
    await at_revision(database_url, revision)

    assert await asyncio.to_thread(migrate.run, OnlyDatabase(database_url)) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        f"The database is at revision {revision}, {why}\n".replace("again\n", "again.\n"),
    )
    assert await current_revision(database_url) == revision
