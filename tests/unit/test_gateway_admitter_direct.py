"""Admission beside direct mode: what is tried again, and that nothing is taken from those whom direct mode has."""

import asyncio

from direct_parts import waiting
from fake_redis import FakeRedis
from gateway.circuit_breaker import OnceMore
from gateway.inference.admission import AdmissionBatcher, AdmissionLimits
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequest
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import TierLimit, Verdict
from scheduler.states import Admission
from scheduler.tasks import end_all

REFUSED = Verdict(Admission.KEY_LIMIT, 5.0, 100, 0, 1)


class Watch(OnceMore):
    """Says that a call is worth three tries, and notes what it was told."""

    def __init__(self) -> None:
        self.told = ""

    def begun(self) -> None:
        self.told += "b"

    def answered(self) -> None:
        self.told += "a"

    def failed(self) -> None:
        self.told += "f"

    def try_again(self, tries: int) -> bool:
        return tries < 3


async def run(redis: FakeRedis, *pending_requests: PendingRequest, watch: Watch | None = None) -> Cancellations:
    """Submit these and let everything happen that needs no time; returns what is to be ended in Redis."""
    cancellations = Cancellations(redis)
    limits = AdmissionLimits([TierLimit("free", 1.0, 1.0, 1, ["free"])], 10.0)
    admission = AdmissionBatcher(redis, lambda: limits, cancellations, watch=watch or Watch())
    task = asyncio.create_task(admission.run())
    for pending in pending_requests:
        admission.submit(pending)
    for _ in range(20):
        await asyncio.sleep(0)
    await end_all([task])
    return cancellations


async def test_a_call_is_sent_again_as_often_as_the_watch_wants_it() -> None:
    """Under the same ids, and each try is reported."""
    redis, watch, pending = FakeRedis(failures=2), Watch(), waiting("a")
    await run(redis, pending, watch=watch)

    assert (redis.admitted, watch.told, pending.accepted) == ([["a"]] * 3, "bfbfba", True)


async def test_whom_direct_mode_took_is_neither_refused_nor_ended() -> None:
    """The call failed for good; of its two requests one was taken over meanwhile."""
    redis, taken, left = FakeRedis(failures=3), waiting("taken"), waiting("left")

    def take() -> None:
        taken.direct = True

    redis.meanwhile = take
    cancellations = await run(redis, taken, left)

    assert (taken.done, left.outcome, len(cancellations)) == (False, ErrorCode.NO_CAPACITY, 1)


async def test_who_waits_behind_and_was_taken_is_not_asked_for() -> None:
    """He is served already."""
    redis, taken = FakeRedis(), waiting("taken")
    taken.direct = True
    await run(redis, taken)

    assert redis.admitted == []


async def test_a_late_refusal_does_not_reach_who_is_served_already() -> None:
    """The call came through after all, and says no: what he was given stands."""
    redis, taken = FakeRedis(verdict=REFUSED), waiting("taken")

    def take() -> None:
        taken.direct = True

    redis.meanwhile = take
    await run(redis, taken)

    assert (taken.done, taken.verdict) == (False, None)


async def test_a_late_acceptance_is_noted() -> None:
    """Redis has it too: should direct mode give it up, it waits there."""
    redis, taken = FakeRedis(), waiting("taken")

    def take() -> None:
        taken.direct = True

    redis.meanwhile = take
    await run(redis, taken)

    assert (taken.done, taken.accepted) == (False, True)
