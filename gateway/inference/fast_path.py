"""The fast path: a request for one output whose body arrived whole is handled without a task or a future of its own.

Its requests are handled together: all that arrived during a call of admission, and all whose outcome arrived in a turn of
the event loop, pass through a stage before the next stage begins. The code of a stage then stays in the caches of the CPU:
one request after another through all stages costs twice as much. The stages are those of all requests. The sink of a
pending request adds it to those that have an outcome. Anything unusual (a body in pieces, an Idempotency-Key, a preference,
direct mode, a draining gateway) is left to the handler (gateway/inference/handler.py), and a list, once it is decoded.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from aiohttp import HttpVersion11, StreamReader
from aiohttp.http import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDictProxy

from gateway.api.inference import ApiFormat
from gateway.http.body.reading import check_length, check_media
from gateway.http.connection import EdgeConnection
from gateway.http.preference import PREFER
from gateway.http.problem_details import wants_problem
from gateway.http.response import HttpResponse
from gateway.inference.call import InferenceCall, KnownHeaders
from gateway.inference.entry import Entry
from gateway.inference.handler import infer
from gateway.inference.idempotency import IDEMPOTENCY_KEY
from gateway.inference.pending import CustomerMoved, Outcome, ResponseSink
from scheduler.errors import RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.replies import Reply
from scheduler.request_id import new_request_id

MOST_TOGETHER = 64
"""Requests that pass through the stages together: others wait for about a millisecond."""

HOLD_S = 0.005
"""For at most so long, requests that arrive during a call of admission wait for its end, as they would in its queue."""


class HandledByTask(Exception):
    """The call has left the fast path."""


class FastPathRequest(InferenceCall):
    """One request on the fast path, from its headers to its response. Each method from `read` on is a stage."""

    __slots__ = (
        "_authorization",
        "_connection",
        "_fast_path",
        "_known",
        "_raw",
        "_reply",
        "_response",
        "authenticated",
        "client_gone",
        "task",
    )

    auxiliary = False  # Admission counts it.
    _reply: Reply  # From `complete` on,
    _response: HttpResponse  # and from `write` on.

    def __init__(
        self,
        fast_path: "FastPath",
        connection: EdgeConnection,
        api_format: ApiFormat,
        headers: CIMultiDictProxy[str],
        authorization: Sequence[str],
    ) -> None:
        known = connection.known_headers
        if known is not None and not (known.headers is headers and known.authorization == authorization):
            known = None
        # Faster than super().
        InferenceCall.__init__(self, api_format, new_request_id(), headers, fast_path.entry.own.clock(), known)
        self.started = self.created
        self._fast_path = fast_path
        self._authorization = authorization
        self._connection = connection
        self._known = known
        self._raw = b""
        self.authenticated = False  # Whether the caller was authenticated.
        self.client_gone = False  # Whether the connection was closed before the response.
        self.task: asyncio.Task[None] | None = None  # If it is handled by one.

    @property
    def known(self) -> bool:
        """Whether a caller with these headers was authenticated."""
        return self.authenticated or self._known is not None

    @property
    def remote(self) -> str | None:
        """The client's address."""
        return self._connection.remote

    def occupy(self, customer_id: str) -> None:
        """Count the connection to this customer. Raises RequestError if it has too many."""
        self._connection.occupy(customer_id)

    def start(self, raw: bytes) -> None:
        """Handle the request with this body. Never raises.

        A caller that its connection does not know yet is authenticated at once: the connection caches only known headers.
        """
        self._raw = raw
        if self._known is None:
            entry = self._fast_path.entry
            try:
                self.identity = entry.authenticator.authenticate(self._authorization, self)
                self.authenticated = True
                check_media(self.headers, len(raw), entry.largest().body_bytes)
                self._remember_headers()
            except Exception as error:  # noqa: BLE001  # the client gets a response to every error
                self.fail(error)
                return
        self._fast_path.arrived(self)

    def _remember_headers(self) -> None:
        """Headers from the cache are the same object for the next request of most clients: remember what was read from them."""
        if "Authorization" in self.headers:
            return
        key = self._fast_path.entry.authenticator.parsed_key(self._authorization)
        if key is not None:
            known = KnownHeaders(self.headers, self._authorization, key, self.is_retry, self.trace_id)
            self._connection.known_headers = known

    def read(self) -> None:
        """Authenticate a caller whose headers are known. Raises RequestError."""
        if self._known is not None and not self.authenticated:
            entry = self._fast_path.entry
            self.identity = entry.authenticator.authenticate_key(self._known.key, self)
            self.authenticated = True
            check_length(len(self._raw), entry.largest().body_bytes)

    def decode(self) -> None:
        """Decode the body. Raises RequestError that names the field."""
        raw, self._raw = self._raw, b""
        self._fast_path.entry.decode(self, raw)
        if self.body.more:
            self._fast_path.handle(self)
            raise HandledByTask

    async def handled(self) -> None:
        """Respond to a decoded call as its handler does."""
        entry = self._fast_path.entry
        self._connection.write_response(await entry.answered(self, infer(entry, self)))

    def place(self) -> None:
        """Find the pipeline. Raises RequestError."""
        self._fast_path.entry.place(self)

    def build(self) -> None:
        """Build the pending request. Raises RequestError."""
        if self.pipeline is not None:
            self.pipeline.build(self, self.sink)

    def admit(self) -> None:
        """Submit the request to admission. Raises RequestError if it is rejected before."""
        if self.pipeline is not None and self.pending is not None:
            self.pipeline.admit(self.pending, self.large)

    def enter(self, cell: str) -> None:
        """Pass the stages from `place` on, in another cell."""
        try:
            self._fast_path.entry.place(self, cell)
            self.build()
            self.admit()
        except Exception as error:  # noqa: BLE001  # the client gets a response to every error
            self.fail(error)

    def sink(self) -> ResponseSink:
        """The method that receives the outcome. The pending request drops it once it is done, to avoid a reference cycle."""
        return self._take

    def _take(self, _: Outcome) -> None:
        self._fast_path.ended(self)

    def remove(self) -> None:
        """The request is not pending any more."""
        if self.pipeline is not None and self.pending is not None:
            self.pipeline.pending_requests.remove(self.pending)

    def complete(self) -> None:
        """Settle the limits. Raises RequestError for an outcome that is not a completed reply, and CustomerMoved."""
        pending = self.pending
        if self.pipeline is not None and pending is not None and pending.outcome is not None:
            self._reply = self.pipeline.completed(self, pending, pending.outcome)

    def write(self) -> None:
        """Build the response."""
        if self.pipeline is not None and self.pending is not None:
            self._response = self.pipeline.write(self, (self.pending,), (self._reply,))

    def record(self) -> None:
        """Record the response."""
        if self.pipeline is not None and self.pending is not None:
            self.pipeline.record(self, (self.pending,), (self._reply,))

    def respond(self) -> None:
        """Write the response to the connection."""
        self._connection.write_response(self._response)

    def client_left(self) -> None:
        """The connection was closed before the response: cancel the pending request and record it."""
        if self.task is not None:
            self.task.cancel()
            if self.pending is not None:  # The task has begun: it records this itself.
                return
        with suppress(RequestError):
            self.read()
        self.client_gone = True
        if self.authenticated:
            self._fast_path.entry.left(self)

    def fail(self, error: Exception) -> None:
        """Record the error and write its response; without limit headers if the caller was not authenticated. Never raises."""
        entry, pending = self._fast_path.entry, self.pending
        try:
            if pending is not None and not pending.gone:
                self.remove()
            if self.authenticated:
                response = entry.reject(self, error)
            else:
                entry.own.events.unknown(self.api_format.endpoint, self.request_id, error)
                problem = wants_problem(self.headers)
                response = self._connection.error_response(error, self.request_id, problem=problem)
            self._connection.write_response(response)
        except Exception as fault:  # noqa: BLE001  # no other response is possible
            log_fault("response not written", fault, request_id=self.request_id)


class FastPath:
    """Decides which requests take the fast path, and handles them. `formats`: the API format of each path."""

    _REQUEST_STAGES = (
        FastPathRequest.read,
        FastPathRequest.decode,
        FastPathRequest.place,
        FastPathRequest.build,
        FastPathRequest.admit,
    )
    _RESPONSE_STAGES = (
        FastPathRequest.remove,
        FastPathRequest.complete,
        FastPathRequest.write,
        FastPathRequest.record,
        FastPathRequest.respond,
    )

    def __init__(self, entry: Entry, formats: Mapping[str, ApiFormat]) -> None:
        self.entry = entry
        self._formats = formats
        self._arrived: list[FastPathRequest] = []
        self._ended: list[FastPathRequest] = []
        self._scheduled = False
        self._held: asyncio.TimerHandle | None = None
        self._admission = entry.own.admission
        self._admission.before_each_call(self._start)
        self._handled: dict[asyncio.Task[None], FastPathRequest] = {}

    @property
    def under_way(self) -> int:
        """The number of requests that have arrived and are not pending yet."""
        return len(self._arrived) + sum(call.pending is None for call in self._handled.values())

    @property
    def open(self) -> bool:
        """Whether requests may take the fast path now: not while draining, nor in direct mode."""
        drain_state = self.entry.drain_state
        return not (drain_state.leaving or drain_state.closed or self.entry.own.direct_active)

    def format_at(self, path: str) -> ApiFormat | None:
        """The format of requests to this path; None if they do not take the fast path."""
        return self._formats.get(path)

    def format_of(self, message: RawRequestMessage, payload: StreamReader) -> ApiFormat | None:
        """The format of a request that may take the fast path, by its headers; None for others.

        aiohttp's parser has read it to its end.
        """
        api_format = self._formats.get(message.path)
        if api_format is None or payload is EMPTY_PAYLOAD:  # No body, or a parser error instead of a request.
            return None
        headers = message.headers
        usual = (
            message.method == "POST"
            and payload.is_eof()
            and payload.exception() is None
            and not (message.should_close or message.upgrade or message.chunked or message.compression)
            and message.version == HttpVersion11
            and "Upgrade" not in headers
            and "Content-Encoding" not in headers
            and IDEMPOTENCY_KEY not in headers
            and PREFER not in headers
            and self.open
        )
        return api_format if usual else None

    def suits(self, api_format: ApiFormat, raw: bytes) -> bool:
        """Whether this body may take the fast path: not if it could request a stream."""
        return api_format.chunks is None or not (b'"stream"' in raw or b"\\u00" in raw)

    def call(
        self,
        connection: EdgeConnection,
        api_format: ApiFormat,
        headers: CIMultiDictProxy[str],
        authorization: Sequence[str],
    ) -> FastPathRequest:
        """A request on the fast path. `authorization`: all values of that header, which need not be in `headers`."""
        return FastPathRequest(self, connection, api_format, headers, authorization)

    def arrived(self, call: FastPathRequest) -> None:
        """Start a request in the next turn of the event loop, or with others once a call of admission has ended."""
        self._arrived.append(call)
        if not self._waits():
            self._schedule()
        elif self._held is None:
            self._held = asyncio.get_running_loop().call_later(HOLD_S, self._start)

    def ended(self, call: FastPathRequest) -> None:
        """Respond to a request, which has an outcome, in the next turn of the event loop."""
        self._ended.append(call)
        self._schedule()

    def handle(self, call: FastPathRequest) -> None:
        """Handle a decoded call in a task of its own."""
        task = asyncio.get_running_loop().create_task(call.handled(), name="request")
        self._handled[task] = call
        task.add_done_callback(self._handled.pop)
        call.task = task

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Respond to requests that have an outcome, and start those that have arrived. Never raises."""
        self._scheduled = False
        ended, self._ended = self._ended[:MOST_TOGETHER], self._ended[MOST_TOGETHER:]
        for stage in self._RESPONSE_STAGES:
            ended = _passed(stage, ended)
        if not self._waits():
            self._start()
        if self._ended:
            self._schedule()

    def _waits(self) -> bool:
        """Whether requests that have arrived wait for others."""
        return self._admission.in_call and len(self._arrived) < MOST_TOGETHER

    def _start(self) -> None:
        """Take requests that have arrived through their stages. Never raises."""
        if self._held is not None:
            self._held.cancel()
            self._held = None
        arrived, self._arrived = self._arrived[:MOST_TOGETHER], self._arrived[MOST_TOGETHER:]
        for stage in self._REQUEST_STAGES:
            arrived = _passed(stage, arrived)
        if self._arrived:  # More than pass together: the rest does not wait for others.
            asyncio.get_running_loop().call_soon(self._start)


def _passed(stage: Callable[[FastPathRequest], None], calls: list[FastPathRequest]) -> list[FastPathRequest]:
    """The calls that passed a stage. The clients of others get the error at once; calls without a client are left out."""
    passed: list[FastPathRequest] = []
    for call in calls:
        if call.client_gone:
            continue
        try:
            stage(call)
        except CustomerMoved as moved:
            call.enter(moved.cell)
        except HandledByTask:
            continue
        except Exception as error:  # noqa: BLE001  # the client gets a response to every error
            call.fail(error)
        else:
            passed.append(call)
    return passed
