"""Submission of a job: `POST /v1/inference` with `Prefer: respond-async` is admitted, stored, and gets a 202.

The stages are those of every request (gateway/inference/handler.py); a job has its own admission, deadlines and
response. Limits are checked first, so that rejected jobs never reach PostgreSQL. The row is committed before the 202, so
that an accepted job survives the loss of everything else. If the gateway crashes between admission and commit, the
request runs and its result is discarded. The body is that of the native API, with a callback URL.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import msgspec
from asyncpg import PostgresError
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest
from gateway.api.inference import INFERENCE, ApiFormat, InferenceBody, read_inference
from gateway.config import JobConfig
from gateway.host_lists import CallbackHosts
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.preference import PREFERENCE_APPLIED, prefers_async
from gateway.http.request import HttpRequest
from gateway.http.response import Headers, HttpResponse
from gateway.http.router import Handler, RoutedRequest
from gateway.http.validation import invalid
from gateway.inference.admission import ENTERED, AdmissionBatcher, AdmissionLimits
from gateway.inference.handler import AwaitedCall, serve
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED, with_more
from gateway.inference.pending import Outcome, PendingRequest
from gateway.inference.pipeline import InferenceParts, InferencePipeline
from gateway.jobs.callback_url import url_problem
from gateway.jobs.results import POLL_LATER, Promise
from gateway.jobs.store import JobStore
from ledger.jobs import NewJob, StoreUnavailable
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Admissions, Submission, Verdict
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.request_status import RequestStatuses
from scheduler.states import Admission

_OWN_FIELDS = (b"callback_url", b"priority", b"\\u")  # With an escape, a name may be spelled in another way.

NOT_NOW = "Jobs cannot be taken right now; try again soon."
_SAME_KEY = (Admission.REPLAYED, Admission.IN_PROGRESS)


class JobOptions(NamedTuple):
    """What only the body of a job has. Whether the customer may use it is checked later."""

    callback_url: str | None = None
    interactive: bool = False


class JobBody(InferenceBody, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /v1/inference` for a job."""

    callback_url: str | UnsetType | None = UNSET
    priority: Literal["background", "interactive"] = "background"


_decoder = msgspec.json.Decoder(JobBody)


def read_job(raw: bytes, max_input_bytes: int) -> tuple[InferenceRequest, JobOptions]:
    """The decoded request and the options of the job. Raises RequestError that names the field."""
    if not any(each in raw for each in _OWN_FIELDS):
        return read_inference(raw, max_input_bytes), JobOptions()
    body = decode(_decoder, raw)
    check_duplicates(raw)
    fields = {name: value for name in InferenceBody.__struct_fields__ if (value := getattr(body, name)) is not UNSET}
    url = None if body.callback_url is UNSET else body.callback_url
    options = JobOptions(url, body.priority == "interactive")
    return read_inference(msgspec.json.encode(fields), max_input_bytes), options


@dataclass(frozen=True, slots=True, eq=False)
class JobRedis:
    """The jobs of one pool in Redis. `limits` has the tiers. `ask` lets the limits of a customer arrive in its cell."""

    admissions: Admissions
    statuses: RequestStatuses
    terminations: Terminations
    limits: Callable[[], AdmissionLimits]
    ask: Callable[[Submission], None]


class JobSubmitHandler:
    """The handler of `POST /v1/inference` in one pool. Requests without the preference go to `waiting`.

    `elsewhere` returns the handler of another pipeline, or None.
    """

    def __init__(
        self,
        waiting: Handler,
        pipeline: InferencePipeline,
        parts: InferenceParts,
        admission: AdmissionBatcher,
        store: JobStore,
        *,
        redis: JobRedis,
        hosts: CallbackHosts,
    ) -> None:
        self._waiting = waiting
        self.pipeline = pipeline
        self.parts = parts
        self.config = cast("JobConfig", parts.config.jobs)
        self.admission = admission
        self.store = store
        self.redis = redis
        self.hosts = hosts
        self.elsewhere: Callable[[InferencePipeline], JobSubmitHandler | None] = lambda _: None
        self.under_way = 0  # A gateway that drains waits for these.
        self.left = False  # Its cell is closed: what it has submitted is not read any more.

    async def __call__(self, request: RoutedRequest) -> HttpResponse:
        """Handle one request. Raises RequestError if the caller is unknown."""
        if not prefers_async(request.headers):
            return await self._waiting(request)
        self.under_way += 1
        try:
            return await serve(JobCall(self, request), request)
        finally:
            self.under_way -= 1

    def may_be_interactive(self, tier: str) -> bool:
        """Whether jobs of the tier may ask for the priority of interactive requests."""
        snapshot = self.parts.catalog.snapshot
        return snapshot is not None and any(row.name == tier and row.interactive_jobs for row in snapshot.tiers)

    def problem(self, now: float) -> RequestError | None:
        """Why no job can be admitted now (monotonic seconds); None if nothing is known to prevent it."""
        parts = self.parts
        if parts.limits.model_too_slow:
            return RequestError(ErrorCode.MODEL_TOO_SLOW)
        if parts.direct.active or parts.limits.no_gpu(now):
            return RequestError(ErrorCode.NO_CAPACITY, NOT_NOW)
        if parts.limits.short_of_memory:
            return RequestError(ErrorCode.BACKPRESSURE)
        return None


class JobCall(AwaitedCall):
    """The submission of one job: its outcome is the verdict of admission, its response the 202.

    `handler` is that of the gateway's own pool until `choose_pool` has selected the pool of the model.
    """

    FAULT = "taking a job failed"
    BESIDE_REDIS = False  # A job outlives its call, and its gateway.

    __slots__ = ("_handler", "_options", "_outcome")

    def __init__(self, handler: JobSubmitHandler, request: HttpRequest, api_format: ApiFormat = INFERENCE) -> None:
        super().__init__(handler.pipeline, api_format, request)
        self._handler = handler
        self._options = JobOptions()
        self._outcome: Outcome | None = None

    def decode(self, raw: bytes) -> InferenceRequest:
        """Decode and check the body. Raises RequestError that names the field."""
        body, self._options = read_job(raw, self.pipeline.largest().input_bytes)
        return body

    def choose_pool(self, cell: str = "") -> None:
        """Select the handler of the model's pool in `cell`, or the customer's cell. Raises RequestError while it is starting."""
        found = self.pipeline.serving(self.identity, self.body, cell)
        if found is not self.pipeline:
            self._handler = self._handler.elsewhere(found) or self._handler
            self.pipeline = self._handler.pipeline

    def build(self) -> PendingRequest:
        """Build the pending request, with the deadlines of a job.

        Raises RequestError if the callback URL or the priority is not allowed, or the model is unknown.
        """
        (url, interactive), config = self._options, self._handler.config
        if url is not None:
            hosts = self._handler.hosts.of(self.identity.customer_id)
            if problem := url_problem(url, hosts, private=config.private_addresses):
                raise invalid("callback_url", problem)
        pending = super().build()
        submission = pending.submission
        if interactive and not self._handler.may_be_interactive(submission.tier):
            problem = f"Jobs of the tier {submission.tier} run in the background; omit `priority`."
            raise invalid("priority", problem)
        # No client waits: by default it gives way to interactive requests; the queue time of the tier does not apply.
        for each in self._pending_requests:
            each.submission.background = not interactive
            each.submission.total_ms = each.submission.queue_ms = config.total_ms
        if url is not None and submission.idempotency:
            submission.fingerprint = with_more(submission.fingerprint, url)
        if interactive and submission.idempotency:
            submission.fingerprint = with_more(submission.fingerprint, "interactive")
        pending.deadline = self.started + submission.total_ms / 1000
        return pending

    def admit(self, pending: PendingRequest) -> None:
        """Submit the job to admission. Raises RequestError if it is rejected before that."""
        parts = self._handler.parts
        tier, error = pending.submission.tier, self._handler.problem(pending.started)
        if error is None and not self._handler.admission.submit(pending):
            error = RequestError(ErrorCode.QUEUE_FULL)
        if error is not None:
            parts.demand_meter.passed(tier)
            parts.demand_meter.shed(tier)
            raise error

    async def wait(self) -> None:
        """Wait for the verdict of admission, or for the gateway's own error."""
        self._outcome = await self._futures[0]

    async def response(self) -> HttpResponse:
        """Store the job and build the 202, or the earlier response to its Idempotency-Key. Raises RequestError."""
        outcome, pending = cast("Outcome", self._outcome), self._pending_requests[0]
        if isinstance(outcome, Verdict) and outcome.outcome in _SAME_KEY:
            self.charge_replay()
            return await self.known_job(outcome)
        if not isinstance(outcome, Verdict) or outcome.outcome not in ENTERED:
            return self.respond([pending], [self.completed(pending, outcome)])  # Raises the error of the rejection.
        self.pipeline.customer_limits.judged(self.identity, pending.submission, outcome)
        await self.store(pending)
        return self.accepted(outcome, self.request_id)

    async def store(self, pending: PendingRequest) -> None:
        """Store the admitted job. Raises RequestError if it cannot be stored; then it is cancelled."""
        submission = pending.submission
        left_s = pending.deadline - self.pipeline.clock()
        code = ErrorCode.NO_CAPACITY  # Not the client's fault: its charges are returned.
        stored = False
        try:
            await self._handler.store.insert(NewJob(submission, left_s, self._options.callback_url))
            stored = True
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
        except PostgresError as error:
            log_fault("a job cannot be stored", error, request_id=submission.id)
            raise RequestError(ErrorCode.INTERNAL_ERROR) from None
        except asyncio.CancelledError:  # The client left.
            code = ErrorCode.CANCELLED
            raise
        finally:
            if not stored:
                self._handler.parts.cancellations.add(submission.id, code)

    async def known_job(self, verdict: Verdict) -> HttpResponse:
        """The Idempotency-Key was used before: the 202 of its job, or the response of a request that was not a job."""
        pending = self._pending_requests[0]
        try:
            known = await self._handler.store.find(verdict.stored_id, self.identity.customer_id)
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
        if known is not None:
            self.pipeline.customer_limits.judged(self.identity, pending.submission, verdict)
            response = self.accepted(verdict, known.id)
        elif verdict.outcome is Admission.IN_PROGRESS:
            return self.respond([pending], [self.completed(pending, verdict)])  # Raises `idempotency_in_progress`.
        else:
            response = self.respond([pending], [await self.replayed_reply(pending, verdict)])
        response.headers.append(IDEMPOTENT_REPLAYED)
        return response

    def accepted(self, verdict: Verdict, task_id: str) -> HttpResponse:
        """Record the job as accepted and build its 202."""
        self.pipeline.events.accepted(self.api_format.endpoint, task_id, self.identity, self._pending_requests[0])
        headers: Headers = [
            ("x-request-id", task_id),
            ("Location", f"/v1/result/{task_id}"),
            PREFERENCE_APPLIED,
            POLL_LATER,
            *self.pipeline.customer_limits.headers(self.identity, verdict),
        ]
        return HttpResponse.of(202, Promise(task_id), headers)

    def client_left(self) -> None:
        """The connection was closed before the response. A job that admission accepts later is cancelled there."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending.gone = True


class JobAdmitter(AdmissionBatcher):
    """Admission of jobs: the verdict is the outcome. Its calls use the gateway id that all jobs share."""

    def _judged(self, pending: PendingRequest, verdict: Verdict) -> None:
        pending.verdict = verdict
        entered = verdict.outcome in ENTERED
        pending.accepted = entered
        if entered and (pending.gone or pending.done):  # The client left during the call.
            self._cancellations.add(pending.id, ErrorCode.CANCELLED)
        pending.finish(verdict)
