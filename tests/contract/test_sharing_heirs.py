"""Equal requests whose run does not end well, or not for all: who runs next, who ends with it, and who tells them."""

import msgspec
import pytest

from key_leaks import leaked_keys
from pool import TIERS, Pool
from scheduler.errors import ErrorCode
from scheduler.protocol.audit_outbox import EndedRecord
from scheduler.protocol.batches import Followers
from scheduler.states import Admission
from sharing_story import KEEP, SHUT, ask, batch_of_all, finish, ids, served_from, stored, untold


async def test_a_leader_that_leaves_hands_over(pool: Pool) -> None:
    """Its own end is its own; the oldest rider is first in the queue, and a scheduler is woken for it."""
    first, *followers = await ask(pool, 3)
    other = await pool.queue(1)
    await pool.client.delete(pool.keys.wake)

    await pool.terminations.cancel([(first.id, ErrorCode.CANCELLED)])

    assert await pool.states(ids([first, *followers])) == ["failed", "queued", "riding"]
    assert await pool.client.llen(pool.keys.wake) == 1
    batch = await batch_of_all(pool)
    assert [r.id for r in batch.requests] == [followers[0].id, *other]
    await finish(pool, batch)
    assert await pool.states(ids(followers)) == ["completed"] * 2


async def test_a_rider_that_leaves_ends_alone(pool: Pool) -> None:
    """Its deadline or its client's leaving is nobody else's."""
    first, gone, stays = await ask(pool, 3)

    (reply,) = await pool.terminations.cancel([(gone.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert reply is not None
    assert reply.error_code == "deadline_exceeded"
    await finish(pool, await batch_of_all(pool))
    assert await pool.states(ids([first, gone, stays])) == ["completed", "failed", "completed"]


async def test_when_all_have_left_nothing_runs(pool: Pool) -> None:
    """The last one's leaving ends the run."""
    asked = await ask(pool, 3)
    for each in asked:
        await pool.terminations.cancel([(each.id, ErrorCode.CANCELLED)])

    await pool.form([("free", 9)])

    assert await pool.pop() is None
    assert await pool.client.exists(pool.keys.same("h")) == 0
    assert await leaked_keys(pool.client) == []


async def test_a_run_goes_on_when_its_leader_leaves(pool: Pool) -> None:
    """As every run whose client leaves: its riders get the answer."""
    first, rider = await ask(pool, 2)
    batch = await batch_of_all(pool)

    await pool.terminations.cancel([(first.id, ErrorCode.CANCELLED)])
    await finish(pool, batch)

    assert await pool.states([rider.id]) == ["completed"]


@pytest.mark.parametrize("field", ["qdl", "dl"])
async def test_a_leader_whose_time_is_up_hands_over(pool: Pool, field: str) -> None:
    """A rider has a deadline of its own, and is not asked for its queue age: it waited in time."""
    first, rider = await ask(pool, 2)
    await pool.overdue([first.id], field)
    await pool.overdue([rider.id], "qdl")

    await pool.terminations.expire(TIERS)

    assert await pool.states([first.id, rider.id]) == ["failed", "queued"]
    assert [r.id for r in (await batch_of_all(pool)).requests] == [rider.id]


async def test_riders_whose_time_is_up_are_passed_over(pool: Pool) -> None:
    """They end as what they are; the next one leads."""
    first, late, heir = await ask(pool, 3)
    await pool.overdue([late.id], "dl")

    await pool.terminations.cancel([(first.id, ErrorCode.CANCELLED)])

    assert await pool.states([late.id, heir.id]) == ["failed", "queued"]
    (reply,) = await pool.results.fetch([late.id])
    assert reply is not None
    assert reply.error_code == "deadline_exceeded"


async def test_nobody_rides_on_one_whose_time_is_up(pool: Pool) -> None:
    """Whatever became of it: a leader that nobody ends must not hold up all that come after it."""
    (first,) = await ask(pool)
    await pool.overdue([first.id], "dl")

    (second,) = await ask(pool)

    assert await pool.states([second.id]) == ["queued"]


async def test_a_lifted_one_that_leads_again_runs_once(pool: Pool) -> None:
    """Its old place in the queue goes when it gets a new one."""
    (old,) = await ask(pool)
    (higher,) = await ask(pool, tier="enterprise")
    await pool.terminations.cancel([(higher.id, ErrorCode.CANCELLED)])

    assert await pool.depth("free") == 1
    assert [r.id for r in (await batch_of_all(pool)).requests] == [old.id]


@pytest.mark.parametrize("code", ["poison_request", "invalid_request", "invalid_output"])
async def test_what_another_run_would_repeat_is_everybodys(pool: Pool, code: str) -> None:
    """One letter tells of a poison, not a thousand."""
    asked = await ask(pool, 3)
    await finish(pool, await batch_of_all(pool), code, "why")

    replies = await stored(pool, asked)

    assert [r.error_code for r in replies if r] == [code] * 3
    assert [letter.id for letter in await pool.letters()] == ids(asked[:1]) * (code == "poison_request")


async def test_a_lost_run_is_tried_again_for_all(pool: Pool) -> None:
    """The leader's retry is theirs."""
    asked = await ask(pool, 3)
    batch = await batch_of_all(pool)
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    await finish(pool, await pool.claim_next("w2", "t2"))

    assert await pool.states(ids(asked)) == ["completed"] * 3


async def test_what_kills_workers_kills_three(pool: Pool) -> None:
    """However many ride on it: with its last attempt all of them end."""
    asked = await ask(pool, 5)
    await pool.form([("free", 9)])
    for number in range(3):
        batch = await pool.claim_next("w", f"t{number}")
        await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    assert await pool.states(ids(asked)) == ["failed"] * 5
    assert await pool.pop() is None
    assert [letter.id for letter in await pool.letters()] == ids(asked[:1])


async def test_an_heir_inherits_the_losses(pool: Pool) -> None:
    """Time ran out for the leader after a loss: the next is a batch by itself, in the attempt after that."""
    first, heir, rider = await ask(pool, 3)
    fresh = await pool.queue(1)
    batch = await batch_of_all(pool)
    await pool.overdue([first.id], "dl")
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    batches = [await pool.claim_next("w", "t1"), await pool.claim_next("w", "t2")]

    assert sorted([r.id for r in b.requests] for b in batches) == sorted([[heir.id], fresh])
    (alone,) = [r for b in batches for r in b.requests if r.id == heir.id]
    assert alone.attempt == 2
    for b in batches:
        await finish(pool, b)
    assert await pool.states([heir.id, rider.id]) == ["completed"] * 2


async def test_no_heir_where_the_pool_can_afford_no_retry(pool: Pool) -> None:
    """It would be one: a wave of losses is not doubled by riders."""
    first, *followers = await ask(pool, 3)
    batch = await batch_of_all(pool)
    await pool.overdue([first.id], "dl")
    at_us = (await pool.now_ms() + 600_000) * 1000
    await pool.client.hset(pool.keys.retry_budget, mapping={"tokens": 0, "at": at_us})
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    assert await pool.states(ids(followers)) == ["failed"] * 2
    assert [r.error_code for r in await stored(pool, followers) if r] == ["worker_lost"] * 2


async def test_a_thousand_riders_are_told_a_few_a_call(pool: Pool) -> None:
    """A script tells 64; the worker goes on until all are told."""
    asked = [s for _ in range(5) for s in await ask(pool, 200)]
    batch = await batch_of_all(pool)

    await finish(pool, batch)

    assert [r.id for r in batch.requests] == [asked[0].id]
    assert set(await pool.states(ids(asked))) == {"completed"}
    assert await pool.client.exists(pool.keys.sharing) == 0
    assert list((await served_from(pool)).values()).count("collapsed") == 999


async def test_a_worker_that_dies_on_the_way_is_replaced(pool: Pool) -> None:
    """The scheduler's pass finds who is not told, and tells them."""
    asked = await untold(pool)
    assert (await pool.states(ids(asked))).count("riding") == 135

    await pool.terminations.expire(TIERS)

    assert set(await pool.states(ids(asked))) == {"completed"}


async def test_two_who_tell_do_no_harm(pool: Pool) -> None:
    """Each rider is ended once; who left meanwhile has its own end."""
    asked = await untold(pool)
    await pool.terminations.cancel([(asked[-1].id, ErrorCode.CANCELLED)])
    followers = Followers(pool.client, pool.keys)

    left = [await followers.share() for _ in range(4)]

    assert left == [True, True, False, False]
    assert (await pool.states(ids(asked)))[-1] == "failed"
    _, ends = await pool.audit()
    assert sorted(e.id for e in ends) == sorted(ids(asked))


async def test_many_dead_riders_cost_a_few_a_call(pool: Pool) -> None:
    """Who left is passed over, 64 a call, until one is found who leads."""
    asked = await ask(pool, 150)
    for start in (1, 75):
        gone = ids(asked)[start : start + 74]
        await pool.terminations.cancel([(i, ErrorCode.CANCELLED) for i in gone])

    await pool.terminations.cancel([(asked[0].id, ErrorCode.CANCELLED)])
    assert await pool.states([asked[-1].id]) == ["riding"]
    await pool.terminations.expire(TIERS)

    assert await pool.states([asked[-1].id]) == ["queued"]


async def test_a_leader_of_a_dead_gateway_hands_over(pool: Pool) -> None:
    """It is dropped before the GPU, and those of living gateways are not."""
    first, rider = pool.submission(**KEEP), pool.submission(**KEEP)
    await pool.admit([first], gateway="dead")
    await pool.admit([rider])
    await pool.aged([first.id, rider.id], 3000)

    await pool.form([("free", 9)])

    assert await pool.states([first.id, rider.id]) == ["failed", "queued"]


async def test_one_that_was_answered_past_redis_hands_over(pool: Pool) -> None:
    """Its answer is not here: a rider runs."""
    first, rider = await ask(pool, 2)
    begun, _ = await pool.audit()
    end = EndedRecord(first.id, "completed", "", 1, 9.0, -1, 9.0, "", 1, "w", 1, 5, 5, "direct", delivered=True)

    await pool.adoption.adopt([(begun[0], end)])

    assert await pool.states([first.id, rider.id]) == ["completed", "queued"]


async def test_what_is_told_again_shares_again(pool: Pool) -> None:
    """After a loss of Redis its gateways submit all that waits: one of them runs."""
    asked = await ask(pool, 3)
    await pool.client.flushall()

    verdicts = await pool.admit([msgspec.structs.replace(s, again=True) for s in asked], SHUT)

    assert {v.outcome for v in verdicts} == {Admission.ACCEPTED}
    assert await pool.states(ids(asked)) == ["queued", "riding", "riding"]
