"""Helpers that several contract tests share."""

from typing import Any

from redis.asyncio import Redis

from pool import Pool
from scheduler.protocol.admission import Submission, Verdict
from scheduler.states import Admission

CUSTOMER, LEASES, KEY = "rl:customer:customer", "rl:leases:customer", "rl:key:key"
"""The limits of the default customer and of its API key, in Redis."""

DAY_MS = 86_400_000


async def everything(client: Redis, *ignored: str) -> dict[bytes, bytes]:
    """The whole content of Redis in a comparable form, without the keys `ignored`."""
    skipped = {key.encode() for key in ignored}
    return {key: await client.dump(key) async for key in client.scan_iter() if key not in skipped}


def outcomes(verdicts: list[Verdict]) -> list[str]:
    """The outcome of each verdict."""
    return [verdict.outcome.value for verdict in verdicts]


async def accept(pool: Pool, **limits: Any) -> Submission:
    """One request that is accepted."""
    submission = pool.submission(**limits)
    (verdict,) = await pool.admit([submission])
    assert verdict.outcome is Admission.ACCEPTED
    return submission


async def admit(pool: Pool, count: int = 1, **limits: Any) -> list[str]:
    """The outcomes of `count` requests of one customer with these limits, in one call."""
    return outcomes(await pool.admit([pool.submission(**limits) for _ in range(count)]))


async def fill_buckets(pool: Pool) -> None:
    """Set the epoch long ago, so that buckets that are not stored yet count as full."""
    await pool.client.set(pool.keys.epoch, 1)


async def shift_bucket(client: Redis, key: str, seconds: float) -> None:
    """Make a bucket look as if it had been written this long ago."""
    await client.hincrby(key, "at", -int(seconds * 1_000_000))


async def spent(pool: Pool, period: str) -> bytes:
    """The requests of the default customer that count against a quota."""
    return bytes((await pool.client.hget(CUSTOMER, f"q:{period}")).split()[1])
