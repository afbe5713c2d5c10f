"""The stages of an inference request, and the objects that they use.

The stages and their order are methods of `InferenceCall`: authenticate, read, check, build, admit, then, once there is
an outcome, respond or reject; both record the result. Two callers run them: the procedure `serve` in
gateway/inference/handler.py, which awaits the outcome (single requests, lists, streams, jobs), and
gateway/inference/fast_path.py, where the outcome itself triggers the response. No stage creates a task or a timer, and
only `read` and `replayed_reply` wait for anything.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from multidict import CIMultiDictProxy

from gateway.api.format import InferenceRequest, InferenceResult, check_size, missing_capability
from gateway.api.inference import ApiFormat
from gateway.auth.authenticator import Authenticator
from gateway.auth.service_tier import served_as
from gateway.config import GatewayConfig
from gateway.direct.mode import Direct
from gateway.http.body.budget import BodyBudget
from gateway.http.body.reading import check_media, read_body
from gateway.http.error_responses import ErrorResponses
from gateway.http.problem_details import wants_problem
from gateway.http.request import HttpRequest
from gateway.http.response import HttpResponse
from gateway.http.retry_header import is_retry
from gateway.http.router import DrainState, RoutedRequest
from gateway.http.sse import EventStream
from gateway.inference.admission import ENTERED, NOT_REJECTED, AdmissionBatcher
from gateway.inference.audit_pairs import Pair, replayed_pair
from gateway.inference.chat_documents import store_chat, with_document
from gateway.inference.coalescing import set_coalescing_key
from gateway.inference.deadlines import Cancellations
from gateway.inference.events import RequestEvents, RequestLog, combined_listener
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED, idempotency_key, stored_reply
from gateway.inference.pending import CustomerMoved, Outcome, PendingRequest, PendingRequests, ResponseSink
from gateway.inference.submission import build_submission
from gateway.inference.traces import RequestTraces, trace_id
from gateway.limits.capacity import LiveLimits
from gateway.limits.customer_limits import CustomerLimits
from gateway.limits.demand import DemandMeter
from gateway.limits.rejections import is_capacity_rejection
from gateway.metrics.counters import Counters
from gateway.served_models import ServedModels
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from ratelimit.request_limits import RequestLimits
from scheduler.body_store import BodyStore
from scheduler.capabilities import capabilities
from scheduler.errors import ErrorCode, RequestError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.payload import DOCUMENTS, Payload
from scheduler.protocol.admission import Residence, Submission, Verdict
from scheduler.protocol.replies import Reply, Results
from scheduler.states import Admission, State

RecordRejection = Callable[[Submission, Identity, RequestError, Verdict | None, float], None]
"""Called for each request that was not admitted: submission, identity, error, verdict if there is one, tier factor."""

NO_GPU = "No GPU is ready to serve this request; try again soon."
KEY_UNKNOWN = "An Idempotency-Key cannot be checked right now; try again soon, or send the request without it."


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParts:
    """The components that a pipeline uses. Built once per pool by gateway/pool.py."""

    config: GatewayConfig
    catalog: Catalog
    limits: LiveLimits
    pending_requests: PendingRequests
    admission: AdmissionBatcher
    cancellations: Cancellations
    demand_meter: DemandMeter
    error_responses: ErrorResponses
    drain_state: DrainState
    bodies: BodyBudget
    results: Results
    direct: Direct
    body_store: BodyStore = field(default_factory=BodyStore)
    authenticator: Authenticator | None = None  # None: API keys only, without a limit on failed authentications.
    record_rejection: RecordRejection = lambda *_: None
    # Keeps audit records, to be sent again if Redis loses them.
    remember: Callable[[Iterable[Pair]], None] = lambda _: None
    passes_on: Callable[[], bool | None] = bool  # Whether all workers pass requests on; None if none was ever known.
    greedy: Callable[[], bool] = bool  # Whether no worker samples when a request has no temperature.
    model_version: Callable[[], str] = str  # The version that all healthy workers run; "" if there is not exactly one.
    counters: Counters = field(default_factory=Counters)
    request_log: RequestLog | None = None
    traces: RequestTraces | None = None
    clock: Callable[[], float] = time.monotonic


class ReplayedFailure(RequestError):
    """The request with the same Idempotency-Key failed with this error; its response is repeated."""

    def __init__(self, error: RequestError, request_id: str) -> None:
        super().__init__(error.code, str(error), error.param)
        self.request_id = request_id  # Of the stored request.


class InferencePipeline:
    """The inference pipeline of one pool: the work of each stage."""

    def __init__(self, parts: InferenceParts) -> None:
        self._parts = parts
        auth = parts.authenticator or Authenticator(parts.catalog)
        self.customer_limits = CustomerLimits(parts.limits, parts.demand_meter, parts.clock)
        self.pending_requests, self.rejections = parts.pending_requests, parts.admission.rejections
        self.clock, self.bodies = parts.clock, parts.bodies
        self.identify, self.authenticate, self.charge = auth.identify, auth.authenticate, auth.charge
        self.events = RequestEvents(
            parts.counters, combined_listener(parts.request_log, parts.traces), parts.config.place, parts.demand_meter
        )
        self.drain_state, self.error_responses = parts.drain_state, parts.error_responses
        self.limits: Callable[[], RequestLimits] = lambda: parts.limits.request  # Of one request.
        self.largest = self.limits  # Of the pool with the largest ones: it is not known while a body is read.
        self.models = ServedModels(parts.config.pool, parts.config.default_model)
        self.single_cell: Callable[[], bool] = lambda: True
        self.elsewhere: Callable[[Identity, str | UnsetType, str], InferencePipeline | None] = lambda *_: None
        self.limits_of: Callable[[Identity], CustomerLimits] = lambda _: self.customer_limits  # In its cell.
        self.all_names: Callable[[], Collection[str]] | None = None  # Of the models of all pools.
        self.residence: Callable[[Identity], Residence] | None = None  # What admission checks of a customer's home.

    @property
    def direct_active(self) -> bool:
        """Whether requests are sent to workers without Redis now."""
        return self._parts.direct.active

    def served_as(self, identity: Identity, body: InferenceRequest) -> Identity:
        """The identity in the tier that `service_tier` selects. Raises RequestError that names the field."""
        return served_as(identity, body.service_tier, self._parts.catalog.snapshot)

    def serving(self, identity: Identity, body: InferenceRequest, cell: str = "") -> "InferencePipeline":
        """The pipeline of the model's pool in `cell`, or the customer's cell; this one if no pool has it. Raises RequestError."""
        wanted = body.model
        is_here = wanted is UNSET or wanted in self.models.names(self._parts.catalog.snapshot)
        if is_here and not cell and self.single_cell():
            return self
        return self.elsewhere(identity, wanted, cell) or self

    def payload(self, body: InferenceRequest, api_format: ApiFormat) -> Payload:
        """The model's payload for the first input. Raises RequestError for an unknown model, and for a missing capability."""
        parts = self._parts
        model = self.models.choose(parts.catalog.snapshot, body.model, api_format.model_field, self.all_names)
        document = body.document
        if document is None:
            return body.payload(model, passed_on=False)
        passes_on = parts.passes_on()
        if document.needs:
            row = None if parts.catalog.snapshot is None else parts.catalog.snapshot.models.get(model)
            # Before a worker is known, there is no capacity, which can be retried.
            has = capabilities(None if row is None else row.capabilities, passes_on=passes_on is not False)
            if (error := missing_capability(document, model, has)) is not None:
                raise error
        return body.payload(model, passed_on=passes_on is not False if document.needs else bool(passes_on))

    def build_pending(
        self,
        call: "InferenceCall",
        payload: Payload,
        sink: ResponseSink,
        request_id: str,
        key: str | None,
        *,
        first: PendingRequest | None = None,
    ) -> PendingRequest:
        """Build a pending request of `call`, not admitted yet, and count it as demand.

        `key` is its Idempotency-Key; `first` is the first member of its list, None for a single request.
        """
        parts, identity, stream = self._parts, call.identity, call.body.stream
        store = parts.body_store if call.BESIDE_REDIS else None
        payload, call.large = with_document(payload, call.body, request_id, store)
        submission = build_submission(
            request_id,
            identity,
            payload,
            self.customer_limits.limits(identity),
            within=parts.limits.request,
            meter=parts.limits.meter,
            endpoint=call.api_format.endpoint,
            key=key,
            trace=trace_id(call.headers),
            stream_to=parts.config.gateway_id if stream else "",
            body=call.body,
        )
        if self.residence is not None:
            submission.home = self.residence(identity)
        sharing = self.models.sharing.get(payload.model)
        if sharing is not None and not stream and not call.large:  # No other may depend on its file.
            set_coalescing_key(submission, payload, sharing, parts.model_version(), greedy=parts.greedy())
        parts.demand_meter.arrived(identity.tier, identity.customer_name)
        if is_retry(call.headers):
            parts.demand_meter.retried(identity.tier)
            parts.counters.retried(identity.tier)
        created = call.created if request_id == call.request_id else parts.clock()
        pending = PendingRequest(submission, call.started, sink, created)
        return pending if parts.traces is None else parts.traces.followed(pending, call.headers, first)

    def admit(self, pending: PendingRequest, large: list[bytes | memoryview] | None = None) -> None:
        """Submit the request, with its whole list, to admission or to direct mode; the sinks receive the outcomes.

        `large`: its chat, if that becomes a file beside Redis. Raises RequestError if it is rejected before; then nothing is pending.
        """
        parts, tier = self._parts, pending.submission.tier
        direct = parts.direct.active
        if direct and pending.submission.idempotency:  # Only Redis knows whether it ran before.
            if not parts.direct.redis_answers:
                raise RequestError(ErrorCode.NO_CAPACITY, KEY_UNKNOWN)
            direct = False
        if not direct and parts.limits.model_too_slow:
            self._count_rejection(tier)
            raise RequestError(ErrorCode.MODEL_TOO_SLOW)
        if not direct and parts.limits.no_gpu(pending.started):
            self._count_rejection(tier)
            raise RequestError(ErrorCode.NO_CAPACITY, NO_GPU)
        if not direct and parts.limits.short_of_memory:
            self._count_rejection(tier)
            raise RequestError(ErrorCode.BACKPRESSURE)
        if large:
            store_chat(pending.id, large, parts.body_store)
        if not (self._submit_directly(pending) if direct else self._submit(pending)):
            self._count_rejection(tier)
            raise RequestError(ErrorCode.QUEUE_FULL)

    def _submit(self, pending: PendingRequest) -> bool:
        for each in pending.together or (pending,):
            self.pending_requests.add(each)
        if self._parts.admission.submit(pending):
            return True
        for each in pending.together or (pending,):
            self.pending_requests.remove(each)
        return False

    def _submit_directly(self, pending: PendingRequest) -> bool:
        """In direct mode the members of a list enter one by one, after a check that the limits allow all of them."""
        if pending.together and self._parts.direct.keeps_out(pending):
            return True
        for each in pending.together or (pending,):
            self.pending_requests.add(each)
            if not self._parts.direct.enter(each):
                for other in pending.together or (pending,):
                    self.pending_requests.remove(other)
                return False
        return True

    def _count_rejection(self, tier: str) -> None:
        """Count a request that was rejected without a call of admission: it is unserved demand."""
        self._parts.demand_meter.passed(tier)
        self._parts.demand_meter.shed(tier)

    def leave(self, pending: PendingRequest) -> None:
        """Remove a request whose response is no longer needed; cancel it if it has no outcome."""
        if pending.outcome is None:
            pending.cancel()
            if pending.verdict is not None and pending.verdict.outcome in ENTERED:
                running, used = pending.streams, pending.used
                self._parts.cancellations.add(pending.id, ErrorCode.CANCELLED, running=running, used=used)
        self.pending_requests.remove(pending)

    def give_up(self, pending: PendingRequest, code: ErrorCode) -> None:
        """End a request with this error, here and in Redis: its response cannot be continued."""
        self._parts.cancellations.add(pending.id, code, delivered=True, used=pending.used)
        pending.finish(code)

    def fail_list(self, pending_requests: Sequence[PendingRequest], code: ErrorCode) -> None:
        """End all members of a list with this error, because one of them failed: the list has one response.

        Members that completed or still run end with the same error in Redis and in the audit, and their charges are
        returned if the fault is Tierlane's. A member that failed by itself keeps its own outcome.
        """
        for pending in pending_requests:
            if pending.sent and not _failed(pending):
                self._parts.cancellations.add(pending.id, code, delivered=True)
                pending.replace_outcome(code)
            self.leave(pending)

    def completed(self, identity: Identity, pending: PendingRequest, outcome: Outcome, api_format: ApiFormat) -> Reply:
        """Settle the limits and return the reply of a completed request. Raises RequestError for any other outcome."""
        failpoint("reply_unwritten")
        verdict = pending.verdict
        base_limit_allows = verdict is not None and self.customer_limits.judged(identity, pending.submission, verdict)
        if isinstance(outcome, Verdict):
            if outcome.outcome is Admission.ELSEWHERE:
                raise CustomerMoved(outcome.stored_id)
            raise self._count_shed(
                identity, self.customer_limits.rejection_error(identity, outcome, base_limit_allows=base_limit_allows)
            )
        if isinstance(outcome, ErrorCode):
            why = self._parts.direct.why_refused() if outcome is ErrorCode.NO_CAPACITY else None
            raise self._count_shed(identity, RequestError(outcome, why))
        if outcome.served_from != "cache":  # For a cached reply the verdict had the final charge.
            self.customer_limits.settle(identity, pending.submission.tokens - outcome.tokens_used)
        if outcome.state != State.COMPLETED:
            raise api_format.failure(outcome)
        now = self.clock()
        self._parts.demand_meter.answered(identity.tier, (now - pending.started) * 1000, now)
        return outcome

    def _count_shed(self, identity: Identity, error: RequestError) -> RequestError:
        if is_capacity_rejection(error.code):
            self._parts.demand_meter.shed(identity.tier)
        return error

    async def stored(self, identity: Identity, pending: PendingRequest, verdict: Verdict) -> Reply:
        """The stored reply for the request's Idempotency-Key. Raises RequestError `no_capacity` if it cannot be read."""
        self.customer_limits.judged(identity, pending.submission, verdict)
        stored = await stored_reply(self._parts.results, verdict.stored_id, identity.customer_id)
        # The gateway that sent this reply first may be gone. If Redis loses the record, this gateway sends it again.
        self._parts.remember([replayed_pair(self._parts.config.gateway_id, pending, stored)])
        return stored.reply

    def record_rejection(
        self, submission: Submission, identity: Identity, error: RequestError, verdict: Verdict | None
    ) -> None:
        """Record a request that was not admitted, for `tierlane explain`."""
        self._parts.record_rejection(submission, identity, error, verdict, self.customer_limits.factor(identity))


class InferenceCall:
    """One call of an inference endpoint, and the stages of its handling, in this order.

    authenticate, read: identify the caller; read the body. The fast path has both at once.
    submit: check the body, tier and pool; build the pending request; admit it.
    respond or reject, or client_left: build the response of the outcome and record the result.

    `pipeline` is that of the gateway's own pool until `choose_pool` found the pool of the model. All times are monotonic
    seconds.
    """

    BESIDE_REDIS = True  # A large chat is a file, which is removed with its pending request.
    FAULT = "request failed"
    """The log event of an exception that is not a RequestError."""

    __slots__ = (
        "api_format",
        "body",
        "created",
        "headers",
        "identity",
        "key",
        "large",
        "passed_on",
        "pending",
        "pipeline",
        "request_id",
        "size",
        "started",
    )

    identity: Identity  # Set by `authenticate`.
    started: float  # Set by `read`.
    body: InferenceRequest  # Set by `submit`.
    size: int  # Set by `submit`: bytes of the body as it was sent.
    large: list[bytes | memoryview] | None  # Set by `build`: the chat, if it becomes a file beside Redis.
    passed_on: bool  # Set by `build`: whether the output will be lines of a model's server.

    def __init__(
        self, pipeline: InferencePipeline, api_format: ApiFormat, request_id: str, headers: CIMultiDictProxy[str]
    ) -> None:
        self.pipeline = pipeline
        self.api_format = api_format
        self.request_id = request_id
        self.created = pipeline.clock()  # Of the id.
        self.headers = headers
        self.key: str | None = None  # The Idempotency-Key.
        self.pending: PendingRequest | None = None  # Of a list the first one.

    def authenticate(self, request: HttpRequest) -> None:
        """Find the identity of the caller. Raises RequestError, which is recorded, if there is none."""
        self.identity = self.pipeline.events.known(self._identify, request, self.api_format.endpoint)

    def _identify(self, request: HttpRequest) -> Identity:
        return self.pipeline.identify(request, self.api_format.key_header)

    async def read(self, request: RoutedRequest) -> bytes:
        """Read the Idempotency-Key and the body. Raises RequestError if either is not acceptable, or while draining."""
        pipeline, http_request = self.pipeline, request.request
        self.key = idempotency_key(request.headers)
        arrived_whole = http_request.content.is_eof()
        if pipeline.drain_state.closed:
            raise RequestError(ErrorCode.DRAINING)
        most = pipeline.largest().body_bytes
        check_media(request.headers, http_request.content_length or 0, most, self.api_format.media)
        raw = await read_body(http_request, most, pipeline.bodies.share(self.identity))
        if not arrived_whole:  # Reading may have taken seconds, in which the key may have been revoked or moved.
            self.identity = self._identify(request)
        # The time of a slow upload does not count against the deadline; the gateway's own time does.
        self.started = request.arrived if arrived_whole else pipeline.clock()
        return raw

    def submit(self, raw: bytes) -> None:
        """Check the body, choose tier and pool, build the pending request, and admit it. Raises RequestError."""
        self.size, self.body = len(raw), self.decode(raw)
        if self.body.service_tier is not None:
            self.identity = self.pipeline.served_as(self.identity, self.body)
        self.enter()

    def enter(self, cell: str = "") -> None:
        """Choose the pool, build the pending request, and admit it. `cell`: of CustomerMoved. Raises RequestError."""
        self.choose_pool(cell)
        check_size(self.body, self.size, self.pipeline.limits())
        pending = self.pending = self.build()
        self.admit(pending)

    def decode(self, raw: bytes) -> InferenceRequest:
        """Decode and check the body. Raises RequestError that names the field."""
        return self.api_format.read(raw, self.pipeline.largest().input_bytes)

    def choose_pool(self, cell: str = "") -> None:
        """Continue with the pipeline of the model's pool in `cell` or the customer's cell. Raises RequestError."""
        self.pipeline = self.pipeline.serving(self.identity, self.body, cell)

    def build(self) -> PendingRequest:
        """Build the pending request; of a list all of them, and return the first. Raises RequestError `model_not_found`."""
        pipeline = self.pipeline
        payload = pipeline.payload(self.body, self.api_format)
        self.passed_on = payload.task in DOCUMENTS
        return pipeline.build_pending(self, payload, self.sink(), self.request_id, self.key)

    def sink(self) -> ResponseSink:
        """The sink of a pending request of this call."""
        raise NotImplementedError

    def admit(self, pending: PendingRequest) -> None:
        """Submit the request, with its list, to admission. Raises RequestError if it is rejected before that."""
        self.pipeline.admit(pending, self.large)

    def completed(self, pending: PendingRequest, outcome: Outcome) -> Reply:
        """The reply of a completed request. Raises RequestError for any other outcome."""
        return self.pipeline.completed(self.identity, pending, outcome, self.api_format)

    async def replayed_reply(self, pending: PendingRequest, verdict: Verdict) -> Reply:
        """The completed reply that is stored for the Idempotency-Key.

        Raises ReplayedFailure if the stored request failed, RequestError `no_capacity` if the reply cannot be read.
        """
        reply = await self.pipeline.stored(self.identity, pending, verdict)
        if reply.state != State.COMPLETED:
            raise ReplayedFailure(self.api_format.failure(reply), reply.id)
        return reply

    def respond(self, pending_requests: Sequence[PendingRequest], replies: Sequence[Reply]) -> HttpResponse:
        """Build the 200 response and record it. The limit headers of a list are those of its last member's verdict."""
        pipeline, identity = self.pipeline, self.identity
        lines = pipeline.customer_limits.lines(identity, pending_requests[-1].verdict)
        model = pending_requests[0].submission.model
        seconds = pipeline.clock() - self.started
        result = InferenceResult(replies, self.body, model, identity.tier, seconds * 1000, lines)
        response = self.api_format.write(result)
        pipeline.events.completed(self.api_format.endpoint, identity, pending_requests, replies, seconds)
        return response

    def reject(self, error: Exception) -> HttpResponse:
        """Record the error and build its response, with the limit headers. Unexpected errors are logged and get 500."""
        pipeline, identity, pending = self.pipeline, self.identity, self.pending
        if not isinstance(error, RequestError):
            log_fault(self.FAULT, error, request_id=self.request_id)
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        verdict = pending.verdict if pending is not None else None
        request_id, replayed = self.request_id, isinstance(error, ReplayedFailure)
        if isinstance(error, ReplayedFailure):
            request_id = error.request_id
        elif pending is not None and (verdict is None or verdict.outcome not in NOT_REJECTED):
            pipeline.record_rejection(pending.submission, identity, error, verdict)
        pipeline.events.failed(self.api_format.endpoint, request_id, identity, pending, error)
        headers = getattr(error, "headers", None) or pipeline.customer_limits.headers(identity, verdict)
        if replayed:
            headers = [*headers, IDEMPOTENT_REPLAYED]
        problem, form = wants_problem(self.headers), self.api_format.form
        return pipeline.error_responses.answer(error, request_id, headers, problem=problem, form=form)

    def client_left(self) -> None:
        """The connection was closed before the response: cancel the pending requests and record it."""
        self.release()
        self.pipeline.events.left(self.api_format.endpoint, self.request_id, self.identity, self.pending)

    def event_stream(self, play: Callable[[EventStream], Awaitable[None]]) -> EventStream:
        """The stream of the response, which `play` writes."""
        return EventStream(play)

    def release(self) -> None:
        """Remove the pending request; cancel it if it has no outcome."""
        if self.pending is not None:
            self.pipeline.leave(self.pending)


def _failed(pending: PendingRequest) -> bool:
    """Whether it has an outcome other than a completed reply."""
    outcome = pending.outcome
    return outcome is not None and not (isinstance(outcome, Reply) and outcome.state == State.COMPLETED)
