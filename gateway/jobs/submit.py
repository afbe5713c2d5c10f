"""Submitting a job: `POST /v1/inference` with `Prefer: respond-async` is admitted, stored, and then answered with 202.

The order matters. Limits are checked first, so that PostgreSQL never sees what they reject; the row is committed before
the 202, so that an accepted job survives the loss of everything else. If the gateway crashes between the two, the
request runs and its result is discarded. The body is that of the native API, with the address for the callback. Nobody
waits for a job's result, so its admission ends the waiting.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, cast

import msgspec
from asyncpg import PostgresError
from msgspec import UNSET, UnsetType

from gateway.api.format import InferenceRequest
from gateway.api.inference import INFERENCE, InferenceBody, read_inference
from gateway.catalog import IdentityView
from gateway.config import JobConfig
from gateway.host_lists import CallbackHosts
from gateway.http.errors import wants_problem
from gateway.http.request import APPLIED, check_duplicates, check_media, decode, invalid, prefers_async, read_body
from gateway.http.response import Headers, HttpResponse
from gateway.http.router import Handler, RoutedRequest
from gateway.inference.admission import ENTERED, AdmissionBatcher
from gateway.inference.pending import Outcome, PendingRequest
from gateway.inference.pipeline import InferenceParts, InferencePipeline
from gateway.inference.submission import REPLAYED, idempotency_key, with_more
from gateway.jobs.results import Promise
from gateway.jobs.store import JobStore, new_job
from gateway.jobs.webhooks import refused
from ledger.jobs import StoreUnavailable
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Verdict
from scheduler.states import Admission, State


class JobBody(InferenceBody, forbid_unknown_fields=True, frozen=True):
    """The body of a job."""

    callback_url: str | UnsetType | None = UNSET


_decoder = msgspec.json.Decoder(JobBody)


def read_job(raw: bytes, max_input_bytes: int) -> tuple[InferenceRequest, str | None]:
    """The request, and its callback's URL as it was sent. Raises RequestError, with `param`."""
    if b"callback_url" not in raw and b"\\u" not in raw:  # No other spelling of the name is possible then.
        return read_inference(raw, max_input_bytes), None
    body = decode(_decoder, raw)
    check_duplicates(raw)
    fields = {name: value for name in InferenceBody.__struct_fields__ if (value := getattr(body, name)) is not UNSET}
    url = None if body.callback_url is UNSET else body.callback_url
    return read_inference(msgspec.json.encode(fields), max_input_bytes), url


NOT_NOW = "Jobs cannot be taken right now; try again soon."
_SAME_KEY = (Admission.REPLAYED, Admission.IN_PROGRESS)


class Job(NamedTuple):
    """A job that asks to enter."""

    pending: PendingRequest
    asked: InferenceRequest
    callback_url: str | None


class JobCall(NamedTuple):
    """What was read of one call."""

    identity: IdentityView
    asked: InferenceRequest
    callback_url: str | None
    key: str | None
    started: float


class JobSubmitHandler:
    """The handler; who does not prefer a job is `waiting`'s, the handler of those who wait.

    `elsewhere` finds the handler of another pool's model.
    """

    def __init__(
        self,
        waiting: Handler,
        inference: InferencePipeline,
        parts: InferenceParts,
        admission: AdmissionBatcher,
        store: JobStore,
        *,
        hosts: CallbackHosts,
    ) -> None:
        self._waiting = waiting
        self._inference = inference
        self._parts = parts
        self._config = cast("JobConfig", parts.config.jobs)
        self._admission = admission
        self._store = store
        self._hosts = hosts
        self.elsewhere: Callable[[str], JobSubmitHandler | None] = lambda _: None
        self.under_way = 0  # A gateway that leaves waits for them.

    async def __call__(self, call: RoutedRequest) -> HttpResponse:
        """Answer one request. Raises RequestError for who is not known."""
        if not prefers_async(call.headers):
            return await self._waiting(call)
        identity = self._inference.ends.known(self._inference.identify, call, INFERENCE.endpoint)
        self.under_way += 1
        try:
            try:
                wish = await self._wish(call, identity)
                there = self._of_pool(wish.asked)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is told with the limits, as everything else
                return self._not_taken(call, identity, None, error)
            return await there.take(call, wish)
        finally:
            self.under_way -= 1

    async def take(self, call: RoutedRequest, wish: JobCall) -> HttpResponse:
        """Answer what was read, in the pool that this is of."""
        identity, job = wish.identity, None
        try:
            job = Job(self._pending(call, wish), wish.asked, wish.callback_url)
            return await self._taken(call, identity, job)
        except Exception as error:  # noqa: BLE001  # as above
            return self._not_taken(call, identity, job, error)

    def _of_pool(self, asked: InferenceRequest) -> "JobSubmitHandler":
        """The handler of the pool that has the model; this one, where none has."""
        if asked.model is UNSET or self._inference.serving(asked) is self._inference:
            return self
        return self.elsewhere(asked.model) or self

    async def _wish(self, call: RoutedRequest, identity: IdentityView) -> JobCall:
        """What is asked. Raises RequestError."""
        key = idempotency_key(call.headers)
        came_whole = call.request.content.is_eof()
        raw = await self._read(call, identity)
        if not came_whole:  # As in the handler of those who wait.
            identity = self._inference.identify(call)
        asked, url = read_job(raw, self._inference.max_input_bytes)
        started = call.arrived if came_whole else self._inference.clock()
        return JobCall(self._inference.served_as(identity, asked), asked, url, key, started)

    def _not_taken(
        self, call: RoutedRequest, identity: IdentityView, job: Job | None, error: Exception
    ) -> HttpResponse:
        if not isinstance(error, RequestError):
            log_fault("taking a job failed", error, request_id=call.request_id)
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        return self._inference.not_served(call, identity, job.pending if job else None, error)

    async def _read(self, call: RoutedRequest, identity: IdentityView) -> bytes:
        if self._parts.drain_state.closed:
            raise RequestError(ErrorCode.DRAINING)
        most = self._inference.max_body_bytes
        check_media(call.headers, call.request.content_length or 0, most)
        return await read_body(call.request, most, self._inference.bodies.share(identity))

    def _pending(self, call: RoutedRequest, wish: JobCall) -> PendingRequest:
        """What asks to enter. Raises RequestError."""
        identity, asked, url, key, started = wish
        if url is not None:
            hosts = self._hosts.of(identity.customer_id)
            if problem := refused(url, hosts, private=self._config.private_addresses):
                raise invalid("callback_url", problem)
        payload = self._inference.payload(asked, INFERENCE)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        pending = self._inference.pending(call, identity, payload, key, started, future=future)
        submission = pending.submission
        # Nobody stands and waits: the tier's patience is not a job's.
        submission.total_ms = submission.queue_ms = self._config.total_ms
        if url is not None and submission.idempotency:
            submission.fingerprint = with_more(submission.fingerprint, url)
        pending.deadline = started + submission.total_ms / 1000
        return pending

    async def _taken(self, call: RoutedRequest, identity: IdentityView, job: Job) -> HttpResponse:
        """The 202, or what the request's key has already. Raises RequestError for everything else."""
        outcome = await self._admitted(job.pending)
        if isinstance(outcome, Verdict) and outcome.outcome in _SAME_KEY:
            return await self._same_again(call, identity, job, outcome)
        if not isinstance(outcome, Verdict) or outcome.outcome not in ENTERED:
            return self._inference.answer(
                identity, job.pending, outcome, job.asked
            )  # Which raises what it is refused with.
        self._inference.customer_limits.judged(identity, job.pending.submission, outcome)
        await self._keep(job)
        self._inference.ends.accepted(INFERENCE.endpoint, call.request_id, identity, job.pending)
        return self._accepted(identity, outcome, call.request_id)

    async def _admitted(self, pending: PendingRequest) -> Outcome:
        """How admission ends. Raises RequestError where it is not even asked."""
        parts, tier = self._parts, pending.submission.tier
        refusal = None
        if parts.direct.active or parts.limits.no_gpu(pending.started):
            refusal = RequestError(ErrorCode.NO_CAPACITY, NOT_NOW)
        elif parts.limits.short_of_memory:
            refusal = RequestError(ErrorCode.BACKPRESSURE)
        elif not self._admission.submit(pending):
            refusal = RequestError(ErrorCode.QUEUE_FULL)
        if refusal is not None:
            parts.demand_meter.passed(tier, parts.limits.factor(tier))
            parts.demand_meter.shed(tier)
            raise refusal
        try:
            return await cast("asyncio.Future[Outcome]", pending.future)
        except asyncio.CancelledError:  # The client left.
            pending.gone = True
            raise

    async def _keep(self, job: Job) -> None:
        """Store what was admitted; where that cannot be done, nothing was promised and it ends. Raises RequestError."""
        submission = job.pending.submission
        left_s = job.pending.deadline - self._inference.clock()
        code = ErrorCode.NO_CAPACITY  # No fault of the client's: what it was charged comes back.
        kept = False
        try:
            await self._store.insert(new_job(submission, left_s, job.callback_url))
            kept = True
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
        except PostgresError as error:
            log_fault("a job cannot be stored", error, request_id=submission.id)
            raise RequestError(ErrorCode.INTERNAL_ERROR) from None
        except asyncio.CancelledError:  # The client left.
            code = ErrorCode.CANCELLED
            raise
        finally:
            if not kept:
                self._parts.cancellations.add(submission.id, code)

    async def _same_again(
        self, call: RoutedRequest, identity: IdentityView, job: Job, verdict: Verdict
    ) -> HttpResponse:
        """The key was used before: its job once more, or the answer of the request that was no job."""
        inference = self._inference
        try:
            known = await self._store.find(verdict.stored_id, identity.customer_id)
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None
        if known is None and verdict.outcome is Admission.IN_PROGRESS:
            return inference.answer(identity, job.pending, verdict, job.asked)
        if known is None:
            answer = await self._replayed(call, identity, job, verdict)
        else:
            inference.customer_limits.judged(identity, job.pending.submission, verdict)
            inference.ends.accepted(INFERENCE.endpoint, known.id, identity, job.pending)
            answer = self._accepted(identity, verdict, known.id)
        answer.headers.append(REPLAYED)
        return answer

    async def _replayed(self, call: RoutedRequest, identity: IdentityView, job: Job, verdict: Verdict) -> HttpResponse:
        """What one who waited was told. Raises RequestError where it cannot be read."""
        inference = self._inference
        reply = await inference.stored(identity, job.pending, verdict)
        if reply.state == State.COMPLETED:
            return inference.written(identity, [job.pending], [reply], job.asked, INFERENCE)
        headers, problem = inference.customer_limits.headers(identity, verdict), wants_problem(call.headers)
        error = inference.failure(reply, INFERENCE)
        inference.ends.failed(INFERENCE.endpoint, reply.id, identity, job.pending, error)
        return inference.faults.answer(error, reply.id, headers, problem=problem)

    def _accepted(self, identity: IdentityView, verdict: Verdict, task_id: str) -> HttpResponse:
        headers: Headers = [
            ("x-request-id", task_id),
            ("Location", f"/v1/result/{task_id}"),
            APPLIED,
            *self._inference.customer_limits.headers(identity, verdict),
        ]
        return HttpResponse.of(202, Promise(task_id), headers)


class JobAdmitter(AdmissionBatcher):
    """Gives each waiter its verdict as the outcome. Its calls go out under the name of the jobs' own gateway."""

    def _judged(self, pending: PendingRequest, verdict: Verdict) -> None:
        pending.verdict = verdict
        entered = verdict.outcome in ENTERED
        pending.accepted = entered
        if entered and (pending.gone or pending.future.done()):  # The client left while the call was under way.
            self._cancellations.add(pending.id, ErrorCode.CANCELLED)
        pending.finish(verdict)
