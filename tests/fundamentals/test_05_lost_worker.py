"""Step 5: a lost worker and the retry.

A killed worker cannot report anything, so its lease ends. Every scheduler runs a reaper (scheduler/batching/reaper.py), which
makes the batches of expired leases ready again; `pool.reaped` expires all leases and runs it.
"""

from pool import Pool, done
from scheduler.protocol.batches import RETRY_BUDGET


async def test_another_worker_gets_the_batch_and_the_late_result_is_discarded(pool: Pool) -> None:
    """The first worker was only slow: its result comes after the second worker has the batch. The client gets one response."""
    lost = await pool.running(1, token="token-1")
    request_id = lost.requests[0].id

    await pool.reaped()
    again = await pool.claim_next("worker-2", "token-2")
    late = await pool.batches.finish(lost.batch_id, "token-1", [done(request_id, "late")])
    await pool.batches.finish(again.batch_id, "token-2", [done(request_id, "in time")])

    assert [(each.id, each.attempt) for each in again.requests] == [(request_id, 2)]
    assert late == 1
    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.output, reply.attempts) == ("in time", 2)


async def test_a_request_that_loses_every_worker_becomes_a_dead_letter(pool: Pool) -> None:
    """The number of attempts is bounded: a request that kills workers must not kill all of them."""
    await pool.queue(1)
    await pool.form([("free", 1)])
    for _ in range(1 + RETRY_BUDGET):
        await pool.claim_next()
        await pool.reaped()

    assert [letter.attempts for letter in await pool.letters()] == [1 + RETRY_BUDGET]
