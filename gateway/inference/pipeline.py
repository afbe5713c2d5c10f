"""The stages of an inference request (authenticate, check, submit, respond), and the parts that they use.

The stages make no Redis call, task or timer. Two callers run them: gateway/inference/fast_path.py, which responds where
the waiting ends, and gateway/inference/handler.py, which awaits the result. The parts are built once by the composition
root.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from gateway.api.format import InferenceRequest, InferenceResult
from gateway.api.inference import INFERENCE, ApiFormat
from gateway.auth.authenticator import Authenticator, Identities
from gateway.auth.service_tier import served_as
from gateway.catalog import CatalogView, IdentityView, ServedModels
from gateway.config import GatewayConfig
from gateway.direct.mode import Direct
from gateway.http.errors import ErrorResponses, wants_problem
from gateway.http.request import BodyBudget, HttpRequest
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState
from gateway.inference.admission import ENTERED, AdmissionBatcher
from gateway.inference.deadlines import Cancellations
from gateway.inference.events import RequestEvents, RequestLog, told_to
from gateway.inference.pending import Outcome, OutcomeSink, PendingRequest, PendingRequests
from gateway.inference.recovery import Pair, replayed_pair
from gateway.inference.submission import build_submission, is_retry, let_share, stored_reply
from gateway.inference.traces import RequestTraces, trace_id
from gateway.limits.capacity import LiveLimits
from gateway.limits.customer_limits import CustomerLimits
from gateway.limits.demand import DemandMeter
from gateway.limits.rejections import for_want_of_capacity
from gateway.metrics.counters import Counters
from scheduler.errors import ErrorCode, RequestError
from scheduler.failpoints import failpoint
from scheduler.payload import Payload
from scheduler.protocol.admission import Verdict
from scheduler.protocol.replies import Reply, Results
from scheduler.states import State

NoteRefusal = Callable[[str, IdentityView, RequestError, Verdict | None, float], None]
"""Told of every request that was not let in: its id, whose it is, the error, what admission said, the tier's factor."""


def _tell_nobody(*_: object) -> None:
    """Nobody asked to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParts:
    """The parts by name."""

    config: GatewayConfig
    catalog: CatalogView
    limits: LiveLimits
    pending_requests: PendingRequests
    admission: AdmissionBatcher
    cancellations: Cancellations
    demand_meter: DemandMeter
    faults: ErrorResponses
    drain_state: DrainState
    bodies: BodyBudget
    results: Results
    direct: Direct
    authenticator: Authenticator | None = None  # None: API keys only, and nobody is told to wait.
    note_refusal: NoteRefusal = _tell_nobody
    remember: Callable[[Iterable[Pair]], None] = _tell_nobody  # Takes ends to tell Redis again, should it lose them.
    greedy: Callable[[], bool] = bool  # Whether no worker samples where a request has no temperature.
    model_version: Callable[[], str] = str  # The one that all healthy workers run; "" where that is not known.
    counters: Counters = field(default_factory=Counters)
    request_log: RequestLog | None = None
    traces: RequestTraces | None = None
    clock: Callable[[], float] = time.monotonic


NO_GPU = "No GPU is ready to serve this request; try again soon."
KEY_UNKNOWN = "An Idempotency-Key cannot be checked right now; try again soon, or leave it out."


class InferencePipeline:
    """The steps. `customer_limits` is what is known of the customers' limits."""

    def __init__(self, parts: InferenceParts) -> None:
        self._parts = parts
        self._authenticator = parts.authenticator or Authenticator(Identities(parts.catalog))
        self.customer_limits = CustomerLimits(parts.limits, parts.demand_meter, parts.clock)
        self.pending_requests = parts.pending_requests
        self.clock = parts.clock
        self.identify, self.recognise = self._authenticator.identify, self._authenticator.recognise
        self.ends = RequestEvents(
            parts.counters, told_to(parts.request_log, parts.traces), parts.config.pool, parts.demand_meter
        )
        self.drain_state = parts.drain_state
        self.faults = parts.faults
        self.max_body_bytes = parts.config.max_body_bytes
        self.bodies = parts.bodies
        self.max_input_bytes = parts.config.max_input_bytes
        self.models = ServedModels(parts.config.pool, parts.config.default_model)
        self.elsewhere: Callable[[str], InferencePipeline | None] = lambda _: None

    @property
    def past_redis(self) -> bool:
        """Whether requests go straight to workers now."""
        return self._parts.direct.active

    def served_as(self, identity: IdentityView, asked: InferenceRequest) -> IdentityView:
        """Whose limits and tier it is. Raises RequestError that names `service_tier`."""
        return served_as(identity, asked.service_tier, self._parts.catalog.snapshot)

    def serving(self, asked: InferenceRequest) -> "InferencePipeline":
        """The steps of the pool that has the model; these, where none has. Raises RequestError where it is not served yet."""
        wanted = asked.model
        if wanted is UNSET or wanted in self.models.names(self._parts.catalog.snapshot):
            return self
        return self.elsewhere(wanted) or self

    def payload(self, asked: InferenceRequest, api_format: ApiFormat) -> Payload:
        """What the model gets of the first input. Raises RequestError `model_not_found`."""
        model = self.models.choose(self._parts.catalog.snapshot, asked.model, api_format.model_field)
        return Payload(model, asked.input, dict(asked.parameters), asked.task)

    def pending(
        self,
        asking: HttpRequest,
        identity: IdentityView,
        payload: Payload,
        key: str | None,
        started: float,
        *,
        future: "asyncio.Future[Outcome] | OutcomeSink",
        stream: bool = False,
        first: PendingRequest | None = None,
    ) -> PendingRequest:
        """What waits for the answer to this, not entered yet. `stream`: somebody reads along. `first`: of its list."""
        parts = self._parts
        submission = build_submission(
            asking.request_id,
            identity,
            payload,
            self.customer_limits.limits(identity),
            total_ms=parts.config.total_ms,
            key=key,
            trace=trace_id(asking.headers),
            stream_to=parts.config.gateway_id if stream else "",
        )
        sharing = self.models.sharing.get(payload.model)
        if sharing is not None and not stream:
            let_share(submission, payload, sharing, parts.model_version(), greedy=parts.greedy())
        parts.demand_meter.arrived(identity.tier, identity.customer_name)
        if is_retry(asking.headers):
            parts.demand_meter.retried(identity.tier)
            parts.counters.retried(identity.tier)
        pending = PendingRequest(submission, started, future)
        return pending if parts.traces is None else parts.traces.followed(pending, asking.headers, first)

    def enter(self, pending: PendingRequest) -> None:
        """Ask for admission of it and of all that are to enter together with it; whoever knows the outcome ends them.

        Raises RequestError where admission is not even asked; then nothing waits.
        """
        parts, tier = self._parts, pending.submission.tier
        past_redis = parts.direct.active
        if past_redis and pending.submission.idempotency:  # Only Redis knows whether it has run already.
            if not parts.direct.redis_answers:
                raise RequestError(ErrorCode.NO_CAPACITY, KEY_UNKNOWN)
            past_redis = False
        if not past_redis and parts.limits.no_gpu(pending.started):
            self._refused(tier)
            raise RequestError(ErrorCode.NO_CAPACITY, NO_GPU)
        if not past_redis and parts.limits.short_of_memory:
            self._refused(tier)
            raise RequestError(ErrorCode.BACKPRESSURE)
        if not (self._direct(pending) if past_redis else self._submit(pending)):
            self._refused(tier)
            raise RequestError(ErrorCode.QUEUE_FULL)

    def _submit(self, pending: PendingRequest) -> bool:
        for each in pending.together or (pending,):
            self.pending_requests.add(each)
        if self._parts.admission.submit(pending):
            return True
        for each in pending.together or (pending,):
            self.pending_requests.remove(each)
        return False

    def _direct(self, pending: PendingRequest) -> bool:
        """Past Redis each enters by itself, once there is enough for all; where one cannot, all are given up."""
        if pending.together and self._parts.direct.keeps_out(pending):
            return True
        for each in pending.together or (pending,):
            self.pending_requests.add(each)
            if not self._parts.direct.enter(each):
                for other in pending.together or (pending,):
                    self.pending_requests.remove(other)
                return False
        return True

    def abandon(self, pending: PendingRequest) -> None:
        """The client has left: end what is under way for it."""
        if pending.verdict is not None and pending.verdict.outcome in ENTERED:
            self._parts.cancellations.add(pending.id, ErrorCode.CANCELLED, running=pending.streams, used=pending.used)
        self.pending_requests.remove(pending)

    def give_up(self, pending: PendingRequest, code: ErrorCode) -> None:
        """It cannot be answered as it was begun: end it, and whatever still runs for it."""
        self._parts.cancellations.add(pending.id, code, told=True)
        pending.finish(code)

    def fail_list(self, pending_requests: Sequence[PendingRequest], code: ErrorCode) -> None:
        """A list is answered with this code, for one of its members: that is the answer to the others as well.

        Those that completed or still run end so, in Redis and in the audit, and get back what they were charged where the
        fault is ours. A member that failed by itself keeps its own end.
        """
        for pending in pending_requests:
            if pending.sent and not _failed(pending):
                self._parts.cancellations.add(pending.id, code, told=True)
                pending.future = answered = asyncio.get_running_loop().create_future()
                answered.set_result(code)
            self.leave(pending)

    def leave(self, pending: PendingRequest) -> None:
        """Nobody waits any more: where it has not ended, it is to end."""
        if pending.future.done() and not pending.future.cancelled():
            self.pending_requests.remove(pending)
        else:
            self.abandon(pending)

    def answer(
        self, identity: IdentityView, pending: PendingRequest, outcome: Outcome, asked: InferenceRequest
    ) -> HttpResponse:
        """Turn the end of one request into the 200 of `/v1/inference`. Raises RequestError for every other end."""
        reply = self.completed(identity, pending, outcome, INFERENCE)
        return self.written(identity, [pending], [reply], asked, INFERENCE)

    def completed(
        self, identity: IdentityView, pending: PendingRequest, outcome: Outcome, api_format: ApiFormat
    ) -> Reply:
        """What has become of it, where it is completed. Raises RequestError for every other end."""
        failpoint("reply_unwritten")
        verdict = pending.verdict
        base_limit_allows = verdict is not None and self.customer_limits.judged(identity, pending.submission, verdict)
        if isinstance(outcome, Verdict):
            raise self._shed(
                identity, self.customer_limits.refusal(identity, outcome, base_limit_allows=base_limit_allows)
            )
        if isinstance(outcome, ErrorCode):
            why = self._parts.direct.why_refused() if outcome is ErrorCode.NO_CAPACITY else None
            raise self._shed(identity, RequestError(outcome, why))
        if outcome.served_from != "cache":  # Else the verdict has told it already.
            self.customer_limits.settle(identity, pending.submission.tokens - outcome.tokens_used)
        if outcome.state != State.COMPLETED:
            raise self.failure(outcome, api_format)
        now = self.clock()
        self._parts.demand_meter.answered(identity.tier, (now - pending.started) * 1000, now)
        return outcome

    async def stored(self, identity: IdentityView, pending: PendingRequest, verdict: Verdict) -> Reply:
        """The reply that the request's Idempotency-Key has already. Raises RequestError where it cannot be read."""
        self.customer_limits.judged(identity, pending.submission, verdict)
        reply = await stored_reply(self._parts.results, verdict.stored_id, identity.customer_id)
        # The gateway that told it first may be dead: should Redis lose the end, this one can tell it.
        self._parts.remember([replayed_pair(self._parts.config.gateway_id, pending, reply)])
        return reply

    def written(
        self,
        identity: IdentityView,
        pending_requests: Sequence[PendingRequest],
        replies: Sequence[Reply],
        asked: InferenceRequest,
        api_format: ApiFormat,
    ) -> HttpResponse:
        """The 200. Of those that were admitted together the last one's verdict tells what is left."""
        lines, model = (
            self.customer_limits.lines(identity, pending_requests[-1].verdict),
            pending_requests[0].submission.model,
        )
        seconds = self.clock() - pending_requests[0].started
        answer = api_format.write(InferenceResult(replies, asked, model, identity.tier, seconds * 1000, lines))
        self.ends.completed(api_format.endpoint, identity, pending_requests, replies, seconds)
        return answer

    def failure(self, reply: Reply, api_format: ApiFormat) -> RequestError:
        """What a failed reply says to the client: the backend's own sentence only where it refused the parameters."""
        try:
            code = ErrorCode(reply.error_code)
        except ValueError:  # Written by a newer version.
            code = ErrorCode.INTERNAL_ERROR
        if code is ErrorCode.INVALID_REQUEST and reply.output:
            return api_format.bad_parameters(reply.output)
        return RequestError(code)

    def _shed(self, identity: IdentityView, error: RequestError) -> RequestError:
        if for_want_of_capacity(error.code):
            self._parts.demand_meter.shed(identity.tier)
        return error

    def _refused(self, tier: str) -> None:
        """Count what was refused without asking admission: it is demand that went unserved."""
        self._parts.demand_meter.passed(tier, self._parts.limits.factor(tier))
        self._parts.demand_meter.shed(tier)

    def not_served(
        self,
        asking: HttpRequest,
        identity: IdentityView,
        pending: PendingRequest | None,
        error: RequestError,
        api_format: ApiFormat = INFERENCE,
    ) -> HttpResponse:
        """The answer to an error, which tells the limits as well; what was kept out is noted for who asks why."""
        verdict = pending.verdict if pending else None
        if pending is not None and (verdict is None or verdict.outcome not in ENTERED):
            self._parts.note_refusal(asking.request_id, identity, error, verdict, self.customer_limits.factor(identity))
        self.ends.failed(api_format.endpoint, asking.request_id, identity, pending, error)
        headers = self.customer_limits.headers(identity, verdict)
        problem = wants_problem(asking.headers)
        return self._parts.faults.answer(error, asking.request_id, headers, problem=problem)


def _failed(pending: PendingRequest) -> bool:
    """Whether it ended, and not as completed; a refusal of admission is no end of its own."""
    if not pending.future.done() or pending.future.cancelled():
        return False
    outcome = pending.future.result()
    return not isinstance(outcome, Reply) or outcome.state != State.COMPLETED
