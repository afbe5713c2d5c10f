"""Reading requests of a connection: in any pieces, with bodies that wait for their reader, and up to invalid data."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
from aiohttp.http import RawRequestMessage
from aiohttp.web import RequestPayloadError
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.header_cache import split_request
from gateway.http.request_line import BAD_VERSION
from gateway.http.request_reader import NOT_HTTP, READ_AHEAD, RequestReader

LINES = b" HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer one\r\n"
GET = (b"GET /get" + LINES + b"\r\n", "/get", b"")
LENGTH = (b"POST /length" + LINES + b"Content-Length: 9\r\n\r\n" + b"\r\n\r\nGET /", "/length", b"\r\n\r\nGET /")
CHUNKED = (
    b"POST /chunked" + LINES + b"Transfer-Encoding: chunked\r\n\r\n" + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX: y\r\n\r\n",
    "/chunked",
    b"abcde",
)
BLANK = (b"\r\n" + GET[0], "/get", b"")
RTSP = b"OPTIONS * RTSP/1.0\r\nHost: a\r\n\r\n"
REQUESTS = [GET, LENGTH, CHUNKED, BLANK]


class Transport:
    """Records whether reading is paused."""

    paused = False

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Served:
    """Reads as a connection does: the next request is parsed once the one before it has its response."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = Transport()
        self.reader = RequestReader(cast("asyncio.Transport", self.transport), loop)
        self.current: RawRequestMessage | None = None
        self.requests: list[tuple[str, bytes]] = []

    def receive(self, data: bytes) -> None:
        reader = self.reader
        if self.current is None:
            self.current = reader.read(data, one_piece=reader.at_boundary and split_request(data) is not None)
        elif reader.body.is_eof():
            reader.hold(data)
        else:
            reader.read(data)

    def respond(self) -> None:
        """Complete all requests that have arrived."""
        while self.current is not None and self.reader.body.is_eof():
            self.requests.append((self.current.path, self.reader.body.read_nowait()))
            self.current = None if self.reader.at_boundary else self.reader.read(b"")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop for the parser."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data`, cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@given(
    requests=st.lists(st.sampled_from(REQUESTS), max_size=5),
    unfinished=st.sampled_from([b"", b"\r\n", b"G", GET[0][:-1], LENGTH[0][:-9], LENGTH[0][:-1], CHUNKED[0][:-2]]),
    cuts=st.lists(st.integers(0, 1000), max_size=8),
    late=st.lists(st.booleans(), max_size=16),
)
@settings(max_examples=1500, deadline=None)
def test_requests_in_any_pieces(
    loop: asyncio.AbstractEventLoop, requests: list[Any], unfinished: bytes, cuts: list[int], late: list[bool]
) -> None:
    """The same requests, however they are cut and whenever they get their responses; the boundary behind them is found."""
    served = Served(loop)
    for number, piece in enumerate(pieces(b"".join(data for data, _, _ in requests) + unfinished, cuts)):
        served.receive(piece)
        if number >= len(late) or not late[number]:
            served.respond()
    served.respond()

    assert served.requests == [(path, body) for _, path, body in requests]
    assert (served.reader.problem, served.reader.held_bytes) == (None, 0)
    assert served.reader.at_boundary is not bool(unfinished)
    assert (served.current is not None) is (unfinished[:4] == b"POST")
    served.reader.close()


@given(
    requests=st.lists(st.sampled_from(REQUESTS), max_size=3),
    invalid=st.sampled_from(
        [b"garbage\r\n\r\n", b"\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"GET /x" + LINES + b"Host: b\r\n\r\n"]
    ),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
)
@settings(max_examples=500, deadline=None)
def test_invalid_data_behind_requests(
    loop: asyncio.AbstractEventLoop, requests: list[Any], invalid: bytes, cuts: list[int]
) -> None:
    """All requests in front of it are read, and nothing behind it."""
    served = Served(loop)
    for piece in pieces(b"".join(data for data, _, _ in requests) + invalid + GET[0], cuts):
        served.receive(piece)
        served.respond()

    assert served.requests == [(path, body) for _, path, body in requests]
    assert (served.reader.problem, served.reader.at_boundary, served.current) == (NOT_HTTP, False, None)
    served.reader.close()


@given(before=st.sampled_from([[], [GET], [GET, CHUNKED]]), cuts=st.lists(st.integers(0, 1000), max_size=6))
@settings(max_examples=300, deadline=None)
def test_other_protocols_are_detected(loop: asyncio.AbstractEventLoop, before: list[Any], cuts: list[int]) -> None:
    """RTSP, which the parser accepts, in any pieces and behind requests that end with a line."""
    served = Served(loop)
    for piece in pieces(b"".join(data for data, _, _ in before) + RTSP, cuts):
        served.receive(piece)
        served.respond()

    assert (served.reader.problem, len(served.requests)) == (BAD_VERSION, len(before))
    served.reader.close()


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("size", [1000, 50_000, 262_144, 2_000_000])
async def test_a_body_waits_for_its_reader(framing: str, size: int) -> None:
    """Reading is paused while the body stream is full; the next request is read after it."""
    served, body = Served(asyncio.get_running_loop()), b"x" * 1_500_000
    if framing == "length":
        data = b"POST /large" + LINES + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        data = (
            b"POST /large" + LINES + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
        )
    received, was_paused = b"", False
    for start in range(0, len(data), size):
        if served.transport.paused:
            was_paused = True
            received += await served.reader.body.readany()
        served.receive(data[start : start + size])
    while not served.reader.body.at_eof():
        received += await served.reader.body.readany()

    assert received == body
    assert (was_paused or size > len(body), served.transport.paused, served.reader.at_boundary) == (True, False, True)
    served.current = None
    served.receive(GET[0])
    served.respond()
    assert served.requests == [("/get", b"")]
    served.reader.close()


def test_a_broken_body_fails_for_its_reader(loop: asyncio.AbstractEventLoop) -> None:
    """The handler gets the error; nothing behind it is read."""
    served = Served(loop)
    served.receive(CHUNKED[0][: -len(b"0\r\nX: y\r\n\r\n")])
    served.receive(b"zz\r\n" + GET[0])

    assert isinstance(served.reader.body.exception(), RequestPayloadError)
    assert (served.reader.problem, served.requests) == (NOT_HTTP, [])
    served.reader.close()


def test_reading_ahead_is_bounded(loop: asyncio.AbstractEventLoop) -> None:
    """Reading stops while more bytes than that wait for the response, and goes on after it."""
    served = Served(loop)
    served.receive(GET[0])
    count = 0
    while not served.transport.paused:
        served.receive(GET[0])
        count += 1

    assert READ_AHEAD < served.reader.held_bytes <= READ_AHEAD + len(GET[0])
    served.respond()
    assert (len(served.requests), served.transport.paused, served.reader.at_boundary) == (count + 1, False, True)
    served.reader.close()
