"""The answer that an Idempotency-Key has already: read once, checked, and told as the one of the request that has it.

Body and `x-request-id` both name the stored request and not this call: that is the one with a row in the audit, by
which support finds what happened. A replay was not accepted and has no row of its own.
"""

from collections.abc import Sequence
from typing import Protocol

from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.replies import Reply

REPLAYED = ("Idempotent-Replayed", "true")


class FetchResults(Protocol):
    """`Results`, as far as it is used here."""

    async def fetch(self, ids: Sequence[str]) -> list[Reply | None]: ...


async def stored_reply(results: FetchResults, request_id: str, customer_id: str) -> Reply:
    """The stored reply. Raises RequestError `no_capacity` where it cannot be had now.

    The nonce is that of the first call, so only the customer can be compared; the key's name holds the customer too.
    """
    try:
        (reply,) = await results.fetch([request_id])
    except RedisUnavailable:
        reply = None
    if reply is not None and reply.customer_id != customer_id:
        log_fault("a stored reply belongs to another customer", None, request_id=request_id)
        reply = None
    if reply is None:
        raise RequestError(ErrorCode.NO_CAPACITY)
    return reply
