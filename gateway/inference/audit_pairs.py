"""The two audit records of a request: its acceptance and its end.

A pair is built once for each accepted request, without its body and output, in about a microsecond.
"""

import msgspec

from gateway.inference.pending import Outcome, PendingRequest
from scheduler.errors import ErrorCode
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.protocol.replies import Reply, StoredReply
from scheduler.request_id import created_ms, own_created_ms
from scheduler.states import State

Pair = tuple[AcceptedRecord, EndedRecord]
SpoolEntry = tuple[AcceptedRecord, EndedRecord | None]
"""A pair, or the accepted record alone of a request that has not ended."""


def audit_pair(gateway_id: str, pending: PendingRequest, outcome: Outcome | None, now: float, mode: str) -> Pair:
    """The records of a request that ended with `outcome`; None if the client left and no response was delivered.

    `now` is monotonic seconds, `mode` that of `EndedRecord`. A rejection (a Verdict) has no records.
    """
    latency_ms = (now - pending.started) * 1000
    # The time in the id plus the time elapsed on this host since then: Redis TIME may not be available.
    ended_at_ms = own_created_ms(pending.submission.id) + int((now - pending.created) * 1000)
    if isinstance(outcome, Reply):
        return accepted_record(gateway_id, pending), _ended_record(outcome, ended_at_ms, latency_ms, mode)
    delivered = isinstance(outcome, ErrorCode)
    code = outcome if isinstance(outcome, ErrorCode) else ErrorCode.CANCELLED
    ended = EndedRecord(
        pending.id, State.FAILED, code, ended_at_ms, latency_ms, -1, -1, "", 0, "", 0, 0, 0, mode, delivered
    )
    return accepted_record(gateway_id, pending), ended


def accepted_record(gateway_id: str, pending: PendingRequest) -> AcceptedRecord:
    """The record of the acceptance of a request."""
    s, g = pending.submission, pending.submission.group
    return AcceptedRecord(
        s.id, g.customer_id, g.api_key_id, g.tier, g.model, gateway_id, s.input_bytes, s.trace_id, g.endpoint
    )


def replayed_pair(gateway_id: str, pending: PendingRequest, stored: StoredReply) -> Pair:
    """The records of the stored request whose reply the client of `pending` received: same customer, key and input.

    If the end is not stored, it is estimated from the time in the queue and on the GPU.
    """
    reply, ended_ms = stored
    began_ms = created_ms(reply.id)
    if ended_ms is None:
        ended_ms = began_ms + int(max(0.0, reply.queue_ms) + max(0.0, reply.gpu_ms))
    accepted = msgspec.structs.replace(accepted_record(gateway_id, pending), id=reply.id)
    return accepted, _ended_record(reply, ended_ms, float(max(0, ended_ms - began_ms)), "queue")


def _ended_record(reply: Reply, ended_at_ms: int, latency_ms: float, mode: str) -> EndedRecord:
    output = reply.output
    return EndedRecord(
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
        cost_ms=reply.cost_ms,
    )
