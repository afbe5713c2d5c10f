"""Reading the requests of one connection, one at a time: aiohttp's parser, the ends of requests, and flow control of bodies.

A request is parsed only when the one before it has its response; until then the bytes behind it are held. Request lines
that the parser accepts and this server rejects (other protocols or versions, invalid hosts) are detected here.

The parser does not report whether it has read more than one request. The last byte of data whose end is not known is
therefore passed separately: if it completes a request, nothing of the next one has arrived.
"""

import asyncio
from typing import cast

from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpProcessingError, HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web import RequestPayloadError

from gateway.http.body.reading import READ_BYTES
from gateway.http.header_cache import is_complete, is_header_block
from gateway.http.request_line import request_line_error, rtsp_line

NOT_HTTP = "The request is not valid HTTP."
MAX_FIELD_BYTES = 8190
"""Of a request target, and of a header's name and value together."""

MAX_HEADERS = 128
MAX_LINE_BYTES = 16_384
"""Bytes of a request line that are kept until its headers are complete."""

READ_AHEAD = 65_536
"""Bytes behind the current request, after which reading stops. One read of the socket may exceed it."""

_RTSP = b" RTSP/"


class _NoFlow(BaseProtocol):
    """The protocol of a stream that needs no flow control."""

    __slots__ = ()

    def pause_reading(self) -> None:
        """Nothing more arrives."""

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002  # aiohttp's signature
        """Nothing was paused."""


class RequestReader:
    """Parses what arrives on one connection. It is the protocol of the body streams, which pause and resume it.

    `body`: of the last request. `at_boundary`: that request was read to its end, and nothing behind it has arrived.
    `problem`: why the received data is not valid; nothing behind it is read.
    """

    __slots__ = (
        "_body_bytes",
        "_held",
        "_parser",
        "_paused",
        "_recent",
        "_transport",
        "_transport_paused",
        "_unread",
        "at_boundary",
        "body",
        "problem",
    )

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport: asyncio.Transport | None = transport
        self._parser: HttpRequestParser | None = HttpRequestParser(
            cast("BaseProtocol", self),
            loop,
            READ_BYTES,
            max_line_size=MAX_FIELD_BYTES,
            max_headers=MAX_HEADERS,
            max_field_size=MAX_FIELD_BYTES,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,  # It stops at the end of each request.
        )
        self.body: StreamReader = EMPTY_PAYLOAD
        self._body_bytes = 0  # Its Content-Length.
        self.at_boundary = True
        self.problem: str | None = None
        self._held = b""  # Received, and not passed to the parser.
        self._unread = False  # The parser has stopped at the end of a request, perhaps before the end of its input.
        self._paused = False  # The body stream is full.
        self._transport_paused = False
        self._recent = b""  # Passed to the parser, and may contain the request line of the next request.

    def close(self) -> None:
        """Drop the parser and the body, which reference this object: a ring, freed by the garbage collector only."""
        self._transport = self._parser = None
        self.body = EMPTY_PAYLOAD
        self._held = b""

    def drop_body(self) -> None:
        """Free what was not read of a complete body."""
        if self.body.is_eof():
            self.body = EMPTY_PAYLOAD

    @property
    def connected(self) -> bool:
        """Whether more of a body can arrive."""
        return self._transport is not None

    @property
    def held_bytes(self) -> int:
        """The number of bytes that wait for a response."""
        return len(self._held)

    @property
    def incomplete(self) -> bool:
        """Whether the current body needs data that has not arrived."""
        return not (self._paused or self.body.is_eof())

    def hold(self, data: bytes) -> None:
        """Keep data that arrives before the current request has its response."""
        self._held += data
        self.at_boundary = False
        self._update_reading()

    def read(self, data: bytes, *, one_piece: bool = False) -> RawRequestMessage | None:
        """Parse data. Returns a request once its headers are complete; then its body is read, until its end.

        Not called between that end and the response. `one_piece`: the data may be one complete request.
        """
        if self._paused or self.problem is not None:
            self._held += data
            self._update_reading()
            return None
        if self._unread or self._held:
            return self._read_held(data)
        if not self.body.is_eof():
            if len(data) <= self._body_bytes - self.body.total_bytes:
                self._feed(data)
                self._set_boundary(self.body.is_eof())
                return None
        elif self.at_boundary and (one_piece or is_header_block(data)):
            self._remember(data)
            message = self._feed(data)
            self._set_boundary(is_complete(data, message, self.body))
            return message
        return self._read_all_but_last(data)

    def _read_held(self, data: bytes) -> RawRequestMessage | None:
        """Continue behind a request, or in a body that was paused."""
        self._held += data
        in_body = not self.body.is_eof()
        message = self._feed(b"")
        if self._has_stopped(in_body or message is not None):
            if not self._unread and not self._held:
                self._set_boundary(self.body.is_eof())
            return message
        self._unread = False
        held, self._held = self._held, b""
        self._update_reading()
        behind = self._read_all_but_last(held) if held else None
        return message or behind

    def _read_all_but_last(self, data: bytes) -> RawRequestMessage | None:
        self.at_boundary, in_body = False, not self.body.is_eof()
        first, last = data[:-1], data[-1:]
        self._remember(first)
        message = self._feed(first) if first else None
        if self._has_stopped(in_body or message is not None):
            self._held, self._unread = last, True
            return message
        self._remember(last)
        begun = self._feed(last)
        message = message or begun
        self._set_boundary((in_body or message is not None) and self.body.is_eof())
        return message

    def _set_boundary(self, at_boundary: bool) -> None:  # noqa: FBT001
        """All data was parsed. `at_boundary`: it ended with a request."""
        self.at_boundary = at_boundary and self.problem is None
        self._recent = b"" if self.at_boundary else _line_begun(self._recent)

    def _has_stopped(self, in_request: bool) -> bool:  # noqa: FBT001
        """Whether the parser stopped, perhaps before the end of its input."""
        return self._paused or self.problem is not None or (in_request and self.body.is_eof())

    def _feed(self, data: bytes) -> RawRequestMessage | None:
        """Pass data to the parser. Returns the request whose headers it completed, if its request line is acceptable."""
        if self._parser is None:
            return None
        try:
            messages, _, _ = self._parser.feed_data(data)
        except (HttpProcessingError, ValueError):  # Its text quotes the client.
            self._fail(NOT_HTTP)
            return None
        if not messages:
            return None
        message: RawRequestMessage = messages[0][0]
        self.body = messages[0][1]
        self._body_bytes = int(message.headers.get("Content-Length", 0))
        line = rtsp_line(message, self._recent)
        if line is not None:
            self._recent = self._recent[line.end() :]
        problem = request_line_error(message, line)
        if problem is not None:
            self._fail(problem)
            return None
        return message

    def _fail(self, problem: str) -> None:
        self.problem, self.at_boundary = problem, False
        if not self.body.is_eof():
            self.body.set_exception(RequestPayloadError())

    def _remember(self, data: bytes) -> None:
        """Keep what may be the begin of a request line, and all lines if one may be of RTSP."""
        recent = self._recent + data
        self._recent = recent if _RTSP in recent else _line_begun(recent)

    def pause_reading(self) -> None:
        """Called by the body stream when it is full."""
        self._paused = True
        if self._parser is not None:
            self._parser.pause_reading()
        self._update_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002  # aiohttp's signature
        """Called by the body stream after every read, and at its end; usually nothing was paused."""
        if not self._paused:
            return
        self._paused = False
        if resume_parser:
            self._read_held(b"")
        self._update_reading()

    def _update_reading(self) -> None:
        """Pause or resume reading of the socket."""
        pause = self._paused or len(self._held) > READ_AHEAD
        if pause is self._transport_paused or self._transport is None or self._transport.is_closing():
            return
        self._transport_paused = pause
        if pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


def complete_body(raw: bytes, loop: asyncio.AbstractEventLoop) -> StreamReader:
    """The stream of a body that was read already."""
    body = StreamReader(_NoFlow(loop), len(raw), loop=loop)
    body.feed_data(raw)
    body.feed_eof()
    return body


def _line_begun(data: bytes) -> bytes:
    """From the begin of the last line, or of the first one that may be of RTSP."""
    at = data.find(_RTSP)
    start = data.rfind(b"\n", 0, len(data) if at < 0 else at) + 1
    return data[start : start + MAX_LINE_BYTES]
