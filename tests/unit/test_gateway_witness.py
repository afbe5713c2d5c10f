"""The second witness: when Redis is suspected, and who is submitted again, in which order."""

import pytest

from gateway.inference.recovery import OTHER_EPOCH, UNAVAILABLE, LossSigns, candidates, to_resubmit
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.states import Admission
from witness_bench import TIERS, Bench, pending


def test_another_epoch_is_a_sign_and_the_first_is_none() -> None:
    """A Redis that came back empty is seen with the next heartbeat, once."""
    signs = LossSigns()

    assert [signs.heartbeat(epoch) for epoch in (5, 5, 6, 6)] == [None, None, OTHER_EPOCH, None]


def test_a_heartbeat_after_failed_ones_is_a_sign() -> None:
    """A replica that took over has the same epoch, but not before connections broke."""
    signs = LossSigns()
    signs.heartbeat(5)
    signs.missed()
    signs.missed()

    assert [signs.heartbeat(5), signs.heartbeat(5)] == [UNAVAILABLE, None]


async def test_whom_redis_may_have_held() -> None:
    """Those that were asked about, not those still to be asked, or answered already."""
    held, under_way, direct = pending(), pending(accepted=False), pending(direct=True)
    answered = pending()
    answered.finish(ErrorCode.DEADLINE_EXCEEDED)

    assert candidates([held, under_way, pending(sent=False), direct, answered]) == [held, under_way, direct]


async def test_order_and_choice_of_those_who_are_submitted_again() -> None:
    """Enterprise first, the nearest deadline first within a tier; a run's time must be left, to the millisecond."""
    free, late_free = pending(0.5, lost=True), pending(0.4, lost=True)
    paid = pending(0.4, "paid", lost=True)
    enterprise, later = pending(0.6, "enterprise", lost=True), pending(0.9, "enterprise", lost=True)
    gone, kept, removed_tier = pending(0.6, lost=True, gone=True), pending(0.6), pending(0.6, "removed", lost=True)
    refused, direct = pending(0.6, lost=True, accepted=False), pending(0.6, lost=True, direct=True)
    waiting = [free, direct, later, gone, kept, paid, enterprise, late_free, removed_tier, refused]

    assert to_resubmit(waiting, TIERS, 4.25, 150.0) == [enterprise, later, paid, late_free, free]
    assert to_resubmit(waiting, TIERS, 4.26, 150.0) == [enterprise, later, free]


async def test_a_recovery_submits_again_under_the_same_id_with_the_time_left() -> None:
    """Everything but the time and the mark is what the client sent, idempotency included; the wait goes on."""
    bench = Bench()
    waiting = pending()
    bench.add(waiting)
    bench.now = 1.5
    bench.recovery.suspect("a test")
    assert await bench.recovery.recover()

    ((again,),) = bench.redis.submitted
    sent = waiting.submission
    assert (again.id, again.nonce, again.body, again.idempotency, again.fingerprint) == (
        sent.id, sent.nonce, sent.body, "c:key", "body",
    )  # fmt: skip
    assert (again.again, again.total_ms) == (True, 2500)
    assert not waiting.done
    assert not waiting.lost


async def test_calls_are_of_256_with_enterprise_in_the_first() -> None:
    """600 waiting are three calls."""
    bench = Bench()
    for index in range(600):
        bench.add(pending(0.0, ("free", "paid", "enterprise")[index % 3]))
    bench.recovery.suspect("a test")
    await bench.recovery.recover()

    assert [len(call) for call in bench.redis.submitted] == [256, 256, 88]
    tiers = [submission.tier for call in bench.redis.submitted for submission in call]
    assert tiers == ["enterprise"] * 200 + ["paid"] * 200 + ["free"] * 200


async def test_who_leaves_between_two_calls_is_not_submitted() -> None:
    """And who leaves while the call is under way is cancelled after it."""
    bench = Bench()
    first = [pending() for _ in range(256)]
    second = [pending(1.0), pending(1.0)]
    bench.add(*first, *second)
    bench.redis.during = lambda: bench.end(first[0], second[0], outcome=ErrorCode.DEADLINE_EXCEEDED)
    bench.recovery.suspect("a test")
    await bench.recovery.recover()

    assert [len(call) for call in bench.redis.submitted] == [256, 1]
    assert len(bench.cancellations) == 1


async def test_a_call_under_way_at_the_loss_is_looked_at_again() -> None:
    """Its answer may be from before the loss: once accepted it is submitted again too, and then all are kept."""
    bench = Bench()
    under_way = pending(accepted=False)
    bench.add(under_way)
    bench.recovery.suspect("a test")
    assert not await bench.recovery.recover()
    under_way.accepted = True
    assert await bench.recovery.recover()

    assert bench.redis.ids == [under_way.id]


async def test_what_redis_has_no_room_for_is_tried_again() -> None:
    """A full Redis takes nobody back; they wait on, and are submitted with the next round."""
    bench = Bench()
    waiting = pending()
    bench.add(waiting)
    bench.redis.outcome = Admission.BACKPRESSURE
    bench.recovery.suspect("a test")
    assert not await bench.recovery.recover()
    assert not waiting.done
    bench.redis.outcome = Admission.DUPLICATE
    assert await bench.recovery.recover()


async def test_a_recovery_that_fails_goes_on_where_it_stopped() -> None:
    """Redis goes away in the middle: those it has confirmed are not sent a second time, the others are."""
    bench = Bench()
    waiting = [pending() for _ in range(300)]
    bench.add(*waiting)
    bench.redis.during = lambda: setattr(bench.redis, "failures", 1)
    bench.recovery.suspect("a test")
    with pytest.raises(RedisUnavailable):
        await bench.recovery.recover()
    bench.redis.during = lambda: None
    assert await bench.recovery.recover()

    assert [len(call) for call in bench.redis.submitted] == [256, 44]
    assert sorted(bench.redis.ids) == sorted(each.id for each in waiting)


async def test_a_request_that_ran_past_redis_is_witnessed_elsewhere() -> None:
    """Direct mode writes its own audit."""
    bench = Bench()
    direct = pending(direct=True)
    bench.add(direct)
    bench.recovery.suspect("a test")
    await bench.recovery.recover()
    bench.end(direct)

    assert (bench.redis.submitted, len(bench.ends)) == ([], 0)


async def test_who_comes_back_from_direct_mode_is_submitted_again_then() -> None:
    """Redis lost it while a worker had it past Redis; that worker was lost too, so it is Redis's again."""
    bench = Bench()
    waiting = pending(direct=True)
    bench.add(waiting)
    bench.recovery.suspect("a test")
    assert not await bench.recovery.recover()
    assert bench.redis.submitted == []
    waiting.direct = False
    assert await bench.recovery.recover()

    assert bench.redis.ids == [waiting.id]


async def test_one_recovery_a_second() -> None:
    """A whole one is followed by a second's pause; one that Redis did not let end is gone on with sooner."""
    bench = Bench()
    bench.add(pending())
    bench.redis.failures = 1
    bench.recovery.suspect("a test")

    assert await bench.recovery._recovered() == 0.25
    assert await bench.recovery._recovered() == 1.0
