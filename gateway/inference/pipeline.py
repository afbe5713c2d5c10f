"""The stages of a call that has a pipeline: build its pending requests, admit them, and build the response of the outcome.

A pipeline serves one pool in one cell. Two callers run its stages: gateway/inference/handler.py and the other transports,
which await the outcome, and gateway/inference/fast_path.py, where the outcome itself triggers the response. No stage
creates a task or a timer, and only `reply` waits for anything: the stored reply of an Idempotency-Key.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.api.format import InferenceResult, missing_capability
from gateway.config import GatewayConfig
from gateway.direct.mode import Direct
from gateway.http.error_responses import ErrorResponses
from gateway.http.problem_details import wants_problem
from gateway.http.response import HttpResponse
from gateway.http.validation import invalid
from gateway.inference.admission import ENTERED, NOT_REJECTED, AdmissionBatcher
from gateway.inference.audit_pairs import Pair, replayed_pair
from gateway.inference.call import InferenceCall
from gateway.inference.chat_documents import store_chat, with_document
from gateway.inference.coalescing import NOT_SHARED, coalescing
from gateway.inference.deadlines import Cancellations
from gateway.inference.events import RecordRejectedCaller, RequestEvents, RequestLog, combined_listener
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED, stored_reply
from gateway.inference.pending import CustomerMoved, Outcome, PendingRequest, PendingRequests, ResponseSink
from gateway.inference.submission import SubmissionGroups, build_submission
from gateway.inference.traces import RequestTraces
from gateway.limits.capacity import LiveLimits
from gateway.limits.customer_limits import CustomerLimits
from gateway.limits.demand import DemandMeter
from gateway.limits.rejections import is_capacity_rejection
from gateway.metrics.counters import Counters
from gateway.served_models import ServedModels
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from ratelimit.limits import EffectiveLimits, effective
from ratelimit.request_limits import RequestLimits
from scheduler.body_store import BodyStore
from scheduler.capabilities import capabilities
from scheduler.errors import ErrorCode, RequestError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.payload import DOCUMENTS, Payload, Task
from scheduler.protocol.admission import MAX_SUBMISSIONS, Residence, Submission, Verdict
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
    results: Results
    direct: Direct
    charge_replay: Callable[
        [Identity], None
    ]  # For each call with a stored reply. Raises RequestError if there are too many.
    all_names: Callable[[], Collection[str]]  # Of the models of all pools.
    residence: Callable[[Identity], Residence]  # What admission checks of a customer's home.
    body_store: BodyStore = field(default_factory=BodyStore)
    record_rejection: RecordRejection = lambda *_: None
    record_rejected_caller: RecordRejectedCaller = lambda *_: None
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
    """The inference pipeline of one pool in one cell."""

    def __init__(self, parts: InferenceParts) -> None:
        self._parts = parts
        self.place, self.admission = parts.config.place, parts.admission
        self.customer_limits = CustomerLimits(parts.limits, parts.demand_meter, parts.clock)
        self.pending_requests, self.rejections = parts.pending_requests, parts.admission.rejections
        self.clock, self.error_responses = parts.clock, parts.error_responses
        self.events = RequestEvents(
            parts.counters,
            combined_listener(parts.request_log, parts.traces),
            self.place,
            parts.demand_meter,
            parts.record_rejected_caller,
        )
        self.models = ServedModels(parts.config.pool, parts.config.default_model)
        self._groups = SubmissionGroups(self.customer_limits.limits, parts.limits.meter, parts.residence)

    @property
    def direct_active(self) -> bool:
        """Whether requests are sent to workers without Redis now."""
        return self._parts.direct.active

    def limits(self) -> RequestLimits:
        """The limits of one request."""
        return self._parts.limits.request

    def payload(self, call: InferenceCall) -> Payload:
        """The model's payload for the first input. Raises RequestError for an unknown model, and for a missing capability."""
        parts, body, field = self._parts, call.body, call.api_format.model_field
        model = self.models.choose(parts.catalog.snapshot, body.model, field, parts.all_names, call.identity.models)
        document = body.document
        if document is None:
            return body.payload(model, passed_on=False)
        passes_on = parts.passes_on()
        if document.needs:
            row = None if parts.catalog.snapshot is None else parts.catalog.snapshot.models.get(model)
            allowed = None if row is None else row.capabilities
            # Before a worker is known, there is no capacity, which can be retried.
            has = capabilities(allowed, passes_on=passes_on is not False)
            if document.task is Task.EMBED:  # A class may read these; a model that does not rejects them by name.
                has |= allowed or frozenset()
            if (error := missing_capability(document, model, has)) is not None:
                raise error
        return body.payload(model, passed_on=passes_on is not False if document.needs else bool(passes_on))

    def build(self, call: InferenceCall, new_sink: Callable[[], ResponseSink]) -> PendingRequest:
        """Build a pending request for each input of a call, not admitted yet, and return the first. `new_sink`: for each one.

        Raises RequestError: `model_not_found`; a missing capability; more inputs than can ever be admitted together.
        """
        payload = self.payload(call)
        call.passed_on = call.body.document is not None and payload.task in DOCUMENTS
        if not call.body.more:
            first = call.pending = self.build_pending(
                call, payload, new_sink(), request_id=call.request_id, key=call.key
            )
            return first
        texts = call.body.inputs(payload)
        check_count(call.api_format.input_field, len(texts), effective(call.identity))
        together: list[PendingRequest] = []
        for index, text in enumerate(texts):
            key = None if call.key is None else member_key(call.key, index)
            pending = self.build_pending(
                call,
                payload.with_input(text),
                new_sink(),
                request_id=call.member_id(index),
                key=key,
                before=together,
                in_list=len(texts),
            )
            pending.together = together
            together.append(pending)
        call.pending = together[0]
        return together[0]

    def build_pending(
        self,
        call: InferenceCall,
        payload: Payload,
        sink: ResponseSink,
        *,
        request_id: str,
        key: str | None,
        before: Sequence[PendingRequest] = (),
        in_list: int = 0,
    ) -> PendingRequest:
        """Build one pending request of a call, and count it as demand.

        `key`: its Idempotency-Key. Of a list: `before`, the members before it, and `in_list`, their number in all.
        """
        parts, identity, stream = self._parts, call.identity, call.body.stream
        call.large = None
        if call.body.document is not None:
            payload, call.large = with_document(
                payload, call.body, request_id, parts.body_store if call.terms.beside_redis else None
            )
        sharing = self.models.sharing.get(payload.model)
        shared = NOT_SHARED
        if sharing is not None and not stream and not call.large:  # No other may depend on its file.
            shared = coalescing(identity.customer_id, payload, sharing, parts.model_version(), greedy=parts.greedy())
        traces = parts.traces
        trace = None if traces is None else traces.sampled(call.headers, before[0] if before else None)
        submission = build_submission(
            request_id,
            identity,
            payload,
            self._groups.of(identity, payload.model, call.api_format.endpoint, background=call.terms.background),
            parts.limits.request,
            trace=call.trace_id if trace is None else trace.context,
            terms=call.terms,
            key=key,
            stream_to=parts.config.gateway_id if stream else "",
            body=call.body,
            in_list=in_list,
            together=0 if before else in_list,
            shared=shared,
        )
        parts.demand_meter.arrived(identity.tier, identity.customer_name)
        if call.is_retry:
            parts.demand_meter.retried(identity.tier)
            parts.counters.retried(identity.tier)
        created = call.created if request_id == call.request_id else parts.clock()
        if traces is None or trace is None:
            return PendingRequest(submission, call.started, sink, created)
        return traces.pending(submission, call.started, sink=sink, created=created, trace=trace)

    def admit(self, pending: PendingRequest, large: list[bytes | memoryview] | None = None) -> None:
        """Submit the request, with its whole list, to admission or to direct mode; the sinks receive the outcomes.

        `large`: its chat, if that becomes a file beside Redis. Raises RequestError if it is rejected before; then nothing is pending.
        """
        parts, direct = self._parts, self._parts.direct.active
        if direct and pending.submission.idempotency:  # Only Redis knows whether it ran before.
            if not parts.direct.redis_answers:
                raise RequestError(ErrorCode.NO_CAPACITY, KEY_UNKNOWN)
            direct = False
        if not direct and parts.limits.model_too_slow:
            self._count_rejection(pending)
            raise RequestError(ErrorCode.MODEL_TOO_SLOW)
        if not direct and parts.limits.no_gpu(pending.started):
            self._count_rejection(pending)
            raise RequestError(ErrorCode.NO_CAPACITY, NO_GPU)
        if not direct and parts.limits.short_of_memory:
            self._count_rejection(pending)
            raise RequestError(ErrorCode.BACKPRESSURE)
        if large:
            store_chat(pending.id, large, parts.body_store)
        if not (self._submit_directly(pending) if direct else self._submit(pending)):
            self._count_rejection(pending)
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

    def _count_rejection(self, pending: PendingRequest) -> None:
        """Count a request, or each of its list, that was rejected without a call of admission: it is unserved demand."""
        for each in pending.together or (pending,):
            self._parts.demand_meter.passed(each.submission.tier)
            self._parts.demand_meter.shed(each.submission.tier)

    def leave(self, pending: PendingRequest) -> None:
        """Remove a request whose response is no longer needed; cancel it if it has no outcome."""
        if pending.outcome is None:
            pending.cancel()
            if pending.verdict is not None and pending.verdict.outcome in ENTERED:
                running, used = pending.streams, pending.used
                self._parts.cancellations.add(pending.id, ErrorCode.CANCELLED, running=running, used=used)
        self.pending_requests.remove(pending)
        pending.reader = None  # It references the call, which references this.

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

    def completed(self, call: InferenceCall, pending: PendingRequest, outcome: Outcome) -> Reply:
        """Settle the limits and return the reply of a completed request. Raises RequestError for any other outcome."""
        failpoint("reply_unwritten")
        identity, verdict = call.identity, pending.verdict
        base_limit_allows = verdict is not None and self.customer_limits.judged(identity, pending.submission, verdict)
        if isinstance(outcome, Verdict):
            if outcome.outcome is Admission.ELSEWHERE:
                raise CustomerMoved(outcome.stored_id)
            raise self._count_shed(
                identity,
                self.customer_limits.rejection_error(identity, outcome, base_limit_allows=base_limit_allows),
                pending,
            )
        if isinstance(outcome, ErrorCode):
            why = self._parts.direct.why_refused() if outcome is ErrorCode.NO_CAPACITY else None
            raise self._count_shed(identity, RequestError(outcome, why), pending)
        if outcome.served_from != "cache":  # For a cached reply the verdict had the final charge.
            self.customer_limits.settle(identity, pending.submission.tokens - outcome.tokens_used)
        if outcome.state != State.COMPLETED:
            raise call.api_format.failure(outcome)
        now = self.clock()
        self._parts.demand_meter.answered(identity.tier, (now - pending.started) * 1000, now)
        return outcome

    def _count_shed(self, identity: Identity, error: RequestError, pending: PendingRequest) -> RequestError:
        """Count a failed request and the members of its list after it, which fail with it, and are judged only here."""
        members = pending.together or (pending,)
        after = members[members.index(pending) + 1 :]
        for each in after:
            if each.verdict is not None:
                self.customer_limits.judged(identity, each.submission, each.verdict)
        if is_capacity_rejection(error.code):
            for _ in range(1 + len(after)):
                self._parts.demand_meter.shed(identity.tier)
        return error

    async def reply(self, call: InferenceCall, pending: PendingRequest, outcome: Outcome) -> Reply:
        """The completed reply of an outcome: that of its run, or the stored one of its Idempotency-Key.

        Raises RequestError for any other outcome: ReplayedFailure if the stored request failed, `no_capacity` if its reply
        cannot be read.
        """
        if not isinstance(outcome, Verdict) or outcome.outcome is not Admission.REPLAYED:
            return self.completed(call, pending, outcome)
        self.charge_replay(call)
        self.customer_limits.judged(call.identity, pending.submission, outcome)
        stored = await stored_reply(self._parts.results, outcome.stored_id, call.identity.customer_id)
        # The gateway that sent this reply first may be gone. If Redis loses the record, this gateway sends it again.
        self._parts.remember([replayed_pair(self._parts.config.gateway_id, pending, stored)])
        if stored.reply.state != State.COMPLETED:
            raise ReplayedFailure(call.api_format.failure(stored.reply), stored.reply.id)
        return stored.reply

    def charge_replay(self, call: InferenceCall) -> None:
        """Count a call that gets a stored response as an auxiliary one, since admission does not count it; a list counts once.

        Raises RequestError if the customer sends too many.
        """
        if not call.replayed:
            call.replayed = True
            self._parts.charge_replay(call.identity)

    def respond(
        self, call: InferenceCall, pending_requests: Sequence[PendingRequest], replies: Sequence[Reply]
    ) -> HttpResponse:
        """Build the 200 response and record it."""
        response = self.write(call, pending_requests, replies)
        self.record(call, pending_requests, replies)
        return response

    def write(
        self, call: InferenceCall, pending_requests: Sequence[PendingRequest], replies: Sequence[Reply]
    ) -> HttpResponse:
        """Build the 200 response. The limit headers of a list are those of its last member's verdict."""
        identity, model = call.identity, pending_requests[0].submission.group.model
        lines = self.customer_limits.lines(identity, pending_requests[-1].verdict)
        latency_ms = (self.clock() - call.started) * 1000
        return call.api_format.write(InferenceResult(replies, call.body, model, identity.tier, latency_ms, lines))

    def record(self, call: InferenceCall, pending_requests: Sequence[PendingRequest], replies: Sequence[Reply]) -> None:
        """Record a call that gets a 200 response."""
        seconds = self.clock() - call.started
        self.events.completed(call.api_format.endpoint, call.identity, pending_requests, replies, seconds)

    def reject(self, call: InferenceCall, error: Exception) -> HttpResponse:
        """Record the error and build its response, with the limit headers. Unexpected errors are logged and get 500."""
        identity, pending, request_id = call.identity, call.pending, call.request_id
        drop_cycles(pending)
        if not isinstance(error, RequestError):
            log_fault("request failed", error, request_id=request_id)
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        verdict = pending.verdict if pending is not None else None
        replayed = isinstance(error, ReplayedFailure)
        if isinstance(error, ReplayedFailure):
            request_id = error.request_id
        elif pending is not None and (verdict is None or verdict.outcome not in NOT_REJECTED):
            self.record_rejection(pending.submission, identity, error, verdict)
        self.events.failed(call.api_format.endpoint, request_id, identity, pending, error)
        headers = getattr(error, "headers", None) or self.customer_limits.headers(identity, verdict)
        if replayed:
            headers = [*headers, IDEMPOTENT_REPLAYED]
        problem, form = wants_problem(call.headers), call.api_format.form
        return self.error_responses.answer(error, request_id, headers, problem=problem, form=form)

    def left(self, call: InferenceCall) -> None:
        """The connection was closed before the response: cancel the pending requests and record it."""
        if call.pending is not None:
            self.leave_all(call.pending)
        self.events.left(call.api_format.endpoint, call.request_id, call.identity, call.pending)

    def leave_all(self, first: PendingRequest) -> None:
        """Leave a request, or all members of the list that begins with it."""
        for pending in first.together or (first,):
            if not pending.gone:
                self.leave(pending)
        drop_cycles(first)

    def record_rejection(
        self, submission: Submission, identity: Identity, error: RequestError, verdict: Verdict | None
    ) -> None:
        """Record a request that was not admitted, for `tierlane explain`."""
        self._parts.record_rejection(submission, identity, error, verdict, self.customer_limits.factor(identity))


def drop_cycles(first: PendingRequest | None) -> None:
    """Drop the references of list members to each other, so that no garbage collection is needed."""
    if first is not None:
        for pending in first.together:
            pending.together = ()


def check_count(field: str, count: int, limits: EffectiveLimits) -> None:
    """Raises RequestError, naming `field`, if a list is longer than the base limits could ever admit at once."""
    most, cause = MAX_SUBMISSIONS, "one request"
    burst = limits.key_requests.size
    for limit, name in ((burst, "the burst of this key"), (limits.max_concurrency, "the concurrency of this key")):
        if 0 < limit < most:
            most, cause = int(limit), name
    if count > most:
        raise invalid(
            field, f"`{field}` contains {count} texts, which are admitted together; {cause} allows at most {most}."
        )


def member_key(key: str, index: int) -> str:
    """The Idempotency-Key of a list member. The first member has the client's key, which detects a changed body.

    No client can send the keys of the other members, because a client's key contains no space.
    """
    return f"{key} {index}" if index else key


def _failed(pending: PendingRequest) -> bool:
    """Whether it has an outcome other than a completed reply."""
    outcome = pending.outcome
    return outcome is not None and not (isinstance(outcome, Reply) and outcome.state == State.COMPLETED)
