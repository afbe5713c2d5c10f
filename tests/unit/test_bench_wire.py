"""Requests as bytes, and answers put together from reads of any size."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlane.bench.http_client import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    BenchResponse,
    RequestForm,
    ResponseParser,
    WireError,
    header,
)
from tierlane.bench.plan import NONCE_CHARACTERS, Inputs, filler_of

OK = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\nX-Request-ID: req_1\r\n\r\nhello world"
)


def answer(data: bytes) -> BenchResponse:
    response = ResponseParser().feed(data)
    assert response is not None
    return response


@given(st.sets(st.integers(1, len(OK) * 2 - 1)))
def test_answers_are_whole_however_they_are_split(cuts: set[int]) -> None:
    """Two answers one after the other, cut anywhere, come out once each, at their last byte."""
    parser, found = ResponseParser(), []
    edges = [0, *sorted(cuts | {len(OK)}), len(OK) * 2]
    for start, end in pairwise(edges):
        response = parser.feed((OK * 2)[start:end])
        if response is not None:
            found.append((end, response))

    assert [end for end, _ in found] == [len(OK), len(OK) * 2]
    assert all((r.status, r.body, r.keep_alive) == (200, b"hello world", True) for _, r in found)


@pytest.mark.parametrize(
    ("data", "status", "body", "keep_alive"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length:2\r\n\r\n{}", 429, b"{}", True),
        (b"HTTP/1.1 503 Busy\r\nCONTENT-LENGTH:  2  \r\nConnection: close\r\n\r\n{}", 503, b"{}", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n", 200, b"", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", False),
        (b"HTTP/1.1 204 No Content\r\nDate: x\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", True),
    ],
)
def test_answers_that_are_read(data: bytes, status: int, body: bytes, keep_alive: bool) -> None:
    """Header names in any case, interim answers skipped, and whether the connection can be used again."""
    response = answer(data)

    assert (response.status, response.body, response.keep_alive) == (status, body, keep_alive)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "chunked"),
        (b"HTTP/1.1 200 OK\r\nDate: x\r\n\r\n", "no Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "not a number: b'x'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "not a number"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), "larger than"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy", "More bytes"),
        (b"SSH-2.0-x\r\n\r\n", "does not begin like HTTP"),
        (b"HTTP/1.1 abc OK\r\n\r\n", "does not begin like HTTP"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "does not begin like HTTP"),
        (b"x" * (MAX_HEAD_BYTES + 1), "head is larger"),
    ],
)
def test_answers_that_cannot_be_read_are_told_why(data: bytes, fault: str) -> None:
    """One sentence that names the fault."""
    with pytest.raises(WireError) as caught:
        ResponseParser().feed(data)

    assert fault in str(caught.value)


@given(st.binary(max_size=300))
def test_nonsense_is_refused_or_waited_for(data: bytes) -> None:
    """No bytes make the parser fail otherwise."""
    try:
        ResponseParser().feed(data)
    except WireError:
        return


@pytest.mark.parametrize(
    ("name", "value"),
    [(b"x-request-id", b"req_1"), (b"content-length", b"11"), (b"request-id", None), (b"missing", None)],
)
def test_headers_are_found_by_their_whole_name(name: bytes, value: bytes | None) -> None:
    """A header is not found in the tail of another one's name."""
    assert header(answer(OK).head, name) == value


@pytest.mark.parametrize(("filler", "model"), [(filler_of(32), None), (' "quoted" \\ ünï\n', "tiny"), ("", None)])
def test_a_request_is_valid_http_with_the_input_in_it(filler: str, model: str | None) -> None:
    """Head and body agree in length, and the body holds nonce and filler as one text."""
    inputs = Inputs("abc123", filler)
    nonce = inputs.nonce(255)
    request = RequestForm("host:1", "/v1/inference", "tl_k", inputs, model).encode(nonce)
    head, _, body = request.partition(b"\r\n\r\n")

    assert head.startswith(b"POST /v1/inference HTTP/1.1\r\nHost: host:1\r\nAuthorization: Bearer tl_k\r\n")
    assert f"\r\nContent-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"input": "abc123000000ff" + filler, **({"model": model} if model else {})}


@pytest.mark.parametrize("key", ["a b", "a\r\nX: y", "ä", "a\x00"])
def test_a_key_cannot_break_out_of_its_header(key: str) -> None:
    """A key with a line break would be another header."""
    with pytest.raises(ValueError, match="ASCII"):
        RequestForm("h", "/", key, Inputs("abc123", ""))


@pytest.mark.parametrize("size", [15, 16, 32, 1000])
def test_inputs_have_the_size_asked_for(size: int) -> None:
    """Nonce and filler together."""
    assert NONCE_CHARACTERS + len(filler_of(size)) == size
