"""READ FIRST. The handler of an inference request: read the body, submit, wait, respond in the request's API format.

A list of inputs is as many requests. They are admitted all or none, and answered together: where one fails, its error
is the response, and the others are cancelled.
"""

import asyncio
from typing import Any, NamedTuple, cast

from multidict import CIMultiDictProxy

from gateway.api.format import Asked
from gateway.api.inference import Dialect
from gateway.catalog import IdentityView
from gateway.http.errors import wants_problem
from gateway.http.request import check_media, check_text, invalid, read_body
from gateway.http.response import Answer
from gateway.http.router import Call
from gateway.inference.pending import Outcome, Waiter
from gateway.inference.pipeline import Inference
from gateway.inference.streaming import Streaming
from gateway.inference.submission import REPLAYED, idempotency_key, with_more
from ratelimit.effective import Effective, effective
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import MAX_SUBMISSIONS, Verdict
from scheduler.protocol.replies import Reply
from scheduler.request_id import new_request_id
from scheduler.states import Admission, State


class Member(NamedTuple):
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


def check_size(field: str, count: int, limits: Effective) -> None:
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


class FailedBefore(RequestError):
    """The request's Idempotency-Key belongs to one that failed, and would fail again."""

    def __init__(self, error: RequestError, request_id: str) -> None:
        super().__init__(error.code, str(error), error.param)
        self.request_id = request_id


class Ended(NamedTuple):
    """All inputs of one exchange, completed."""

    replies: list[Reply]
    replayed: bool


class Wish(NamedTuple):
    """What was read of one call: who asks, for what, with which Idempotency-Key, and since when."""

    identity: IdentityView
    asked: Asked
    key: str | None
    started: float


class Exchange:
    """The handler of one door."""

    def __init__(self, inference: Inference, dialect: Dialect) -> None:
        self._inference = inference
        self._dialect = dialect

    async def __call__(self, call: Call) -> Answer:
        """Answer one call. Raises RequestError only for who is not known; other errors carry the key's limits."""
        ends = self._inference.ends
        identity = ends.known(self._inference.identify, call, self._dialect.endpoint)
        try:
            wish = await self._wish(call, identity)
            inference = self._inference.serving(wish.asked)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told with the limits, as everything else
            return self._not_served(call, identity, [], error)
        there = self if inference is self._inference else Exchange(inference, self._dialect)
        return await there.serve(call, wish)

    async def serve(self, call: Call, wish: Wish) -> Answer:
        """Answer what was read, in the pool that this exchange is of."""
        waiters: list[Waiter] = []
        identity, asked = wish.identity, wish.asked
        try:
            waiters += self._waiters(call, wish)
            if asked.stream:
                streaming = Streaming(self._inference, self._dialect, identity, waiters[0], asked, stored=self._stored)
                return await streaming.answer()
            ended = await self._ended(identity, waiters)
            return self._written(identity, waiters, ended, asked)
        except asyncio.CancelledError:  # The client left.
            first = waiters[0] if waiters else None
            self._inference.ends.left(self._dialect.endpoint, call.request_id, identity, first)
            raise
        except Exception as error:  # noqa: BLE001  # as above
            return self._not_served(call, identity, waiters, error)

    async def _wish(self, call: Call, identity: IdentityView) -> Wish:
        """What is asked. Raises RequestError."""
        inference = self._inference
        key = idempotency_key(call.headers)
        came_whole = call.request.content.is_eof()
        raw = await self._read(call, identity)
        if not came_whole:  # It took up to seconds, in which the key may have been revoked or moved.
            identity = inference.identify(call)
        # A slow sender's time does not count against its deadline; the time that we take does.
        started = call.arrived if came_whole else inference.clock()
        asked = self._dialect.read(raw, inference.max_input_bytes)
        return Wish(inference.served_as(identity, asked), asked, key, started)

    async def _read(self, call: Call, identity: IdentityView) -> bytes:
        """The body. Raises RequestError where it is not to be read, or does not come as it should."""
        most = self._inference.max_body_bytes
        if self._inference.doors.closed:
            raise RequestError(ErrorCode.DRAINING)
        check_media(call.headers, call.request.content_length or 0, most)
        return await read_body(call.request, most, self._inference.bodies.share(identity))

    def _waiters(self, call: Call, wish: Wish) -> list[Waiter]:
        """One for each input, not entered yet. Raises RequestError where there are more than may ever enter together."""
        identity, asked, key, started = wish
        inference, payload = self._inference, self._inference.payload(asked, self._dialect)
        if not asked.more:
            future = _new_future()
            return [inference.waiter(call, identity, payload, key, started, future=future, stream=asked.stream)]
        count = 1 + len(asked.more)
        check_size(self._dialect.input_field, count, effective(identity))
        together: list[Waiter] = []
        for place, text in enumerate((asked.input, *asked.more)):
            member = Member(new_request_id() if place else call.request_id, call.headers, call.remote)
            own_key = None if key is None else member_key(key, place)
            one = payload.with_input(text)
            first = together[0] if together else None
            waiter = inference.waiter(member, identity, one, own_key, started, future=_new_future(), first=first)
            if key is not None:
                waiter.submission.fingerprint = with_more(waiter.submission.fingerprint, str(count))
            waiter.together = together
            together.append(waiter)
        together[0].submission.together = count
        return list(together)

    async def _ended(self, identity: IdentityView, waiters: list[Waiter]) -> Ended:
        """Ask for admission and wait for every end. Raises RequestError for the first that is no success."""
        inference = self._inference
        inference.enter(waiters[0])
        replies: list[Reply] = []
        replayed = False
        try:
            for waiter in waiters:
                outcome = await cast("asyncio.Future[Outcome]", waiter.future)
                if isinstance(outcome, Verdict) and outcome.outcome is Admission.REPLAYED:
                    replayed = True
                    replies.append(await self._stored(identity, waiter, outcome))
                else:
                    replies.append(inference.completed(identity, waiter, outcome, self._dialect))
        except Exception as error:
            code = error.code if isinstance(error, RequestError) else ErrorCode.INTERNAL_ERROR
            inference.fail_list(waiters, code)
            raise
        except BaseException:  # The client left: whatever has not ended has nobody who waits for it.
            _leave(inference, waiters)
            raise
        finally:
            for waiter in waiters:
                waiter.together = ()  # Only the garbage collector could free a ring.
        _leave(inference, waiters)
        return Ended(replies, replayed)

    async def _stored(self, identity: IdentityView, waiter: Waiter, verdict: Verdict) -> Reply:
        reply = await self._inference.stored(identity, waiter, verdict)
        if reply.state != State.COMPLETED:
            raise FailedBefore(self._inference.failure(reply, self._dialect), reply.id)
        return reply

    def _written(self, identity: IdentityView, waiters: list[Waiter], ended: Ended, asked: Asked) -> Answer:
        answer = self._inference.written(identity, waiters, ended.replies, asked, self._dialect)
        if ended.replayed:
            answer.headers.append(REPLAYED)
        return answer

    def _not_served(self, call: Call, identity: IdentityView, waiters: list[Waiter], error: Exception) -> Answer:
        inference = self._inference
        if not isinstance(error, RequestError):
            log_fault("request failed", error, request_id=call.request_id)
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        first = waiters[0] if waiters else None
        if isinstance(error, FailedBefore):
            inference.ends.failed(self._dialect.endpoint, error.request_id, identity, first, error)
            headers = [*inference.standing.headers(identity, first.verdict if first else None), REPLAYED]
            return inference.faults.answer(error, error.request_id, headers, problem=wants_problem(call.headers))
        return inference.not_served(call, identity, first, error, self._dialect)


def _new_future() -> "asyncio.Future[Outcome]":
    return asyncio.get_running_loop().create_future()


def _leave(inference: Inference, waiters: list[Waiter]) -> None:
    for waiter in waiters:
        inference.leave(waiter)
