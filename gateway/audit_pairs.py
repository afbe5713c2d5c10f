"""A request's two audit records as the gateway writes them itself: what it took, and what it told its client."""

import msgspec

from gateway.inference.pending import Outcome, Waiter
from scheduler.errors import ErrorCode
from scheduler.protocol.audit_outbox import Accepted, Ended
from scheduler.protocol.replies import Reply
from scheduler.request_id import created_ms
from scheduler.states import State

Pair = tuple[Accepted, Ended]
Note = tuple[Accepted, Ended | None]
"""A pair, or the beginning alone of what has not ended yet."""


def audit_pair(gateway_id: str, waiter: Waiter, outcome: Outcome | None, now: float, mode: str) -> Pair:
    """The records of a request that ended with `outcome`; None: nobody was told, because the client left.

    `now` is monotonic seconds, `mode` that of `Ended`. A refusal has no records, and must not be asked for.
    """
    latency_ms = (now - waiter.started) * 1000
    # The id's own time plus what passed on this host, since Redis may not be there to tell it.
    ended_at_ms = created_ms(waiter.id) + int(latency_ms)
    if isinstance(outcome, Reply):
        return beginning(gateway_id, waiter), _told(outcome, ended_at_ms, latency_ms, mode)
    told = isinstance(outcome, ErrorCode)
    code = outcome if isinstance(outcome, ErrorCode) else ErrorCode.CANCELLED
    ended = Ended(waiter.id, State.FAILED, code, ended_at_ms, latency_ms, -1, -1, "", 0, "", 0, 0, 0, mode, told)
    return beginning(gateway_id, waiter), ended


def beginning(gateway_id: str, waiter: Waiter) -> Accepted:
    """The record of what was taken, whatever becomes of it."""
    s = waiter.submission
    return Accepted(s.id, s.customer_id, s.api_key_id, s.tier, s.model, gateway_id, s.input_bytes, s.trace_id)


def replayed_pair(gateway_id: str, waiter: Waiter, reply: Reply) -> Pair:
    """The records of the request whose stored `reply` the client of `waiter` got: same customer, key and input.

    When it ended is not stored; its time in the queue and on the GPU is what is known of it.
    """
    latency_ms = max(0.0, reply.queue_ms) + max(0.0, reply.gpu_ms)
    began = msgspec.structs.replace(beginning(gateway_id, waiter), id=reply.id)
    return began, _told(reply, created_ms(reply.id) + int(latency_ms), latency_ms, "queue")


def _told(reply: Reply, ended_at_ms: int, latency_ms: float, mode: str) -> Ended:
    output = reply.output
    return Ended(
        reply.id,
        reply.state,
        reply.error_code,
        ended_at_ms,
        latency_ms,
        reply.queue_ms,
        reply.gpu_ms,
        reply.batch_id,
        reply.batch_size,
        reply.worker_id,
        reply.attempts,
        reply.tokens_used,
        len(output) if output.isascii() else len(output.encode()),
        mode,
        delivered=True,
        served_from=reply.served_from,
    )
