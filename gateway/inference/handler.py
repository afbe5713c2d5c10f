"""READ FIRST. The handler of an inference request: read the body, submit, wait, respond in the request's API format.

A list of inputs is as many requests. They are admitted all or none, and answered together: where one fails, its error
is the response, and the others are cancelled.
"""

import asyncio
from typing import Any, NamedTuple, cast

from multidict import CIMultiDictProxy

from gateway.api.format import InferenceRequest
from gateway.api.inference import ApiFormat
from gateway.catalog import IdentityView
from gateway.http.errors import wants_problem
from gateway.http.request import check_media, check_text, invalid, read_body
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.inference.pending import Outcome, PendingRequest
from gateway.inference.pipeline import InferencePipeline
from gateway.inference.streaming import StreamedResponse
from gateway.inference.submission import REPLAYED, idempotency_key, with_more
from ratelimit.effective import EffectiveLimits, effective
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import MAX_SUBMISSIONS, Verdict
from scheduler.protocol.replies import Reply
from scheduler.request_id import new_request_id
from scheduler.states import Admission, State


class ListMember(NamedTuple):
    """One of them, as a request that asks."""

    request_id: str
    headers: CIMultiDictProxy[str]
    remote: str | None


def texts_of(field: str, given: str | list[Any], max_bytes: int, not_text: str) -> list[str]:
    """The texts of a field that may hold one or several. Raises RequestError, which says `not_text` where one is none."""
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise invalid(field, f"`{field}` must not be empty.")
    if any(not isinstance(each, str) for each in texts):
        raise invalid(field, not_text)
    for each in texts:
        check_text(field, each, max_bytes)
    return texts


def check_size(field: str, count: int, limits: EffectiveLimits) -> None:
    """Raises RequestError, naming `field`, for more than could ever enter in one moment, by the base limits."""
    most = MAX_SUBMISSIONS
    why = "of one call"
    for limit, words in ((limits.told_burst, "of this key's burst"), (limits.max_concurrency, "of its concurrency")):
        if 0 < limit < most:
            most, why = int(limit), words
    if count > most:
        raise _too_many(field, count, most, why)


def _too_many(field: str, count: int, most: int, why: str) -> RequestError:
    return invalid(field, f"`{field}` holds {count} texts, which enter together: {most} is the most {why}.")


def member_key(key: str, place: int) -> str:
    """The Idempotency-Key of one of them. The first has the client's own, by which another body is found out.

    No client can send the others': a key holds no space.
    """
    return f"{key} {place}" if place else key


class ReplayedFailure(RequestError):
    """The request's Idempotency-Key belongs to one that failed, and would fail again."""

    def __init__(self, error: RequestError, request_id: str) -> None:
        super().__init__(error.code, str(error), error.param)
        self.request_id = request_id


class CompletedReplies(NamedTuple):
    """All inputs of one exchange, completed."""

    replies: list[Reply]
    replayed: bool


class InferenceCall(NamedTuple):
    """What was read of one call: who asks, for what, with which Idempotency-Key, and since when."""

    identity: IdentityView
    asked: InferenceRequest
    key: str | None
    started: float


class InferenceHandler:
    """The handler of one door."""

    def __init__(self, inference: InferencePipeline, api_format: ApiFormat) -> None:
        self._inference = inference
        self._api_format = api_format

    async def __call__(self, call: RoutedRequest) -> HttpResponse:
        """Answer one call. Raises RequestError only for who is not known; other errors carry the key's limits."""
        ends = self._inference.ends
        identity = ends.known(self._inference.identify, call, self._api_format.endpoint)
        try:
            wish = await self._wish(call, identity)
            inference = self._inference.serving(wish.asked)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told with the limits, as everything else
            return self._not_served(call, identity, [], error)
        there = self if inference is self._inference else InferenceHandler(inference, self._api_format)
        return await there.serve(call, wish)

    async def serve(self, call: RoutedRequest, wish: InferenceCall) -> HttpResponse:
        """Answer what was read, in the pool that this exchange is of."""
        pending_requests: list[PendingRequest] = []
        identity, asked = wish.identity, wish.asked
        try:
            pending_requests += self._pending_requests(call, wish)
            if asked.stream:
                streaming = StreamedResponse(
                    self._inference, self._api_format, identity, pending_requests[0], asked, stored=self._stored
                )
                return await streaming.answer()
            ended = await self._ended(identity, pending_requests)
            return self._written(identity, pending_requests, ended, asked)
        except asyncio.CancelledError:  # The client left.
            first = pending_requests[0] if pending_requests else None
            self._inference.ends.left(self._api_format.endpoint, call.request_id, identity, first)
            raise
        except Exception as error:  # noqa: BLE001  # as above
            return self._not_served(call, identity, pending_requests, error)

    async def _wish(self, call: RoutedRequest, identity: IdentityView) -> InferenceCall:
        """What is asked. Raises RequestError."""
        inference = self._inference
        key = idempotency_key(call.headers)
        came_whole = call.request.content.is_eof()
        raw = await self._read(call, identity)
        if not came_whole:  # It took up to seconds, in which the key may have been revoked or moved.
            identity = inference.identify(call)
        # A slow sender's time does not count against its deadline; the time that we take does.
        started = call.arrived if came_whole else inference.clock()
        asked = self._api_format.read(raw, inference.max_input_bytes)
        return InferenceCall(inference.served_as(identity, asked), asked, key, started)

    async def _read(self, call: RoutedRequest, identity: IdentityView) -> bytes:
        """The body. Raises RequestError where it is not to be read, or does not come as it should."""
        most = self._inference.max_body_bytes
        if self._inference.drain_state.closed:
            raise RequestError(ErrorCode.DRAINING)
        check_media(call.headers, call.request.content_length or 0, most)
        return await read_body(call.request, most, self._inference.bodies.share(identity))

    def _pending_requests(self, call: RoutedRequest, wish: InferenceCall) -> list[PendingRequest]:
        """One for each input, not entered yet. Raises RequestError where there are more than may ever enter together."""
        identity, asked, key, started = wish
        inference, payload = self._inference, self._inference.payload(asked, self._api_format)
        if not asked.more:
            future = _new_future()
            return [inference.pending(call, identity, payload, key, started, future=future, stream=asked.stream)]
        count = 1 + len(asked.more)
        check_size(self._api_format.input_field, count, effective(identity))
        together: list[PendingRequest] = []
        for place, text in enumerate((asked.input, *asked.more)):
            member = ListMember(new_request_id() if place else call.request_id, call.headers, call.remote)
            own_key = None if key is None else member_key(key, place)
            one = payload.with_input(text)
            first = together[0] if together else None
            pending = inference.pending(member, identity, one, own_key, started, future=_new_future(), first=first)
            if key is not None:
                pending.submission.fingerprint = with_more(pending.submission.fingerprint, str(count))
            pending.together = together
            together.append(pending)
        together[0].submission.together = count
        return list(together)

    async def _ended(self, identity: IdentityView, pending_requests: list[PendingRequest]) -> CompletedReplies:
        """Ask for admission and wait for every end. Raises RequestError for the first that is no success."""
        inference = self._inference
        inference.enter(pending_requests[0])
        replies: list[Reply] = []
        replayed = False
        try:
            for pending in pending_requests:
                outcome = await cast("asyncio.Future[Outcome]", pending.future)
                if isinstance(outcome, Verdict) and outcome.outcome is Admission.REPLAYED:
                    replayed = True
                    replies.append(await self._stored(identity, pending, outcome))
                else:
                    replies.append(inference.completed(identity, pending, outcome, self._api_format))
        except Exception as error:
            code = error.code if isinstance(error, RequestError) else ErrorCode.INTERNAL_ERROR
            inference.fail_list(pending_requests, code)
            raise
        except BaseException:  # The client left: whatever has not ended has nobody who waits for it.
            _leave(inference, pending_requests)
            raise
        finally:
            for pending in pending_requests:
                pending.together = ()  # Only the garbage collector could free a ring.
        _leave(inference, pending_requests)
        return CompletedReplies(replies, replayed)

    async def _stored(self, identity: IdentityView, pending: PendingRequest, verdict: Verdict) -> Reply:
        reply = await self._inference.stored(identity, pending, verdict)
        if reply.state != State.COMPLETED:
            raise ReplayedFailure(self._inference.failure(reply, self._api_format), reply.id)
        return reply

    def _written(
        self,
        identity: IdentityView,
        pending_requests: list[PendingRequest],
        ended: CompletedReplies,
        asked: InferenceRequest,
    ) -> HttpResponse:
        answer = self._inference.written(identity, pending_requests, ended.replies, asked, self._api_format)
        if ended.replayed:
            answer.headers.append(REPLAYED)
        return answer

    def _not_served(
        self, call: RoutedRequest, identity: IdentityView, pending_requests: list[PendingRequest], error: Exception
    ) -> HttpResponse:
        inference = self._inference
        if not isinstance(error, RequestError):
            log_fault("request failed", error, request_id=call.request_id)
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        first = pending_requests[0] if pending_requests else None
        if isinstance(error, ReplayedFailure):
            inference.ends.failed(self._api_format.endpoint, error.request_id, identity, first, error)
            headers = [*inference.customer_limits.headers(identity, first.verdict if first else None), REPLAYED]
            return inference.faults.answer(error, error.request_id, headers, problem=wants_problem(call.headers))
        return inference.not_served(call, identity, first, error, self._api_format)


def _new_future() -> "asyncio.Future[Outcome]":
    return asyncio.get_running_loop().create_future()


def _leave(inference: InferencePipeline, pending_requests: list[PendingRequest]) -> None:
    for pending in pending_requests:
        inference.leave(pending)
