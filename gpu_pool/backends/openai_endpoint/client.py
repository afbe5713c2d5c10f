"""The HTTP client of an endpoint: calls with a timeout for each phase, and distinct errors."""

import asyncio
import errno
import os
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from gpu_pool.backends.backend import InvalidOutput
from gpu_pool.backends.openai_endpoint.faults import EndpointFault, FaultCause
from gpu_pool.backends.openai_endpoint.messages import Body
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl
from gpu_pool.config import Access
from scheduler.errors import TierlaneError

MAX_ANSWER_BYTES = 64 << 20
_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 18
"""Larger bodies are written in pieces of this size, without a long step of the event loop."""

_STREAMS = frozenset({"text/event-stream", "text/plain", "application/octet-stream"})
"""Media types of streams: some servers write events as plain text, or without a type, for which aiohttp has the last one."""

_IDLE_S = 1.5
"""Servers close idle connections too, uvicorn after 5 s, gunicorn after 2; closing earlier avoids lost calls."""
_TOLD_IDLE = re.compile(r"\btimeout\s*=\s*\"?(\d+)", re.IGNORECASE)
"""In the header Keep-Alive, by which some servers tell their own time."""

_UNREACHED: tuple[tuple[type[Exception], str, FaultCause], ...] = (
    (aiohttp.ClientConnectorDNSError, "its host name is not known", FaultCause.HOST_UNKNOWN),
    (
        aiohttp.ClientConnectorCertificateError,
        "its certificate is not accepted; check the host name in the URL and TIERLANE_ENDPOINT_CA_FILE",
        FaultCause.TLS,
    ),
    (aiohttp.ClientConnectorSSLError, "it does not use TLS as expected; does the URL need http://?", FaultCause.TLS),
    (aiohttp.ConnectionTimeoutError, "it does not accept the connection in time", FaultCause.TIMEOUT),
)
"""Why there is no connection, by the exception; for others the words of the operating system."""


class NoResponse(TierlaneError):
    """No byte of a response was received. `sent`: the request may have been read; otherwise there was no connection."""

    def __init__(self, reason: str, *, sent: bool, cause: FaultCause = FaultCause.CLOSED) -> None:
        super().__init__(reason)
        self.sent, self.cause = sent, cause


class ResponseAborted(TierlaneError):
    """A response began and did not end."""

    cause = FaultCause.CLOSED


class CallTimeout(TierlaneError):
    """The timeout of a phase expired."""

    cause = FaultCause.TIMEOUT


CALL_FAILURES = (NoResponse, ResponseAborted, CallTimeout, InvalidOutput)
"""All failures of a call whose whole response is read."""


def fault_of(error: NoResponse | ResponseAborted | CallTimeout | InvalidOutput) -> EndpointFault:
    """The failure of a call as a reason why the endpoint cannot be used."""
    return EndpointFault(str(error), FaultCause.OTHER if isinstance(error, InvalidOutput) else error.cause)


class EndpointResponse(NamedTuple):
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class OpenResponse:
    """A response whose headers were received."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    @property
    def is_stream(self) -> bool:
        """Whether the server sends events, as requested."""
        return self.status == 200 and self._response.content_type in _STREAMS

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises ResponseAborted."""
        try:
            async for part in self._response.content.iter_any():
                yield part
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ResponseAborted(f"The endpoint's response broke off: {type(error).__name__}.") from None

    @property
    def content(self) -> aiohttp.StreamReader:
        """The body, for `StreamSweep`."""
        return self._response.content

    async def whole(self, within_s: float | None = None) -> EndpointResponse:
        """The whole body. Raises ResponseAborted, CallTimeout after `within_s`, and InvalidOutput for one that is too large."""
        body = bytearray()
        try:
            async with asyncio.timeout(within_s):
                async for part in self.parts():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise InvalidOutput("The model's output is too large.")
        except TimeoutError:
            raise CallTimeout("The endpoint did not finish its response in time.") from None
        return EndpointResponse(self.status, self.headers, bytes(body))


class _Connector(aiohttp.TCPConnector):
    """Uses no idle connection on which the server has sent more than its responses: it would be taken for the next one."""

    async def _get(self, *arguments: Any) -> aiohttp.connector.Connection | None:
        while (found := await super()._get(*arguments)) is not None:
            if found.protocol is None or not found.protocol.should_close:
                break
            found.close()
        return found


class Transport:
    """Calls to one endpoint. Call `open` first, in the event loop of the calls."""

    def __init__(self, address: EndpointUrl, access: Access) -> None:
        """Raises StartError for certificates that cannot be used."""
        self._base = address.base
        self._access = access
        self._tls: ssl.SSLContext | bool = access.ssl_context() if address.base.startswith("https:") else True
        self._session: aiohttp.ClientSession | None = None
        self._connector: aiohttp.TCPConnector | None = None

    async def open(self) -> None:
        """Create the client; it connects on use."""
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._access.api_key:
            headers["Authorization"] = f"Bearer {self._access.api_key}"
        self._connector = _Connector(limit=0, ssl=self._tls, keepalive_timeout=_IDLE_S)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._access.connect_ms / 1000),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BYTES,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, url: str, within_s: float) -> EndpointResponse:
        """A small document. Raises NoResponse, ResponseAborted, CallTimeout."""
        async with self._limited(within_s), self._begun("GET", url, None, within_s) as opened:
            return await opened.whole()

    async def post(self, route: str, body: Body, within_s: float, traceparent: str = "") -> EndpointResponse:
        """A whole response. Raises NoResponse, ResponseAborted, CallTimeout; InvalidOutput for one that is too large."""
        async with self._limited(within_s), self.open_post(route, body, within_s, traceparent) as opened:
            return await opened.whole()

    @asynccontextmanager
    async def open_post(
        self, route: str, body: Body, within_s: float, traceparent: str = ""
    ) -> AsyncIterator[OpenResponse]:
        """A response whose body the caller reads, within its own time; the connection is closed if the body was not
        read to its end. Raises NoResponse, CallTimeout. `traceparent`: the calling span, "" if it is not traced.
        """
        headers = {"traceparent": traceparent} if traceparent else {}
        sent: bytes | AsyncIterator[bytes] = body.begin
        if body.chat is not None or len(body.begin) > _WRITE_BYTES:
            sent = _pieces(body)
            headers["Content-Length"] = str(body.size)
        async with self._begun("POST", self._base + route, sent, within_s, headers) as opened:
            yield opened

    def call_limit_s(self, within_s: float) -> float:
        """Seconds for a whole call of a request that has `within_s` left."""
        return min(within_s, self._access.total_ms / 1000 or within_s)

    @asynccontextmanager
    async def _limited(self, within_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.call_limit_s(within_s)):
                yield
        except TimeoutError:
            raise CallTimeout("The endpoint did not finish its response in time.") from None

    @asynccontextmanager
    async def _begun(
        self,
        method: str,
        url: str,
        body: bytes | AsyncIterator[bytes] | None,
        within_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[OpenResponse]:
        if self._session is None:
            raise RuntimeError("the transport is used before open(); this is a bug")
        first_s = min(within_s, self._access.first_byte_ms / 1000 or within_s)
        try:
            async with asyncio.timeout(first_s):
                # A redirect would send the key to its target.
                response = await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            number = error.errno if isinstance(error, OSError) else None
            why = os.strerror(number).lower() if number and number > 0 else type(error).__name__
            cause = FaultCause.REFUSED if number == errno.ECONNREFUSED else FaultCause.UNREACHABLE
            known = ((text, its) for kind, text, its in _UNREACHED if isinstance(error, kind))
            why, cause = next(known, (why, cause))
            raise NoResponse(f"The endpoint cannot be reached: {why}.", sent=False, cause=cause) from None
        except aiohttp.ClientResponseError:
            words = "The endpoint's response is not HTTP; does the URL need https://?"
            raise NoResponse(words, sent=True, cause=FaultCause.WRONG_SERVER) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            asked = f"{method} {urlsplit(url).path}"
            words = f"The endpoint closed the connection of {asked} without a response: {type(error).__name__}."
            raise NoResponse(words, sent=True) from None
        except TimeoutError:
            raise CallTimeout("The endpoint did not begin its response in time.") from None
        told = _TOLD_IDLE.search(response.headers.get("Keep-Alive", ""))
        if told is not None and self._connector is not None:
            # Idle connections are closed in half the time after which the server does; aiohttp has no public way.
            self._connector._keepalive_timeout = min(_IDLE_S, int(told[1]) / 2)  # noqa: SLF001
        try:
            yield OpenResponse(response)
        finally:
            response.close()  # After a complete body the connection is in the pool already.


async def _pieces(body: Body) -> AsyncIterator[bytes]:
    for at in range(0, len(body.begin), _WRITE_BYTES):
        yield body.begin[at : at + _WRITE_BYTES]
    if body.chat is not None:
        for piece in body.chat.pieces(1, _WRITE_BYTES):
            yield piece
