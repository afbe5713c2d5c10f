"""The refusals that gateways hand over with their beats: kept a while, bounded, and found again."""

from typing import Any

import pytest

import scheduler.protocol.presence
from pool import Pool
from scheduler.protocol.limits import KEEP_MS, MAX_A_BEAT, RejectionRecord, find_refusal, recent_refusals
from scheduler.protocol.pool_view import GatewayStats
from scheduler.redis_client.keys import Keys
from scheduler.request_id import created_ms, new_request_id


def refused(customer_id: str = "acme", **fields: Any) -> RejectionRecord:
    known = {"key_id": "k1", "tier": "free", "code": "rate_limit_exceeded", "outcome": "customer_limit"}
    return RejectionRecord(id=new_request_id(), customer_id=customer_id, **known | fields)


async def beats(pool: Pool, *refusals: RejectionRecord, gateway: str = "g1") -> None:
    await pool.presence.gateway_beat(GatewayStats(gateway, 0.0, {}), refusals)


async def test_a_refusal_is_found_by_its_id(pool: Pool) -> None:
    """Every field comes back as it was, and the id says when it was."""
    wanted = refused(factor=0.38, rate=38.5, burst=19.0, quota="1day", quota_amount=10_000, tokens_left=-2.5, more=7)
    await beats(pool, refused(), wanted, refused())

    found = await find_refusal(pool.client, pool.keys, wanted.id)

    assert found == wanted
    assert found is not None
    assert found.at_ms == created_ms(wanted.id)


async def test_an_unknown_id_is_not_found(pool: Pool) -> None:
    """Not even where another refusal holds it in another field."""
    request_id = new_request_id()
    await beats(pool, refused(customer_id=request_id))

    assert await find_refusal(pool.client, pool.keys, request_id) is None
    assert await find_refusal(pool.client, Keys("other"), request_id) is None


async def test_the_newest_of_a_customer_come_first(pool: Pool) -> None:
    """Over all gateways, each once, no more than asked for, and of nobody else."""
    first, second, third = refused(), refused(), refused()
    await beats(pool, first, third)
    await beats(pool, first, third)  # As when the outcome of the first call was not known.
    await beats(pool, second, refused("other", key_id="acme"), gateway="g2")

    assert await recent_refusals(pool.client, pool.keys, "acme", 10) == [third, second, first]
    assert await recent_refusals(pool.client, pool.keys, "acme", 2) == [third, second]
    assert await recent_refusals(pool.client, pool.keys, "nobody", 10) == []


async def test_the_list_outlives_its_gateway(pool: Pool) -> None:
    """A gateway that is killed or leaves takes nothing along."""
    kept = refused()
    await beats(pool, kept)
    await pool.client.delete(pool.keys.gateways, pool.keys.gateway("g1"))
    assert await find_refusal(pool.client, pool.keys, kept.id) == kept

    await pool.presence.gateway_gone("g1")

    assert await recent_refusals(pool.client, pool.keys, "acme", 1) == [kept]


async def test_lists_and_index_age_out(pool: Pool) -> None:
    """Ten minutes after the newest entry; a gateway that went longer ago is dropped from the index."""
    await pool.client.zadd(pool.keys.refusal_lists, {"gone": await pool.now_ms() - KEEP_MS - 1})
    await beats(pool, refused())

    for key in (pool.keys.refusals("g1"), pool.keys.refusal_lists):
        assert KEEP_MS - 5000 < await pool.client.pttl(key) <= KEEP_MS
    assert await pool.client.zrange(pool.keys.refusal_lists, 0, -1) == [b"g1"]


async def test_nothing_is_written_where_nothing_was_refused(pool: Pool) -> None:
    """And a list keeps its age when only the heart beats."""
    await beats(pool)
    assert await pool.client.exists(pool.keys.refusals("g1"), pool.keys.refusal_lists) == 0

    await beats(pool, refused())
    await pool.client.pexpire(pool.keys.refusals("g1"), 1000)
    await beats(pool)

    assert await pool.client.pttl(pool.keys.refusals("g1")) <= 1000


async def test_a_beat_and_a_list_are_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a gateway hands over: 256 a beat, and the newest so many in all."""
    monkeypatch.setattr(scheduler.protocol.presence, "KEPT_A_GATEWAY", 300)
    first = [refused() for _ in range(MAX_A_BEAT + 44)]
    second = [refused() for _ in range(MAX_A_BEAT)]

    await beats(pool, *first)
    assert await pool.client.llen(pool.keys.refusals("g1")) == MAX_A_BEAT
    await beats(pool, *second)

    assert await pool.client.llen(pool.keys.refusals("g1")) == 300
    assert await find_refusal(pool.client, pool.keys, first[0].id) is None
    assert await find_refusal(pool.client, pool.keys, first[MAX_A_BEAT - 1].id) == first[MAX_A_BEAT - 1]
    assert await find_refusal(pool.client, pool.keys, second[0].id) == second[0]


async def test_long_lists_are_read_to_their_end(pool: Pool) -> None:
    """A page after the other."""
    oldest = refused()
    await beats(pool, oldest)
    for _ in range(4):
        await beats(pool, *(refused("other") for _ in range(MAX_A_BEAT)))

    assert await find_refusal(pool.client, pool.keys, oldest.id) == oldest
    assert await recent_refusals(pool.client, pool.keys, "acme", 5) == [oldest]


async def test_the_last_memory_is_not_spent_on_it(pool: Pool) -> None:
    """The heart beats on, the queue comes first."""
    used = (await pool.client.info("memory"))["used_memory"]
    await pool.client.config_set("maxmemory", round(used * 1.02))
    try:
        await beats(pool, refused())
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert await pool.client.exists(pool.keys.refusals("g1")) == 0
    assert await pool.client.exists(pool.keys.gateway("g1")) == 1


async def test_an_entry_that_cannot_be_read_spoils_nothing(pool: Pool) -> None:
    """One that a newer version wrote is passed over."""
    kept = refused()
    await beats(pool, kept)
    await pool.client.lpush(pool.keys.refusals("g1"), b"\xc1" + kept.id.encode() + b"acme")

    assert await find_refusal(pool.client, pool.keys, kept.id) == kept
    assert await recent_refusals(pool.client, pool.keys, "acme", 5) == [kept]
