"""An HTTP response as bytes: status, headers and body, written to the connection in one piece.

Building the headers from known strings costs a fraction of a general header map. `headers` must not contain data from a
client.
"""

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from gateway.http.parsed_request import ParsedRequest

Headers = list[tuple[str, str]]

JSON = "application/json"
REASONS = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}
_LINES = {code: f"HTTP/1.1 {code} {phrase}\r\n" for code, phrase in REASONS.items()}
encode_json = msgspec.json.Encoder().encode


class _Date:
    """The line of the Date header, formatted once a second."""

    second = 0
    line = ""

    def now(self) -> str:
        second = int(time.time())
        if second != self.second:
            self.second, self.line = second, f"Date: {formatdate(second, usegmt=True)}\r\n"
        return self.line


_date_line = _Date().now


class HttpResponse:
    """One response. `close` closes the connection after it; `abort` does so without reading the rest of the request.

    `keep_alive`: whether the connection stays open, once the response is written.
    """

    __slots__ = ("abort", "body", "close", "content_type", "headers", "keep_alive", "lines", "status")

    def __init__(self, status: int, body: bytes, headers: Headers | None = None, content_type: str = JSON) -> None:
        self.status = status
        self.body = body
        self.headers: Headers = headers if headers is not None else []
        self.lines = ""  # More headers, as complete lines, so that constant ones are built once.
        self.content_type = content_type
        self.close = False
        self.abort = False
        self.keep_alive = True

    @classmethod
    def of(
        cls, status: int, document: object, headers: Headers | None = None, content_type: str = JSON
    ) -> "HttpResponse":
        """A response with `document` as JSON."""
        return cls(status, encode_json(document), headers, content_type)

    def head(self, connection: str = "") -> bytes:
        """The status line and all headers, including the empty line. `connection`: that header's value, or ""."""
        fields = "".join([f"{name}: {value}\r\n" for name, value in self.headers])
        end = f"Connection: {connection}\r\n\r\n" if connection else "\r\n"
        return (
            f"{_LINES[self.status]}Content-Type: {self.content_type}\r\n{self.length()}{_date_line()}"
            f"{self.lines}{fields}{end}"
        ).encode("latin-1")

    def length(self) -> str:
        """The header line for the end of the body."""
        return f"Content-Length: {len(self.body)}\r\n"

    async def write_to(self, request: "ParsedRequest") -> None:
        """Write the response to this request. Raises ConnectionResetError if the client left."""
        self.keep_alive = request.keep_alive and not self.close and not self.abort
        connection = request.protocol
        transport = connection.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("The client left.")
        head = self.head(self.connection_option(request))
        # Both have the length of a body that they do not contain.
        transport.write(head if request.method == "HEAD" or self.status == 304 else head + self.body)
        if self.abort:
            connection.close()
        elif connection.writing_paused:
            await connection.drain()

    def connection_option(self, request: "ParsedRequest") -> str:
        """The value of the header Connection; "" for none."""
        if not self.keep_alive:
            return "close"
        return "" if request.version >= (1, 1) else "keep-alive"
