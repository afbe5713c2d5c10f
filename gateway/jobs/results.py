"""`GET /v1/result/{id}` shows a job, `DELETE` cancels it. Neither spends anything of a limit.

The document of a job is that of its callback too.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.inference import INFERENCE
from gateway.catalog import IdentityView
from gateway.http.errors import ErrorResponses, Fault, fault_of, wants_problem
from gateway.http.response import Headers, HttpResponse
from gateway.http.router import RoutedRequest
from gateway.inference.deadlines import Cancellations
from gateway.inference.pipeline import InferencePipeline
from gateway.jobs.inbox import end_of
from gateway.jobs.store import JobStore
from ledger.jobs import JobEnd, JobRow, StoreUnavailable
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.protocol.cancellation import Terminations
from scheduler.request_id import created_ms

Status = Literal["PENDING", "SUCCESS", "FAILURE"]


class Promise(msgspec.Struct, gc=False):
    """The body of the 202."""

    task_id: str
    status: Literal["PENDING"] = "PENDING"


class JobResult(msgspec.Struct, gc=False):
    """How a job stands: `output` where it succeeded, `error` where it failed."""

    status: Status
    output: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET


class Told(msgspec.Struct, gc=False):
    """The body of a callback: the same, with the task's id."""

    task_id: str
    status: Status
    output: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET


def job_result(job_id: str, status: str, output: bytes | None, error_code: str | None) -> JobResult:
    """`status` is that of the row."""
    text = (output or b"").decode(errors="replace")
    if status == "completed":
        return JobResult("SUCCESS", output=text)
    if status == "failed":
        return JobResult("FAILURE", error=fault_of(_failure(error_code or "", text), job_id))
    return JobResult("PENDING")


def _failure(code: str, sentence: str) -> RequestError:
    """What a client that waited would have been told."""
    try:
        known = ErrorCode(code)
    except ValueError:  # Written by a newer version.
        known = ErrorCode.INTERNAL_ERROR
    if known is ErrorCode.INVALID_REQUEST and sentence:
        return INFERENCE.bad_parameters(sentence)
    return RequestError(known)


NOT_NOW = "Results cannot be read right now; try again soon."
UNKNOWN = "There is no such task, or its result is not kept any more."


class JobResultHandler:
    """The two handlers. Without a store (jobs are not served here) no task is known.

    `elsewhere` finds the handlers of another pool by its name: Redis knows a job in its own pool only.
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
        """How the job stands. Raises RequestError for who is not known."""
        identity = self._inference.identify(call)
        try:
            return self._told(call, identity, await self._find(call.tail, identity))
        except RequestError as error:
            return self._refused(call, identity, error)

    async def delete(self, call: RoutedRequest) -> HttpResponse:
        """Cancel the job, and tell how it stands then. Raises RequestError for who is not known."""
        identity = self._inference.identify(call)
        try:
            row = await self._find(call.tail, identity)
            if not row.ended:
                await (self.elsewhere(row.pool) or self).cancel(row)
                row = await self._find(call.tail, identity)
            return self._told(call, identity, row)
        except RequestError as error:
            return self._refused(call, identity, error)

    async def _find(self, job_id: str, identity: IdentityView) -> JobRow:
        """The customer's job. Raises RequestError."""
        row = None
        if self._store is not None and _is_id(job_id):
            try:
                row = await self._store.find(job_id, identity.customer_id)
            except StoreUnavailable:
                raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
        if row is None:
            raise RequestError(ErrorCode.NOT_FOUND, UNKNOWN)
        return row

    async def cancel(self, row: JobRow) -> None:
        """End it, as Redis says that it has ended or else as cancelled. One that runs is left to run, and is not heard.

        Raises RequestError.
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

    def _told(self, call: RoutedRequest, identity: IdentityView, row: JobRow) -> HttpResponse:
        headers: Headers = [
            ("x-request-id", call.request_id),
            ("Cache-Control", "no-store"),
            *self._inference.customer_limits.headers(identity),
        ]
        return HttpResponse.of(200, job_result(row.id, row.status, row.output, row.error_code), headers)

    def _refused(self, call: RoutedRequest, identity: IdentityView, error: RequestError) -> HttpResponse:
        headers = self._inference.customer_limits.headers(identity)
        return self._faults.answer(error, call.request_id, headers, problem=wants_problem(call.headers))


def _is_id(text: str) -> bool:
    """PostgreSQL is not asked for what is no id."""
    try:
        created_ms(text)
    except ValueError:
        return False
    return True
