"""`POST /v1/inference`: who, what, may it, then wait for the answer. No Redis call, task or timer of its own."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import UNSET
from multidict import CIMultiDictProxy

from gateway.admitter import ENTERED, Admitter
from gateway.answer import Answer, Headers
from gateway.bearer import bearer_token
from gateway.body import check_media, read_body
from gateway.cancels import Cancels
from gateway.catalog_view import CatalogView, IdentityView, choose_model
from gateway.config import GatewayConfig
from gateway.direct import Direct
from gateway.doors import Doors
from gateway.faults import Faults
from gateway.idempotency import NONE, idempotency, idempotency_key
from gateway.inference_body import decode_inference
from gateway.key_states import KeyStates
from gateway.limits import LiveLimits
from gateway.meter import Meter
from gateway.rate_headers import RateState, rate_headers
from gateway.replays import REPLAYED, FetchResults, stored_reply
from gateway.routes import Call
from gateway.success import success
from gateway.verdicts import for_want_of_capacity, refusal
from gateway.waiters import Outcome, Waiter, Waiters
from scheduler.admission import Submission, Verdict
from scheduler.errors import ErrorCode, RequestError
from scheduler.failpoints import failpoint
from scheduler.payload import Payload, encode_payload
from scheduler.replies import Reply
from scheduler.states import Admission, State

KEY_UNKNOWN = "An Idempotency-Key cannot be checked right now; try again soon, or leave it out."
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParts:
    """What the handler works with; built once by the composition root."""

    config: GatewayConfig
    catalog: CatalogView
    limits: LiveLimits
    waiters: Waiters
    admitter: Admitter
    cancels: Cancels
    meter: Meter
    faults: Faults
    doors: Doors
    results: FetchResults
    direct: Direct
    clock: Callable[[], float] = time.monotonic


class Inference:
    """The handler."""

    def __init__(self, parts: InferenceParts) -> None:
        self._parts = parts
        self._keys = KeyStates()

    async def __call__(self, call: Call) -> Answer:
        """Answer one request. Raises RequestError only for who is not known; other errors carry the key's limits."""
        identity = self._identify(call)
        waiter: Waiter | None = None
        try:
            key = idempotency_key(call.request.headers)
            came_whole = call.request.content.is_eof()
            raw = await self._read(call)
            if not came_whole:  # It took up to seconds, in which the key may have been revoked or moved.
                identity = self._identify(call)
            # A slow sender's time does not count against its deadline; the time that we take does.
            started = call.arrived if came_whole else self._parts.clock()
            waiter = self._waiter(call, identity, self._payload(raw), key, started)
            outcome = await self._outcome(waiter)
            failpoint("reply_unwritten")
            if isinstance(outcome, Verdict) and outcome.outcome is Admission.REPLAYED:
                return await self._replay(identity, waiter, outcome)
            return self._answer(identity, waiter, outcome)
        except RequestError as error:
            verdict = waiter.verdict if waiter else None
            return self._parts.faults.answer(error, call.request_id, self._rate_headers(identity, verdict))

    def _identify(self, call: Call) -> IdentityView:
        return self._parts.catalog.identify(bearer_token(call.request.headers), time.time())

    async def _read(self, call: Call) -> bytes:
        """The body. Raises RequestError where it is not to be read, or does not come as it should."""
        if self._parts.doors.closed:
            raise RequestError(ErrorCode.DRAINING)
        check_media(call.request, self._parts.config.max_body_bytes)
        return await read_body(call.request, self._parts.config.max_body_bytes)

    def _payload(self, raw: bytes) -> Payload:
        """What the client asks for. Raises RequestError."""
        parts = self._parts
        body = decode_inference(raw, parts.config.max_input_bytes)
        snapshot = parts.catalog.snapshot
        models = snapshot.models if snapshot else {}
        model = choose_model(models, parts.config.pool, body.model, parts.config.default_model)
        return Payload(model, body.input, {} if body.parameters is UNSET else dict(body.parameters))

    def _waiter(self, call: Call, identity: IdentityView, payload: Payload, key: str | None, started: float) -> Waiter:
        rate, burst = self._effective(identity)
        encoded = encode_payload(payload)
        value, fingerprint = NONE if key is None else idempotency(identity.customer_id, key, payload)
        submission = Submission(
            id=call.request_id,
            tier=identity.tier,
            customer_id=identity.customer_id,
            api_key_id=identity.key_id,
            nonce=secrets.token_hex(8),
            model=payload.model,
            input_bytes=len(payload.input.encode()),
            total_ms=self._parts.config.total_ms,
            queue_ms=identity.max_queue_ms,
            rate=rate,
            burst=burst,
            trace_id=trace_id(call.request.headers),
            idempotency=value,
            fingerprint=fingerprint,
            body=encoded,
        )
        return Waiter(submission, started, asyncio.get_running_loop().create_future())

    async def _outcome(self, waiter: Waiter) -> Outcome:
        """Ask for admission and wait for the end. Raises RequestError where admission is not even asked."""
        parts, tier = self._parts, waiter.submission.tier
        parts.meter.arrived(tier)
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
        parts.waiters.add(waiter)
        try:
            if not (parts.direct.enter(waiter) if past_redis else parts.admitter.submit(waiter)):
                self._refused(tier)
                raise RequestError(ErrorCode.QUEUE_FULL)
            return await waiter.future
        except asyncio.CancelledError:  # The client left.
            if waiter.verdict is not None and waiter.verdict.outcome in ENTERED:
                parts.cancels.add(waiter.id, ErrorCode.CANCELLED)
            raise
        finally:
            parts.waiters.remove(waiter)

    def _answer(self, identity: IdentityView, waiter: Waiter, outcome: Outcome) -> Answer:
        """Turn the end into a 200. Raises RequestError for every other end."""
        verdict = waiter.verdict
        base_limit_allows = verdict is not None and self._judge(identity, verdict)
        if isinstance(outcome, Verdict):
            raise self._shed(identity, refusal(outcome, base_limit_allows=base_limit_allows))
        if isinstance(outcome, ErrorCode):
            raise self._shed(identity, RequestError(outcome))
        if outcome.state != State.COMPLETED:
            raise _failure(outcome)
        now = self._parts.clock()
        latency_ms = (now - waiter.started) * 1000
        self._parts.meter.answered(identity.tier, latency_ms, now)
        return success(outcome, identity.tier, latency_ms, self._rate_headers(identity, verdict))

    async def _replay(self, identity: IdentityView, waiter: Waiter, verdict: Verdict) -> Answer:
        """The answer that the request's key has already. Raises RequestError where it cannot be read."""
        self._judge(identity, verdict)
        reply = await stored_reply(self._parts.results, verdict.stored_id, identity.customer_id)
        headers = [*self._rate_headers(identity, verdict), *REPLAYED]
        if reply.state != State.COMPLETED:
            return self._parts.faults.answer(_failure(reply), reply.id, headers)
        return success(reply, identity.tier, (self._parts.clock() - waiter.started) * 1000, headers)

    def _judge(self, identity: IdentityView, verdict: Verdict) -> bool:
        """Note a verdict. True where the key's base limit would let the request in."""
        now = self._parts.clock()
        state = self._keys.of(identity.key_id, identity.burst, now)
        state.remaining, state.seen_at = verdict.remaining, now
        if verdict.outcome in ENTERED or verdict.outcome is Admission.KEY_LIMIT:
            base_limit_allows = state.take_base(identity.requests_per_second, identity.burst, now)
        else:
            base_limit_allows = True
        factor = self._parts.limits.factor(identity.tier)
        if verdict.outcome is not Admission.KEY_LIMIT:
            self._parts.meter.passed(identity.tier, factor)
        return base_limit_allows and factor < 1

    def _shed(self, identity: IdentityView, error: RequestError) -> RequestError:
        if for_want_of_capacity(error.code):
            self._parts.meter.shed(identity.tier)
        return error

    def _refused(self, tier: str) -> None:
        """Count what was refused without asking admission: it is demand that went unserved."""
        self._parts.meter.passed(tier, self._parts.limits.factor(tier))
        self._parts.meter.shed(tier)

    def _effective(self, identity: IdentityView) -> tuple[float, float]:
        """The key's rate and bucket size as lowered now."""
        factor = self._parts.limits.factor(identity.tier)
        return identity.requests_per_second * factor, max(1.0, identity.burst * factor)

    def _rate_headers(self, identity: IdentityView, verdict: Verdict | None) -> Headers:
        rate, burst = self._effective(identity)
        if verdict is None:
            return rate_headers(self._keys.estimate(identity.key_id, rate, burst, self._parts.clock()))
        return rate_headers(RateState(rate, burst, verdict.remaining, verdict.reset_ms))


def trace_id(headers: CIMultiDictProxy[str]) -> str:
    """The trace id of a W3C `traceparent`, or "" where there is none that is valid."""
    value = headers.get("traceparent")
    found = _TRACEPARENT.fullmatch(value) if value else None
    if found is None or set(found[1]) == {"0"} or found[0].startswith("ff"):
        return ""
    return found[1]


def _failure(reply: Reply) -> RequestError:
    """What a failed reply says to the client: the backend's own sentence only where it refused the parameters."""
    try:
        code = ErrorCode(reply.error_code)
    except ValueError:  # Written by a newer version.
        code = ErrorCode.INTERNAL_ERROR
    if code is ErrorCode.INVALID_REQUEST and reply.output:
        return RequestError(code, reply.output, "parameters")
    return RequestError(code)
