"""The fast path: a `POST /v1/inference` whose body arrived whole is handled without a task or a future of its own.

The sink of its pending request is the method that writes the response to the connection. The stages are those of all
requests. Anything unusual (a body in pieces, an Idempotency-Key, a preference, direct mode,
a draining gateway) is left to the handler (gateway/inference/handler.py).
"""

from collections.abc import Sequence

from aiohttp import HttpVersion11, StreamReader
from aiohttp.http import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDictProxy

from gateway.api.inference import INFERENCE
from gateway.http.body.reading import check_media
from gateway.http.connection import EdgeConnection
from gateway.http.preference import PREFER
from gateway.http.problem_details import wants_problem
from gateway.inference.call import InferenceCall
from gateway.inference.entry import Entry
from gateway.inference.idempotency import IDEMPOTENCY_KEY
from gateway.inference.pending import CustomerMoved, Outcome, ResponseSink
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id


class FastPath:
    """Decides which requests take the fast path."""

    def __init__(self, entry: Entry, path: str = "/v1/inference") -> None:
        self.entry = entry
        self._path = path

    @property
    def open(self) -> bool:
        """Whether requests may take the fast path now: not while draining, nor in direct mode."""
        drain_state = self.entry.drain_state
        return not (drain_state.leaving or drain_state.closed or self.entry.own.direct_active)

    def accepts(self, message: RawRequestMessage, payload: StreamReader) -> bool:
        """Whether this request may take the fast path. aiohttp's parser has read it to its end."""
        if payload is EMPTY_PAYLOAD:  # No body, or a parser error instead of a request.
            return False
        headers = message.headers
        return (
            message.path == self._path
            and message.method == "POST"
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

    def call(
        self, connection: EdgeConnection, headers: CIMultiDictProxy[str], authorization: Sequence[str]
    ) -> "FastPathRequest":
        """A request on the fast path. `authorization`: all values of that header, which need not be in `headers`."""
        return FastPathRequest(self.entry, connection, headers, authorization)


class FastPathRequest(InferenceCall):
    """One request on the fast path, from its headers to its response."""

    __slots__ = ("_authorization", "_connection", "_entry", "authenticated")

    auxiliary = False  # Admission counts it.

    def __init__(
        self,
        entry: Entry,
        connection: EdgeConnection,
        headers: CIMultiDictProxy[str],
        authorization: Sequence[str],
    ) -> None:
        InferenceCall.__init__(self, INFERENCE, new_request_id(), headers, entry.own.clock())  # Faster than super().
        self._entry = entry
        self._authorization = authorization
        self._connection = connection
        self.authenticated = False  # Whether the caller was authenticated.

    @property
    def remote(self) -> str | None:
        """The client's address."""
        return self._connection.remote

    def occupy(self, customer_id: str) -> None:
        """Count the connection to this customer. Raises RequestError if it has too many."""
        self._connection.occupy(customer_id)

    def start(self, raw: bytes) -> None:
        """Run the stages up to admission; a rejection is written at once. Never raises."""
        entry = self._entry
        self.started = entry.own.clock()
        try:
            self.identity = entry.authenticator.authenticate(self._authorization, self)
            self.authenticated = True
            check_media(self.headers, len(raw), entry.largest().body_bytes)
            entry.decode(self, raw)
        except Exception as error:  # noqa: BLE001  # the client gets a response to every error
            self._write_error(error)
            return
        self._enter("")

    def _enter(self, cell: str) -> None:
        """Place the call, and admit its request. A rejection is written at once."""
        try:
            pipeline = self._entry.place(self, cell)
            pending = pipeline.build(self, self.sink)
            pipeline.admit(pending, self.large)
        except Exception as error:  # noqa: BLE001  # the client gets a response to every error
            if self.pipeline is not None and self.pending is not None:
                self.pipeline.pending_requests.remove(self.pending)
            self._write_error(error)

    def client_left(self) -> None:
        """The connection was closed before the response: cancel the pending request and record it."""
        if self.authenticated:
            self._entry.left(self)

    def sink(self) -> ResponseSink:
        """The method that writes the response. The pending request drops it once it is done, to avoid a reference cycle."""
        return self._finish

    def _finish(self, outcome: Outcome) -> None:
        """Respond to the outcome. Never raises, because it is called in the loops that serve all requests."""
        pipeline, pending = self.pipeline, self.pending
        if pipeline is None or pending is None:  # Not reached: only a request that was built can have an outcome.
            return
        try:
            pipeline.pending_requests.remove(pending)
            reply = pipeline.completed(self, pending, outcome)
            self._connection.write_response(pipeline.respond(self, (pending,), (reply,)))
        except CustomerMoved as moved:
            self._enter(moved.cell)
        except Exception as error:  # noqa: BLE001  # the client gets a response to every error
            self._write_error(error)

    def _write_error(self, error: Exception) -> None:
        """Record the error and write its response; without limit headers if the caller was not authenticated."""
        entry = self._entry
        try:
            if self.authenticated:
                response = entry.reject(self, error)
            else:
                entry.own.events.unknown(INFERENCE.endpoint, self.request_id, error)
                problem = wants_problem(self.headers)
                response = self._connection.error_response(error, self.request_id, problem=problem)
            self._connection.write_response(response)
        except Exception as fault:  # noqa: BLE001  # no other response is possible
            log_fault("response not written", fault, request_id=self.request_id)
