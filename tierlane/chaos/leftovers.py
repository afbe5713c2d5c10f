"""What Redis still holds after the drain: a look at every key, which only a tool may do."""

from collections.abc import AsyncIterator

from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded, command_client
from scheduler.redis_client.keys import Keys
from scheduler.states import State
from tierlane.chaos.proof import Leftovers

PATIENCE_S = 20.0
CHUNK = 500
FOREVER = -1
OPEN = frozenset({State.QUEUED.value.encode(), State.PROCESSING.value.encode()})
LISTS = ("queue:", "inflight:", "outbox:")


async def read_leftovers(redis_url: str, keys: Keys | None = None) -> Leftovers:
    """Look at every key of the pool. Raises RedisUnavailable."""
    client = command_client(redis_url)
    try:
        async with bounded(PATIENCE_S):
            return await _look(client, keys or Keys())
    finally:
        await client.aclose()


async def _look(client: Redis, keys: Keys) -> Leftovers:
    requests: list[str] = []
    lengths = {
        keys.batch_queue: await client.llen(keys.batch_queue),
        keys.outbox: await client.llen(keys.outbox),
        keys.leases: await client.zcard(keys.leases),
    }
    leaks: list[str] = []
    async for chunk in _chunks(client, keys.prefix):
        requests += await _open(client, [key for key in chunk if key.startswith(keys.request(""))], keys.request(""))
        for key in chunk:
            if key.removeprefix(keys.prefix).startswith(LISTS):
                lengths[key] = await client.llen(key)
        leaks += await _leaks(client, chunk, keys)
    return Leftovers(tuple(sorted(requests)), lengths, tuple(sorted(leaks)))


async def _chunks(client: Redis, prefix: str) -> AsyncIterator[list[str]]:
    chunk: list[str] = []
    async for raw in client.scan_iter(match=f"{prefix}*", count=CHUNK):
        chunk.append(raw.decode())
        if len(chunk) >= CHUNK:
            yield chunk
            chunk = []
    yield chunk


async def _open(client: Redis, keys: list[str], prefix: str) -> list[str]:
    async with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.hget(key, "state")
        states = await pipeline.execute()
    return [key.removeprefix(prefix) for key, state in zip(keys, states, strict=True) if state in OPEN]


async def _leaks(client: Redis, chunk: list[str], keys: Keys) -> list[str]:
    names = [key for key in chunk if not keys.is_permanent(key)]
    async with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.pttl(name)
        lives = await pipeline.execute()
    return [name for name, life in zip(names, lives, strict=True) if life == FOREVER]
