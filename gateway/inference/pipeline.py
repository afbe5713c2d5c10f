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

from gateway.api.format import Asked, Served
from gateway.api.inference import INFERENCE, Dialect
from gateway.auth.authenticator import Doorman, Identities
from gateway.auth.service_tier import served_as
from gateway.catalog import CatalogView, IdentityView, ServedModels
from gateway.config import GatewayConfig
from gateway.direct.mode import Direct
from gateway.http.errors import Faults, wants_problem
from gateway.http.request import Asking, BodyBudget
from gateway.http.response import Answer
from gateway.http.router import Doors
from gateway.inference.admission import ENTERED, Admitter
from gateway.inference.deadlines import Cancels
from gateway.inference.events import Ends, RequestLog, told_to
from gateway.inference.pending import Ending, Outcome, Waiter, Waiters
from gateway.inference.recovery import Pair, replayed_pair
from gateway.inference.submission import FetchResults, build_submission, is_retry, let_share, stored_reply
from gateway.inference.traces import RequestTraces, trace_id
from gateway.limits.capacity import LiveLimits
from gateway.limits.customer_limits import Standing
from gateway.limits.demand import Meter
from gateway.limits.rejections import for_want_of_capacity
from gateway.metrics.counters import Tally
from scheduler.errors import ErrorCode, RequestError
from scheduler.failpoints import failpoint
from scheduler.payload import Payload
from scheduler.protocol.admission import Verdict
from scheduler.protocol.replies import Reply
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
    waiters: Waiters
    admitter: Admitter
    cancels: Cancels
    meter: Meter
    faults: Faults
    doors: Doors
    bodies: BodyBudget
    results: FetchResults
    direct: Direct
    doorman: Doorman | None = None  # None: API keys only, and nobody is told to wait.
    note_refusal: NoteRefusal = _tell_nobody
    remember: Callable[[Iterable[Pair]], None] = _tell_nobody  # Takes ends to tell Redis again, should it lose them.
    greedy: Callable[[], bool] = bool  # Whether no worker samples where a request has no temperature.
    model_version: Callable[[], str] = str  # The one that all healthy workers run; "" where that is not known.
    tally: Tally = field(default_factory=Tally)
    request_log: RequestLog | None = None
    traces: RequestTraces | None = None
    clock: Callable[[], float] = time.monotonic


NO_GPU = "No GPU is ready to serve this request; try again soon."
KEY_UNKNOWN = "An Idempotency-Key cannot be checked right now; try again soon, or leave it out."


class Inference:
    """The steps. `standing` is what is known of the customers' limits."""

    def __init__(self, parts: InferenceParts) -> None:
        self._parts = parts
        self._doorman = parts.doorman or Doorman(Identities(parts.catalog))
        self.standing = Standing(parts.limits, parts.meter, parts.clock)
        self.waiters = parts.waiters
        self.clock = parts.clock
        self.identify, self.recognise = self._doorman.identify, self._doorman.recognise
        self.ends = Ends(parts.tally, told_to(parts.request_log, parts.traces), parts.config.pool, parts.meter)
        self.doors = parts.doors
        self.faults = parts.faults
        self.max_body_bytes = parts.config.max_body_bytes
        self.bodies = parts.bodies
        self.max_input_bytes = parts.config.max_input_bytes
        self.models = ServedModels(parts.config.pool, parts.config.default_model)
        self.elsewhere: Callable[[str], Inference | None] = lambda _: None

    @property
    def past_redis(self) -> bool:
        """Whether requests go straight to workers now."""
        return self._parts.direct.active

    def served_as(self, identity: IdentityView, asked: Asked) -> IdentityView:
        """Whose limits and tier it is. Raises RequestError that names `service_tier`."""
        return served_as(identity, asked.service_tier, self._parts.catalog.snapshot)

    def serving(self, asked: Asked) -> "Inference":
        """The steps of the pool that has the model; these, where none has. Raises RequestError where it is not served yet."""
        wanted = asked.model
        if wanted is UNSET or wanted in self.models.names(self._parts.catalog.snapshot):
            return self
        return self.elsewhere(wanted) or self

    def payload(self, asked: Asked, dialect: Dialect) -> Payload:
        """What the model gets of the first input. Raises RequestError `model_not_found`."""
        model = self.models.choose(self._parts.catalog.snapshot, asked.model, dialect.model_field)
        return Payload(model, asked.input, dict(asked.parameters), asked.task)

    def waiter(
        self,
        asking: Asking,
        identity: IdentityView,
        payload: Payload,
        key: str | None,
        started: float,
        *,
        future: "asyncio.Future[Outcome] | Ending",
        stream: bool = False,
        first: Waiter | None = None,
    ) -> Waiter:
        """What waits for the answer to this, not entered yet. `stream`: somebody reads along. `first`: of its list."""
        parts = self._parts
        submission = build_submission(
            asking.request_id,
            identity,
            payload,
            self.standing.limits(identity),
            total_ms=parts.config.total_ms,
            key=key,
            trace=trace_id(asking.headers),
            stream_to=parts.config.gateway_id if stream else "",
        )
        sharing = self.models.sharing.get(payload.model)
        if sharing is not None and not stream:
            let_share(submission, payload, sharing, parts.model_version(), greedy=parts.greedy())
        parts.meter.arrived(identity.tier, identity.customer_name)
        if is_retry(asking.headers):
            parts.meter.retried(identity.tier)
            parts.tally.retried(identity.tier)
        waiter = Waiter(submission, started, future)
        return waiter if parts.traces is None else parts.traces.followed(waiter, asking.headers, first)

    def enter(self, waiter: Waiter) -> None:
        """Ask for admission of it and of all that are to enter together with it; whoever knows the outcome ends them.

        Raises RequestError where admission is not even asked; then nothing waits.
        """
        parts, tier = self._parts, waiter.submission.tier
        past_redis = parts.direct.active
        if past_redis and waiter.submission.idempotency:  # Only Redis knows whether it has run already.
            if not parts.direct.redis_answers:
                raise RequestError(ErrorCode.NO_CAPACITY, KEY_UNKNOWN)
            past_redis = False
        if not past_redis and parts.limits.no_gpu(waiter.started):
            self._refused(tier)
            raise RequestError(ErrorCode.NO_CAPACITY, NO_GPU)
        if not past_redis and parts.limits.short_of_memory:
            self._refused(tier)
            raise RequestError(ErrorCode.BACKPRESSURE)
        if not (self._direct(waiter) if past_redis else self._submit(waiter)):
            self._refused(tier)
            raise RequestError(ErrorCode.QUEUE_FULL)

    def _submit(self, waiter: Waiter) -> bool:
        for each in waiter.together or (waiter,):
            self.waiters.add(each)
        if self._parts.admitter.submit(waiter):
            return True
        for each in waiter.together or (waiter,):
            self.waiters.remove(each)
        return False

    def _direct(self, waiter: Waiter) -> bool:
        """Past Redis each enters by itself, once there is enough for all; where one cannot, all are given up."""
        if waiter.together and self._parts.direct.keeps_out(waiter):
            return True
        for each in waiter.together or (waiter,):
            self.waiters.add(each)
            if not self._parts.direct.enter(each):
                for other in waiter.together or (waiter,):
                    self.waiters.remove(other)
                return False
        return True

    def abandon(self, waiter: Waiter) -> None:
        """The client has left: end what is under way for it."""
        if waiter.verdict is not None and waiter.verdict.outcome in ENTERED:
            self._parts.cancels.add(waiter.id, ErrorCode.CANCELLED, running=waiter.streams, used=waiter.used)
        self.waiters.remove(waiter)

    def give_up(self, waiter: Waiter, code: ErrorCode) -> None:
        """It cannot be answered as it was begun: end it, and whatever still runs for it."""
        self._parts.cancels.add(waiter.id, code, told=True)
        waiter.finish(code)

    def fail_list(self, waiters: Sequence[Waiter], code: ErrorCode) -> None:
        """A list is answered with this code, for one of its members: that is the answer to the others as well.

        Those that completed or still run end so, in Redis and in the audit, and get back what they were charged where the
        fault is ours. A member that failed by itself keeps its own end.
        """
        for waiter in waiters:
            if waiter.sent and not _failed(waiter):
                self._parts.cancels.add(waiter.id, code, told=True)
                waiter.future = answered = asyncio.get_running_loop().create_future()
                answered.set_result(code)
            self.leave(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Nobody waits any more: where it has not ended, it is to end."""
        if waiter.future.done() and not waiter.future.cancelled():
            self.waiters.remove(waiter)
        else:
            self.abandon(waiter)

    def answer(self, identity: IdentityView, waiter: Waiter, outcome: Outcome, asked: Asked) -> Answer:
        """Turn the end of one request into the 200 of `/v1/inference`. Raises RequestError for every other end."""
        reply = self.completed(identity, waiter, outcome, INFERENCE)
        return self.written(identity, [waiter], [reply], asked, INFERENCE)

    def completed(self, identity: IdentityView, waiter: Waiter, outcome: Outcome, dialect: Dialect) -> Reply:
        """What has become of it, where it is completed. Raises RequestError for every other end."""
        failpoint("reply_unwritten")
        verdict = waiter.verdict
        base_limit_allows = verdict is not None and self.standing.judged(identity, waiter.submission, verdict)
        if isinstance(outcome, Verdict):
            raise self._shed(identity, self.standing.refusal(identity, outcome, base_limit_allows=base_limit_allows))
        if isinstance(outcome, ErrorCode):
            why = self._parts.direct.why_refused() if outcome is ErrorCode.NO_CAPACITY else None
            raise self._shed(identity, RequestError(outcome, why))
        if outcome.served_from != "cache":  # Else the verdict has told it already.
            self.standing.settle(identity, waiter.submission.tokens - outcome.tokens_used)
        if outcome.state != State.COMPLETED:
            raise self.failure(outcome, dialect)
        now = self.clock()
        self._parts.meter.answered(identity.tier, (now - waiter.started) * 1000, now)
        return outcome

    async def stored(self, identity: IdentityView, waiter: Waiter, verdict: Verdict) -> Reply:
        """The reply that the request's Idempotency-Key has already. Raises RequestError where it cannot be read."""
        self.standing.judged(identity, waiter.submission, verdict)
        reply = await stored_reply(self._parts.results, verdict.stored_id, identity.customer_id)
        # The gateway that told it first may be dead: should Redis lose the end, this one can tell it.
        self._parts.remember([replayed_pair(self._parts.config.gateway_id, waiter, reply)])
        return reply

    def written(
        self,
        identity: IdentityView,
        waiters: Sequence[Waiter],
        replies: Sequence[Reply],
        asked: Asked,
        dialect: Dialect,
    ) -> Answer:
        """The 200. Of those that were admitted together the last one's verdict tells what is left."""
        lines, model = self.standing.lines(identity, waiters[-1].verdict), waiters[0].submission.model
        seconds = self.clock() - waiters[0].started
        answer = dialect.write(Served(replies, asked, model, identity.tier, seconds * 1000, lines))
        self.ends.completed(dialect.endpoint, identity, waiters, replies, seconds)
        return answer

    def failure(self, reply: Reply, dialect: Dialect) -> RequestError:
        """What a failed reply says to the client: the backend's own sentence only where it refused the parameters."""
        try:
            code = ErrorCode(reply.error_code)
        except ValueError:  # Written by a newer version.
            code = ErrorCode.INTERNAL_ERROR
        if code is ErrorCode.INVALID_REQUEST and reply.output:
            return dialect.bad_parameters(reply.output)
        return RequestError(code)

    def _shed(self, identity: IdentityView, error: RequestError) -> RequestError:
        if for_want_of_capacity(error.code):
            self._parts.meter.shed(identity.tier)
        return error

    def _refused(self, tier: str) -> None:
        """Count what was refused without asking admission: it is demand that went unserved."""
        self._parts.meter.passed(tier, self._parts.limits.factor(tier))
        self._parts.meter.shed(tier)

    def not_served(
        self,
        asking: Asking,
        identity: IdentityView,
        waiter: Waiter | None,
        error: RequestError,
        dialect: Dialect = INFERENCE,
    ) -> Answer:
        """The answer to an error, which tells the limits as well; what was kept out is noted for who asks why."""
        verdict = waiter.verdict if waiter else None
        if waiter is not None and (verdict is None or verdict.outcome not in ENTERED):
            self._parts.note_refusal(asking.request_id, identity, error, verdict, self.standing.factor(identity))
        self.ends.failed(dialect.endpoint, asking.request_id, identity, waiter, error)
        headers = self.standing.headers(identity, verdict)
        problem = wants_problem(asking.headers)
        return self._parts.faults.answer(error, asking.request_id, headers, problem=problem)


def _failed(waiter: Waiter) -> bool:
    """Whether it ended, and not as completed; a refusal of admission is no end of its own."""
    if not waiter.future.done() or waiter.future.cancelled():
        return False
    outcome = waiter.future.result()
    return not isinstance(outcome, Reply) or outcome.state != State.COMPLETED
