"""The HTTP client of the load generators: requests as bytes, and responses parsed from reads of any size."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlane_tools.bench.http_client import MAX_BODY_BYTES, MAX_HEAD_BYTES, RequestForm, ResponseParser, WireError
from tierlane_tools.bench.plan.inputs import Inputs, filler_of
from tierlane_tools.chaos.history import LoadCustomer
from tierlane_tools.chaos.load.messages import request_bytes

OK = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\nX-Request-ID: req_1\r\n\r\nhello world"
)


@given(st.sets(st.integers(1, len(OK) * 2 - 1)))
def test_responses_are_parsed_however_they_are_split(cuts: set[int]) -> None:
    """Each of two responses is returned once, at its last byte."""
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
        (b"HTTP/1.1 503 Busy\r\nCONTENT-LENGTH:  2  \r\nConnection: Close\r\n\r\n{}", 503, b"{}", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", False),
        (b"HTTP/1.1 204 No Content\r\nDate: x\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", True),
    ],
)
def test_valid_responses(data: bytes, status: int, body: bytes, *, keep_alive: bool) -> None:
    """Header names in any case, interim responses, and whether the connection can be reused."""
    response = ResponseParser().feed(data)

    assert response is not None
    assert (response.status, response.body, response.keep_alive) == (status, body, keep_alive)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nDate: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"x" * (MAX_HEAD_BYTES + 1),
    ],
)
def test_invalid_responses(data: bytes) -> None:
    """FaultPhase cannot be parsed is an error, not a response."""
    with pytest.raises(WireError):
        ResponseParser().feed(data)


def test_a_stream_that_ends_incomplete_after_its_error() -> None:
    """The response is complete with the error event, without waiting for the end of the connection."""
    parser = ResponseParser()
    events = ('data: {"choices":[]}\n\n', 'data: {"error":{"code":"x"}}\n\n')
    first, last = (f"{len(event):x}\r\n{event}\r\n".encode() for event in events)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    assert parser.feed(head + first) is None
    assert parser.feed(last[:-1]) is None
    response = parser.feed(last[-1:])

    assert response is not None
    assert (response.status, response.body, response.keep_alive) == (200, "".join(events).encode(), False)


def test_a_chunked_response_in_many_reads() -> None:
    """The response is complete with its last chunk; its body is that of all chunks."""
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n0\r\n\r\n\r\na\r\n0123456789\r\n0\r\n\r\n"
    parser = ResponseParser()
    responses = [parser.feed(data[at : at + 1]) for at in range(len(data))]

    assert responses[:-1] == [None] * (len(data) - 1)
    assert responses[-1] is not None
    assert responses[-1].body == b"0\r\n\r\n0123456789"


@pytest.mark.parametrize(("filler", "model"), [(filler_of(32), None), (' "quoted" \\ ünï\n', "tiny"), ("", None)])
def test_a_request_of_the_bench(filler: str, model: str | None) -> None:
    """Content-Length is that of the body, which holds the nonce and the filler as one text."""
    inputs = Inputs("abc123", filler)
    request = RequestForm("host:1", "/v1/inference", "tl_k", inputs, model).encode(inputs.nonce(255))
    head, _, body = request.partition(b"\r\n\r\n")

    assert head.startswith(b"POST /v1/inference HTTP/1.1\r\nHost: host:1\r\nAuthorization: Bearer tl_k\r\n")
    assert f"\r\nContent-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"input": "abc123000000ff" + filler, **({"model": model} if model else {})}


def test_a_request_of_the_chaos_load() -> None:
    """It carries its own trace id, and an Idempotency-Key where there is one."""
    customer = LoadCustomer(tier="free", id="c", name="n", key="tl_k_s")
    head, body = request_bytes("host:1", customer, "text", "ab" * 16, "k1").decode().split("\r\n\r\n")
    lines = head.split("\r\n")

    assert {f"traceparent: 00-{'ab' * 16}-{'ab' * 8}-01", "Idempotency-Key: k1"} <= set(lines)
    assert {"Authorization: Bearer tl_k_s", f"Content-Length: {len(body)}"} <= set(lines)
    assert json.loads(body) == {"input": "text"}
    assert b"Idempotency" not in request_bytes("host:1", customer, "text", "ab" * 16, "")


@pytest.mark.parametrize("key", ["a b", "a\r\nX: y", "ä", "a\x00"])
def test_a_key_cannot_inject_a_header(key: str) -> None:
    """Keys with blanks, line breaks or non-ASCII characters are rejected."""
    with pytest.raises(ValueError, match="ASCII"):
        RequestForm("h", "/", key, Inputs("abc123", ""))
