"""The last quarter of an hour in Redis: one writes, all read, it never grows, and it comes back after Redis was emptied."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.operations.snapshots import DashboardHistory
from gateway.operations.state import DashboardEvent, DashboardState, TierState
from scheduler.protocol.history import KEEP_MS, MAX_POINTS, STEP_MS, TURN_MS, HistoryStore
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys

KEYS = Keys()
FREE = TierState("free", 0.1, 3, 40.0, 10.0, 9.0, 1.0, 11.0, 9.0, 0.5, 1.0, 10.0, 20.0, None)


def document(at_ms: int, *events: DashboardEvent) -> DashboardState:
    fields: dict[str, Any] = dict.fromkeys(DashboardState.__struct_fields__, 0)
    return DashboardState(**fields | {"at_ms": at_ms, "status": "healthy", "tiers": [FREE], "events": list(events)})


@pytest.fixture
async def away() -> AsyncIterator[Redis]:
    """A client of a Redis that nobody answers for."""
    client = command_client("redis://127.0.0.1:1")
    yield client
    await client.aclose()


async def test_one_gateway_has_the_turn(client: Redis) -> None:
    """For as long as it renews it; when it gives up, the next one has it at once."""
    first, second = HistoryStore(client, KEYS, "g1"), HistoryStore(client, KEYS, "g2")

    assert [await first.has_turn(), await second.has_turn(), await first.has_turn()] == [True, False, True]
    assert 0 < await client.pttl(KEYS.history_turn) <= TURN_MS
    await second.release()
    assert not await second.has_turn()
    await first.release()
    assert await second.has_turn()


async def test_the_list_is_bounded_and_ages_out(client: Redis) -> None:
    """The newest 450, for a quarter of an hour from the newest."""
    history = HistoryStore(client, KEYS, "g1")
    await client.rpush(KEYS.history, *[b"old"] * (MAX_POINTS + 50))  # type: ignore[misc]

    assert await history.add(b"new") == MAX_POINTS
    assert await client.llen(KEYS.history) == MAX_POINTS  # type: ignore[misc]
    assert (await history.read())[-1] == b"new"
    assert 0 < await client.pttl(KEYS.history) <= KEEP_MS


async def test_a_gateway_that_starts_later_has_the_same(client: Redis) -> None:
    """A moment every two seconds, with all events between; only one of two gateways writes it; nonsense is passed over."""
    first, second = (DashboardHistory(HistoryStore(client, KEYS, name)) for name in ("g1", "g2"))
    lost = DashboardEvent(STEP_MS + 500, "bad", "gpu-1 was lost.")
    for at_ms, events in ((0, ()), (STEP_MS + 500, ()), (STEP_MS + 1000, (lost,)), (2 * STEP_MS, ())):
        await first.add(document(at_ms, *events))
        await second.add(document(at_ms, *events))
    await client.lpush(KEYS.history, b"nonsense")  # type: ignore[misc]
    later = DashboardHistory(HistoryStore(client, KEYS, "g3"))
    await later.add(document(3 * STEP_MS))

    assert [each.at_ms for each in first.all] == [0, STEP_MS + 500, 2 * STEP_MS]
    assert second.all == first.all
    assert later.all[:-1] == first.all
    assert later.all[2].events == [lost]
    assert len(await HistoryStore(client, KEYS, "g1").read()) == 4


async def test_without_redis_each_goes_on_with_its_own(client: Redis, away: Redis) -> None:
    """And what it kept comes before nothing: a Redis that is empty is given all of it."""
    alone = DashboardHistory(HistoryStore(away, KEYS, "g1"))
    for at_ms in (0, STEP_MS):
        await alone.add(document(at_ms))
    assert [each.at_ms for each in alone.all] == [0, STEP_MS]

    kept = DashboardHistory(HistoryStore(client, KEYS, "g1"))
    for at_ms in (0, STEP_MS):
        await kept.add(document(at_ms))
    await client.flushall()
    await kept.add(document(2 * STEP_MS))
    later = DashboardHistory(HistoryStore(client, KEYS, "g2"))
    await later.add(document(3 * STEP_MS))

    assert [each.at_ms for each in later.all] == [0, STEP_MS, 2 * STEP_MS, 3 * STEP_MS]
    assert 0 < await client.pttl(KEYS.history) <= KEEP_MS


async def test_the_ring_is_bounded(away: Redis) -> None:
    """However long Redis is away."""
    alone = DashboardHistory(HistoryStore(away, KEYS, "g1"))
    alone._loaded = True
    for step in range(MAX_POINTS + 10):
        alone._append(document(step * STEP_MS))

    assert len(alone.all) == MAX_POINTS
    assert alone.all[0].at_ms == 10 * STEP_MS
