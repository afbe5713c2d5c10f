"""What a role stands on: a Redis that cannot lose work, a database that is migrated.

A server that is away is no reason to refuse: it may come back, and the roles are built to go on meanwhile.
"""

import structlog

from scheduler.errors import RedisUnavailable, StartError
from scheduler.redis_client.connections import check_server, command_client

log = structlog.get_logger("process")


async def check_redis(redis_url: str) -> None:
    """Refuse a Redis that is too old or may evict queued work. Raises StartError."""
    client = command_client(redis_url)
    try:
        await check_server(client)
    except RedisUnavailable as error:
        log.warning("redis_away", error=str(error))
    finally:
        await client.aclose()


async def check_database(database_url: str) -> None:
    """Refuse an old schema. Raises StartError."""
    from ledger.revision import current_revision, head_revision, is_behind  # noqa: PLC0415 - workers never need asyncpg

    try:
        revision = await current_revision(database_url)
    except StartError as error:
        log.warning("database_away", error=str(error))
        return
    if is_behind(revision):
        raise StartError(
            f"The database is at revision {revision or 'none'}, not {head_revision()}: run `tierlane migrate`."
        )
