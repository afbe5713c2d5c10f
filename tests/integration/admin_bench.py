"""The admin verbs in a test's hands: the command line on the test's own database, and whole tables to compare."""

import asyncio
import json
from typing import Any

from typer.testing import CliRunner, Result

from tierlane.cli import app

Connection = Any
CATALOG = ("tiers", "customers", "api_keys", "quotas", "models", "config_changes", "catalog_version")
GOLD = (
    *("--priority", "4", "--guaranteed-share", "0.1", "--requests-per-second", "50", "--burst", "60"),
    *("--max-concurrency", "7", "--max-queue-depth", "100", "--max-queue-ms", "1500"),
)
"""Options of a new tier: all that it cannot go without."""


class Admin:
    """Runs `tierlane` on one database; settings and a stack of this machine are out of reach."""

    def __init__(self, database_url: str) -> None:
        self._env = {"TIERLANE_DATABASE_URL": database_url, "TIERLANE_DATA_DIR": "/nonexistent"}

    async def run(self, *arguments: str, env: dict[str, str] | None = None, **options: Any) -> Result:
        """Whatever comes out of it, but no traceback."""
        environment = self._env | (env or {})
        result: Result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments], env=environment, **options)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    async def done(self, *arguments: str, **options: Any) -> str:
        """Run what must go well; its output."""
        result = await self.run(*arguments, **options)
        assert (result.exit_code, result.stderr) == (0, ""), arguments
        return result.stdout

    async def json(self, *arguments: str) -> Any:
        """Run what must go well; its output for programs, read."""
        return json.loads(await self.done(*arguments, "-o", "json"))

    async def fault(self, exit_code: int, *arguments: str) -> str:
        """Run what must be refused with this exit code, in one line and nothing else; the line."""
        result = await self.run(*arguments)
        assert (result.exit_code, result.stdout) == (exit_code, ""), arguments
        assert result.stderr.count("\n") == 1
        assert not {"SELECT", "UPDATE", "INSERT", "violates", "constraint", "Traceback"} & set(result.stderr.split())
        line: str = result.stderr
        return line.rstrip("\n")


async def tables(db: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of the catalog, for a comparison."""
    return {name: [tuple(row) for row in await db.fetch(f"SELECT * FROM {name} ORDER BY 1")] for name in CATALOG}


async def customer(db: Connection, name: str = "acme", tier: str = "paid") -> str:
    """A customer; its id."""
    made: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ($1, $2) RETURNING id::text", name, tier)
    return made
