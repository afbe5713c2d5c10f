"""A request as its handler sees it: line, headers, and the body that may still be arriving."""

from typing import TYPE_CHECKING

from aiohttp import HttpVersion, StreamReader
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDictProxy, MultiDictProxy

if TYPE_CHECKING:
    import asyncio

    from gateway.http.connection import EdgeConnection


class ParsedRequest:
    """One request. `content`: its body. `raw_path`: the target of the request line. `protocol`: its connection."""

    __slots__ = ("_message", "content", "headers", "keep_alive", "method", "protocol", "raw_path", "version")

    def __init__(self, message: RawRequestMessage, content: StreamReader, protocol: "EdgeConnection") -> None:
        self._message = message
        self.content = content
        self.protocol = protocol
        self.method: str = message.method
        self.raw_path: str = message.path
        self.version: HttpVersion = message.version
        self.headers: CIMultiDictProxy[str] = message.headers
        self.keep_alive: bool = not message.should_close

    @property
    def query(self) -> MultiDictProxy[str]:
        """The parameters of the query."""
        return self._message.url.query

    @property
    def content_length(self) -> int | None:
        """The length of the body, if the client announced it."""
        length = self.headers.get("Content-Length")
        return None if length is None else int(length)

    @property
    def transport(self) -> "asyncio.Transport | None":
        """The transport of the connection; None once it is closed."""
        return self.protocol.transport

    @property
    def remote(self) -> str | None:
        """The client's address, if the transport has one."""
        return self.protocol.remote
