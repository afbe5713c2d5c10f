"""The versions of Tierlane, of Python and of the servers, for the report."""

import platform
from importlib.metadata import version

import asyncpg

from ledger.postgres import asyncpg_dsn
from scheduler.redis_client.connections import bounded, command_client

PATIENCE_S = 2.0


async def versions(redis_url: str, database_url: str) -> dict[str, str]:
    """Versions by name. Raises RedisUnavailable and errors of asyncpg."""
    client = command_client(redis_url)
    try:
        async with bounded(PATIENCE_S):
            info = await client.info("server")
    finally:
        await client.aclose()
    connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=PATIENCE_S)
    try:
        postgres = str(await connection.fetchval("SHOW server_version")).partition(" ")[0]
    finally:
        await connection.close(timeout=PATIENCE_S)
    server = "valkey" if "valkey_version" in info else "redis"
    return {
        "tierlane": version("tierlane"),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        server: str(info[f"{server}_version"]),
        "postgresql": postgres,
    }
