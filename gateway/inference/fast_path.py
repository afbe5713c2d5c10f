"""The fast lane: `POST /v1/inference` that came whole is answered without a task or a future of its own.

A ride stands in for the future of its waiter: whoever ends the waiting writes the answer, at that moment. What a ride
decides it decides with the steps of the handler (gateway/inference/handler.py), so both say the same; whatever is out of the
ordinary (a body in pieces, an Idempotency-Key, a preference, direct mode, a gateway that leaves) is left to the handler.
"""

from collections.abc import Sequence
from typing import Protocol

from aiohttp import HttpVersion, HttpVersion11, StreamReader
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDictProxy

from gateway.api.format import InferenceRequest
from gateway.api.inference import INFERENCE, read_inference
from gateway.catalog import IdentityView
from gateway.http.errors import wants_problem
from gateway.http.request import HEADER as PREFER
from gateway.http.request import check_media
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState
from gateway.inference.pending import Outcome, PendingRequest
from gateway.inference.pipeline import InferencePipeline
from gateway.inference.submission import HEADER as IDEMPOTENCY_KEY
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.request_id import new_request_id

NOTHING = InferenceRequest("")
"""Stands for a body that is not read yet."""


class RequestHead(Protocol):
    """The head of a request as aiohttp's parser gives it; what stands for a parser's error has none of it."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> HttpVersion: ...
    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def should_close(self) -> bool: ...
    @property
    def compression(self) -> str | None: ...
    @property
    def upgrade(self) -> bool: ...
    @property
    def chunked(self) -> bool: ...


class FastPathConnection(Protocol):
    """What a ride needs of its connection."""

    @property
    def remote(self) -> str | None: ...

    def arrive(self, answer: HttpResponse) -> None:
        """Write the answer."""

    def fault(self, error: Exception, request_id: str, *, problem: bool) -> HttpResponse:
        """An answer without anybody's limits."""


class FastPath:
    """Which requests ride, and the handler whose parts they use."""

    def __init__(self, inference: InferencePipeline, drain_state: DrainState, path: str = "/v1/inference") -> None:
        self.inference = inference
        self._drain_state = drain_state
        self._path = path

    @property
    def open(self) -> bool:
        """Whether anything rides now."""
        drain_state = self._drain_state
        return not (drain_state.leaving or drain_state.closed or self.inference.past_redis)

    def suits(self, message: RequestHead, payload: StreamReader) -> bool:
        """Whether a ride can answer this; aiohttp's parser has read it to its end."""
        if payload is EMPTY_PAYLOAD:  # Nothing, or an error in the place of a request.
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
            and IDEMPOTENCY_KEY not in headers
            and PREFER not in headers
            and self.open
        )


class FastPathRequest:
    """One request on its way, from its headers to its answer. To its waiter it is the future."""

    __slots__ = (
        "_asked",
        "_authorization",
        "_connection",
        "_identity",
        "_inference",
        "_left",
        "_outcome",
        "_pending",
        "headers",
        "request_id",
    )

    def __init__(
        self,
        fast_path: FastPath,
        connection: FastPathConnection,
        headers: CIMultiDictProxy[str],
        authorization: Sequence[str],
    ) -> None:
        """`authorization`: all values of that header, which need not be among `headers`."""
        self._authorization = authorization
        self._inference = fast_path.inference
        self._connection = connection
        self.headers = headers
        self.request_id = new_request_id()
        self._identity: IdentityView | None = None
        self._asked = NOTHING
        self._pending: PendingRequest | None = None
        self._outcome: Outcome | None = None
        self._left = False

    @property
    def remote(self) -> str | None:
        """The client's address."""
        return self._connection.remote

    @property
    def recognised(self) -> bool:
        """Whether it is known whose request it is."""
        return self._identity is not None

    def begin(self, raw: bytes) -> None:
        """Ask for admission; what is refused at once is answered at once."""
        inference = self._inference
        started = inference.clock()
        try:
            identity = self._identity = inference.recognise(self._authorization, self)
            check_media(self.headers, len(raw), inference.max_body_bytes)
            asked = self._asked = read_inference(raw, inference.max_input_bytes)
            if asked.service_tier is not None:
                identity = self._identity = inference.served_as(identity, asked)
            inference = self._inference = inference.serving(asked)
            payload = inference.payload(asked, INFERENCE)
            pending = self._pending = inference.pending(self, identity, payload, None, started, future=self)
            inference.enter(pending)
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer
            if self._pending is not None:
                inference.pending_requests.remove(self._pending)
            self._fail(error)

    def client_left(self) -> None:
        """The connection is gone."""
        self._left = True
        if self._pending is not None:
            self._inference.abandon(self._pending)
        if self._identity is not None:
            self._inference.ends.left(INFERENCE.endpoint, self.request_id, self._identity, self._pending)

    def done(self) -> bool:
        """As of a future."""
        return self._outcome is not None or self._left

    def cancelled(self) -> bool:
        """As of a future: nobody waits any more."""
        return self._left

    def result(self) -> Outcome:
        """As of a future. Raises RuntimeError before it is done."""
        if self._outcome is None:
            raise RuntimeError("This is a bug: the ride has not ended.")
        return self._outcome

    def set_result(self, outcome: Outcome) -> None:
        """The waiting ends: answer. Never raises, because it is called in the loops that serve everybody."""
        self._outcome = outcome
        pending, identity = self._pending, self._identity
        if pending is None or identity is None:  # Only who was entered can be told an outcome.
            return
        try:
            self._inference.pending_requests.remove(pending)
            self._connection.arrive(self._inference.answer(identity, pending, outcome, self._asked))
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        self._pending = None  # It knows this ride: only the garbage collector could free a ring of two.

    def _fail(self, error: Exception) -> None:
        try:
            self._connection.arrive(self._error_answer(error))
        except Exception as fault:  # noqa: BLE001  # nothing more can be said
            log_fault("answer not written", fault, request_id=self.request_id)

    def _error_answer(self, error: Exception) -> HttpResponse:
        problem = wants_problem(self.headers)
        if self._identity is None:
            self._inference.ends.unknown(INFERENCE.endpoint, self.request_id, error)
            return self._connection.fault(error, self.request_id, problem=problem)
        if not isinstance(error, RequestError):
            log_fault("request failed", error, request_id=self.request_id)
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        return self._inference.not_served(self, self._identity, self._pending, error)
