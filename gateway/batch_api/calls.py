"""One line of a batch as a call of its endpoint: a job (gateway/jobs/submit.py) without a client.

A line becomes submissions like a job: with its deadlines, and without the queue time of its tier. A list of inputs is one
submission per input; their ids follow from that of the line's request, so that a line that is submitted again after a crash
has the same ones.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.api.chat import CHAT
from gateway.api.completions import COMPLETIONS
from gateway.api.embeddings import EMBEDDINGS
from gateway.api.format import InferenceResult
from gateway.api.inference import ApiFormat
from gateway.batch_api.lines import ENDPOINTS, completed_line, failed_line, is_final
from gateway.http.error_responses import ErrorBody, fault_of
from gateway.http.response import encode_json
from gateway.http.validation import invalid
from gateway.inference.audit_pairs import replayed_pair
from gateway.inference.call import InferenceCall, Terms
from gateway.inference.entry import Entry
from gateway.inference.pending import Outcome, PendingRequest
from gateway.inference.pipeline import drop_cycles
from gateway.jobs.inbox import LINE_NONCE
from gateway.jobs.service import Jobs, JobServing
from gateway.translations.response_output import RESPONSES
from gateway.translations.responses import ResponsesRequest
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from scheduler.errors import HTTP, ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Submission
from scheduler.protocol.replies import StoredReply
from scheduler.protocol.request_status import RequestStatus
from scheduler.redis_client.keys import JOBS_GATEWAY
from scheduler.request_id import PREFIX
from scheduler.states import State

FORMATS = dict(zip(ENDPOINTS, (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES), strict=True))
"""The formats of the endpoints of lines."""

_NO_HEADERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())


class LineOutcome(NamedTuple):
    """What becomes of a line that has ended in Redis. `line`: that of a file, empty if it is to be submitted again.

    `ran`: whether a run of it failed.
    """

    line: bytes
    failed: bool
    ran: bool = False


class LineCall(InferenceCall):
    """The call of one line. Nothing waits for its outcome, which is read from Redis."""

    __slots__ = ("jobs", "submissions")

    jobs: JobServing  # Set by `build`: those of the pool that serves the model.
    submissions: Sequence[Submission]

    def __init__(self, endpoint: str, request_id: str, identity: Identity, started: float) -> None:
        super().__init__(FORMATS[endpoint], request_id, _NO_HEADERS, started)
        self.identity = identity
        self.started = started

    def member_id(self, index: int) -> str:
        """The same one each time the line is submitted."""
        return member_id(self.request_id, index)

    def build(
        self, raw: bytes, entry: Entry, jobs_of: Callable[[str], Jobs], left_ms: int, *, again: bool = False
    ) -> None:
        """Decode the body, place the call, and build its submissions, which the batch admits with those of other lines.

        `left_ms`: until the batch expires; `again`: Redis may have lost the line. Raises RequestError.
        """
        body = self.api_format.read(raw, entry.largest().input_bytes)
        if body.stream:
            raise invalid("stream", "A line of a batch has no stream: leave `stream` out.")
        if isinstance(body, ResponsesRequest):
            for name in ("previous_response_id", "background"):
                if getattr(body.original, name):
                    raise invalid(name, f"A line of a batch cannot have `{name}`: leave it out.")
            # The response is only in the output file, whatever its `store`.
            original = msgspec.structs.replace(body.original, store=False)
            body = msgspec.structs.replace(body, original=original)
        entry.accept(self, body, len(raw))
        pipeline = entry.place(self)
        jobs = jobs_of(pipeline.place).serving
        if jobs is None:
            raise RuntimeError("This is a bug: a pool of this gateway has no jobs.")
        self.jobs = jobs
        self.terms = Terms(
            deadline_ms=min(jobs.config.total_ms, left_ms),
            background=True,
            again=again,
            nonce=LINE_NONCE,
            beside_redis=False,
        )
        first = pipeline.build(self, lambda: _ignore)
        self.submissions = [each.submission for each in first.together or (first,)]
        drop_cycles(first)
        self.pending = None  # Redis has the requests.

    def outcome(self, custom_id: str, statuses: Sequence[RequestStatus], runs: int) -> LineOutcome:
        """The outcome, from the final states of all submissions. `runs`: failed runs of this line before."""
        replies = [status.reply for status in statuses if status.reply is not None]
        failed = (each for each in statuses if each.reply is None or each.reply.state != State.COMPLETED)
        error = next((_error(status, self.api_format) for status in failed), None)
        if error is None:
            try:
                result = InferenceResult(replies, self.body, self.submissions[0].model, self.identity.tier, 0.0, "")
                body = self.api_format.write(result).body
                return LineOutcome(completed_line(self.request_id, custom_id, body), failed=False)
            except RequestError as unreadable:
                error = unreadable
            except Exception as fault:  # noqa: BLE001  # one line must not stop the batch
                log_fault("the response of a line cannot be written", fault, request_id=self.request_id)
                error = RequestError(ErrorCode.INTERNAL_ERROR)
        ran = any(reply.attempts for reply in replies)
        if not is_final(error, runs + ran):
            return LineOutcome(b"", failed=True, ran=ran)
        return LineOutcome(error_line(self.request_id, custom_id, error), failed=True)

    def remember(self, statuses: Sequence[RequestStatus]) -> None:
        """Keep the audit records of the line, to send them again if Redis loses them before they are in PostgreSQL."""
        self.jobs.remember(
            replayed_pair(JOBS_GATEWAY, PendingRequest(submission, self.started), StoredReply(status.reply, None))
            for submission, status in zip(self.submissions, statuses, strict=True)
            if status.reply is not None
        )


def error_line(request_id: str, custom_id: str, error: RequestError) -> bytes:
    """The line of the error file."""
    body = encode_json(ErrorBody(fault_of(error, request_id)))
    return failed_line(request_id, custom_id, HTTP[error.code].status, body)


def member_id(request_id: str, index: int) -> str:
    """The id of an input of a line: the line's own for the first one, else a UUIDv7 that follows from it, of the same time."""
    if not index:
        return request_id
    digits = sha256(f"{request_id} {index}".encode()).hexdigest()
    head = request_id.removeprefix(PREFIX)[:13]  # Its time, and the version.
    return f"{PREFIX}{head}{digits[:3]}8{digits[3:18]}"


def identity_of(catalog: Catalog, customer_id: str, key_id: str) -> Identity | None:
    """The customer of a batch as it is now; None while it is suspended or unknown.

    The rate of the key does not apply. Its models and quotas do, also once it is revoked.
    """
    snapshot = catalog.snapshot
    row = None if snapshot is None else snapshot.customers.get(customer_id)
    if snapshot is None or row is None or row.suspended:
        return None
    identity, key = row.identity(key_id), snapshot.keys.get(key_id)
    if key is None:
        return identity
    return msgspec.structs.replace(identity, models=key.identity.models, quotas=key.identity.quotas)


def _error(status: RequestStatus, api_format: ApiFormat) -> RequestError:
    if status.reply is not None:
        return api_format.failure(status.reply)
    try:
        return RequestError(ErrorCode(status.error_code))
    except ValueError:  # There is none, or it was written by a newer version.
        return RequestError(ErrorCode.INTERNAL_ERROR)


def _ignore(_: Outcome) -> None:
    pass
