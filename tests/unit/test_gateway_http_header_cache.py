"""The header cache: which requests match it, and that the parser would have returned the same."""

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

from gateway.api.inference import INFERENCE
from gateway.http.header_cache import CompleteRequest, HeaderCache, RepeatedHead, is_complete, split_request

LINE = b"POST /v1/inference HTTP/1.1"
BODY = b'{"input":"hello"}'


def request(*lines: bytes, body: bytes = BODY) -> bytes:
    return b"\r\n".join([LINE, *lines]) + b"\r\n\r\n" + body


USUAL = (b"Host: a", b"Authorization: Bearer one", b"Accept: */*", b"Content-Length: 17", b"X-Last: b")
LOWER = (b"content-length: 17", b"host: a", b"authorization: Bearer one")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop for the parser."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def new_parser(loop: asyncio.AbstractEventLoop) -> HttpRequestParser:
    """A parser with the gateway's settings."""
    protocol = BaseProtocol(loop)
    return HttpRequestParser(protocol, loop, 2**16, max_line_size=8190, max_field_size=8190, auto_decompress=False)


class Parse:
    """aiohttp's parser: message and body where the bytes are one request and nothing else, otherwise None."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, data: bytes) -> tuple[Any, bytes] | None:
        try:
            messages, _, tail = new_parser(self._loop).feed_data(data)
        except HttpProcessingError:
            return None
        if len(messages) != 1 or tail or not messages[0][1].is_eof():
            return None
        message, payload = messages[0]
        return message, payload.read_nowait()


@pytest.fixture(scope="module")
def parse(loop: asyncio.AbstractEventLoop) -> Parse:
    """The reference."""
    return Parse(loop)


def add(cache: HeaderCache, parse: Parse, data: bytes) -> CompleteRequest:
    complete, parsed = split_request(data), parse(data)
    assert complete is not None
    assert parsed is not None
    cache.add(complete, parsed[0].headers)
    return complete


@pytest.mark.parametrize(
    "data",
    [
        request(*USUAL),
        request(*LOWER),
        request(b"Authorization: Bearer one  ", b"Content-Length: 17"),
        request(b"Content-Length: 017", b"Authorization:   Bearer one"),
    ],
)
def test_a_complete_request_is_split(data: bytes) -> None:
    """In any order of headers, and with the white space that the parser drops. The template contains no key."""
    complete = split_request(data)

    assert complete is not None
    assert (complete.authorization, complete.body) == ("Bearer one", BODY)
    assert b"Bearer" not in complete.template


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n".join([LINE, b"Authorization: Bearer one", b"Content-Length: 073\r"]),  # 73 bytes and 3, without an end.
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
def test_unusual_requests_are_left_to_the_parser(data: bytes) -> None:
    """More or less than one request, one of the two headers missing, or a value that needs validation."""
    assert split_request(data) is None


def test_equal_headers_match_with_another_key_and_length(parse: Parse) -> None:
    """Key and length are not part of the entry. Its headers are shared by customers, so they are read-only."""
    cache = HeaderCache()
    add(cache, parse, request(*USUAL))
    lines = (b"Host: a", b"Authorization: Basic x", USUAL[2], b"Content-Length: 3", USUAL[4])
    other = split_request(request(*lines, body=b"abc"))

    assert other is not None
    headers = cache.get(other)
    assert isinstance(headers, CIMultiDictProxy)
    assert dict(headers) == {"Host": "a", "Accept": "*/*", "X-Last": "b"}
    assert (other.authorization, other.body) == ("Basic x", b"abc")


@pytest.mark.parametrize("second", [b"Authorization: Bearer two", b"authorization: Bearer one", b"AUTHORIZATION: x"])
def test_headers_with_two_keys_are_not_cached(parse: Parse, second: bytes) -> None:
    """One of the keys would not be checked."""
    cache = HeaderCache()
    add(cache, parse, request(*USUAL, second))

    assert len(cache) == 0


def test_the_number_of_entries_is_bounded(parse: Parse) -> None:
    """The oldest entry is dropped."""
    cache = HeaderCache(max_entries=3)
    added = [add(cache, parse, request(*USUAL, b"X-Number: %d" % number)) for number in range(5)]

    assert [cache.get(complete) is not None for complete in added] == [False, False, True, True, True]
    assert len(cache) == 3


PIECES = [b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"\x00", b"\xff", b"0", b"7", b",", b"\r\n\r\n", b"GET"]
PIECES += [b"Content-Length: 17\r\n", b"Authorization: Bearer two\r\n", b"Transfer-Encoding: chunked\r\n"]
PIECES += [b"\r\nAuthorization: "]
MUTATIONS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 3), st.sampled_from(PIECES) | st.binary(max_size=3)),
    min_size=1,
    max_size=3,
)


def mutated(data: bytes, mutations: list[tuple[int, int, bytes]]) -> bytes:
    """`data` with pieces replaced: (where, how many bytes are removed, what is inserted)."""
    for at, removed, inserted in mutations:
        data = data[:at] + inserted + data[at + removed :]
    return data


def line(message: Any) -> tuple[Any, ...]:
    """All that the parser returns for a message beside its headers."""
    flags = (message.should_close, message.upgrade, message.chunked, message.compression)
    return (message.method, message.path, message.version, *flags)


@given(
    base=st.sampled_from([USUAL, LOWER]),
    cached=st.none() | MUTATIONS,
    mutations=MUTATIONS,
    length=st.none() | st.integers(-2, 30),
    complete_head=st.booleans(),
)
@settings(max_examples=2000, deadline=None)
def test_a_cached_match_equals_the_parsed_request(
    parse: Parse, base: tuple[bytes, ...], cached: Any, mutations: Any, length: int | None, complete_head: bool
) -> None:
    """Of any bytes: only those match that the parser reads as one request with the same headers and body."""
    cache, lines_of = HeaderCache(), dict[bytes, Any]()
    for data in [request(*base), *([] if cached is None else [mutated(request(*base), cached)])]:
        complete, parsed = split_request(data), parse(data)
        if complete is not None and parsed is not None and parsed[1] == complete.body:
            cache.add(complete, parsed[0].headers)
            lines_of[complete.template] = line(parsed[0])
    data = mutated(request(*base), mutations)
    if not complete_head:  # The rest has not arrived yet.
        data = data.partition(b"\r\n\r\n")[0] + b"\r"
    if length is not None:  # A length that would fit if the head ended somewhere else.
        data = data.replace(b": 17", b": %03d" % (len(data) + 1 - length), 1)
    complete = split_request(data)
    headers = cache.get(complete) if complete is not None else None
    if complete is None or headers is None:
        return

    parsed = parse(data)
    assert parsed is not None
    message, body = parsed
    expected, found = CIMultiDict(message.headers), CIMultiDict(headers)
    assert int(expected.pop("Content-Length")) == len(complete.body)
    found["Authorization"] = complete.authorization
    assert sorted(found.items()) == sorted(expected.items())
    assert (line(message), body) == (lines_of[complete.template], complete.body)


@given(
    base=st.sampled_from([USUAL, LOWER]),
    body=st.binary(max_size=40),
    digits=st.none() | st.sampled_from([b"17", b"017", b"+17", b"17 ", b"", b"1\r\n7", b"0" * 12 + b"17"]),
    mutations=MUTATIONS | st.just([]),
)
@settings(max_examples=1500, deadline=None)
def test_a_repeated_head_equals_the_split_request(
    base: tuple[bytes, ...], body: bytes, digits: bytes | None, mutations: Any
) -> None:
    """Of any bytes: those match that are one complete request with the same headers, key included, of any length."""
    first = split_request(request(*base))
    assert first is not None
    repeated = RepeatedHead(first, CIMultiDictProxy(CIMultiDict()), INFERENCE)
    data = request(*base, body=body).replace(b": 17", b": " + (b"%d" % len(body) if digits is None else digits), 1)
    data = mutated(data, mutations)
    whole = split_request(data)
    equal = whole is not None and whole.head[: whole.length_at] == first.head[: first.length_at]
    equal = equal and whole is not None and whole.head[whole.length_end :] == first.head[first.length_end :]

    assert repeated.body_of(data) == (whole.body if whole is not None and equal else None)
    assert repeated.authorization == ("Bearer one",)


REQUESTS = [
    (request(*USUAL), True),
    (b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", True),
    (request(b"Host: a", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\n\r\n"), False),
    (request(b"Host: a", b"Connection: Upgrade", b"Upgrade: h2c"), False),
    (request(*USUAL) + b"POST", False),
    (b"\r\n" + request(*USUAL) + b"\r\n", False),
]


@pytest.mark.parametrize(("data", "complete"), REQUESTS)
def test_complete_means_that_nothing_follows(loop: asyncio.AbstractEventLoop, data: bytes, complete: bool) -> None:
    """With or without a body; chunked bodies and protocol upgrades do not count."""
    (parsed,) = new_parser(loop).feed_data(data)[0]

    assert is_complete(data, *parsed) is complete


@given(base=st.sampled_from([data for data, _ in REQUESTS]), mutations=MUTATIONS | st.just([]))
@settings(max_examples=2000, deadline=None)
def test_after_a_complete_request_the_parser_is_in_its_initial_state(
    loop: asyncio.AbstractEventLoop, base: bytes, mutations: Any
) -> None:
    """The next request on the connection is parsed as if it were the first."""
    parser, data = new_parser(loop), mutated(base, mutations)
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
