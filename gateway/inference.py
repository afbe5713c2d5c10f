"""`POST /v1/inference` and its like: who, what, may it, then wait for the answer. No Redis call, task or timer of its own."""

import asyncio
from copy import copy
from typing import Protocol, cast

from msgspec import UNSET
from multidict import CIMultiDictProxy

from gateway.admitter import ENTERED
from gateway.answer import Answer
from gateway.body import check_media, read_body
from gateway.catalog_view import IdentityView, ServedModels
from gateway.dialect import INFERENCE, Dialect
from gateway.doorman import Doorman
from gateway.idempotency import idempotency_key
from gateway.identities import Identities
from gateway.inference_parts import InferenceParts
from gateway.problem import wants_problem
from gateway.replays import REPLAYED, stored_reply
from gateway.routes import Call
from gateway.standing import Standing
from gateway.submissions import build_submission, is_retry, trace_id
from gateway.verdicts import for_want_of_capacity
from gateway.waiters import Ending, Outcome, Waiter
from scheduler.admission import Verdict
from scheduler.errors import ErrorCode, RequestError
from scheduler.failpoints import failpoint
from scheduler.fault_log import log_fault
from scheduler.payload import Payload
from scheduler.replies import Reply
from scheduler.states import Admission, State

KEY_UNKNOWN = "An Idempotency-Key cannot be checked right now; try again soon, or leave it out."


class Asking(Protocol):
    """A request, as far as its handler looks at it; `remote` is the client's address."""

    @property
    def request_id(self) -> str: ...
    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def remote(self) -> str | None: ...


class Inference:
    """The handler, and the parts of it that the fast lane uses. `standing` is what it knows of the customers' limits."""

    def __init__(self, parts: InferenceParts) -> None:
        self._parts = parts
        self._doorman = parts.doorman or Doorman(Identities(parts.catalog))
        self.standing = Standing(parts.limits, parts.meter, parts.clock)
        self.waiters = parts.waiters
        self.clock = parts.clock
        self.identify = self._doorman.identify
        self.max_body_bytes = parts.config.max_body_bytes
        self.models = ServedModels(parts.config.pool, parts.config.default_model)
        self._dialect = INFERENCE

    def speaking(self, dialect: Dialect) -> "Inference":
        """The handler of another door: the same in all but how bodies and answers are written."""
        other = copy(self)
        other._dialect = dialect  # noqa: SLF001 - its own kind
        return other

    @property
    def past_redis(self) -> bool:
        """Whether requests go straight to workers now."""
        return self._parts.direct.active

    async def __call__(self, call: Call) -> Answer:
        """Answer one request. Raises RequestError only for who is not known; other errors carry the key's limits."""
        identity = self.identify(call)
        waiter: Waiter | None = None
        try:
            key = idempotency_key(call.headers)
            came_whole = call.request.content.is_eof()
            raw = await self._read(call)
            if not came_whole:  # It took up to seconds, in which the key may have been revoked or moved.
                identity = self.identify(call)
            # A slow sender's time does not count against its deadline; the time that we take does.
            started = call.arrived if came_whole else self.clock()
            waiter = self.waiter(call, identity, raw, key, started, future=_new_future())
            outcome = await self._outcome(waiter)
            if isinstance(outcome, Verdict) and outcome.outcome is Admission.REPLAYED:
                return await self._replay(call, identity, waiter, outcome)
            return self.answer(identity, waiter, outcome)
        except RequestError as error:
            return self.not_served(call, identity, waiter, error)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told with the limits, as everything else
            log_fault("request failed", error, request_id=call.request_id)
            return self.not_served(call, identity, waiter, RequestError(ErrorCode.INTERNAL_ERROR))

    async def _read(self, call: Call) -> bytes:
        """The body. Raises RequestError where it is not to be read, or does not come as it should."""
        if self._parts.doors.closed:
            raise RequestError(ErrorCode.DRAINING)
        check_media(call.headers, call.request.content_length or 0, self.max_body_bytes)
        return await read_body(call.request, self.max_body_bytes)

    def waiter(
        self,
        asking: Asking,
        identity: IdentityView,
        raw: bytes,
        key: str | None,
        started: float,
        *,
        future: "asyncio.Future[Outcome] | Ending",
    ) -> Waiter:
        """What waits for the answer to this body, not entered yet. Raises RequestError for a body that is not valid."""
        parts = self._parts
        body = self._dialect.read(raw, parts.config.max_input_bytes)
        model = self.models.choose(parts.catalog.snapshot, body.model, self._dialect.model_field)
        submission = build_submission(
            asking.request_id,
            identity,
            Payload(model, body.input, {} if body.parameters is UNSET else dict(body.parameters)),
            self.standing.limits(identity),
            total_ms=parts.config.total_ms,
            key=key,
            trace=trace_id(asking.headers),
        )
        parts.meter.arrived(identity.tier)
        if is_retry(asking.headers):
            parts.meter.retried(identity.tier)
        return Waiter(submission, started, future)

    async def _outcome(self, waiter: Waiter) -> Outcome:
        """Ask for admission and wait for the end. Raises RequestError where admission is not even asked."""
        self.enter(waiter)
        try:
            return await cast("asyncio.Future[Outcome]", waiter.future)
        except asyncio.CancelledError:  # The client left.
            self.abandon(waiter)
            raise
        finally:
            self.waiters.remove(waiter)

    def enter(self, waiter: Waiter) -> None:
        """Ask for admission; the waiter is ended by whoever knows the outcome.

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
            raise RequestError(ErrorCode.NO_CAPACITY)
        if not past_redis and parts.limits.short_of_memory:
            self._refused(tier)
            raise RequestError(ErrorCode.BACKPRESSURE)
        self.waiters.add(waiter)
        if not (parts.direct.enter(waiter) if past_redis else parts.admitter.submit(waiter)):
            self.waiters.remove(waiter)
            self._refused(tier)
            raise RequestError(ErrorCode.QUEUE_FULL)

    def abandon(self, waiter: Waiter) -> None:
        """The client has left: end what is under way for it."""
        if waiter.verdict is not None and waiter.verdict.outcome in ENTERED:
            self._parts.cancels.add(waiter.id, ErrorCode.CANCELLED)
        self.waiters.remove(waiter)

    def answer(self, identity: IdentityView, waiter: Waiter, outcome: Outcome) -> Answer:
        """Turn the end into a 200. Raises RequestError for every other end."""
        failpoint("reply_unwritten")
        verdict = waiter.verdict
        base_limit_allows = verdict is not None and self.standing.judged(identity, waiter.submission, verdict)
        if isinstance(outcome, Verdict):
            raise self._shed(identity, self.standing.refusal(identity, outcome, base_limit_allows=base_limit_allows))
        if isinstance(outcome, ErrorCode):
            raise self._shed(identity, RequestError(outcome))
        self.standing.settle(identity, waiter.submission.tokens - outcome.tokens_used)
        if outcome.state != State.COMPLETED:
            raise self._failure(outcome)
        now = self.clock()
        latency_ms = (now - waiter.started) * 1000
        self._parts.meter.answered(identity.tier, latency_ms, now)
        return self._written(identity, waiter, outcome, latency_ms)

    async def _replay(self, call: Call, identity: IdentityView, waiter: Waiter, verdict: Verdict) -> Answer:
        """The answer that the request's key has already. Raises RequestError where it cannot be read."""
        self.standing.judged(identity, waiter.submission, verdict)
        reply = await stored_reply(self._parts.results, verdict.stored_id, identity.customer_id)
        if reply.state != State.COMPLETED:
            headers = [*self.standing.headers(identity, verdict), REPLAYED]
            return self._parts.faults.answer(
                self._failure(reply), reply.id, headers, problem=wants_problem(call.headers)
            )
        answer = self._written(identity, waiter, reply, (self.clock() - waiter.started) * 1000)
        answer.headers.append(REPLAYED)
        return answer

    def _written(self, identity: IdentityView, waiter: Waiter, reply: Reply, latency_ms: float) -> Answer:
        lines = self.standing.lines(identity, waiter.verdict)
        return self._dialect.write(reply, waiter.submission.model, identity.tier, latency_ms, lines)

    def _failure(self, reply: Reply) -> RequestError:
        """What a failed reply says to the client: the backend's own sentence only where it refused the parameters."""
        try:
            code = ErrorCode(reply.error_code)
        except ValueError:  # Written by a newer version.
            code = ErrorCode.INTERNAL_ERROR
        if code is ErrorCode.INVALID_REQUEST and reply.output:
            return self._dialect.bad_parameters(reply.output)
        return RequestError(code)

    def _shed(self, identity: IdentityView, error: RequestError) -> RequestError:
        if for_want_of_capacity(error.code):
            self._parts.meter.shed(identity.tier)
        return error

    def _refused(self, tier: str) -> None:
        """Count what was refused without asking admission: it is demand that went unserved."""
        self._parts.meter.passed(tier, self._parts.limits.factor(tier))
        self._parts.meter.shed(tier)

    def not_served(self, asking: Asking, identity: IdentityView, waiter: Waiter | None, error: RequestError) -> Answer:
        """The answer to an error, which tells the limits as well; what was kept out is noted for who asks why."""
        verdict = waiter.verdict if waiter else None
        if waiter is not None and (verdict is None or verdict.outcome not in ENTERED):
            self._parts.note_refusal(asking.request_id, identity, error, verdict, self.standing.factor(identity))
        headers = self.standing.headers(identity, verdict)
        problem = wants_problem(asking.headers)
        return self._parts.faults.answer(error, asking.request_id, headers, problem=problem)


def _new_future() -> "asyncio.Future[Outcome]":
    return asyncio.get_running_loop().create_future()
