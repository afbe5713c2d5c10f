"""Step 4: a worker claims a batch and finishes it.

A claim makes the worker the owner for 600 ms, which it extends while the batch runs. Its token is a fence: only the call with
the token of the present owner changes anything.
"""

from eventually import eventually
from pool import Pool, done
from scheduler.protocol.replies import decode_replies


async def test_the_owner_ends_each_request_once(pool: Pool) -> None:
    """`finish` stores the reply and publishes it to the gateway of the request. A second call is too late, and changes nothing."""
    (request_id,) = await pool.queue(1)
    await pool.form([("free", 1)])
    claimed = await pool.claim_next("worker-1", "token-1")
    async with pool.client.pubsub(ignore_subscribe_messages=True) as gateway:
        await gateway.subscribe(pool.keys.responses("g1"))

        stale = await pool.batches.finish(claimed.batch_id, "token-1", [done(request_id, "olleh")])
        again = await pool.batches.finish(claimed.batch_id, "token-1", [done(request_id, "other")])

        message = await eventually(gateway.get_message, "the reply is published")

    assert (stale, again) == (0, 1)
    assert await pool.states([request_id]) == ["completed"]
    (stored,) = await pool.results.fetch([request_id])
    assert stored is not None
    assert stored.output == "olleh"
    assert decode_replies(message["data"]) == [stored]
