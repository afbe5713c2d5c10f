"""Submission of a job: `POST /v1/inference` with `Prefer: respond-async` is admitted, stored, and gets a 202.

The stages are those of every request (gateway/inference/handler.py); a job has its own admission, deadlines and
response. Limits are checked first, so that rejected jobs never reach PostgreSQL. The row is committed before the 202, so
that an accepted job survives the loss of everything else. If the gateway crashes between admission and commit, the
request runs and its result is discarded. The body is that of the native API, with a callback URL.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import msgspec
from asyncpg import PostgresError
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest
from gateway.api.inference import INFERENCE, InferenceBody, read_inference
from gateway.config import JobConfig
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.preference import PREFERENCE_APPLIED, prefers_async
from gateway.http.response import Headers, HttpResponse
from gateway.http.router import Handler, RoutedRequest
from gateway.http.validation import invalid
from gateway.inference.admission import ENTERED
from gateway.inference.call import InferenceCall, Terms
from gateway.inference.entry import Entry
from gateway.inference.handler import future_sink
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED
from gateway.inference.pending import CustomerMoved, Outcome, PendingRequest
from gateway.inference.pipeline import InferencePipeline
from gateway.jobs.callback_url import url_problem
from gateway.jobs.documents import POLL_LATER, Promise
from gateway.jobs.service import NOT_NOW, Jobs, JobServing
from ledger.jobs import NewJob, StoreUnavailable
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Verdict
from scheduler.states import Admission

_OWN_FIELDS = (b"callback_url", b"priority", b"\\u")  # With an escape, a name may be spelled in another way.

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


class JobSubmitHandler:
    """The handler of `POST /v1/inference`. Requests without the preference go to `waiting`.

    `own`: the jobs of the gateway's own pool, which count all submissions; `jobs_of`: those of a place.
    """

    def __init__(self, waiting: Handler, entry: Entry, own: Jobs, jobs_of: Callable[[str], Jobs]) -> None:
        self._waiting = waiting
        self._entry = entry
        self._own = own
        self._jobs_of = jobs_of

    async def __call__(self, request: RoutedRequest) -> HttpResponse:
        """Handle one request. Raises RequestError if the caller is unknown."""
        if not prefers_async(request.headers) or self._own.serving is None:
            return await self._waiting(request)
        with self._own.submission():
            call = self._entry.call(INFERENCE, request)
            return await self._entry.answered(call, self._submit(call, request))

    async def _submit(self, call: InferenceCall, request: RoutedRequest) -> HttpResponse:
        entry = self._entry
        raw = await entry.read(call, request)
        body, options = read_job(raw, entry.largest().input_bytes)
        entry.accept(call, body, len(raw))
        del raw  # It may be large.
        return await self.submit(call, options, AcceptedJob())

    async def submit(self, call: InferenceCall, options: JobOptions, response: "AcceptedJob") -> HttpResponse:
        """Admit a decoded call as a job, store it, and return its response. Raises RequestError."""
        cell = ""
        while True:
            pipeline = self._entry.place(call, cell)
            jobs = self._jobs_of(pipeline.place).serving
            if jobs is None:
                raise RuntimeError("This is a bug: a pool of this gateway has no jobs.")
            try:
                return await self._in_pool(jobs, call, options, response)
            except CustomerMoved as moved:
                cell = moved.cell

    async def _in_pool(
        self, jobs: JobServing, call: InferenceCall, options: JobOptions, response: "AcceptedJob"
    ) -> HttpResponse:
        pipeline, identity = jobs.pipeline, call.identity
        if options.callback_url is not None:
            hosts = jobs.hosts.of(identity.customer_id)
            if problem := url_problem(options.callback_url, hosts, private=jobs.config.private_addresses):
                raise invalid("callback_url", problem)
        if options.interactive:
            tier, snapshot = identity.tier, self._entry.catalog.snapshot
            if snapshot is None or not any(row.name == tier and row.interactive_jobs for row in snapshot.tiers):
                raise invalid("priority", f"Jobs of the tier {tier} run in the background; omit `priority`.")
        call.terms = job_terms(jobs.config, options)
        futures: list[asyncio.Future[Outcome]] = []
        pending = pipeline.build(call, partial(future_sink, futures))
        jobs.submit(pending)
        stored = False  # Or being stored, where a client that leaves cancels the job.
        try:
            outcome = await futures[0]
            if isinstance(outcome, Verdict) and outcome.outcome in _SAME_KEY:
                pipeline.charge_replay(call)
                known = await response.known(jobs, call, pending, outcome)
                known.headers.append(IDEMPOTENT_REPLAYED)
                return known
            if not isinstance(outcome, Verdict) or outcome.outcome not in ENTERED:
                # Raises the error of the rejection.
                return pipeline.respond(call, [pending], [pipeline.completed(call, pending, outcome)])
            pipeline.customer_limits.judged(identity, pending.submission, outcome)
            stored = True
            await response.before_job(jobs, call, pending)
            await _store(jobs, pending, options.callback_url)
        except asyncio.CancelledError:  # The client left. A job that admission accepts later is cancelled there.
            pending.cancel()
            pending.gone = True
            if pending.accepted and not stored:
                jobs.cancellations.add(pending.id, ErrorCode.CANCELLED)
            raise
        return response.accepted(jobs, call, pending, outcome, call.request_id)


def job_terms(config: JobConfig, options: JobOptions) -> Terms:
    """The terms of a job. No client waits: by default it gives way to interactive requests, and has its own deadline."""
    more = () if options.callback_url is None else (options.callback_url,)
    return Terms(
        deadline_ms=config.total_ms,
        background=not options.interactive,
        fingerprint=(*more, "interactive") if options.interactive else more,
        beside_redis=False,  # A job outlives its call, and its gateway.
    )


async def _store(jobs: JobServing, pending: PendingRequest, callback_url: str | None) -> None:
    """Store the admitted job. Raises RequestError if it cannot be stored; then it is cancelled."""
    left_s = pending.deadline - jobs.pipeline.clock()
    code = ErrorCode.NO_CAPACITY  # Not the client's fault: its charges are returned.
    stored = False
    try:
        await jobs.store.insert(NewJob(pending.submission, left_s, callback_url))
        stored = True
    except StoreUnavailable:
        raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
    except PostgresError as error:
        log_fault("a job cannot be stored", error, request_id=pending.id)
        raise RequestError(ErrorCode.INTERNAL_ERROR) from None
    except asyncio.CancelledError:  # The client left.
        code = ErrorCode.CANCELLED
        raise
    finally:
        if not stored:
            jobs.cancellations.add(pending.id, code)


class AcceptedJob:
    """The responses to an accepted job: the 202, and that of a known Idempotency-Key."""

    async def before_job(self, jobs: JobServing, call: InferenceCall, pending: PendingRequest) -> None:
        """Store what must be there before a fast job ends. Raises RequestError if that fails; then the job is cancelled."""

    def accepted(
        self, jobs: JobServing, call: InferenceCall, pending: PendingRequest, verdict: Verdict, task_id: str
    ) -> HttpResponse:
        """Record the job as accepted and build its response."""
        return HttpResponse.of(
            202,
            Promise(task_id),
            [
                ("x-request-id", task_id),
                ("Location", f"/v1/result/{task_id}"),
                PREFERENCE_APPLIED,
                POLL_LATER,
                *accepted_headers(jobs.pipeline, call, pending, verdict, task_id),
            ],
        )

    async def known(
        self, jobs: JobServing, call: InferenceCall, pending: PendingRequest, verdict: Verdict
    ) -> HttpResponse:
        """The Idempotency-Key was used before: the 202 of its job, or the response of a request that was not a job."""
        pipeline = jobs.pipeline
        try:
            known = await jobs.store.find(verdict.stored_id, call.identity.customer_id)
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
        if known is not None:
            pipeline.customer_limits.judged(call.identity, pending.submission, verdict)
            return self.accepted(jobs, call, pending, verdict, known.id)
        if verdict.outcome is Admission.IN_PROGRESS:
            reply = pipeline.completed(call, pending, verdict)  # Raises `idempotency_in_progress`.
        else:
            reply = await pipeline.reply(call, pending, verdict)
        return pipeline.respond(call, [pending], [reply])


def accepted_headers(
    pipeline: InferencePipeline, call: InferenceCall, pending: PendingRequest, verdict: Verdict, task_id: str
) -> Headers:
    """Record the job as accepted; the limit headers of its response."""
    pipeline.events.accepted(call.api_format.endpoint, task_id, call.identity, pending)
    return pipeline.customer_limits.headers(call.identity, verdict)
