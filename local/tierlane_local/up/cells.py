"""The cells of `tierlane up --cells`: a Redis server for each beside that of the default cell, and their rows.

With --cluster, cells are slots of the cluster, so they need no servers. The table has the state of each cell, so a cell that
was drained stays drained when the stack starts again.
"""

from collections.abc import Mapping
from pathlib import Path

import asyncpg

from ledger.postgres import asyncpg_dsn
from scheduler.redis_client.keys import DEFAULT_CELL
from tierlane_local.embedded import EmbeddedRedis
from tierlane_local.up.data_dir import StackError

_UPSERT = """
INSERT INTO cells (name, redis_url) VALUES ($1, $2)
ON CONFLICT (name) DO UPDATE SET redis_url = excluded.redis_url WHERE cells.redis_url IS DISTINCT FROM excluded.redis_url
"""


def cell_names(count: int) -> list[str]:
    """The cells beside the default one."""
    return [f"c{number}" for number in range(2, count + 1)]


def cell_server(home: Path, name: str, *, ephemeral: bool) -> EmbeddedRedis:
    """The server of a cell, in a directory of its own."""
    server = EmbeddedRedis(home / "cells" / name, home / "run" / name, ephemeral=ephemeral)
    server.name = f"redis-{name}"
    return server


async def write_cells(database_url: str, servers: Mapping[str, str | None], home: Path) -> None:
    """Add the rows of cells that are missing, and set the servers of the others; `servers`: the URLs by name.

    Raises StackError if a cell of this directory is not closed and not among them: its customers would have no server.
    """
    try:
        connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise StackError(f"Cannot connect to PostgreSQL for the cells: {error}") from error
    try:
        rows = await connection.fetch(
            "SELECT name, redis_url FROM cells WHERE state <> 'closed' AND name <> $1", DEFAULT_CELL
        )
        kept = [name for name, url in rows if url == cell_server(home, name, ephemeral=False).url]
        if left := sorted(set(kept) - servers.keys(), key=lambda name: (len(name), name)):
            *others, last = left
            which = f"Cells {', '.join(others)} and {last}" if others else f"Cell {last}"
            missing = f"{which} of this data directory must be drained and closed first"
            raise StackError(f"{missing}: start with --cells {last.lstrip('c')}, and do that.")
        for name, url in servers.items():
            await connection.execute(_UPSERT, name, url)
    except asyncpg.PostgresError as error:
        raise StackError(f"PostgreSQL rejected the cells: {error}") from error
    finally:
        await connection.close()
