"""Keep a draining worker blocked in its pop: Redis rejects the command that ends it. Widens a race of microseconds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

UNBLOCK = "client|unblock"


@asynccontextmanager
async def pops_held(client: Redis) -> AsyncIterator[None]:
    """Reject CLIENT UNBLOCK until the block ends."""
    await client.execute_command("ACL", "SETUSER", "default", f"-{UNBLOCK}")
    try:
        yield
    finally:
        await client.execute_command("ACL", "SETUSER", "default", f"+{UNBLOCK}")
