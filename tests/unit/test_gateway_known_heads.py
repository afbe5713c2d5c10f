"""Heads that need no second parsing: which requests are recognised, and that the parser would have said the same."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http.header_cache import CompleteRequest, HeaderCache, is_complete, split_request

LINE = b"POST /v1/inference HTTP/1.1"
BODY = b'{"input":"hello"}'


def request(*lines: bytes, body: bytes = BODY) -> bytes:
    return b"\r\n".join([LINE, *lines]) + b"\r\n\r\n" + body


USUAL = (b"Host: a", b"Authorization: Bearer one", b"Accept: */*", b"Content-Length: 17", b"X-Last: b")
LOWER = (b"content-length: 17", b"host: a", b"authorization: Bearer one")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """For the parser, which wants one."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def a_parser(loop: asyncio.AbstractEventLoop) -> HttpRequestParser:
    """As the gateway has it."""
    protocol = BaseProtocol(loop)
    return HttpRequestParser(protocol, loop, 2**16, max_line_size=8190, max_field_size=8190, auto_decompress=False)


class Parsed:
    """What aiohttp's parser says of some bytes: one request and nothing else, or None."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, data: bytes) -> tuple[Any, bytes] | None:
        try:
            messages, _, tail = a_parser(self._loop).feed_data(data)
        except HttpProcessingError:
            return None
        if len(messages) != 1 or tail or not messages[0][1].is_eof():
            return None
        message, payload = messages[0]
        return message, payload.read_nowait()


@pytest.fixture(scope="module")
def parsed(loop: asyncio.AbstractEventLoop) -> Parsed:
    """The judge of what HTTP is."""
    return Parsed(loop)


@pytest.mark.parametrize(
    "data",
    [
        request(*USUAL),
        request(*LOWER),
        request(b"Authorization: Bearer one  ", b"Content-Length: 17"),
        request(b"Content-Length: 017", b"Authorization:   Bearer one"),
    ],
)
def test_a_whole_request_is_taken_apart(data: bytes) -> None:
    """Whichever header comes first, and with spaces as the parser drops them."""
    whole = split_request(data)

    assert whole is not None
    assert (whole.authorization, whole.body) == ("Bearer one", BODY)
    assert b"Bearer" not in whole.template


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n".join([LINE, b"Authorization: Bearer one", b"Content-Length: 073\r"]),  # 73 and 3 bytes, and no end
        request(*USUAL, b"X-Long: " + b"x" * 4096),
        request(*USUAL)[:-1],
        request(*USUAL) + b"x",
        request(*USUAL) * 2,
        request(b"Authorization: Bearer one"),
        request(b"Content-Length: 17"),
        request(b"Authorization: Bearer one", b"Content-Length: 0", body=b""),
        request(b"Authorization: Bearer one", b"Content-Length: +17"),
        request(b"Authorization: Bearer one", b"Content-Length: 17 "),
        request(b"Authorization: Bearer one", b"Content-Length: " + b"0" * 20 + b"17"),
        request(b"Authorization: Bearer \xc3\xa9", b"Content-Length: 17"),
        request(b"Authorization: Bearer\tone", b"Content-Length: 17"),
        request(b"Authorization: Bearer \x00", b"Content-Length: 17"),
        request(b"Authorization: Bearer " + b"x" * 5000, b"Content-Length: 17"),
        request(b"Content-Length: 17", body=b"Authorization: Bearer"),
        request(body=b"\r\nAuthorization: Bearer one\r\nContent-Length: 0\r\n\r\n"),
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_the_parser(data: bytes) -> None:
    """More or less than one request, a header of the two missing, or a value that needs judging."""
    assert split_request(data) is None


def learnt(heads: HeaderCache, parsed: Parsed, data: bytes) -> CompleteRequest:
    whole, found = split_request(data), parsed(data)
    assert whole is not None
    assert found is not None
    heads.add(whole, found[0].headers)
    return whole


def test_a_head_is_known_whoever_sends_it_and_however_much(parsed: Parsed) -> None:
    """The key and the length are not part of it; what is kept of it has neither."""
    heads = HeaderCache()
    learnt(heads, parsed, request(*USUAL))
    other = split_request(
        request(b"Host: a", b"Authorization: Basic x", *USUAL[2:3], b"Content-Length: 3", USUAL[4], body=b"abc")
    )

    assert other is not None
    headers = heads.get(other)
    assert headers is not None
    assert dict(headers) == {"Host": "a", "Accept": "*/*", "X-Last": "b"}
    assert (other.authorization, other.body) == ("Basic x", b"abc")


@pytest.mark.parametrize("twice", [b"Authorization: Bearer two", b"authorization: Bearer one", b"AUTHORIZATION: x"])
def test_two_keys_are_never_known(parsed: Parsed, twice: bytes) -> None:
    """Else one of them would not be looked at."""
    heads = HeaderCache()
    learnt(heads, parsed, request(*USUAL, twice))

    assert len(heads) == 0


def test_no_more_heads_are_kept_than_may_be(parsed: Parsed) -> None:
    """The oldest makes room."""
    heads = HeaderCache(max_entries=3)
    wholes = [learnt(heads, parsed, request(*USUAL, b"X-Number: %d" % number)) for number in range(5)]

    assert [heads.get(whole) is not None for whole in wholes] == [False, False, True, True, True]
    assert len(heads) == 3


SPOTS = [b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"\x00", b"\xff", b"0", b"7", b",", b"Content-Length: 17\r\n"]
SPOTS += [
    b"Authorization: Bearer two\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"\r\n\r\n",
    b"GET",
    b"\r\nAuthorization: ",
]
CHANGES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 3), st.sampled_from(SPOTS) | st.binary(max_size=3)),
    min_size=1,
    max_size=3,
)


@given(
    base=st.sampled_from([USUAL, LOWER]),
    taught=CHANGES,
    changes=CHANGES,
    teach=st.booleans(),
    told=st.none() | st.integers(-2, 30),
    end=st.booleans(),
)
@settings(max_examples=2000, deadline=None)
def test_what_is_known_is_what_the_parser_would_say(
    parsed: Parsed, base: tuple[bytes, ...], taught: Any, changes: Any, teach: bool, told: int | None, end: bool
) -> None:
    """Of any bytes: recognised are only those of which the parser makes one request, with the same headers and body."""
    heads, learnt_of = HeaderCache(), dict[bytes, Any]()
    for data in [request(*base), changed(request(*base), taught)] if teach else [request(*base)]:
        whole, found = split_request(data), parsed(data)
        if whole is not None and found is not None and found[1] == whole.body:
            heads.add(whole, found[0].headers)
            learnt_of[whole.template] = line(found[0])
    data = changed(request(*base), changes)
    if not end:  # As if the rest were still on its way.
        data = data.partition(b"\r\n\r\n")[0] + b"\r"
    if told is not None:  # A length that may be right by where somebody believes the head to end.
        data = data.replace(b": 17", b": %03d" % (len(data) + 1 - told), 1)
    whole = split_request(data)
    headers = heads.get(whole) if whole is not None else None
    if whole is None or headers is None:
        return

    found = parsed(data)
    assert found is not None
    message, body = found
    again = CIMultiDict(headers)
    again["Authorization"] = whole.authorization
    assert int(message.headers["Content-Length"]) == len(whole.body)
    without = CIMultiDict(message.headers)
    del without["Content-Length"]
    assert sorted(again.items()) == sorted(without.items())
    assert (line(message), body) == (learnt_of[whole.template], whole.body)


def line(message: Any) -> tuple[Any, ...]:
    """All that the parser says of a head beside its headers."""
    flags = (message.should_close, message.upgrade, message.chunked, message.compression)
    return (message.method, message.path, message.version, *flags)


WHOLES = [
    request(*USUAL),
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    request(b"Host: a", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n"),
    request(b"Host: a", b"Connection: Upgrade", b"Upgrade: h2c"),
    request(*USUAL) + b"POST",
    b"\r\n" + request(*USUAL) + b"\r\n",
]


@given(base=st.sampled_from(WHOLES), changes=CHANGES | st.just([]))
@settings(max_examples=2000, deadline=None)
def test_what_is_all_of_it_leaves_the_parser_between_two(
    loop: asyncio.AbstractEventLoop, base: bytes, changes: Any
) -> None:
    """A request that comes behind it is parsed as if it were the first."""
    parser, data = a_parser(loop), changed(base, changes)
    try:
        messages, _, _ = parser.feed_data(data)
    except HttpProcessingError:
        return
    if len(messages) != 1 or not is_complete(data, *messages[0]):
        return

    parser.message_consumed()
    ((message, payload),), upgraded, tail = parser.feed_data(request(*USUAL))
    assert (message.path, payload.read_nowait(), upgraded, tail) == ("/v1/inference", BODY, False, b"")
    assert [name for name, _ in message.raw_headers] == [each.split(b":")[0] for each in USUAL]


@pytest.mark.parametrize(("data", "whole"), list(zip(WHOLES, [True, True, False, False, False, False], strict=True)))
def test_only_what_has_no_more_behind_it_is_all(loop: asyncio.AbstractEventLoop, data: bytes, whole: bool) -> None:
    """With a body or without; nothing that changes the protocol or comes in chunks."""
    (found,) = a_parser(loop).feed_data(data)[0]

    assert is_complete(data, *found) is whole


def changed(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """`data` with pieces replaced: (where, how many bytes go, what comes)."""
    for at, gone, come in changes:
        data = data[:at] + come + data[at + gone :]
    return data


def test_the_kept_headers_cannot_be_changed(parsed: Parsed) -> None:
    """They are shared by requests of different customers."""
    heads = HeaderCache()
    headers = heads.get(learnt(heads, parsed, request(*USUAL)))

    assert isinstance(headers, CIMultiDictProxy)
