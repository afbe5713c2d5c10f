"""Admission batching: which requests share a call, what is repeated, what is rejected and what is cancelled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from direct_parts import submission, waiting
from fake_redis import ACCEPTED, FakeRedis
from gateway.circuit_breaker import OnceMore
from gateway.inference.admission import AdmissionBatcher, AdmissionLimits
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequests
from recovery_setup import reply
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import MAX_SUBMISSIONS, TierLimit, Verdict, calls_of
from scheduler.redis_client.scripts import MAX_CALL_BYTES
from scheduler.states import Admission
from scheduler.tasks import end_all

LIMITS = AdmissionLimits([TierLimit("free", 1.0, 1.0, 1, ["free"])], 10.0)
REJECTED = Verdict(Admission.KEY_LIMIT, retry_after_ms=50, depth=1)


class ThreeTries(OnceMore):
    """Allows three tries of a call, and records the reports about each."""

    def __init__(self) -> None:
        self.reports: list[str] = []

    def begun(self) -> None:
        self.reports.append("begun")

    def answered(self) -> None:
        self.reports.append("answered")

    def failed(self) -> None:
        self.reports.append("failed")

    def try_again(self, tries: int) -> bool:
        return tries < 3


async def settled() -> None:
    """Run everything that can run without time passing."""
    for _ in range(400):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(
    redis: FakeRedis, cancellations: Cancellations | None = None, limits: AdmissionLimits = LIMITS, **options: Any
) -> AsyncIterator[AdmissionBatcher]:
    """A batcher whose loop runs until all that was submitted has settled."""
    cancellations = Cancellations(redis) if cancellations is None else cancellations
    batcher = AdmissionBatcher(redis, lambda: limits, cancellations, **options)
    task = asyncio.create_task(batcher.run())
    yield batcher
    await settled()
    await end_all([task])


async def test_requests_that_arrive_during_a_call_share_the_next_one() -> None:
    """The first request is sent at once; the others go together, at most 256 in a call."""
    redis = FakeRedis()
    redis.gate.clear()
    async with running(redis) as batcher:
        assert batcher.submit(waiting("first"))
        await settled()
        for index in range(MAX_SUBMISSIONS + 3):
            assert batcher.submit(waiting(f"w{index}"))
        redis.gate.set()

    assert [len(call) for call in redis.admitted] == [1, MAX_SUBMISSIONS, 3]


async def test_large_bodies_of_one_customer_do_not_delay_other_customers() -> None:
    """Each customer has a share of a call, in its own order; later small requests of others go with the first call."""
    redis = FakeRedis()
    redis.gate.clear()
    async with running(redis) as batcher:
        batcher.submit(waiting("first"))
        await settled()
        for index in range(20):
            batcher.submit(waiting(f"l{index}", customer_id="big", body=bytes(128 * 1024)))
        for index in range(30):
            batcher.submit(waiting(f"s{index}", customer_id=f"c{index % 3}", body=bytes(100)))
        batcher.submit(waiting("last", customer_id="big", body=bytes(100)))
        redis.gate.set()
    calls = redis.admitted[1:]

    assert {f"s{index}" for index in range(30)} <= set(calls[0])
    assert [name for call in calls for name in call if name[0] == "l"] == [*(f"l{i}" for i in range(20)), "last"]
    assert max(sum(name[0] == "l" for name in call) for call in calls) <= 5


def test_resubmitted_requests_are_split_into_bounded_calls() -> None:
    """By number and by bytes, in order; a submission larger than a call goes alone."""
    small, large, huge = submission(), submission(body=bytes(900_000)), submission(body=bytes(3 * MAX_CALL_BYTES))

    assert list(calls_of([])) == []
    assert [len(call) for call in calls_of([small] * (MAX_SUBMISSIONS + 1))] == [MAX_SUBMISSIONS, 1]
    assert [len(call) for call in calls_of([large] * 5)] == [2, 2, 1]
    assert [len(call) for call in calls_of([small, huge, small])] == [1, 1, 1]


async def test_the_number_of_queued_requests_is_bounded() -> None:
    """A request above the bound is not taken."""
    batcher = AdmissionBatcher(FakeRedis(), lambda: LIMITS, Cancellations(FakeRedis()), max_pending=2)

    assert [batcher.submit(waiting(name)) for name in "abc"] == [True, True, False]


async def test_a_failed_call_is_repeated_under_the_same_ids() -> None:
    """Admission is idempotent. The circuit breaker decides how often, and gets a report of each try."""
    redis, breaker, pending = FakeRedis(failures=2), ThreeTries(), waiting("a")
    async with running(redis, watch=breaker) as batcher:
        batcher.submit(pending)

    assert redis.admitted == [["a"]] * 3
    assert breaker.reports == ["begun", "failed"] * 2 + ["begun", "answered"]
    assert pending.accepted


async def test_an_outage_rejects_the_call_and_the_requests_behind_it() -> None:
    """After two failures all get 503. Only ids that were sent may exist in Redis, so only they are cancelled."""
    redis = FakeRedis(failures=2)
    redis.gate.clear()
    cancellations = Cancellations(redis)
    sent, behind = waiting("sent"), waiting("behind")
    async with running(redis, cancellations) as batcher:
        batcher.submit(sent)
        await settled()
        batcher.submit(behind)
        redis.gate.set()

    assert (sent.outcome, behind.outcome) == (ErrorCode.NO_CAPACITY, ErrorCode.NO_CAPACITY)
    assert await cancellations.flush()
    assert redis.cancelled == [[("sent", ErrorCode.NO_CAPACITY)]]


async def test_a_removed_tier_fails_only_its_own_requests() -> None:
    """An admin removed the tier after authentication: its request may be retried, the others are admitted."""
    redis = FakeRedis()
    stray, other = waiting("stray", tier="removed"), waiting("other")
    async with running(redis) as batcher:
        batcher.submit(stray)
        batcher.submit(other)

    assert stray.outcome is ErrorCode.CATALOG_UNAVAILABLE
    assert (redis.admitted, other.verdict) == ([["other"]], ACCEPTED)


@pytest.mark.parametrize(("arrived", "left_ms"), [(10.0, 4000), (9.99, 4000), (9.5, 3500), (5.0, 1)])
async def test_the_deadline_counts_from_the_arrival(arrived: float, left_ms: int) -> None:
    """Time spent in the admission queue is subtracted, so that no run outlives the client's 504."""
    redis = FakeRedis()
    async with running(redis, clock=lambda: 10.0) as batcher:
        batcher.submit(waiting("a", started=arrived))

    assert redis.total_ms == [left_ms]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_request_that_ended_during_admission_is_cancelled_after_it(answered: bool) -> None:
    """A cancellation before the admission would find nothing, and the request would run without a client.

    A request that ended before it was sent is not admitted at all.
    """
    redis, pending_requests = FakeRedis(), PendingRequests()
    redis.gate.clear()
    cancellations = Cancellations(redis)
    sent, never_sent = waiting("sent"), waiting("never-sent")
    async with running(redis, cancellations) as batcher:
        for pending in (sent, never_sent):
            pending_requests.add(pending)
            batcher.submit(pending)
            await settled()
            if answered:
                pending.finish(ErrorCode.DEADLINE_EXCEEDED)
            else:
                pending_requests.remove(pending)
        redis.gate.set()
    await cancellations.flush()

    assert redis.admitted == [["sent"]]
    code = ErrorCode.DEADLINE_EXCEEDED if answered else ErrorCode.CANCELLED
    assert redis.cancelled == [[("sent", code)]]
    assert redis.told == (["sent"] if answered else [])


async def test_requests_over_a_limit_are_rejected_without_a_call() -> None:
    """A customer's rejection holds until the time that Redis returned; other customers are not affected."""
    now = [10.0]
    redis = FakeRedis(verdict=Verdict(Admission.CUSTOMER_LIMIT, retry_after_ms=300, depth=1))
    pending = {name: waiting(name, 10.0, customer_id=customer) for name, customer in zip("abcd", "xxyx", strict=True)}
    async with running(redis, clock=lambda: now[0]) as batcher:
        for name in "abc":
            batcher.submit(pending[name])
            await settled()
            redis.verdict = ACCEPTED
        now[0] = 10.4
        batcher.submit(pending["d"])

    assert redis.admitted == [["a"], ["c"], ["d"]]
    verdict = pending["b"].outcome
    assert isinstance(verdict, Verdict)
    assert (verdict.outcome, verdict.retry_after_ms) == (Admission.CUSTOMER_LIMIT, 300)
    assert pending["b"].verdict == verdict


@pytest.mark.parametrize("inputs", [1, 3])
async def test_too_late_by_a_wrong_redis_time_is_sent_again(inputs: int) -> None:
    """A step of the Redis clock rejects no request: while the gateway's clock has time left, the call is repeated without it."""
    redis = FakeRedis(verdict=Verdict(Admission.TOO_LATE))
    redis.meanwhile = lambda: setattr(redis, "verdict", redis.verdict if redis.redis_ms[-1] else ACCEPTED)
    members = [waiting(f"w{index}") for index in range(inputs)]
    if inputs > 1:
        for member in members:
            member.together = members
    async with running(redis, limits=LIMITS._replace(redis_ms=1000), clock=lambda: 1.0) as batcher:
        batcher.submit(members[0])

    ids = [member.id for member in members]
    assert (redis.admitted, redis.redis_ms) == ([ids, ids], [1000, 0])
    assert [(member.verdict, member.done) for member in members] == [(ACCEPTED, False)] * inputs


async def test_too_late_by_the_gateways_clock_is_rejected() -> None:
    """The deadline is over here as well, so the call is not repeated."""
    redis, pending = FakeRedis(verdict=Verdict(Admission.TOO_LATE)), waiting("a")
    async with running(redis, limits=LIMITS._replace(redis_ms=1000), clock=lambda: 4.0) as batcher:
        batcher.submit(pending)

    assert (pending.outcome, len(redis.admitted)) == (redis.verdict, 1)


async def test_an_outage_does_not_end_requests_in_direct_mode() -> None:
    """Of two requests of a failed call one moved to direct mode meanwhile: only the other is rejected and cancelled.

    A queued request that direct mode has taken is not sent to Redis either.
    """
    redis, taken, left = FakeRedis(failures=2), waiting("taken"), waiting("left")
    redis.meanwhile = lambda: setattr(taken, "direct", True)
    cancellations = Cancellations(redis)
    async with running(redis, cancellations) as batcher:
        batcher.submit(taken)
        batcher.submit(left)
        await settled()
        batcher.submit(taken)

    assert redis.admitted == [["taken", "left"]] * 2
    assert (taken.done, left.outcome, len(cancellations)) == (False, ErrorCode.NO_CAPACITY, 1)


@pytest.mark.parametrize("code", [None, ErrorCode.DEADLINE_EXCEEDED])
async def test_a_failed_call_does_not_revoke_what_the_client_got(code: ErrorCode | None) -> None:
    """Regression: Redis had run the call, and the request; its row became `no_capacity` after the client had its output."""
    redis, pending = FakeRedis(failures=2), waiting("a")
    given = code or reply(pending)
    redis.meanwhile = lambda: pending.finish(given)
    cancellations = Cancellations(redis)
    async with running(redis, cancellations) as batcher:
        batcher.submit(pending)
    await cancellations.flush()

    assert pending.outcome is given
    assert redis.cancelled == [[("a", code)] if code else []]


@pytest.mark.parametrize("verdict", [ACCEPTED, REJECTED])
async def test_a_late_verdict_does_not_end_a_request_in_direct_mode(verdict: Verdict) -> None:
    """An acceptance is recorded, because Redis has the request as well; a rejection is ignored."""
    redis, taken = FakeRedis(verdict=verdict), waiting("taken")
    redis.meanwhile = lambda: setattr(taken, "direct", True)
    async with running(redis) as batcher:
        batcher.submit(taken)

    assert (taken.done, taken.accepted) == (False, verdict is ACCEPTED)
    assert taken.verdict == (verdict if verdict is ACCEPTED else None)
