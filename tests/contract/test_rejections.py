"""Rejections that gateways send with their heartbeats: stored for some time, bounded, and found again."""

from typing import Any

import pytest

import scheduler.protocol.presence
from pool import Pool
from scheduler.protocol.limits import KEEP_MS, MAX_PER_HEARTBEAT, RejectionRecord, find_rejection, recent_rejections
from scheduler.protocol.pool_view import GatewayStats
from scheduler.redis_client.keys import Keys
from scheduler.request_id import created_ms, new_request_id


def rejection(customer_id: str = "acme", **fields: Any) -> RejectionRecord:
    defaults = {"key_id": "k1", "tier": "free", "code": "rate_limit_exceeded", "outcome": "customer_limit"}
    return RejectionRecord(id=new_request_id(), customer_id=customer_id, **defaults | fields)


async def heartbeat(pool: Pool, *rejections: RejectionRecord, gateway: str = "g1") -> None:
    await pool.presence.gateway_beat(GatewayStats(gateway, 0.0, {}), rejections)


async def recent(pool: Pool, customer: str = "acme", limit: int = 10) -> list[RejectionRecord]:
    return await recent_rejections(pool.client, pool.keys, customer, limit)


async def test_a_rejection_is_found_by_its_id(pool: Pool) -> None:
    """With all fields; its time is in the id. An id in another field, or of another pool, is not found."""
    wanted = rejection(factor=0.38, rate=38.5, burst=19.0, quota="1day", quota_amount=10_000, tokens_left=-2.5, more=7)
    other = rejection(customer_id=new_request_id())
    await heartbeat(pool, rejection(), wanted, other)

    assert await find_rejection(pool.client, pool.keys, wanted.id) == wanted
    assert wanted.at_ms == created_ms(wanted.id)
    assert await find_rejection(pool.client, pool.keys, other.customer_id) is None
    assert await find_rejection(pool.client, Keys("other"), wanted.id) is None


async def test_the_newest_rejections_of_a_customer(pool: Pool) -> None:
    """Of all gateways, each once, newest first."""
    first, second, third = rejection(), rejection(), rejection()
    for _ in range(2):  # the outcome of the first call was unknown
        await heartbeat(pool, first, third)
    await heartbeat(pool, second, rejection("other", key_id="acme"), gateway="g2")

    assert await recent(pool) == [third, second, first]
    assert await recent(pool, limit=2) == [third, second]
    assert await recent(pool, "unknown") == []


async def test_the_list_outlives_its_gateway(pool: Pool) -> None:
    """Whether the gateway is lost or stopped."""
    stored = rejection()
    await heartbeat(pool, stored)
    await pool.client.delete(pool.keys.gateways, pool.keys.gateway("g1"))
    assert await recent(pool) == [stored]

    await pool.presence.gateway_gone("g1")

    assert await recent(pool) == [stored]


async def test_lists_and_index_expire(pool: Pool) -> None:
    """Ten minutes after the newest rejection; a heartbeat without rejections extends nothing."""
    await heartbeat(pool)
    assert await pool.client.exists(pool.keys.refusals("g1"), pool.keys.refusal_lists) == 0
    await pool.client.zadd(pool.keys.refusal_lists, {"gone": await pool.now_ms() - KEEP_MS - 1})
    await heartbeat(pool, rejection())

    for key in (pool.keys.refusals("g1"), pool.keys.refusal_lists):
        assert KEEP_MS - 5000 < await pool.client.pttl(key) <= KEEP_MS
    assert await pool.client.zrange(pool.keys.refusal_lists, 0, -1) == [b"g1"]

    await pool.client.pexpire(pool.keys.refusals("g1"), 1000)
    await heartbeat(pool)
    assert await pool.client.pttl(pool.keys.refusals("g1")) <= 1000


async def test_a_heartbeat_and_a_list_are_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 per heartbeat, and the newest of each gateway."""
    monkeypatch.setattr(scheduler.protocol.presence, "MAX_PER_GATEWAY", 300)
    first, second = ([rejection() for _ in range(count)] for count in (MAX_PER_HEARTBEAT + 44, MAX_PER_HEARTBEAT))

    await heartbeat(pool, *first)
    assert await pool.client.llen(pool.keys.refusals("g1")) == MAX_PER_HEARTBEAT
    await heartbeat(pool, *second)

    assert await pool.client.llen(pool.keys.refusals("g1")) == 300
    assert await find_rejection(pool.client, pool.keys, first[0].id) is None
    for each in (first[MAX_PER_HEARTBEAT - 1], second[0]):
        assert await find_rejection(pool.client, pool.keys, each.id) == each


async def test_long_lists_are_read_in_pages(pool: Pool) -> None:
    """To their end."""
    oldest = rejection()
    await heartbeat(pool, oldest)
    for _ in range(4):
        await heartbeat(pool, *(rejection("other") for _ in range(MAX_PER_HEARTBEAT)))

    assert await find_rejection(pool.client, pool.keys, oldest.id) == oldest
    assert await recent(pool) == [oldest]


async def test_rejections_are_not_stored_when_memory_is_short(pool: Pool) -> None:
    """The heartbeat is."""
    used = (await pool.client.info("memory"))["used_memory"]
    await pool.client.config_set("maxmemory", round(used * 1.02))
    try:
        await heartbeat(pool, rejection())
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert await pool.client.exists(pool.keys.refusals("g1")) == 0
    assert await pool.client.exists(pool.keys.gateway("g1")) == 1


async def test_an_unreadable_entry_is_skipped(pool: Pool) -> None:
    """A newer version wrote it."""
    stored = rejection()
    await heartbeat(pool, stored)
    await pool.client.lpush(pool.keys.refusals("g1"), b"\xc1" + stored.id.encode() + b"acme")

    assert await find_rejection(pool.client, pool.keys, stored.id) == stored
    assert await recent(pool) == [stored]
