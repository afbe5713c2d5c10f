"""The handler of an inference request. Read this module first.

`serve` runs the stages of gateway/inference/pipeline.py for all requests that are not on the fast path: single
requests, lists, streams (gateway/inference/streaming.py) and jobs (gateway/jobs/submit.py). gateway/grpc/call.py runs them
for gRPC.

A list of inputs is one request per input. All of them are admitted or none. They have one response: if one fails, its
error is the response, and the others are cancelled.
"""

import asyncio
from collections.abc import Awaitable
from functools import partial

from gateway.api.inference import ApiFormat
from gateway.http.request import HttpRequest
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.http.validation import invalid
from gateway.inference.chat_documents import with_document
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED, with_more
from gateway.inference.pending import CustomerMoved, Outcome, PendingRequest, ResponseSink
from gateway.inference.pipeline import InferenceCall, InferencePipeline
from gateway.inference.streaming import StreamedResponse
from gateway.inference.token_estimate import input_tokens
from ratelimit.limits import EffectiveLimits, effective
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import MAX_SUBMISSIONS, Verdict
from scheduler.protocol.replies import Reply
from scheduler.request_id import new_request_id
from scheduler.states import Admission


class InferenceHandler:
    """The handler of one endpoint. Each endpoint has one API format."""

    def __init__(self, pipeline: InferencePipeline, api_format: ApiFormat) -> None:
        self._pipeline = pipeline
        self._api_format = api_format

    async def __call__(self, request: RoutedRequest) -> HttpResponse:
        """Handle one request. Raises RequestError if the caller is unknown; other errors become responses."""
        return await serve(AwaitedCall(self._pipeline, self._api_format, request), request)


async def serve(call: "AwaitedCall", request: RoutedRequest) -> HttpResponse:
    """Run the stages of one call. Raises RequestError if the caller is unknown, CancelledError if the client left."""
    call.authenticate(request)
    return await run(call, call.read(request))


async def run(call: "AwaitedCall", read: Awaitable[bytes]) -> HttpResponse:
    """Run the stages of a call whose caller is known; `read` returns its body. Raises CancelledError if the client left."""
    try:
        raw = await read
        call = call.successor()
        call.submit(raw)  # Decodes the body, chooses tier and pool, builds the pending requests, admits them.
        del raw  # It may be large.
        return await _response(call)  # Recorded as a success.
    except asyncio.CancelledError:
        call.client_left()  # Cancelled, and recorded as such.
        raise
    except Exception as error:  # noqa: BLE001  # every error has a response, with the limit headers
        return call.reject(error)  # Recorded as a failure.


async def _response(call: "AwaitedCall") -> HttpResponse:
    """Wait for the outcome and build the response. A request whose customer has moved is submitted in its new cell."""
    while True:
        try:
            await call.wait()
            return await call.response()
        except CustomerMoved as moved:
            call.enter(moved.cell)


class AwaitedCall(InferenceCall):
    """A call whose outcome is awaited: a single request, a list, or a stream. A list has an outcome per member."""

    __slots__ = ("_futures", "_pending_requests", "_replayed", "_replies", "_stream")

    def __init__(self, pipeline: InferencePipeline, api_format: ApiFormat, request: HttpRequest) -> None:
        super().__init__(pipeline, api_format, request.request_id, request.headers)
        self._futures: list[asyncio.Future[Outcome]] = []  # One per pending request.
        self._pending_requests: list[PendingRequest] = []
        self._replies: list[Reply] = []
        self._replayed = False  # Whether a reply is the stored one of an Idempotency-Key.
        self._stream: StreamedResponse | None = None

    def successor(self) -> "AwaitedCall":
        """The call that continues after the body was read: a job's, if the body requests one."""
        return self

    def enter(self, cell: str = "") -> None:
        """Choose the pool, build the pending requests, and admit them. Raises RequestError."""
        self._drop_cycles()  # Of those that were built before the customer moved.
        self._futures, self._pending_requests, self._replies = [], [], []
        super().enter(cell)

    def sink(self) -> ResponseSink:
        """A sink that resolves a future. It must not reference the call, which references the pending request."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return partial(_resolve, future)

    def build(self) -> PendingRequest:
        """Build a pending request for each input, and the stream if the client requested one.

        Raises RequestError if the model is unknown, or if the list has more inputs than can ever be admitted together.
        """
        if self.body.more:
            self._pending_requests = self._build_list()
            return self._pending_requests[0]
        pending = super().build()
        self._pending_requests = [pending]
        if self.body.stream:
            self._stream = StreamedResponse(self, pending, self._futures[0], self.keep, passed_on=self.passed_on)
        return pending

    def _build_list(self) -> list[PendingRequest]:
        payload = self.pipeline.payload(self.body, self.api_format)
        texts = self.body.inputs(payload)
        check_size(self.api_format.input_field, len(texts), effective(self.identity))
        together: list[PendingRequest] = []
        for index, text in enumerate(texts):
            request_id = self.member_id(index)
            key = None if self.key is None else member_key(self.key, index)
            first = together[0] if together else None
            pending = self.pipeline.build_pending(
                self, payload.with_input(text), self.sink(), request_id, key, first=first
            )
            if key is not None:
                pending.submission.fingerprint = with_more(pending.submission.fingerprint, str(len(texts)))
            pending.together = together
            together.append(pending)
        together[0].submission.together = len(texts)
        return list(together)

    def member_id(self, index: int) -> str:
        """The request id of a list member. The first member has that of the call."""
        return new_request_id() if index else self.request_id

    async def wait(self) -> None:
        """Wait for all outcomes, or for the admission of a stream. Raises RequestError for the first that failed."""
        if self._stream is not None:
            await self._stream.wait()
            return
        try:
            for pending, future in zip(self._pending_requests, self._futures, strict=True):
                outcome = await future
                if isinstance(outcome, Verdict) and outcome.outcome is Admission.REPLAYED:
                    reply = await self.replayed_reply(pending, outcome)
                else:
                    reply = self.completed(pending, outcome)
                self._replies.append(reply)
                await self.keep(reply)
        except Exception as error:
            code = error.code if isinstance(error, RequestError) else ErrorCode.INTERNAL_ERROR
            self.pipeline.fail_list(self._pending_requests, code)
            raise
        self.release()

    async def replayed_reply(self, pending: PendingRequest, verdict: Verdict) -> Reply:
        """As InferenceCall. Raises also what `charge_replay` does."""
        self.charge_replay()
        return await super().replayed_reply(pending, verdict)

    def charge_replay(self) -> None:
        """Count a call that gets a stored response as an auxiliary one, since admission does not count it; a list counts once.

        Raises RequestError if the customer sends too many.
        """
        if not self._replayed:
            self._replayed = True
            self.pipeline.charge(self.identity)

    async def keep(self, reply: Reply) -> None:
        """Store the reply for later reads, before the end of its response is sent. Raises RequestError if that fails."""

    async def response(self) -> HttpResponse:
        """Build the response: 200 with the outputs, or the stream."""
        stream, self._stream = self._stream, None  # The stream references this call: avoid a reference cycle.
        if stream is not None:
            return stream.response()
        response = self.respond(self._pending_requests, self._replies)
        if self._replayed:
            response.headers.append(IDEMPOTENT_REPLAYED)
        return response

    def reject(self, error: Exception) -> HttpResponse:
        """Record the error and build its response, with the limit headers."""
        self._drop_cycles()
        return super().reject(error)

    def release(self) -> None:
        """Remove all pending requests; cancel those without an outcome."""
        if self._stream is None:
            for pending in self._pending_requests:
                self.pipeline.leave(pending)
        self._drop_cycles()

    def _drop_cycles(self) -> None:
        """Close the stream, and drop the references of list members to each other, so that no garbage collection is needed."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        for pending in self._pending_requests:
            pending.together = ()


class CountCall(AwaitedCall):
    """A call that ends where others are admitted, free of charge: its result is the estimate of the tokens of its input."""

    __slots__ = ()

    def counted(self, tokens: int) -> object:
        """The response body."""
        raise NotImplementedError

    def submit(self, raw: bytes) -> None:
        """Check the body. Raises RequestError."""
        self.body = self.decode(raw)
        self.choose_pool()

    async def wait(self) -> None:
        """Return at once, since nothing was admitted."""

    async def response(self) -> HttpResponse:
        """Count the tokens in the form that the model gets, and record the call. Raises RequestError."""
        payload, _ = with_document(self.pipeline.payload(self.body, self.api_format), self.body, self.request_id, None)
        count = input_tokens(payload, len(payload.input.encode()), self.body.document)
        self.pipeline.events.answered(self.api_format.endpoint, self.identity)
        limits, form = self.pipeline.customer_limits.lines(self.identity, None), self.api_format.form
        response = HttpResponse.of(200, self.counted(count))
        response.lines = f"x-request-id: {self.request_id}\r\n{limits}"
        response.lines += form.lines(self.request_id, limits) if form else ""
        return response


def _resolve(future: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
    if not future.done():  # It is cancelled when the connection is lost, before its task runs again.
        future.set_result(outcome)


def check_size(field: str, count: int, limits: EffectiveLimits) -> None:
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
