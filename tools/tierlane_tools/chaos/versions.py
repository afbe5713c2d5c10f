"""The versions of Tierlane, of Python and of the servers, for the report."""

import platform
from importlib.metadata import version

import asyncpg

from ledger.postgres import asyncpg_dsn
from scheduler.redis_client.connections import bounded, command_client

PATIENCE_S = 2.0


async def versions(redis_url: str, database_url: str) -> dict[str, str]:
    """Versions by name. Raises RedisUnavailable and errors of asyncpg."""
    return {
        "tierlane": version("tierlane"),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        **await _redis(redis_url),
        "postgresql": await _postgres(database_url),
    }


async def _redis(url: str) -> dict[str, str]:
    client = command_client(url)
    try:
        async with bounded(PATIENCE_S):
            info = await client.info("server")
    finally:
        await client.aclose()
    if "valkey_version" in info:
        return {"valkey": str(info["valkey_version"])}
    return {"redis": str(info["redis_version"])}


async def _postgres(url: str) -> str:
    connection = await asyncpg.connect(asyncpg_dsn(url), timeout=PATIENCE_S)
    try:
        return str(await connection.fetchval("SHOW server_version")).partition(" ")[0]
    finally:
        await connection.close(timeout=PATIENCE_S)
