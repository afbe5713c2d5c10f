"""How these verbs reach Redis: the address of the settings or of the local stack, one client, faults in one sentence."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from ledger.catalog.loader import read_models
from ledger.catalog.quotas import BadCatalogRow
from ledger.postgres import Connection
from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import Observation
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys, is_pool_name, pools_of
from tierlane.admin.options import VerbCall
from tierlane.admin.runner import APPLICATION
from tierlane.connect import UsageError, VerbError, database

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

TIMEOUT_S = 2.0  # A person waits, not a request.


@asynccontextmanager
async def redis_of(settings: "Settings") -> AsyncIterator[Redis]:
    """A client. Raises VerbError where none is set, or it does not answer."""
    if not settings.redis_url:
        raise VerbError("TIERLANE_REDIS_URL is not set, so nothing can be said of what runs now.")
    client = command_client(settings.redis_url, TIMEOUT_S)
    try:
        yield client
    except RedisUnavailable as error:
        raise VerbError(str(error)) from error
    finally:
        await client.aclose()


async def pool_names(connection: Connection, settings: "Settings", only: str | None) -> list[str]:
    """The pools that are looked at: `only` that one, else the own one and those that enabled models name.

    Raises UsageError for what is no name of a pool, and VerbError.
    """
    if only is not None:
        if not is_pool_name(only):
            raise UsageError(f"--pool: must be made of letters, digits, - and _, got {only!r}")
        return [only]
    try:
        named = pools_of((await read_models(connection)).values())
    except BadCatalogRow as error:
        raise VerbError(f"The models cannot be read: {error}") from error
    return sorted(named | {settings.pool})


async def look_everywhere(call: VerbCall, tiers: Sequence[str]) -> dict[str, Observation] | None:
    """One look at each pool that a person may mean; None where Redis does not answer. Raises VerbError."""
    async with database(call.settings, APPLICATION) as connection:
        names = await pool_names(connection, call.settings, None)
    try:
        return await look_at(call.settings, names, tiers)
    except VerbError:
        return None


async def look_at(settings: "Settings", pools: Sequence[str], tiers: Sequence[str]) -> dict[str, Observation]:
    """One look at each pool. Raises VerbError."""
    async with redis_of(settings) as client:
        presences = {pool: Presence(client, Keys(pool), gone_ms=settings.gone_ms) for pool in pools}
        return {pool: await presence.observe(tiers) for pool, presence in presences.items()}
