"""`GET /v1/result/{id}` returns a job, `DELETE` cancels it. Both count against the limit of auxiliary requests.

Callbacks send the same document.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.inference import INFERENCE
from gateway.http.error_responses import ErrorResponses, Fault, fault_of
from gateway.http.problem_details import wants_problem
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.inference.deadlines import Cancellations
from gateway.inference.pipeline import InferencePipeline
from gateway.jobs.job_end import end_of
from gateway.jobs.store import JobStore
from ledger.catalog.snapshot import Identity
from ledger.jobs import JobEnd, JobRow, StoreUnavailable
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.protocol.cancellation import Terminations
from scheduler.request_id import created_ms

Status = Literal["PENDING", "SUCCESS", "FAILURE"]

POLL_LATER = ("Retry-After", "1")
"""Of a job that has not ended: seconds until its result should be read again."""

NOT_NOW = "Results cannot be read right now; try again soon."
UNKNOWN = "There is no such task, or its result is not kept any more."


class Promise(msgspec.Struct, gc=False):
    """The body of the 202."""

    task_id: str
    status: Literal["PENDING"] = "PENDING"


class JobMetadata(msgspec.Struct, gc=False):
    """Details of a job that has ended. `latency_ms`: from its submission to its end."""

    tokens_used: int
    latency_ms: float
    model: str
    tier: str


class JobResult(msgspec.Struct, gc=False):
    """The status of a job: `output` if it succeeded, `error` if it failed."""

    status: Status
    output: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET
    metadata: JobMetadata | UnsetType = UNSET


class CallbackBody(msgspec.Struct, gc=False):
    """The body of a callback: the job's result with its id."""

    task_id: str
    status: Status
    output: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET
    metadata: JobMetadata | UnsetType = UNSET


def job_result(row: JobRow) -> JobResult:
    """The document of a job, from its row."""
    if not row.ended:
        return JobResult("PENDING")
    text = (row.output or b"").decode(errors="replace")
    metadata = JobMetadata(row.tokens_used or 0, round(max(0.0, row.latency_ms or 0.0), 2), row.model, row.tier)
    if row.status == "completed":
        return JobResult("SUCCESS", output=text, metadata=metadata)
    try:
        code = ErrorCode(row.error_code or "")
    except ValueError:  # Written by a newer version.
        code = ErrorCode.INTERNAL_ERROR
    return JobResult("FAILURE", error=fault_of(INFERENCE.refusal(code, text), row.id), metadata=metadata)


class JobResultHandler:
    """The two handlers. Without a store (this gateway serves no jobs) every task is unknown.

    `elsewhere` returns the handlers of another pool by its name: a job is cancelled in the Redis keys of its pool.
    """

    def __init__(
        self,
        inference: InferencePipeline,
        faults: ErrorResponses,
        terminations: Terminations,
        cancellations: Cancellations,
        store: JobStore | None,
    ) -> None:
        self._inference = inference
        self._faults = faults
        self._terminations = terminations
        self._cancellations = cancellations
        self._store = store
        self.elsewhere: Callable[[str], JobResultHandler | None] = lambda _: None

    async def get(self, call: RoutedRequest) -> HttpResponse:
        """Return the job. Raises RequestError if the caller is unknown."""
        return await self._respond(call, cancel=False)

    async def delete(self, call: RoutedRequest) -> HttpResponse:
        """Cancel the job if it is open, and return it. Raises RequestError if the caller is unknown."""
        return await self._respond(call, cancel=True)

    async def _respond(self, call: RoutedRequest, *, cancel: bool) -> HttpResponse:
        identity = self._inference.identify(call)
        try:
            row = await self._find(call.tail, identity)
            if cancel and not row.ended:
                await self.cancel_open(row)
                row = await self._find(call.tail, identity)
        except RequestError as error:
            headers = self._inference.limits_of(identity).headers(identity)
            return self._faults.answer(error, call.request_id, headers, problem=wants_problem(call.headers))
        headers = [
            ("x-request-id", call.request_id),
            ("Cache-Control", "no-store"),
            *self._inference.limits_of(identity).headers(identity),
        ]
        if not row.ended:
            headers.append(POLL_LATER)
        return HttpResponse.of(200, job_result(row), headers)

    async def _find(self, job_id: str, identity: Identity) -> JobRow:
        """The customer's job. Raises RequestError."""
        row = None
        if self._store is not None:
            try:
                created_ms(job_id)  # An invalid id needs no query.
                row = await self._store.find(job_id, identity.customer_id)
            except ValueError:
                pass
            except StoreUnavailable:
                raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
        if row is None:
            raise RequestError(ErrorCode.NOT_FOUND, UNKNOWN)
        return row

    async def cancel_job(self, job_id: str, identity: Identity) -> None:
        """Cancel the customer's job if it is open. Raises RequestError."""
        row = await self._find(job_id, identity)
        if not row.ended:
            await self.cancel_open(row)

    async def cancel_open(self, row: JobRow) -> None:
        """Cancel an open job, in its pool. Raises RequestError."""
        await (self.elsewhere(row.pool) or self).cancel(row)

    async def cancel(self, row: JobRow) -> None:
        """End the job with its reply in Redis if there is one, or else as cancelled. Raises RequestError.

        A job that is running finishes, and its result is discarded.
        """
        end = JobEnd(row.id, ErrorCode.CANCELLED, customer_id=row.customer_id)
        try:
            (reply,) = await self._terminations.cancel([(row.id, ErrorCode.CANCELLED)])
        except RedisUnavailable:
            self._cancellations.add(row.id, ErrorCode.CANCELLED)
        else:
            end = end if reply is None else end_of(reply)
        try:
            if self._store is not None:
                await self._store.end(end)
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
