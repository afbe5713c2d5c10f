"""One HTTP client for an endpoint's life: calls with a limit to each of their phases, and plain names for what goes wrong."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec

from gpu_pool.backends.backend import InvalidOutput
from gpu_pool.backends.openai_endpoint.settings import EndpointUrl
from gpu_pool.config import Access
from scheduler.errors import TierlaneError

MAX_ANSWER_BYTES = 64 << 20
_AT_ONCE = 1 << 16
_IDLE_S = 15.0  # Servers close idle connections, too; the sooner we do, the fewer calls go into a closed one.


class NoAnswer(TierlaneError):
    """Nothing of an answer came. `sent`: the request may have been read; else there was no connection for it."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class BrokenOff(TierlaneError):
    """An answer began and did not end."""


class TooSlow(TierlaneError):
    """The time for a phase of the call was over."""


class EndpointResponse(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Opened:
    """An answer of which the head is here."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    @property
    def in_pieces(self) -> bool:
        """Whether the server sends events, as it was asked to."""
        return self.status == 200 and self._response.content_type == "text/event-stream"

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises BrokenOff."""
        try:
            async for part in self._response.content.iter_any():
                yield part
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BrokenOff(f"The endpoint's answer broke off: {type(error).__name__}.") from None

    async def whole(self) -> EndpointResponse:
        """The body to its end. Raises BrokenOff, and InvalidOutput for one that is too large."""
        body = bytearray()
        async for part in self.parts():
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise InvalidOutput("The model's answer is too large.")
        return EndpointResponse(self.status, self.headers, bytes(body))


class Transport:
    """Calls to one endpoint. `open` comes first, in the loop that makes the calls."""

    def __init__(self, address: EndpointUrl, access: Access) -> None:
        """Raises StartError for certificates that cannot be used."""
        self._base = address.base
        self._access = access
        self._tls: ssl.SSLContext | bool = access.ssl_context() if address.base.startswith("https:") else True
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the client; it connects on use."""
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._access.api_key:
            headers["Authorization"] = f"Bearer {self._access.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._access.connect_ms / 1000),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_AT_ONCE,
        )

    async def close(self) -> None:
        """Drop all connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, url: str, within_s: float) -> EndpointResponse:
        """A small document. Raises NoAnswer, BrokenOff, TooSlow."""
        async with self._limited(within_s), self._begun("GET", url, None, within_s) as opened:
            return await opened.whole()

    async def post(
        self, route: str, body: Mapping[str, Any], within_s: float, traceparent: str = ""
    ) -> EndpointResponse:
        """A whole answer. Raises NoAnswer, BrokenOff, TooSlow; InvalidOutput for one that is too large."""
        async with self._limited(within_s), self.begun(route, body, within_s, traceparent) as opened:
            return await opened.whole()

    @asynccontextmanager
    async def begun(
        self, route: str, body: Mapping[str, Any], within_s: float, traceparent: str = ""
    ) -> AsyncIterator[Opened]:
        """An answer whose body the caller reads; what is left of it when the block ends is not wanted, and the server
        is hung up on. Raises NoAnswer, TooSlow. How long the body may take is the caller's matter.
        `traceparent`: the span that asks, "" where nobody traces it.
        """
        headers = {"traceparent": traceparent} if traceparent else None
        sent = msgspec.json.encode(body)
        async with self._begun("POST", self._base + route, sent, within_s, headers) as opened:
            yield opened

    def patience_s(self, within_s: float) -> float:
        """Seconds for a whole call where its batch has `within_s`."""
        return min(within_s, self._access.total_ms / 1000 or within_s)

    @asynccontextmanager
    async def _limited(self, within_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.patience_s(within_s)):
                yield
        except TimeoutError:
            raise TooSlow("The endpoint did not end its answer in time.") from None

    @asynccontextmanager
    async def _begun(
        self, method: str, url: str, body: bytes | None, within_s: float, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Opened]:
        response = await self._head(method, url, body, within_s, headers)
        try:
            yield Opened(response)
        finally:
            response.close()  # Where all was read, the connection is back in the pool already.

    async def _head(
        self, method: str, url: str, body: bytes | None, within_s: float, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("the transport is used before open(); this is a bug")
        first_s = min(within_s, self._access.first_byte_ms / 1000 or within_s)
        try:
            async with asyncio.timeout(first_s):
                # A redirect would take the key to wherever it points.
                return await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NoAnswer(f"The endpoint cannot be reached: {type(error).__name__}.", sent=False) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise NoAnswer(f"The endpoint hung up: {type(error).__name__}.", sent=True) from None
        except TimeoutError:
            raise TooSlow("The endpoint did not begin its answer in time.") from None
