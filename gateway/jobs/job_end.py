"""The end of a job as PostgreSQL stores it, from its reply or its status in Redis."""

from ledger.jobs import JobEnd
from scheduler.errors import ErrorCode
from scheduler.protocol.replies import Reply
from scheduler.protocol.request_status import RequestStatus
from scheduler.states import State


def end_of(reply: Reply) -> JobEnd:
    code = "" if reply.state == State.COMPLETED else reply.error_code or ErrorCode.INTERNAL_ERROR.value
    counts = reply.tokens_used, reply.output_tokens
    return JobEnd(reply.id, code, reply.output, reply.customer_id, *counts, reply.finish_reason)


def end_without_reply(job_id: str, known: RequestStatus) -> JobEnd:
    return JobEnd(job_id, known.error_code or ErrorCode.INTERNAL_ERROR.value)
