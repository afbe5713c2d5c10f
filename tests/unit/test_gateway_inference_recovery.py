"""Recovery after a loss of Redis: when it is suspected, which requests are resubmitted, and which records are resent."""

import pytest

from gateway.inference.audit_pairs import audit_pair, replayed_pair
from gateway.inference.recovery.loss_recovery import RESEND_EVERY_S
from gateway.inference.recovery.loss_signs import OTHER_EPOCH, UNAVAILABLE, LossSigns
from gateway.inference.recovery.recent_outcomes import KEEP_S
from gateway.inference.recovery.resubmission import candidates, to_resubmit
from recovery_setup import TIERS, Setup, pending, reply
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.admission import Verdict
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.protocol.replies import StoredReply
from scheduler.request_id import created_ms
from scheduler.states import Admission


def test_signs_of_a_loss() -> None:
    """A new epoch, and a heartbeat after failed ones: a promoted replica has the same epoch."""
    signs = LossSigns()
    assert [signs.heartbeat(epoch) for epoch in (5, 5, 6, 6)] == [None, None, OTHER_EPOCH, None]
    signs.missed()
    signs.missed()
    assert [signs.heartbeat(6), signs.heartbeat(6)] == [UNAVAILABLE, None]


def test_which_requests_are_resubmitted_in_which_order() -> None:
    """Lost requests with time for a run, by tier and then by deadline; candidates were sent and have no outcome."""
    held, in_flight, direct, answered = pending(), pending(accepted=False), pending(direct=True), pending()
    answered.finish(ErrorCode.DEADLINE_EXCEEDED)
    assert candidates([held, in_flight, pending(sent=False), direct, answered]) == [held, in_flight, direct]

    free, late_free = pending(0.5, lost=True), pending(0.4, lost=True)
    paid = pending(0.4, "paid", lost=True)
    enterprise, later = pending(0.6, "enterprise", lost=True), pending(0.9, "enterprise", lost=True)
    gone, kept, removed_tier = pending(0.6, lost=True, gone=True), pending(0.6), pending(0.6, "removed", lost=True)
    rejected, direct = pending(0.6, lost=True, accepted=False), pending(0.6, lost=True, direct=True)
    requests = [free, direct, later, gone, kept, paid, enterprise, late_free, removed_tier, rejected]
    assert to_resubmit(requests, TIERS, 4.25, 150.0) == [enterprise, later, paid, late_free, free]
    assert to_resubmit(requests, TIERS, 4.26, 150.0) == [enterprise, later, free]


@pytest.mark.parametrize(("ended_after_ms", "latency_ms"), [(320, 320.0), (-3, 0.0), (None, 62.0)])
def test_the_audit_record_of_a_replay_has_the_stored_end(ended_after_ms: int | None, latency_ms: float) -> None:
    """Regression: the end was estimated from queue and GPU time, without the wait of a formed batch for its worker."""
    waiting = pending()
    began_ms = created_ms(waiting.id)
    ended_ms = None if ended_after_ms is None else began_ms + ended_after_ms
    accepted, ended = replayed_pair("g1", waiting, StoredReply(reply(waiting), ended_ms))

    assert (accepted.id, ended.id) == (waiting.id, waiting.id)
    assert (ended.ended_at_ms, ended.latency_ms) == (began_ms + 62 if ended_ms is None else ended_ms, latency_ms)


def test_a_record_ends_when_its_request_did() -> None:
    """Regression: what passed between the id and the whole body was missing, so a run seemed to end before it had."""
    waiting = pending(started=2.0)
    waiting.created = 0.5
    _, ended = audit_pair("g1", waiting, reply(waiting), 3.0, "direct")

    assert (ended.ended_at_ms - created_ms(waiting.id), ended.latency_ms) == (2500, 1000.0)


async def test_a_lost_request_is_resubmitted_with_the_time_left() -> None:
    """Under the same id and nonce, as a repetition; the client keeps waiting."""
    setup, lost = Setup(), pending()
    setup.add(lost)
    setup.now = 1.5
    setup.recovery.suspect("a test")
    assert await setup.recovery.recover()

    ((again,),) = setup.redis.submitted
    sent = lost.submission
    assert (again.id, again.nonce, again.body) == (sent.id, sent.nonce, sent.body)
    assert (again.idempotency, again.fingerprint, again.again, again.total_ms) == ("c:key", "body", True, 2500)
    assert (lost.done, lost.lost) == (False, False)


async def test_resubmission_in_calls_by_tier() -> None:
    """600 requests are three calls, with enterprise in the first one."""
    setup = Setup()
    for index in range(600):
        setup.add(pending(0.0, ("free", "paid", "enterprise")[index % 3]))
    setup.recovery.suspect("a test")
    await setup.recovery.recover()

    assert [len(call) for call in setup.redis.submitted] == [256, 256, 88]
    tiers = [submission.tier for call in setup.redis.submitted for submission in call]
    assert tiers == ["enterprise"] * 200 + ["paid"] * 200 + ["free"] * 200


async def test_requests_that_end_during_the_recovery() -> None:
    """One that ends between two calls is not submitted; one that ends during its call is cancelled after it."""
    setup = Setup()
    first = [pending() for _ in range(256)]
    second = [pending(1.0), pending(1.0)]
    setup.add(*first, *second)
    setup.redis.during = lambda: setup.end(first[0], second[0], outcome=ErrorCode.DEADLINE_EXCEEDED)
    setup.recovery.suspect("a test")
    await setup.recovery.recover()

    assert [len(call) for call in setup.redis.submitted] == [256, 1]
    assert len(setup.cancellations) == 1


@pytest.mark.parametrize(("state", "later"), [("accepted", True), ("direct", False)])
async def test_undecided_requests_are_resubmitted_later(state: str, later: bool) -> None:
    """An admission in flight may be from before the loss, and a request in direct mode may return to Redis."""
    setup, undecided = Setup(), pending(**{state: not later})
    setup.add(undecided)
    setup.recovery.suspect("a test")
    assert not await setup.recovery.recover()
    assert setup.redis.submitted == []
    setattr(undecided, state, later)
    assert await setup.recovery.recover()

    assert setup.redis.ids == [undecided.id]


async def test_a_request_that_ends_in_direct_mode_has_no_record_here() -> None:
    """Direct mode writes its own audit records."""
    setup, direct = Setup(), pending(direct=True)
    setup.add(direct)
    setup.recovery.suspect("a test")
    await setup.recovery.recover()
    setup.end(direct)

    assert (setup.redis.submitted, len(setup.ends)) == ([], 0)


async def test_a_full_redis_gets_them_again() -> None:
    """The requests stay pending until the next round."""
    setup, lost = Setup(), pending()
    setup.add(lost)
    setup.redis.outcome = Admission.BACKPRESSURE
    setup.recovery.suspect("a test")
    assert not await setup.recovery.recover()
    assert not lost.done
    setup.redis.outcome = Admission.DUPLICATE
    assert await setup.recovery.recover()


async def test_an_interrupted_recovery_continues() -> None:
    """Requests that Redis has confirmed are not sent again. A complete recovery is followed by a pause of a second."""
    setup = Setup()
    lost = [pending() for _ in range(300)]
    setup.add(*lost)
    setup.redis.during = lambda: setattr(setup.redis, "failures", 1)
    setup.recovery.suspect("a test")
    assert await setup.recovery._recovered() == 0.25
    setup.redis.during = lambda: None
    assert await setup.recovery._recovered() == 1.0

    assert [len(call) for call in setup.redis.submitted] == [256, 44]
    assert sorted(setup.redis.ids) == sorted(each.id for each in lost)


async def test_recent_records_are_resent() -> None:
    """With the outcome that the client got, in bytes of UTF-8; rejected requests have no record."""
    setup, answered, rejected = Setup(), pending(), pending(accepted=False)
    setup.add(answered, rejected)
    setup.now = 0.25
    setup.end(answered, outcome=reply(answered, "größer"))
    setup.end(rejected, outcome=Verdict(Admission.QUEUE_FULL))
    setup.recovery.suspect("a test")
    await setup.recovery.recover()

    (((accepted, ended),),) = setup.redis.adopted
    assert accepted == AcceptedRecord(answered.id, "c", "k", "free", "m", "g1", 7, "t", "/v1/messages")
    assert ended == EndedRecord(
        id=answered.id, state="completed", error_code="", ended_at_ms=created_ms(answered.id) + 250, latency_ms=250.0,
        queue_ms=12.5, gpu_ms=50.0, batch_id="b1", batch_size=8, worker_id="w1", attempts=2, tokens_used=3,
        output_bytes=8, mode="queue", delivered=True,
    )  # fmt: skip


@pytest.mark.parametrize(("outcome", "code"), [(ErrorCode.DRAINING, "draining"), (None, "cancelled")])
async def test_outcomes_of_the_gateway_are_recorded(outcome: ErrorCode | None, code: str) -> None:
    """An error that the gateway sent was delivered; after a disconnect nothing was."""
    setup, request = Setup(), pending()
    setup.add(request)
    if outcome is None:
        request.cancel()
    else:
        request.finish(outcome)
    setup.pending_requests.remove(request)

    ((_, ended),) = setup.ends.pairs()
    assert (ended.state, ended.error_code, ended.delivered) == ("failed", code, outcome is not None)
    assert (ended.queue_ms, ended.gpu_ms, ended.batch_id) == (-1, -1, "")


@pytest.mark.parametrize("outcome", [ErrorCode.DEADLINE_EXCEEDED, None])
async def test_a_request_with_too_little_time_has_its_records_sent_at_its_end(outcome: ErrorCode | None) -> None:
    """It is not resubmitted. If its reply comes from Redis after all, Redis has written the records itself."""
    setup, late = Setup(), pending()
    setup.add(late)
    setup.now = 3.95
    setup.recovery.suspect("a test")
    assert await setup.recovery.recover()
    assert (setup.redis.submitted, setup.redis.adopted) == ([], [])
    setup.end(late, outcome=outcome)
    await setup.recovery.recover()

    records = [(accepted.id, ended.error_code) for call in setup.redis.adopted for accepted, ended in call]
    assert records == ([(late.id, "deadline_exceeded")] if outcome else [])


async def test_records_are_resent_once_in_calls_of_256() -> None:
    """A failed call is repeated."""
    setup = Setup()
    setup.end(*[pending() for _ in range(600)])
    setup.recovery.suspect("a test")
    setup.redis.failures = 1
    with pytest.raises(RedisUnavailable):
        await setup.recovery.recover()
    await setup.recovery.recover()

    assert [len(call) for call in setup.redis.adopted] == [256, 256, 88]
    assert len({ended.id for call in setup.redis.adopted for _, ended in call}) == 600


async def test_an_unstable_redis_gets_the_records_every_few_seconds() -> None:
    """Under one epoch the records wait, and are kept meanwhile; a new epoch gets them at once."""
    setup, resent = Setup(), []
    setup.end(pending())
    setup.recovery.heartbeat(1)
    for setup.now, epoch in ((0.0, 1), (0.0, 1), (0.0, 1), (KEEP_S + 5, 1), (KEEP_S + 5, 2)):
        setup.recovery.missed()
        setup.recovery.heartbeat(epoch)
        assert len(setup.ends) == 1
        await setup.recovery.recover()
        resent.append(len(setup.redis.adopted))

    assert resent == [1, 1, 1, 2, 3]
    assert RESEND_EVERY_S < KEEP_S  # Otherwise a record would be dropped before it is resent.


async def test_old_records_are_dropped_only_while_redis_responds() -> None:
    """Ten seconds after their end, but not while heartbeats fail: then only this gateway has them."""
    setup = Setup()
    setup.end(pending())
    setup.recovery.heartbeat(1)
    setup.now = KEEP_S - 1
    setup.recovery.heartbeat(1)
    assert len(setup.ends) == 1
    for second in range(20):
        setup.now = KEEP_S + second
        setup.recovery.missed()
    setup.recovery.heartbeat(1)
    assert len(setup.ends) == 1
    await setup.recovery.recover()
    setup.recovery.unwritten(None)
    setup.recovery.heartbeat(1)
    assert (len(setup.ends), len(setup.redis.adopted)) == (0, 1)


async def test_records_that_postgresql_does_not_have_are_kept() -> None:
    """Redis may lose them: until the outbox has only records that are newer by KEEP_S; also after they were sent again."""
    setup, ended = Setup(), pending()
    setup.end(ended)
    setup.now = 3 * KEEP_S
    ended_ms = created_ms(ended.id)

    def kept(oldest_ms: int | None) -> int:
        setup.recovery.unwritten(oldest_ms)
        setup.recovery.heartbeat(1)
        return len(setup.ends)

    oldest_known = (ended_ms - 5000, ended_ms, ended_ms + 1000 * int(KEEP_S))
    assert [kept(oldest_ms) for oldest_ms in oldest_known] == [1, 1, 1]

    setup.recovery.suspect("a test")
    assert kept(None) == 1
    await setup.recovery.recover()
    setup.recovery.heartbeat(1)
    assert (len(setup.ends), len(setup.redis.adopted)) == (1, 1)

    assert kept(ended_ms + 4000 * int(KEEP_S)) == 0


async def test_the_number_of_records_is_bounded() -> None:
    """The oldest are dropped and counted."""
    setup = Setup(max_pairs=10)
    ended = [pending() for _ in range(15)]
    setup.end(*ended)

    assert [end.id for _, end in setup.ends.pairs()] == [each.id for each in ended[5:]]
    assert setup.ends.overwritten == 5
