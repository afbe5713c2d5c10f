"""Bugs of queues with leases: work that runs twice, or is lost between two steps, or is given back by halves."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from eventually import eventually
from pool import TIERS, Pool, done
from scheduler.batching.policy import BatchPolicy, PoolSnapshot, TierPolicy, TierQueue, choose, decide
from scheduler.batching.reaper import Reaper
from scheduler.errors import ErrorCode


async def memberships(pool: Pool, ids: list[str]) -> dict[str, int]:
    """In how many tier queues and inflight lists each id stands."""
    lists = [[i.decode() for i in await pool.client.lrange(pool.keys.queue(tier), 0, -1)] for tier in TIERS]
    lists += (await pool.inflight()).values()
    return {each: sum(found.count(each) for found in lists) for each in ids}


async def test_bug_08_slow_is_not_dead(pool: Pool) -> None:
    """A worker that was only slow ran its work beside its heir (Celery #5935); here the late end is stale and counted."""
    first = await pool.running(1, token="slow")
    await pool.expire_leases()
    await pool.terminations.reap(0)
    batch_id = await pool.pop()
    assert batch_id is not None
    second = await pool.batches.claim(batch_id, "w2", "heir")
    assert second is not None
    request_id = second.requests[0].id

    assert await pool.batches.finish(batch_id, "heir", [done(request_id, "the heir's")]) == 0
    assert await pool.batches.finish(first.batch_id, "slow", [done(request_id, "the slow one's")]) == 1

    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.output, reply.attempts) == ("the heir's", 2)
    _, ended = await pool.audit()
    assert [record.id for record in ended] == [request_id]


async def test_bug_08_a_worker_that_renews_is_left_alone(pool: Pool) -> None:
    """A lease by time alone is taken from whoever works long; here progress renews it, and the reaper finds nothing."""
    claimed = await pool.running(1)
    await pool.expire_leases()
    assert await pool.batches.renew(claimed.batch_id, claimed.token)

    await pool.terminations.reap(0)

    assert await pool.pop() is None
    assert await pool.batches.finish(claimed.batch_id, claimed.token, [done(claimed.requests[0].id)]) == 0


@pytest.mark.parametrize("give_back", ["reap", "fail", "release"])
async def test_bug_09_requeue_in_two_steps(pool: Pool, give_back: str) -> None:
    """RPOP then LPUSH loses what dies in between; here one script moves it, and four at once move it once."""
    claimed = await pool.running(3)
    ids = [member.id for member in claimed.requests]
    await pool.expire_leases()
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "reap": lambda: pool.terminations.reap(0),
        "fail": lambda: pool.batches.fail(claimed.batch_id, claimed.token, ErrorCode.WORKER_LOST, 0),
        "release": lambda: pool.batches.release(claimed.batch_id, claimed.token),
    }

    await asyncio.gather(*[ways[give_back]() for _ in range(4)])

    assert await memberships(pool, ids) == dict.fromkeys(ids, 1)
    assert set(await pool.states(ids)) == {"queued" if give_back == "release" else "processing"}


async def test_bug_10_an_entry_without_a_lease(pool: Pool) -> None:
    """A lease written by a second call can be missing; here each list in flight has a leased batch, whatever happened last."""

    async def leased() -> bool:
        batches = {key.rpartition(":")[2] for key in await pool.inflight()}
        leases = {raw.decode() for raw in await pool.client.zrange(pool.keys.leases, 0, -1)}
        return bool(batches) and batches == leases

    await pool.queue(2, "free")
    await pool.queue(2, "paid")
    await pool.form([("paid", 2), ("free", 2)])
    assert await leased()
    await pool.pop()
    assert await pool.batches.claim("b1", "w1", "token") is not None
    assert await leased()
    assert await pool.batches.renew("b1", "token")
    assert await leased()
    assert await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)
    assert await leased()
    await pool.expire_leases()
    await pool.terminations.reap(0)
    assert await leased()


async def test_bug_11_lrem_is_slow_and_by_value(pool: Pool) -> None:
    """LREM walks the list, and misses what was serialised again; here ids lie in lists and a cancel touches none of them."""
    ids = await pool.queue(20)
    assert await pool.client.lrange(pool.keys.queue("free"), 0, -1) == [i.encode() for i in reversed(ids)]
    await pool.client.config_resetstat()

    await pool.terminations.cancel([(ids[7], ErrorCode.CANCELLED)])

    calls = await pool.client.info("commandstats")
    assert "cmdstat_lrem" not in calls
    await pool.form([("free", 20)])
    assert await memberships(pool, ids) == {i: int(i != ids[7]) for i in ids}


@pytest.mark.parametrize("give_back", ["reap", "push", "release", "fail"])
async def test_bug_15_requeue_without_a_wake_up(pool: Pool, give_back: str) -> None:
    """What was put back lay there until the next arrival (BullMQ #2384); here the same script leaves a wake token."""
    if give_back == "push":
        await pool.queue(1)
        await pool.form([("free", 1)])
        await pool.pop()
    else:
        await pool.running(1)
    await pool.client.delete(pool.keys.wake)

    if give_back == "release":
        await pool.batches.release("b1", "token")
    elif give_back == "fail":
        await pool.batches.fail("b1", "token", ErrorCode.WORKER_LOST, 0)
    else:
        await pool.expire_leases()
        await pool.terminations.reap(0)

    assert await pool.client.llen(pool.keys.wake) == 1


SHARES = [TierPolicy("enterprise", 1, 0.05), TierPolicy("paid", 2, 0.25), TierPolicy("free", 3, 0.10)]
POLICY = BatchPolicy(20, 40.0, 4, 1000.0, SHARES)


def test_bug_23_starvation_under_strict_order() -> None:
    """Strict priority starves the last tier for ever (sidekiq #112); here it keeps its share, and has one once it is old."""
    flood = {"enterprise": TierQueue(10_000, 100.0), "paid": TierQueue(0, 0.0), "free": TierQueue(1000, 100.0)}
    credit: dict[str, float] = {}
    given = 0
    for _ in range(50):
        picks, credit = choose(flood, POLICY, credit)
        given += dict(picks).get("free", 0)
    assert given == pytest.approx(0.10 * 50 * 20, rel=0.05)

    promised_nothing = replace(POLICY, tiers=[replace(tier, guaranteed_share=0.0) for tier in POLICY.tiers])
    picks, _ = choose(flood, promised_nothing, {})
    assert "free" not in dict(picks)
    picks, _ = choose(flood | {"free": TierQueue(1000, 1500.0)}, promised_nothing, {})
    assert dict(picks)["free"] == 1  # A twentieth of 20.


async def test_bug_24_inversion_by_batches_that_are_formed(pool: Pool) -> None:
    """Formed batches of a low tier stand before a late enterprise request (asynq #314); here what waits can be overtaken."""
    snapshot = PoolSnapshot(
        {"free": TierQueue(1000, 500.0)}, ready_batches=1, leased_batches=3, workers=2, arrivals_per_s=0
    )
    decision = decide(snapshot, POLICY, {})
    assert not decision.picks
    await pool.queue(9, "free")
    for _ in range(5):
        await pool.form([("free", 3)], lookahead=decision.ready_limit)
    assert await pool.client.llen(pool.keys.batch_queue) == decision.ready_limit == 1
    (late,) = await pool.queue(1, "enterprise")

    await pool.pop()
    await pool.form([("enterprise", 1), ("free", 2)], lookahead=1)

    batch_id = await pool.pop()
    assert batch_id is not None
    claimed = await pool.batches.claim(batch_id, "w1", "token")
    assert claimed is not None
    assert claimed.requests[0].id == late


async def test_bug_25_a_reliable_pop_takes_one_source(pool: Pool) -> None:
    """BLMOVE has one source, so a pop of several queues is not reliable (GitLab); here a script takes of all, or of none."""
    ids = [i for tier in TIERS for i in await pool.queue(2, tier)]

    await pool.form([(tier, 2) for tier in TIERS])

    assert sorted(i for found in (await pool.inflight()).values() for i in found) == sorted(ids)
    assert await pool.client.zcard(pool.keys.leases) == await pool.client.llen(pool.keys.batch_queue) == 1


async def test_bug_36_a_poison_entry_at_the_head(pool: Pool) -> None:
    """An entry that nobody can read stops everything behind it (Sidekiq #4053); here it is passed over, everywhere."""
    (request_id,) = await pool.queue(1)
    await pool.client.rpush(pool.keys.queue("free"), "nonsense", b"\xff\xfe")  # At the head.
    await pool.client.rpush(pool.keys.batch_queue, "no-such-batch")
    await pool.client.zadd(pool.keys.leases, {"no-such-lease": 1})

    await pool.form([("free", 1)])
    await pool.terminations.reap(0)
    await pool.terminations.expire(TIERS)

    assert await pool.batches.claim(await pool.pop() or "", "w1", "token") is None
    claimed = await pool.batches.claim(await pool.pop() or "", "w1", "token")
    assert claimed is not None
    assert [member.id for member in claimed.requests] == [request_id]


async def test_bug_38_a_retry_burned_by_a_graceful_stop(pool: Pool) -> None:
    """A deploy that hands work back used up its retries; here a release counts nothing, however often."""
    (request_id,) = await pool.queue(1)
    for turn in range(5):
        await pool.form([("free", 1)])
        batch_id = await pool.pop()
        assert batch_id is not None
        claimed = await pool.batches.claim(batch_id, "w1", f"token-{turn}")
        assert claimed is not None
        assert (claimed.requests[0].id, claimed.requests[0].attempt) == (request_id, 1)
        assert await pool.batches.release(batch_id, claimed.token)


async def test_bug_48_a_dead_letter_list_that_is_never_reached(pool: Pool) -> None:
    """With a 1 s lease a deadline of 4 s ended every poison request as a timeout; here three real leases run out before it."""
    (request_id,) = await pool.queue(1)
    await pool.form([("free", 1)])
    reaper = Reaper(pool.terminations, pool.presence, lambda: TIERS, lambda: 50)
    watching = asyncio.create_task(reaper.run())

    async def lost_again() -> bool:
        batch_id = await pool.pop()  # A worker takes it and is never heard of again.
        if batch_id:
            await pool.batches.claim(batch_id, "w1", "token")
        return await pool.states([request_id]) == ["failed"]

    await eventually(lost_again, "it is given up")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.error_code, reply.attempts) == ("worker_lost", 3)
    assert await pool.client.llen(pool.keys.dlq) == 1


async def test_bug_50_a_holder_that_goes_on_after_its_lock(pool: Pool) -> None:
    """Whoever pauses longer than its lock goes on as if it held it; here every verb asks for the token, and is refused."""
    paused = await pool.running(1, token="paused")
    await pool.expire_leases()
    await pool.terminations.reap(0)
    batch_id = await pool.pop()
    assert batch_id is not None
    assert await pool.batches.claim(batch_id, "w2", "owner") is not None
    outcomes = [done(paused.requests[0].id)]

    for held in {paused.batch_id, batch_id}:
        assert not await pool.batches.renew(held, "paused")
        assert not await pool.batches.release(held, "paused")
        assert not await pool.batches.fail(held, "paused", ErrorCode.WORKER_LOST, 0)
        assert await pool.batches.finish(held, "paused", outcomes) == 1

    assert await pool.batches.renew(batch_id, "owner")
    assert await pool.batches.finish(batch_id, "owner", outcomes) == 0
