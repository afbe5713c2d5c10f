"""The migrations, run from an empty database: they equal the metadata, keep data, and are safe to repeat."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import create_async_engine

from integration.ledger_fixtures import database_url, db, dsn, empty_url, postgres_server
from ledger import migration
from ledger.migration import is_compared, upgrade_to_head
from ledger.revision import current_revision, head_revision, known_revisions, migrations_dir
from ledger.schema import metadata
from scheduler.errors import StartError
from tierlane.roles import migrate

__all__ = ["database_url", "db", "empty_url", "postgres_server"]

Connection = Any
# The schema as PostgreSQL prints it, so that CHECKs and partial indexes are compared completely.
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


async def shape_of(url: str) -> dict[str, list[tuple[object, ...]]]:
    connection = await asyncpg.connect(dsn(url))
    try:
        tables = list(metadata.tables)
        return {part: [tuple(row) for row in await connection.fetch(sql, tables)] for part, sql in SHAPE.items()}
    finally:
        await connection.close()


@asynccontextmanager
async def migrated_to(url: str, revision: str) -> AsyncIterator[Connection]:
    """Run the migrations up to `revision`; a connection to the database."""

    def upgrade(connection: Any) -> None:
        config = migration._config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    engine = create_async_engine(url)
    async with engine.connect() as connection:
        await connection.run_sync(upgrade)
    await engine.dispose()
    db = await asyncpg.connect(dsn(url))
    try:
        yield db
    finally:
        await db.close()


async def test_the_migrations_produce_the_metadata(database_url: str, empty_url: str) -> None:
    """Columns, types, defaults, comments, keys, checks and indexes are equal, and every column has a comment.

    `alembic revision --autogenerate` finds no difference.
    """

    def differences(connection: Any) -> object:
        options = {"compare_type": True, "compare_server_default": True, "include_name": is_compared}
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)

    engine = create_async_engine(empty_url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
    migrated, declared = await shape_of(database_url), await shape_of(empty_url)
    engine = create_async_engine(database_url)
    async with engine.connect() as connection:
        generated = await connection.run_sync(differences)
    await engine.dispose()

    assert migrated == declared
    assert len(migrated["tables"]) == len(metadata.tables)
    assert [column[:2] for column in migrated["columns"] if not column[-1]] == []
    assert generated == []


async def test_several_processes_may_migrate_at_once(empty_url: str) -> None:
    """One runs the migrations; the others wait for it, and have nothing to do."""
    assert await current_revision(empty_url) is None
    program = f"import sys; from ledger.migration import *; import asyncio; asyncio.run(upgrade_to_head({empty_url!r}))"
    words = (sys.executable, "-W", "error", "-c", program)
    processes = [await asyncio.create_subprocess_exec(*words, stderr=subprocess.PIPE) for _ in range(3)]
    outputs = [await process.communicate() for process in processes]

    assert [process.returncode for process in processes] == [0] * 3
    assert [stderr for _, stderr in outputs] == [b""] * 3
    assert await current_revision(empty_url) == head_revision()


async def test_rows_of_the_audit_are_kept_by_migrations(empty_url: str) -> None:
    """Rows in any partition have no mode afterwards, and are still moved out of the default partition."""
    async with migrated_to(empty_url, "0006_pre_default_tiers") as db:
        insert = (
            "INSERT INTO requests (id, created_at, status) VALUES ($1, now() + make_interval(days => $2), 'completed')"
        )
        for n, days in enumerate((0, 9)):
            await db.execute(insert, f"req_{n:032x}", days)
        await upgrade_to_head(empty_url)
        await db.execute("SELECT ensure_request_partitions(9)")
        rows = await db.fetch("SELECT status, mode, delivered, tableoid::regclass::text LIKE '%default' FROM requests")

    assert [tuple(row) for row in rows] == [("completed", None, None, False)] * 2


async def test_token_limits_that_were_set_are_kept_by_migrations(empty_url: str) -> None:
    """Only the default tiers without a token limit get one; recorded changes are kept."""
    changes = "SELECT count(*) FROM config_changes"
    async with migrated_to(empty_url, "0007_pre_delivery") as db:
        await db.execute("UPDATE tiers SET tokens_per_minute = 5 WHERE name = 'paid'")
        await db.execute("DELETE FROM tiers WHERE name = 'free'")
        await db.execute("INSERT INTO tiers SELECT 'gold', 9, 0, 1, 1, 1, NULL, 1, 1")
        before = await db.fetchval(changes)
        await upgrade_to_head(empty_url)
        rows = await db.fetch("SELECT name, tokens_per_minute FROM tiers ORDER BY priority")
        counts = [await db.fetchval(sql) for sql in (changes, f"{changes} WHERE xact > 0")]

    assert [tuple(row) for row in rows] == [("enterprise", 60_000_000), ("paid", 5), ("gold", None)]
    assert counts == [before + 3] * 2  # A token limit, and the waits of two tiers.


async def test_a_failed_migration_leaves_nothing(empty_url: str) -> None:
    """All migrations run in one transaction."""
    connection = await asyncpg.connect(dsn(empty_url))
    await connection.execute("CREATE VIEW tier_slo AS SELECT 1")  # 0005 creates it.

    with pytest.raises(StartError, match="tier_slo"):
        await upgrade_to_head(empty_url)
    tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    await connection.close()

    assert tables == []


def test_the_role_reports_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, without the password; a missing setting is named."""
    url = f"postgresql+asyncpg://user:hunter2@/lane?host={tmp_path}"
    for address, part in ((url, "Cannot migrate PostgreSQL at"), ("", "TIERLANE_DATABASE_URL")):
        assert migrate.run(address) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert part in error
        assert "hunter2" not in error


def test_file_names_have_the_order_and_the_phase_of_migrations() -> None:
    """The names sort in the order in which the migrations run, and each is `pre` or `post`."""
    names = sorted(path.stem for path in (migrations_dir() / "versions").glob("*.py"))

    assert [name[:4] for name in names] == [f"{n + 1:04}" for n in range(len(names))]
    assert all(name[5:].startswith(("pre_", "post_")) for name in names)
    assert names == known_revisions()
    assert names[-1] == head_revision()
    walked = ScriptDirectory.from_config(migration._config()).walk_revisions()
    assert [script.revision for script in walked] == names[::-1]


@pytest.mark.parametrize(
    ("revision", "code", "message"),
    [
        ("9999_pre_things", 0, "nothing to do, this version can run on it"),
        ("9999_post_things", 1, "requires a newer version of Tierlane"),
        ("1975ea83b712", 1, "is not a revision of Tierlane"),
    ],
)
async def test_a_database_of_another_version(
    database_url: str, db: Connection, capsys: pytest.CaptureFixture[str], revision: str, code: int, message: str
) -> None:
    """An older version runs after `pre` migrations of a newer one, and on no other schema; the schema is kept."""
    await db.execute("UPDATE alembic_version SET version_num = $1", revision)

    assert await asyncio.to_thread(migrate.run, database_url) == code
    output = capsys.readouterr()
    text = output.err if code else output.out
    assert text.startswith(f"The database is at revision {revision}, which ")
    assert message in text
    assert (output.out + output.err).count("\n") == 1
    assert await current_revision(database_url) == revision
