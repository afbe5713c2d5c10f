"""`cancel` and `expire`: ends that no worker writes; the first terminal writer wins."""

import asyncio

from pool import TIERS, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.cancellation import STORED_KEEP_MS


async def test_stored_leaves_what_has_not_ended(pool: Pool) -> None:
    """Only a row that has ended is kept for less; one that waits, is unknown or is of another type stays as it is."""
    waits, damaged, ended = await pool.queue(3, total_ms=600_000)
    await pool.terminations.cancel([(ended, ErrorCode.CANCELLED)])
    await pool.client.set(pool.keys.request(damaged), "text", px=600_000)

    assert await pool.terminations.stored([waits, damaged, ended, "req_unknown"]) == 1
    lives = [await pool.client.pttl(pool.keys.request(each)) for each in (waits, damaged, ended)]
    assert min(lives[:2]) > 590_000
    assert 0 < lives[2] <= STORED_KEEP_MS


async def test_cancel_ends_what_is_queued(pool: Pool) -> None:
    """The client left before the batch: failed, noted, and the reply that stands is returned."""
    (request_id,) = await pool.queue(1)

    (reply,) = await pool.terminations.cancel([(request_id, ErrorCode.CANCELLED)])

    assert reply is not None
    assert (reply.state, reply.error_code) == ("failed", "cancelled")
    _, ended = await pool.audit()
    assert [(e.id, e.error_code, e.queue_ms) for e in ended] == [(request_id, "cancelled", -1)]


async def test_cancel_leaves_a_running_request_alone(pool: Pool) -> None:
    """A running batch is finished and the answer discarded by the gateway; the audit says what really happened."""
    claimed = await pool.running(1)
    request_id = claimed.requests[0].id

    assert await pool.terminations.cancel([(request_id, ErrorCode.CANCELLED)]) == [None]
    assert await pool.batches.finish("b1", "token", [done(request_id)]) == 0


async def test_a_deadline_ends_a_running_request(pool: Pool) -> None:
    """The client is told 504 now, so the late result must not become the truth; inflight no longer holds the id."""
    claimed = await pool.running(2)
    first, second = (r.id for r in claimed.requests)

    (reply,) = await pool.terminations.cancel([(first, ErrorCode.DEADLINE_EXCEEDED)])

    assert reply is not None
    assert reply.error_code == "deadline_exceeded"
    assert await pool.inflight() == {"inflight:free:b1": [second]}


async def test_a_result_that_is_there_wins_over_the_deadline(pool: Pool) -> None:
    """The last look before a timeout finds what pub/sub lost."""
    claimed = await pool.running(1)
    request_id = claimed.requests[0].id
    await pool.batches.finish("b1", "token", [done(request_id, "there")])

    (reply,) = await pool.terminations.cancel([(request_id, ErrorCode.DEADLINE_EXCEEDED)])

    assert reply is not None
    assert (reply.state, reply.output) == ("completed", "there")


async def test_an_unknown_id_is_none(pool: Pool) -> None:
    """Redis may have come back empty: nothing is made up."""
    assert await pool.terminations.cancel([("req_unknown", ErrorCode.DEADLINE_EXCEEDED)]) == [None]
    assert await pool.terminations.cancel([]) == []


async def test_expire_ends_the_oldest_first_and_stops_at_the_living(pool: Pool) -> None:
    """What waited longer than its queue age fails; the first that may still wait ends the look."""
    old = await pool.overdue(await pool.queue(2))
    live = await pool.queue(2)

    assert await pool.terminations.expire(TIERS) == (2, 0)

    assert await pool.states([*old, *live]) == ["failed", "failed", "queued", "queued"]
    assert await pool.depth("free") == 2


async def test_expire_looks_behind_one_that_may_wait_longer(pool: Pool) -> None:
    """Customers of one tier may differ in queue age: the oldest does not hide others whose time is up."""
    (patient,) = await pool.queue(1)
    hasty = await pool.overdue(await pool.queue(2))

    assert await pool.terminations.expire(TIERS) == (2, 0)

    assert await pool.states([patient, *hasty]) == ["queued", "failed", "failed"]
    assert await pool.depth("free") == 3  # dead entries, until they are the oldest


async def test_an_admission_after_its_end_does_nothing(pool: Pool) -> None:
    """The client was answered while the call was on its way: what arrives late must not run for nobody."""
    submission = pool.submission()
    assert await pool.terminations.cancel([(submission.id, ErrorCode.NO_CAPACITY)]) == [None]

    (verdict,) = await pool.admit([submission])

    assert verdict.outcome == "duplicate"
    assert await pool.depth("free") == 0
    assert await pool.audit() == ([], [])


async def test_an_unreadable_reply_costs_only_itself(pool: Pool) -> None:
    """One stored reply of a newer version, say, does not keep the others from their waiters."""
    claimed = await pool.running(2)
    first, second = (r.id for r in claimed.requests)
    await pool.batches.finish("b1", "token", [done(first), done(second)])
    await pool.client.hset(pool.keys.request(first), "reply", b"\xc1")

    replies = await pool.results.fetch([first, second])

    assert [r.id if r else None for r in replies] == [None, second]


async def test_expire_sweeps_entries_that_ended_in_the_queue(pool: Pool) -> None:
    """A cancelled id at the head of the queue is removed without being ended twice."""
    ids = await pool.queue(2)
    await pool.terminations.cancel([(ids[0], ErrorCode.CANCELLED)])

    assert await pool.terminations.expire(TIERS) == (0, 1)
    _, ended = await pool.audit()
    assert len(ended) == 1


async def test_every_end_at_once_makes_one_end(pool: Pool) -> None:
    """Cancel, deadline, expiry and forming race for the same request: one terminal record comes out."""
    ids = await pool.queue(20)
    await pool.overdue(ids[::2])

    await asyncio.gather(
        *(pool.terminations.cancel([(i, ErrorCode.CANCELLED)]) for i in ids),
        *(pool.terminations.cancel([(i, ErrorCode.DEADLINE_EXCEEDED)]) for i in ids),
        *(pool.terminations.expire(TIERS) for _ in range(5)),
        *(pool.form([("free", 5)]) for _ in range(5)),
    )

    _, ended = await pool.audit()
    assert sorted(e.id for e in ended) == sorted(ids)
    assert await pool.depth("free") == 0
