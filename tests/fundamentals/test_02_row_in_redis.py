"""Step 2: the row of a request in Redis.

One call of `admit` checks the limits and writes everything or nothing: the row, the id in the queue of the tier, and the
first half of the audit record. docs/redis-keys.md has all keys.
"""

import asyncio

from integration.gateway_fixtures import Stack, accepted, stack
from scheduler.payload import decode_payload
from scheduler.protocol.audit_records import AcceptedRecord, decode_entry
from scheduler.redis_client.keys import Keys

__all__ = ["stack"]


async def test_an_accepted_request_has_a_row_a_place_and_a_record(stack: Stack) -> None:
    """The worker claims nothing here, so the request stays in its queue until the end of the test."""
    keys, stack.worker.hold = Keys(), True
    response = asyncio.create_task(stack.infer({"input": "hello"}, "paid"))
    await accepted(stack)
    (pending,) = stack.gateway.pending_requests.all()

    row = await stack.redis.hgetall(keys.request(pending.id))
    queue = await stack.redis.lrange(keys.queue("paid"), 0, -1)
    ((record,), _) = decode_entry((await stack.redis.lrange(keys.outbox, 0, -1))[0])

    assert (row[b"state"], decode_payload(row[b"body"]).input) == (b"queued", "hello")
    assert queue == [pending.id.encode()]
    assert isinstance(record, AcceptedRecord)
    assert (record.id, record.tier, record.gateway_id) == (pending.id, "paid", "g1")

    stack.worker.hold = False
    assert (await response)[0] == 200
