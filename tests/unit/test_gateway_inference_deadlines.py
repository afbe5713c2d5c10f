"""Cancellations and the deadline sweep: what is ended in Redis, and what the client gets at its deadline."""

import asyncio

import pytest

from direct_parts import waiting
from fake_redis import FakeRedis
from gateway.inference.deadlines import GRACE_S, LEAD_S, MAX_IDS, Cancellations, DeadlineSweep
from gateway.inference.pending import PendingRequest, PendingRequests
from scheduler.errors import ErrorCode
from scheduler.protocol.replies import Reply
from scheduler.tasks import end_all


def reply(request_id: str) -> Reply:
    return Reply(request_id, "c", "n", "completed", "", 1, 1.0, "b", 1, "w", 1.0, 1, "v1", "in time")


async def settled() -> None:
    """Run everything that can run without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


class Setup:
    """A sweep over pending requests, with a fake Redis that may have stored results."""

    def __init__(self, *sent: str, stored: str = "") -> None:
        self.redis = FakeRedis()
        self.pending_requests, self.cancellations = PendingRequests(), Cancellations(self.redis)
        self.sweep = DeadlineSweep(self.pending_requests, self.redis, self.cancellations)
        self.requests = [self.add(name) for name in sent]
        if stored:
            self.redis.customer_limits[stored] = reply(stored)

    def add(self, name: str, started: float = 0.0, *, sent: bool = True) -> PendingRequest:
        pending = waiting(name, started)
        pending.sent = sent
        self.pending_requests.add(pending)
        return pending


async def test_cancellations_during_a_call_share_the_next_one() -> None:
    """Many disconnects cause few calls."""
    redis = FakeRedis()
    redis.gate.clear()
    cancellations = Cancellations(redis)
    task = asyncio.create_task(cancellations.run())
    cancellations.add("first", ErrorCode.CANCELLED)
    await settled()
    for index in range(100):
        cancellations.add(f"c{index}", ErrorCode.CANCELLED)
    redis.gate.set()
    await settled()
    await end_all([task])

    assert [len(call) for call in redis.cancelled] == [1, 100]
    assert len(cancellations) == 0


async def test_cancellations_are_kept_during_an_outage_for_ten_minutes() -> None:
    """A failed call keeps its ids; after ten minutes the scheduler has ended the requests by their deadline."""
    redis, now = FakeRedis(failures=1), [0.0]
    cancellations = Cancellations(redis, clock=lambda: now[0])
    cancellations.add("old", ErrorCode.CANCELLED)
    assert not await cancellations.flush()
    assert len(cancellations) == 1
    now[0] = 601.0
    cancellations.add("new", ErrorCode.CANCELLED)
    assert await cancellations.flush()

    assert redis.cancelled[-1] == [("new", ErrorCode.CANCELLED)]
    assert cancellations.dropped == 1


def test_the_number_of_cancellations_is_bounded() -> None:
    """Above the bound the oldest is dropped."""
    cancellations = Cancellations(FakeRedis())
    for index in range(MAX_IDS + 5):
        cancellations.add(str(index), ErrorCode.CANCELLED)

    assert (len(cancellations), cancellations.dropped) == (MAX_IDS, 5)


async def test_drain_ends_all_requests_in_redis_first() -> None:
    """A request whose result is stored by then gets it; the others get `draining`, without a call if they were not sent."""
    setup = Setup("done", "rest", stored="done")
    done, rest = setup.requests
    unsent = setup.add("unsent", sent=False)

    await setup.sweep.end_all(ErrorCode.DRAINING)

    assert setup.redis.cancelled == [[("done", ErrorCode.DRAINING), ("rest", ErrorCode.DRAINING)]]
    assert done.outcome == reply("done")
    assert [rest.outcome, unsent.outcome] == [ErrorCode.DRAINING] * 2


async def test_requests_that_cannot_be_served_end_before_their_deadline() -> None:
    """Once, and those that Redis may have: a direct request is run by a worker, one not sent yet is rejected later."""
    setup = Setup("done", "rest", "direct", stored="done")
    done, rest, direct = setup.requests
    direct.direct = True
    unsent = setup.add("unsent", sent=False)

    for now in (1.0, 1.25):
        setup.sweep.end_sent(ErrorCode.MODEL_TOO_SLOW, now)
    await settled()

    assert setup.redis.cancelled == [[("done", ErrorCode.MODEL_TOO_SLOW), ("rest", ErrorCode.MODEL_TOO_SLOW)]]
    assert [done.outcome, rest.outcome] == [reply("done"), ErrorCode.MODEL_TOO_SLOW]
    assert (direct.done, unsent.done) == (False, False)


async def test_all_due_requests_are_ended_in_one_call() -> None:
    """Redis is called shortly before the deadline, once; a stored result is returned instead of the timeout."""
    setup = Setup("done", "late", stored="done")
    done, late = setup.requests
    early = setup.add("early", started=3.0)

    for now in (3.999, 4.001, 4.01):
        setup.sweep.sweep(now - LEAD_S)
    await settled()

    assert setup.redis.cancelled == [[("done", ErrorCode.DEADLINE_EXCEEDED), ("late", ErrorCode.DEADLINE_EXCEEDED)]]
    assert done.outcome == reply("done")
    assert late.outcome is ErrorCode.DEADLINE_EXCEEDED
    assert not early.done


@pytest.mark.parametrize("failures", [0, 1])
async def test_an_unresponsive_redis_does_not_delay_the_504(failures: int) -> None:
    """After the grace the client gets 504, and Redis is told so later: a result stored at that moment must not be
    recorded as delivered.
    """
    setup = Setup("late", stored="late")
    (late,) = setup.requests
    setup.redis.gate.clear()
    setup.redis.failures = failures

    setup.sweep.sweep(4.0)
    await settled()
    assert not late.done
    setup.sweep.sweep(4.0 + GRACE_S)
    assert late.outcome is ErrorCode.DEADLINE_EXCEEDED
    setup.redis.gate.set()
    await settled()
    assert (len(setup.cancellations), setup.sweep.overrun) == (1, 1)
    await setup.cancellations.flush()

    assert late.outcome is ErrorCode.DEADLINE_EXCEEDED
    assert setup.redis.told == ["late"]


async def test_a_suspended_gateway_fetches_the_result_before_the_504() -> None:
    """The process was stopped past deadline and grace; a result that was stored meanwhile is the response."""
    setup = Setup("done", stored="done")

    setup.sweep.sweep(10.0)
    await settled()

    assert setup.requests[0].outcome == reply("done")
    assert setup.sweep.overrun == 0
