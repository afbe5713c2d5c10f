"""Data that Redis holds after the drain, read without the proxies."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded, command_client, server_url, tag_at
from scheduler.redis_client.keys import Keys
from scheduler.states import State

PATIENCE_S = 20.0
CHUNK = 500
FOREVER = -1
OPEN = frozenset({State.QUEUED.value.encode(), State.PROCESSING.value.encode()})
LISTS = ("queue:", "backlog:", "inflight:", "outbox:")


@dataclass(frozen=True)
class Leftovers:
    """Data in Redis that should not exist when no request is open."""

    open_requests: tuple[str, ...] = ()  # Ids whose state is queued or processing.
    lengths: Mapping[str, int] = field(default_factory=dict)  # Of lists and sets that should be empty.
    leaked_keys: tuple[str, ...] = ()  # Without a TTL, and not among the permanent ones.

    @property
    def settled(self) -> bool:
        """Whether no request is open."""
        return not self.open_requests and not any(self.lengths.values())

    def __add__(self, other: "Leftovers") -> "Leftovers":
        """Of two cells."""
        return Leftovers(
            self.open_requests + other.open_requests,
            {**self.lengths, **other.lengths},
            self.leaked_keys + other.leaked_keys,
        )


async def leftovers_of_cells(redis_urls: Sequence[str]) -> Leftovers:
    """What is left in all cells; their keys have different names. Raises RedisUnavailable."""
    found = await asyncio.gather(*map(read_leftovers, redis_urls))
    return sum(found, start=Leftovers())


async def read_leftovers(redis_url: str, keys: Keys | None = None) -> Leftovers:
    """Scan every key of the pool. Raises RedisUnavailable."""
    client = command_client(await server_url(redis_url))
    try:
        keys = keys or Keys(tag=tag_at(client))
        prefix = keys.request("")
        async with bounded(PATIENCE_S):
            names = [raw.decode() async for raw in client.scan_iter(match=f"{keys.prefix}*", count=CHUNK)]
            lists = [name for name in names if name.removeprefix(keys.prefix).startswith(LISTS)]
            states = await _read(client, [name for name in names if name.startswith(prefix)], "HGET", "state")
            lives = await _read(client, [name for name in names if not keys.is_permanent(name)], "PTTL")
            lengths = await _read(client, [keys.batch_queue, keys.outbox, *lists], "LLEN")
            lengths[keys.leases] = await client.zcard(keys.leases)
            lengths[f"{keys.prefix}unclaimed"] = await client.hlen(f"{keys.prefix}unclaimed")
            slots = [text.split() for text in await client.hvals(f"{keys.prefix}slots")]
    finally:
        await client.aclose()
    lengths["Taken slots"] = sum(int(count) - int(free) for free, count in slots)
    return Leftovers(
        tuple(sorted(name.removeprefix(prefix) for name, state in states.items() if state in OPEN)),
        lengths,
        tuple(sorted(name for name, life in lives.items() if life == FOREVER)),
    )


async def _read(client: Redis, names: Sequence[str], command: str, *arguments: str) -> dict[str, Any]:
    """The replies of one command for each key."""
    found: dict[str, Any] = {}
    for first in range(0, len(names), CHUNK):
        chunk = names[first : first + CHUNK]
        async with client.pipeline(transaction=False) as pipeline:
            for name in chunk:
                pipeline.execute_command(command, name, *arguments)
            found.update(zip(chunk, await pipeline.execute(), strict=True))
    return found
