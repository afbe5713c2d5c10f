"""A Redis that ends no worker's pop: the worker pops one batch more though it drains, as happens else in a few microseconds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

LET_GO = "client|unblock"


@asynccontextmanager
async def pops_held(client: Redis) -> AsyncIterator[None]:
    """Refuse, as long as this lasts, what ends a pop."""
    await client.execute_command("ACL", "SETUSER", "default", f"-{LET_GO}")
    try:
        yield
    finally:
        await client.execute_command("ACL", "SETUSER", "default", f"+{LET_GO}")
