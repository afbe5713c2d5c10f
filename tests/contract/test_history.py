"""The dashboard history in Redis: one gateway writes it, all read it, it is bounded, and it is restored after a loss."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from gateway.operations.dashboard.downsampling import COARSE_MS
from gateway.operations.dashboard.history import MAX_KEPT, DashboardHistory, WeekHistory
from gateway.operations.dashboard.history_points import history_point
from gateway.operations.dashboard.state import DashboardEvent, DashboardState, TierState
from scheduler.protocol.history import KEEP_MS, MAX_POINTS, STEP_MS, TURN_MS, WEEK, HistoryStore
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys

KEYS = Keys()
FREE = TierState("free", 0.1, 3, 40.0, 10.0, 9.0, 1.0, 11.0, 9.0, 0.5, 1.0, 10.0, 20.0, None)


def point(at_ms: int, *events: DashboardEvent) -> DashboardState:
    fields: dict[str, Any] = dict.fromkeys(DashboardState.__struct_fields__, 0)
    return DashboardState(**fields | {"at_ms": at_ms, "status": "healthy", "tiers": [FREE], "events": list(events)})


def history_of(client: Redis, gateway: str) -> DashboardHistory:
    return DashboardHistory(HistoryStore(client, KEYS, gateway), HistoryStore(client, KEYS, gateway, WEEK))


def times(history: DashboardHistory) -> list[int]:
    return [each.at_ms for each in history.all]


@pytest.fixture
async def unreachable() -> AsyncIterator[Redis]:
    """A client of a Redis that does not exist."""
    client = command_client("redis://127.0.0.1:1")
    yield client
    await client.aclose()


async def test_one_gateway_has_the_turn(client: Redis) -> None:
    """While it renews it; when it releases it, the next gateway has it at once."""
    first, second = HistoryStore(client, KEYS, "g1"), HistoryStore(client, KEYS, "g2")

    assert [await first.has_turn(), await second.has_turn(), await first.has_turn()] == [True, False, True]
    assert 0 < await client.pttl(KEYS.history_turn) <= TURN_MS
    await second.release()
    assert not await second.has_turn()
    await first.release()
    assert await second.has_turn()


async def test_the_list_is_bounded_and_expires(client: Redis) -> None:
    """The newest points, for an hour after the newest one."""
    history = HistoryStore(client, KEYS, "g1")
    await client.rpush(KEYS.history, *[b"old"] * (MAX_POINTS + 50))

    assert await history.add(b"new") == MAX_POINTS
    assert await client.llen(KEYS.history) == MAX_POINTS
    assert (await history.read())[-1] == b"new"
    assert 0 < await client.pttl(KEYS.history) <= KEEP_MS


async def test_all_gateways_have_the_same_history(client: Redis) -> None:
    """One point every two seconds with all events between; a gateway that starts later reads it; unreadable points are
    skipped.
    """
    first, second = (history_of(client, name) for name in ("g1", "g2"))
    lost = DashboardEvent(STEP_MS + 500, "bad", "gpu-1 was lost.")
    for at_ms, events in ((0, ()), (STEP_MS + 500, ()), (STEP_MS + 1000, (lost,)), (2 * STEP_MS, ())):
        await first.add(point(at_ms, *events))
        await second.add(point(at_ms, *events))
    await client.lpush(KEYS.history, b"nonsense")
    later = history_of(client, "g3")
    await later.add(point(3 * STEP_MS))

    assert times(first) == [0, STEP_MS + 500, 2 * STEP_MS]
    assert second.all == first.all == later.all[:-1]
    assert later.all[2].events == [lost]
    assert len(await HistoryStore(client, KEYS, "g1").read()) == 4


async def test_a_gateway_keeps_its_own_history(client: Redis, unreachable: Redis) -> None:
    """While Redis is unavailable, bounded; an empty Redis gets all of it."""
    alone = history_of(unreachable, "g1")
    for at_ms in (0, STEP_MS):
        await alone.add(point(at_ms))
    assert times(alone) == [0, STEP_MS]
    for step in range(2, MAX_POINTS + 10):
        alone._append(point(step * STEP_MS))
    assert len(alone.all) <= MAX_KEPT + COARSE_MS // STEP_MS
    assert abs(alone.all[0].at_ms - 10 * STEP_MS) <= COARSE_MS

    restored = history_of(client, "g1")
    for at_ms in (0, STEP_MS):
        await restored.add(point(at_ms))
    await client.flushall()
    await restored.add(point(2 * STEP_MS))
    later = history_of(client, "g2")
    await later.add(point(3 * STEP_MS))

    assert times(later) == [0, STEP_MS, 2 * STEP_MS, 3 * STEP_MS]
    assert 0 < await client.pttl(KEYS.history) <= KEEP_MS


def week_of(history: DashboardHistory) -> list[int]:
    """The numbers of the intervals of five minutes."""
    return [each.at_ms // WEEK.step_ms for each in history.week.since(0)]


async def test_a_week_has_a_point_for_each_five_minutes_that_ended(client: Redis) -> None:
    """One gateway writes it; another one that gets the turn adds what is missing, also after a loss of Redis."""
    first, second = history_of(client, "g1"), history_of(client, "g2")
    lost = DashboardEvent(WEEK.step_ms, "bad", "gpu-1 was lost.")
    for at_ms in range(0, 3 * WEEK.step_ms + STEP_MS, STEP_MS):
        events = [lost] if at_ms == WEEK.step_ms else []
        for history in (first, second):
            history._since += events
            history._append(point(at_ms))
    await first.add(point(3 * WEEK.step_ms + 2 * STEP_MS))
    assert week_of(first) == [0, 1, 2]
    assert [len(each.events) for each in first.week.since(0)] == [0, 1, 0]
    assert week_of(first)[-1] == first.week.since(2 * WEEK.step_ms)[0].at_ms // WEEK.step_ms
    assert await client.llen(KEYS.history_week) == 3
    assert 0 < await client.pttl(KEYS.history_week) <= WEEK.keep_ms

    await first.close()
    await client.lpop(KEYS.history_week)
    await second.add(point(3 * WEEK.step_ms + 4 * STEP_MS))
    assert await client.llen(KEYS.history_week) == 3
    later = history_of(client, "g3")
    await later.add(point(3 * WEEK.step_ms + 6 * STEP_MS))
    assert later.week.since(0) == second.week.since(0) == first.week.since(0)

    await client.flushall()
    await second.add(point(4 * WEEK.step_ms))
    assert week_of(second) == [0, 1, 2, 3]
    assert await client.llen(KEYS.history_week) == 4


async def test_a_week_is_bounded(client: Redis, unreachable: Redis) -> None:
    """In memory and in Redis, also while Redis is unavailable; points of another version, and of a clock that was ahead, are skipped."""
    alone = WeekHistory(HistoryStore(unreachable, KEYS, "g1", WEEK))
    week = WeekHistory(HistoryStore(client, KEYS, "g1", WEEK))
    await client.rpush(KEYS.history_week, msgspec.msgpack.encode([10**15]), b"nonsense", msgspec.msgpack.encode(["x"]))
    for number in range(WEEK.max_points + 5):
        hour = [history_point(point(each * WEEK.step_ms), []) for each in (number, number + 1)]
        await week.add(hour, writes=number % 500 == 0)
        if number % 100 == 0:
            await alone.add(hour, writes=True)
    await week.add(hour, writes=True)

    assert len(week.since(0)) == await client.llen(KEYS.history_week) == WEEK.max_points
    assert len(alone.since(0)) == WEEK.max_points // 100 + 1
