"""The `tierlane` command line on the test's own servers."""

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tierlane.cli import app

Connection = Any


class Admin:
    """Runs `tierlane` on one database; settings files and a local stack of this machine have no effect."""

    def __init__(self, database_url: str, **variables: str) -> None:
        self.database_url = database_url
        self._env = {"TIERLANE_DATABASE_URL": database_url, "TIERLANE_DATA_DIR": "/nonexistent"} | variables

    async def run(self, *arguments: str, env: dict[str, str] | None = None, **options: Any) -> Result:
        """Run a verb; a traceback fails the test."""
        environment = self._env | (env or {})
        result: Result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments], env=environment, **options)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    async def done(self, *arguments: str, **options: Any) -> str:
        """Run a verb that must succeed; its output."""
        result = await self.run(*arguments, **options)
        assert (result.exit_code, result.stderr) == (0, ""), arguments
        return result.stdout

    async def json(self, *arguments: str) -> Any:
        """Run a verb that must succeed; its output as a document."""
        return json.loads(await self.done(*arguments, "-o", "json"))

    async def fault(self, exit_code: int, *arguments: str) -> str:
        """Run a verb that must fail with this exit code and one line without SQL; the line."""
        result = await self.run(*arguments)
        assert (result.exit_code, result.stdout) == (exit_code, ""), arguments
        assert result.stderr.count("\n") == 1
        assert not {"SELECT", "UPDATE", "INSERT", "violates", "constraint", "Traceback"} & set(result.stderr.split())
        return str(result.stderr).rstrip("\n")


async def customer(db: Connection, name: str = "acme", tier: str = "paid") -> str:
    """Insert a customer; its id."""
    row_id: str = await db.fetchval("INSERT INTO customers (name, tier) VALUES ($1, $2) RETURNING id::text", name, tier)
    return row_id


@pytest.fixture
async def acme(db: Connection) -> str:
    """The id of a customer `acme` of the tier paid."""
    return await customer(db)


@pytest.fixture
def admin(database_url: str, acme: str) -> Admin:
    return Admin(database_url)
