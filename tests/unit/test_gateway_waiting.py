"""Waiters, coalesced admission, cancels and the deadline sweep, on a fake at the seam of Admissions and Endings."""

import asyncio

import msgspec
import pytest

from customer_limits import in_force
from fake_redis import ACCEPTED, FakeRedis
from gateway.inference.admission import AdmissionBatcher, AdmissionLimits
from gateway.inference.deadlines import GRACE_S, LEAD_S, MAX_IDS, Cancellations, DeadlineSweep
from gateway.inference.pending import Outcome, PendingRequest, PendingRequests
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import MAX_SUBMISSIONS, Submission, TierLimit, Verdict, calls_of
from scheduler.protocol.replies import Reply
from scheduler.redis_client.scripts import MAX_CALL_BYTES
from scheduler.states import Admission
from scheduler.tasks import end_all

REFUSED = Verdict(Admission.KEY_LIMIT, retry_after_ms=50, depth=1)


def pending(
    request_id: str, started: float = 0.0, customer: str = "c", nonce: str = "n", tier: str = "free"
) -> PendingRequest:
    submission = Submission(
        id=request_id,
        tier=tier,
        customer_id=customer,
        api_key_id="k",
        nonce=nonce,
        model="m",
        input_bytes=1,
        total_ms=4000,
        queue_ms=2000,
        limits=in_force(1.0, 1.0),
        body=b"",
    )
    return PendingRequest(submission, started)


def reply(request_id: str, customer: str = "c", nonce: str = "n", output: str = "out") -> Reply:
    return Reply(request_id, customer, nonce, "completed", "", 1, 1.0, "b", 1, "w", 1.0, 1, "v1", output)


async def settled() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sent", "resolved", "unknown", "refused"),
    [
        (("a", "c", "n"), True, 0, 0),
        (("x", "c", "n"), False, 1, 0),
        (("a", "other", "n"), False, 0, 1),
        (("a", "c", "other"), False, 0, 1),
    ],
)
async def test_a_reply_must_match_id_customer_and_nonce(
    sent: tuple[str, str, str], resolved: bool, unknown: int, refused: int
) -> None:
    """Anything else is dropped and counted, and the waiter goes on waiting."""
    pending_requests, waiting = PendingRequests(), pending("a")
    pending_requests.add(waiting)

    assert pending_requests.resolve(reply(*sent)) is resolved
    assert (pending_requests.unknown_replies, pending_requests.refused_replies) == (unknown, refused)
    assert waiting.done is resolved


def test_the_sink_receives_the_first_outcome_once() -> None:
    """A later outcome changes nothing, and the sink is dropped: kept, it could form a reference ring."""
    received: list[Outcome] = []
    waiting = pending("a")
    waiting.sink = received.append
    waiting.finish(ErrorCode.QUEUE_TIMEOUT)
    waiting.finish(reply("a"))
    waiting.cancel()

    assert received == [ErrorCode.QUEUE_TIMEOUT]
    assert (waiting.outcome, waiting.error_code) == (ErrorCode.QUEUE_TIMEOUT, ErrorCode.QUEUE_TIMEOUT)
    assert (waiting.done, waiting.cancelled, waiting.sink) == (True, False, None)


def test_a_cancelled_request_has_no_outcome() -> None:
    """Its client left: it is done, and nothing is delivered."""
    received: list[Outcome] = []
    waiting = pending("a")
    waiting.sink = received.append
    waiting.cancel()
    waiting.finish(reply("a"))

    assert (waiting.done, waiting.cancelled, waiting.outcome, received) == (True, True, None, [])


def test_a_removed_request_calls_no_sink() -> None:
    """Nobody waits for it; what it ends with is kept for the audit."""
    received: list[Outcome] = []
    pending_requests, waiting = PendingRequests(), pending("a")
    waiting.sink = received.append
    pending_requests.add(waiting)
    pending_requests.remove(waiting)
    waiting.finish(reply("a"))

    assert (waiting.outcome, waiting.gone, received) == (reply("a"), True, [])


def test_the_error_of_a_list_replaces_the_outcomes_of_its_members() -> None:
    """The response that was sent is the outcome, also of a member that completed."""
    completed, running = pending("a"), pending("b")
    completed.finish(reply("a"))
    for member in (completed, running):
        member.replace_outcome(ErrorCode.POISON_REQUEST)
    running.finish(reply("b"))

    assert [member.error_code for member in (completed, running)] == [ErrorCode.POISON_REQUEST] * 2


async def test_the_first_outcome_stands_and_late_replies_are_counted() -> None:
    """A second reply changes nothing, and one after removal is unknown."""
    pending_requests, waiting = PendingRequests(), pending("a")
    pending_requests.add(waiting)
    pending_requests.resolve_all([reply("a", output="first"), None, reply("a", output="second")])

    outcome = waiting.outcome
    assert isinstance(outcome, Reply)
    assert outcome.output == "first"
    pending_requests.remove(waiting)
    assert not pending_requests.resolve(reply("a"))
    assert (len(pending_requests), pending_requests.unknown_replies) == (0, 1)


async def test_waiters_are_found_by_age() -> None:
    """Due are those past their deadline; older ones are found for the slow look."""
    pending_requests = PendingRequests()
    for index, started in enumerate((0.0, 1.0, 2.0)):
        pending_requests.add(pending(f"w{index}", started))

    assert [w.id for w in pending_requests.due(5.5)] == ["w0", "w1"]
    assert [w.id for w in pending_requests.started_before(2.0)] == ["w0", "w1"]


def limits() -> AdmissionLimits:
    return AdmissionLimits([TierLimit("free", 1.0, 1.0, 1, ["free"])], 10.0)


async def test_what_arrives_during_a_call_shares_the_next_one() -> None:
    """The first goes at once; all that came meanwhile go together, at most 256 a call."""
    redis = FakeRedis()
    admission = AdmissionBatcher(redis, limits, Cancellations(redis))
    task = asyncio.create_task(admission.run())
    redis.gate.clear()
    assert admission.submit(pending("first"))
    await settled()
    for index in range(MAX_SUBMISSIONS + 3):
        assert admission.submit(pending(f"w{index}"))
    redis.gate.set()
    await settled()
    await end_all([task])

    assert [len(call) for call in redis.admitted] == [1, MAX_SUBMISSIONS, 3]


async def test_refusals_end_the_waiting_and_acceptance_does_not() -> None:
    """An accepted request waits for its reply; a refused one has its verdict as the outcome."""
    redis = FakeRedis()
    admission = AdmissionBatcher(redis, limits, Cancellations(redis))
    task = asyncio.create_task(admission.run())
    accepted, refused = pending("a"), pending("b")
    admission.submit(accepted)
    await settled()
    redis.verdict = REFUSED
    admission.submit(refused)
    await settled()
    await end_all([task])

    assert (accepted.verdict, accepted.done) == (ACCEPTED, False)
    assert refused.outcome == REFUSED


async def test_pending_is_bounded() -> None:
    """Beyond the bound nobody is taken."""
    admission = AdmissionBatcher(FakeRedis(), limits, Cancellations(FakeRedis()), max_pending=2)

    assert [admission.submit(pending(name)) for name in "abc"] == [True, True, False]


async def test_a_lost_call_is_sent_once_more_under_the_same_ids() -> None:
    """One failure is invisible; admission is idempotent."""
    redis = FakeRedis()
    redis.failures = 1
    admission = AdmissionBatcher(redis, limits, Cancellations(redis))
    task = asyncio.create_task(admission.run())
    waiting = pending("a")
    admission.submit(waiting)
    await settled()
    await end_all([task])

    assert redis.admitted == [["a"], ["a"]]
    assert waiting.verdict == ACCEPTED


async def test_redis_away_refuses_the_call_and_everybody_behind_it() -> None:
    """Two failures: 503 for all; only ids that were sent may exist, and are to be ended."""
    redis = FakeRedis()
    redis.failures = 2
    redis.gate.clear()
    cancellations = Cancellations(redis)
    admission = AdmissionBatcher(redis, limits, cancellations)
    task = asyncio.create_task(admission.run())
    sent, behind = pending("sent"), pending("behind")
    admission.submit(sent)
    await settled()
    admission.submit(behind)
    redis.gate.set()
    await settled()
    await end_all([task])

    assert (sent.outcome, behind.outcome) == (ErrorCode.NO_CAPACITY, ErrorCode.NO_CAPACITY)
    assert await cancellations.flush()
    assert redis.cancelled == [[("sent", ErrorCode.NO_CAPACITY)]]


async def test_a_tier_that_is_gone_fails_only_its_own() -> None:
    """An admin took the tier away after the key was looked at: that one may try again, the others are admitted."""
    redis = FakeRedis()
    admission = AdmissionBatcher(redis, limits, Cancellations(redis))
    stray, other = pending("stray", tier="removed"), pending("other")
    admission.submit(stray)
    admission.submit(other)
    task = asyncio.create_task(admission.run())
    await settled()
    await end_all([task])

    assert stray.outcome is ErrorCode.CATALOG_UNAVAILABLE
    assert (redis.admitted, other.verdict) == ([["other"]], ACCEPTED)


@pytest.mark.parametrize(("arrived", "left_ms"), [(10.0, 4000), (9.99, 4000), (9.5, 3500), (5.0, 1)])
async def test_the_deadline_counts_from_the_arrival(arrived: float, left_ms: int) -> None:
    """Time spent waiting for admission is taken off what Redis is told, so that no run outlives the client's 504."""
    redis = FakeRedis()
    admission = AdmissionBatcher(redis, limits, Cancellations(redis), clock=lambda: 10.0)
    admission.submit(pending("a", started=arrived))
    task = asyncio.create_task(admission.run())
    await settled()
    await end_all([task])

    assert redis.total_ms == [left_ms]


async def test_an_acceptance_after_the_answer_is_cancelled() -> None:
    """The sweep answered 504 while the call was under way: the request must not run for nobody."""
    redis = FakeRedis()
    redis.gate.clear()
    cancellations = Cancellations(redis)
    admission = AdmissionBatcher(redis, limits, cancellations)
    answered = pending("answered")
    admission.submit(answered)
    task = asyncio.create_task(admission.run())
    await settled()
    answered.finish(ErrorCode.DEADLINE_EXCEEDED)
    redis.gate.set()
    await settled()
    await end_all([task])
    await cancellations.flush()

    assert redis.cancelled == [[("answered", ErrorCode.DEADLINE_EXCEEDED)]]
    assert redis.told == ["answered"]


async def test_a_client_that_left_during_admission_is_cancelled_after_it() -> None:
    """A cancel that came before the admission would find nothing, and the request would run for nobody."""
    redis = FakeRedis()
    redis.gate.clear()
    cancellations, pending_requests = Cancellations(redis), PendingRequests()
    admission = AdmissionBatcher(redis, limits, cancellations)
    task = asyncio.create_task(admission.run())
    left, never_sent = pending("left"), pending("never-sent")
    for each in (left, never_sent):
        pending_requests.add(each)
    admission.submit(left)
    await settled()
    admission.submit(never_sent)
    pending_requests.remove(left)
    pending_requests.remove(never_sent)
    redis.gate.set()
    await settled()
    await end_all([task])
    await cancellations.flush()

    assert redis.admitted == [["left"]]
    assert redis.cancelled == [[("left", ErrorCode.CANCELLED)]]


async def test_cancels_gather_while_a_call_is_under_way() -> None:
    """Many disconnects are few calls."""
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


async def test_cancels_are_kept_while_redis_is_away_but_not_for_ever() -> None:
    """A failed call keeps its ids; after ten seconds the scheduler has ended them by deadline."""
    redis, now = FakeRedis(), [0.0]
    cancellations = Cancellations(redis, clock=lambda: now[0])
    cancellations.add("old", ErrorCode.CANCELLED)
    redis.failures = 1
    assert not await cancellations.flush()
    now[0] = 11.0
    cancellations.add("new", ErrorCode.CANCELLED)
    assert await cancellations.flush()

    assert redis.cancelled[-1] == [("new", ErrorCode.CANCELLED)]
    assert cancellations.dropped == 1


async def test_cancels_are_bounded() -> None:
    """The oldest goes when there are too many."""
    cancellations = Cancellations(FakeRedis())
    for index in range(MAX_IDS + 5):
        cancellations.add(str(index), ErrorCode.CANCELLED)

    assert (len(cancellations), cancellations.dropped) == (MAX_IDS, 5)


def sweeping(redis: FakeRedis) -> tuple[DeadlineSweep, PendingRequests, Cancellations]:
    pending_requests, cancellations = PendingRequests(), Cancellations(redis)
    return DeadlineSweep(pending_requests, redis, cancellations), pending_requests, cancellations


async def test_all_can_be_ended_at_once_with_what_is_stored() -> None:
    """A gateway that leaves asks Redis before it refuses: one whose output is there by then gets it."""
    redis = FakeRedis()
    sweep, pending_requests, _ = sweeping(redis)
    done, rest, unasked = pending("done"), pending("rest"), pending("unasked")
    for each in (done, rest, unasked):
        each.sent = each is not unasked
        pending_requests.add(each)
    redis.customer_limits["done"] = reply("done", output="in time")

    await sweep.end_all(ErrorCode.DRAINING)

    assert redis.cancelled == [[("done", ErrorCode.DRAINING), ("rest", ErrorCode.DRAINING)]]
    assert done.outcome == reply("done", output="in time")
    assert [rest.outcome, unasked.outcome] == [ErrorCode.DRAINING] * 2


async def test_all_that_are_due_are_ended_in_one_call() -> None:
    """Nobody is asked about long before the deadline; close to it the stored result wins over the timeout."""
    redis = FakeRedis()
    sweep, pending_requests, _ = sweeping(redis)
    done, late, early = pending("done"), pending("late"), pending("early", started=3.0)
    for each in (done, late, early):
        each.sent = True
        pending_requests.add(each)
    redis.customer_limits["done"] = reply("done", output="in time")

    sweep.sweep(3.999 - LEAD_S)
    sweep.sweep(4.001 - LEAD_S)
    sweep.sweep(4.01 - LEAD_S)
    await settled()

    assert redis.cancelled == [[("done", ErrorCode.DEADLINE_EXCEEDED), ("late", ErrorCode.DEADLINE_EXCEEDED)]]
    assert done.outcome == reply("done", output="in time")
    assert late.outcome is ErrorCode.DEADLINE_EXCEEDED
    assert not early.done


async def test_a_silent_redis_does_not_hold_the_504() -> None:
    """Within the grace the client is answered whatever Redis does; the ids are ended later."""
    redis = FakeRedis()
    sweep, pending_requests, cancellations = sweeping(redis)
    late = pending("late")
    late.sent = True
    pending_requests.add(late)
    redis.gate.clear()
    redis.failures = 1

    sweep.sweep(4.0)
    await settled()
    assert not late.done
    sweep.sweep(4.0 + GRACE_S)
    assert late.outcome is ErrorCode.DEADLINE_EXCEEDED
    redis.gate.set()
    await settled()
    assert (len(cancellations), sweep.overrun) == (1, 1)


async def test_redis_is_told_of_a_504_that_it_did_not_confirm() -> None:
    """A finish that lands at this moment must not leave a row that says `completed`: the answer was sent."""
    redis = FakeRedis()
    sweep, pending_requests, cancellations = sweeping(redis)
    late = pending("late")
    late.sent = True
    pending_requests.add(late)
    redis.gate.clear()
    redis.customer_limits["late"] = reply("late")

    sweep.sweep(4.0)
    await settled()
    sweep.sweep(4.0 + GRACE_S)
    redis.gate.set()
    await settled()
    await cancellations.flush()

    assert late.outcome is ErrorCode.DEADLINE_EXCEEDED
    assert redis.told == ["late"]


async def test_after_standing_still_the_result_is_asked_for_before_the_504() -> None:
    """The process stood still past deadline and grace; the result that came meanwhile is the answer."""
    redis = FakeRedis()
    sweep, pending_requests, _ = sweeping(redis)
    waiting = pending("done")
    waiting.sent = True
    pending_requests.add(waiting)
    redis.customer_limits["done"] = reply("done")

    sweep.sweep(10.0)
    await settled()

    assert waiting.outcome == reply("done")
    assert sweep.overrun == 0


async def test_what_was_never_sent_is_not_asked_about() -> None:
    """A request that admission has not seen is answered without Redis."""
    redis = FakeRedis()
    sweep, pending_requests, _ = sweeping(redis)
    waiting = pending("pending")
    pending_requests.add(waiting)

    sweep.sweep(4.0)
    await settled()

    assert waiting.outcome is ErrorCode.DEADLINE_EXCEEDED
    assert redis.cancelled == [[]]


def heavy(request_id: str, customer: str, size: int) -> PendingRequest:
    """One with so large a body."""
    made = pending(request_id, customer=customer)
    made.submission.body = bytes(size)
    return made


async def calls_made(waiting: list[PendingRequest]) -> list[list[str]]:
    """The calls by which these are admitted that came while one was under way."""
    redis = FakeRedis()
    admission = AdmissionBatcher(redis, limits, Cancellations(redis))
    task = asyncio.create_task(admission.run())
    redis.gate.clear()
    admission.submit(pending("first"))
    await settled()
    for each in waiting:
        assert admission.submit(each)
    redis.gate.set()
    for _ in range(20):
        await settled()
    await end_all([task])
    return redis.admitted[1:]


async def test_a_call_carries_so_many_bytes() -> None:
    """One that takes a tenth of a second would hold up all that Redis does; a larger body goes alone."""
    waiting = [heavy(f"{i}", f"c{i}", 300_000) for i in range(10)] + [heavy("huge", "h", 3 * MAX_CALL_BYTES)]

    calls = await calls_made(waiting)

    assert [name for call in calls for name in call] == [*(str(i) for i in range(10)), "huge"]
    assert [len(call) for call in calls] == [6, 4, 1]


async def test_one_customers_large_bodies_do_not_hold_up_the_others() -> None:
    """It has a share of each call, in its own order; whoever came later with a small body goes with the first call."""
    large = [heavy(f"l{i}", "big", 128 * 1024) for i in range(20)]
    small = [heavy(f"s{i}", f"c{i % 3}", 100) for i in range(30)]

    calls = await calls_made([*large, *small, heavy("last", "big", 100)])

    assert {f"s{i}" for i in range(30)} <= set(calls[0])
    assert [name for call in calls for name in call if name[0] == "l"] == [*(f"l{i}" for i in range(20)), "last"]
    assert max(sum(name[0] == "l" for name in call) for call in calls) <= 5


async def test_who_is_over_a_limit_is_rejected_without_a_call() -> None:
    """Until the time that Redis said; the others are asked for as ever, and each is told a verdict."""
    now = [10.0]
    redis = FakeRedis()
    redis.verdict = Verdict(Admission.CUSTOMER_LIMIT, retry_after_ms=300, depth=1)
    admission = AdmissionBatcher(redis, limits, Cancellations(redis), clock=lambda: now[0])
    task = asyncio.create_task(admission.run())
    waiting = {name: pending(name, 10.0, customer) for name, customer in zip("abcd", "xxyx", strict=True)}
    for name in "abc":
        admission.submit(waiting[name])
        await settled()
        redis.verdict = ACCEPTED

    assert redis.admitted == [["a"], ["c"]]
    verdict = waiting["b"].outcome
    assert isinstance(verdict, Verdict)
    assert (verdict.outcome, verdict.retry_after_ms) == (Admission.CUSTOMER_LIMIT, 300)
    assert waiting["b"].verdict == verdict

    now[0] = 10.4
    admission.submit(waiting["d"])
    await settled()
    await end_all([task])
    assert redis.admitted[2:] == [["d"]]


def test_what_is_submitted_again_goes_in_calls_of_a_bounded_size() -> None:
    """By number and by bytes, in order; one that is larger than a call goes alone."""
    submission = Submission(
        id="a",
        tier="free",
        customer_id="c",
        api_key_id="k",
        nonce="n",
        model="m",
        input_bytes=1,
        total_ms=1,
        queue_ms=1,
        limits=in_force(1.0, 1.0),
        body=b"",
    )
    large = msgspec.structs.replace(submission, body=bytes(900_000))
    huge = msgspec.structs.replace(submission, body=bytes(3 * MAX_CALL_BYTES))

    assert list(calls_of([])) == []
    assert [len(call) for call in calls_of([submission] * (MAX_SUBMISSIONS + 1))] == [MAX_SUBMISSIONS, 1]
    assert [len(call) for call in calls_of([large] * 5)] == [2, 2, 1]
    assert [len(call) for call in calls_of([submission, huge, submission])] == [1, 1, 1]


@pytest.mark.parametrize("inputs", [1, 3])
async def test_a_step_of_redis_clock_makes_nobody_too_late(inputs: int) -> None:
    """Too late, and there is time left here: the guess of Redis TIME is wrong. They are sent again, without a guess."""
    redis = FakeRedis(verdict=Verdict(Admission.TOO_LATE))
    redis.meanwhile = lambda: setattr(redis, "verdict", redis.verdict if redis.redis_ms[-1] else ACCEPTED)
    admission = AdmissionBatcher(
        redis, lambda: limits()._replace(redis_ms=1000), Cancellations(redis), clock=lambda: 1.0
    )
    waiting = [pending(f"w{index}") for index in range(inputs)]
    if inputs > 1:
        for one in waiting:
            one.together = waiting
    task = asyncio.create_task(admission.run())
    admission.submit(waiting[0])
    await settled()
    await end_all([task])

    ids = [one.id for one in waiting]
    assert (redis.admitted, redis.redis_ms) == ([ids, ids], [1000, 0])
    assert [(one.verdict, one.done) for one in waiting] == [(ACCEPTED, False)] * inputs


async def test_who_is_too_late_by_our_own_clock_is_refused() -> None:
    """The time is over here as well: nobody is sent again."""
    refused = Verdict(Admission.TOO_LATE)
    redis = FakeRedis(verdict=refused)
    admission = AdmissionBatcher(
        redis, lambda: limits()._replace(redis_ms=1000), Cancellations(redis), clock=lambda: 4.0
    )
    waiting = pending("a")
    admission.submit(waiting)
    task = asyncio.create_task(admission.run())
    await settled()
    await end_all([task])

    assert (waiting.outcome, len(redis.admitted)) == (refused, 1)
