"""`GET /v1/result/{id}` returns a job, `DELETE` cancels it. Both count against the limit of auxiliary requests."""

from collections.abc import Callable

from gateway.http.error_responses import ErrorResponses
from gateway.http.problem_details import wants_problem
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.inference.entry import Entry
from gateway.jobs.documents import POLL_LATER, job_result
from gateway.jobs.service import Jobs
from ledger.catalog.snapshot import Identity
from ledger.jobs import JobRow, StoreUnavailable
from scheduler.errors import ErrorCode, RequestError
from scheduler.request_id import created_ms

NOT_NOW = "Results cannot be read right now; try again soon."
UNKNOWN = "There is no such task, or its result is not kept any more."


class JobResultHandler:
    """The two handlers. Without a store (this gateway serves no jobs) every task is unknown.

    `own`: the jobs of the gateway's own pool; `jobs_of`: those of a place, in whose Redis keys a job is cancelled.
    """

    def __init__(self, entry: Entry, faults: ErrorResponses, own: Jobs, jobs_of: Callable[[str], Jobs]) -> None:
        self._entry = entry
        self._faults = faults
        self._store = own.store
        self._jobs_of = jobs_of

    async def get(self, call: RoutedRequest) -> HttpResponse:
        """Return the job. Raises RequestError if the caller is unknown."""
        return await self._respond(call, cancel=False)

    async def delete(self, call: RoutedRequest) -> HttpResponse:
        """Cancel the job if it is open, and return it. Raises RequestError if the caller is unknown."""
        return await self._respond(call, cancel=True)

    async def _respond(self, call: RoutedRequest, *, cancel: bool) -> HttpResponse:
        identity = self._entry.authenticator.identify(call)
        try:
            row = await self._find(call.tail, identity)
            if cancel and not row.ended:
                await self.cancel_open(row)
                row = await self._find(call.tail, identity)
        except RequestError as error:
            headers = self._entry.limits_of(identity).headers(identity)
            return self._faults.answer(error, call.request_id, headers, problem=wants_problem(call.headers))
        headers = [
            ("x-request-id", call.request_id),
            ("Cache-Control", "no-store"),
            *self._entry.limits_of(identity).headers(identity),
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
        try:
            await self._jobs_of(row.pool).cancel(row)
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
