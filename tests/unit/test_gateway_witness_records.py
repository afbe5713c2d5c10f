"""The second witness: which audit records are sent again, when, and what they say."""

import pytest

from gateway.inference.recovery import KEEP_S, RESEND_EVERY_S
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.admission import Verdict
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord
from scheduler.request_id import created_ms
from scheduler.states import Admission
from witness_bench import Bench, pending, reply


async def test_the_last_records_are_sent_again() -> None:
    """As the client was told it, with what only this gateway knows now; refused requests are not among them."""
    bench = Bench()
    answered, refused = pending(), pending(accepted=False)
    bench.add(answered, refused)
    bench.now = 0.25
    bench.end(answered, outcome=reply(answered, "größer"))
    bench.end(refused, outcome=Verdict(Admission.QUEUE_FULL))
    bench.recovery.suspect("a test")
    await bench.recovery.recover()

    (((accepted, ended),),) = bench.redis.adopted
    assert accepted == AcceptedRecord(answered.id, "c", "k", "free", "m", "g1", 7, "t")
    assert ended == EndedRecord(
        id=answered.id, state="completed", error_code="", ended_at_ms=created_ms(answered.id) + 250, latency_ms=250.0,
        queue_ms=12.5, gpu_ms=50.0, batch_id="b1", batch_size=8, worker_id="w1", attempts=2, tokens_used=3,
        output_bytes=8, mode="queue", delivered=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "code", "delivered"),
    [
        (ErrorCode.DEADLINE_EXCEEDED, "deadline_exceeded", True),
        (ErrorCode.DRAINING, "draining", True),
        (None, "cancelled", False),
    ],
)
async def test_ends_of_the_gateways_own(outcome: ErrorCode | None, code: str, delivered: bool) -> None:
    """A code that the gateway told; or the client left, and nobody was told."""
    bench = Bench()
    waiting = pending()
    bench.add(waiting)
    if outcome is None:
        waiting.cancel()
    else:
        waiting.finish(outcome)
    bench.pending_requests.remove(waiting)

    ((_, ended),) = bench.ends.pairs()
    assert (ended.state, ended.error_code, ended.delivered) == ("failed", code, delivered)
    assert (ended.queue_ms, ended.gpu_ms, ended.batch_id) == (-1, -1, "")


async def test_who_was_not_submitted_again_has_its_records_sent_when_it_ends() -> None:
    """Too little time was left, so Redis never hears of it but by these records."""
    bench = Bench()
    waiting = pending()
    bench.add(waiting)
    bench.now = 3.95
    bench.recovery.suspect("a test")
    assert await bench.recovery.recover()
    assert (bench.redis.submitted, bench.redis.adopted) == ([], [])
    bench.end(waiting, outcome=ErrorCode.DEADLINE_EXCEEDED)
    await bench.recovery.recover()

    (((accepted, ended),),) = bench.redis.adopted
    assert (accepted.id, ended.error_code) == (waiting.id, "deadline_exceeded")


async def test_who_has_its_end_from_redis_owes_nothing() -> None:
    """It was a false alarm: Redis knew it, and wrote its records itself."""
    bench = Bench()
    waiting = pending()
    bench.add(waiting)
    bench.now = 3.95
    bench.recovery.suspect("a test")
    await bench.recovery.recover()
    bench.end(waiting)
    await bench.recovery.recover()

    assert bench.redis.adopted == []


async def test_records_are_sent_in_calls_of_256_and_each_once_over_a_failure() -> None:
    """A failed call is repeated; what went through is not."""
    bench = Bench()
    bench.end(*[pending() for _ in range(600)])
    bench.recovery.suspect("a test")
    bench.redis.failures = 1
    with pytest.raises(RedisUnavailable):
        await bench.recovery.recover()
    await bench.recovery.recover()

    assert [len(call) for call in bench.redis.adopted] == [256, 256, 88]
    assert len({ended.id for call in bench.redis.adopted for _, ended in call}) == 600


async def test_a_redis_that_comes_and_goes_is_not_given_all_records_each_time() -> None:
    """Under one epoch they wait for four seconds, and nothing is forgotten meanwhile; another epoch cannot wait."""
    bench = Bench()
    bench.end(pending())
    bench.recovery.heartbeat(1)
    for _ in range(3):
        bench.recovery.missed()
        bench.recovery.heartbeat(1)
        await bench.recovery.recover()
    assert len(bench.redis.adopted) == 1
    bench.now = KEEP_S + 5
    bench.recovery.heartbeat(1)
    assert len(bench.ends) == 1
    await bench.recovery.recover()
    assert len(bench.redis.adopted) == 2
    bench.recovery.heartbeat(2)
    await bench.recovery.recover()
    assert len(bench.redis.adopted) == 3


async def test_old_records_are_forgotten_only_while_redis_is_well() -> None:
    """Ten seconds after their end, but not while heartbeats fail: what is lost then is known only here."""
    bench = Bench()
    bench.end(pending())
    bench.recovery.heartbeat(1)
    bench.now = KEEP_S - 1
    bench.recovery.heartbeat(1)
    assert len(bench.ends) == 1
    for second in range(20):
        bench.now = KEEP_S + second
        bench.recovery.missed()
    bench.recovery.heartbeat(1)
    assert len(bench.ends) == 1
    await bench.recovery.recover()
    bench.recovery.heartbeat(1)
    assert (len(bench.ends), len(bench.redis.adopted)) == (0, 1)


async def test_records_are_bounded_in_number() -> None:
    """The oldest go first, and those that were still wanted are counted."""
    bench = Bench(max_pairs=10)
    ended = [pending() for _ in range(15)]
    bench.end(*ended)

    assert [end.id for _, end in bench.ends.pairs()] == [each.id for each in ended[5:]]
    assert bench.ends.overwritten == 5


def test_the_pause_between_records_is_shorter_than_they_are_kept() -> None:
    """Else what ended before a second loss would be forgotten before it is sent again."""
    assert RESEND_EVERY_S < KEEP_S
