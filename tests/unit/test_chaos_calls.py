"""One try as bytes, and what its answer says; and the watch over the tool's own standstills."""

import asyncio
import time

import pytest

from eventually import eventually
from tierlane.bench.http_client import ResponseParser
from tierlane.chaos.history import LoadCustomer, request_input
from tierlane.chaos.load import AnswerReading, read_answer, request_bytes, watch_stalls

CUSTOMER = LoadCustomer(tier="free", id="c", name="n", key="tl_k_s")
TEXT = request_input("0123456789abcdef", 12.5, "xyz")
OTHER = request_input("fedcba9876543210", 12.5, "")
ID = "req_" + "1" * 32


def reading(status: int, body: str, headers: str = "") -> AnswerReading:
    raw = f"HTTP/1.1 {status} X\r\nx-request-id: {ID}\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}"
    response = ResponseParser().feed(raw.encode())
    assert response is not None
    return read_answer(response, TEXT)


def test_a_request_as_bytes() -> None:
    """The key, the trace, the length of the body; an Idempotency-Key only where there is one."""
    whole = request_bytes("host:1", CUSTOMER, TEXT, "ab" * 16, "k1")
    head, body = whole.decode().split("\r\n\r\n")
    lines = head.split("\r\n")

    assert lines[0] == "POST /v1/inference HTTP/1.1"
    assert f"traceparent: 00-{'ab' * 16}-{'ab' * 8}-01" in lines
    assert "Authorization: Bearer tl_k_s" in lines
    assert "Idempotency-Key: k1" in lines
    assert f"Content-Length: {len(body)}" in lines
    assert body == f'{{"input": "{TEXT}"}}'
    assert b"Idempotency" not in request_bytes("host:1", CUSTOMER, TEXT, "ab" * 16, "")


@pytest.mark.parametrize(
    ("output", "owner"),
    [
        (TEXT[::-1], "0123456789abcdef"),
        (OTHER[::-1], "fedcba9876543210"),
        (TEXT, "?"),  # Not reversed.
        (TEXT[::-1] + "!", "?"),
        (OTHER[::-1][:10] + TEXT[::-1][10:], "?"),  # The right nonce in a text of two requests.
        ("", "?"),
    ],
)
def test_whose_output_it_is(output: str, owner: str) -> None:
    """The whole input reversed, or it is another's, or nobody's."""
    assert reading(200, f'{{"request_id":"{ID}","output":"{output}"}}').owner == owner


def test_an_error_and_a_replay() -> None:
    """The code and the id are in the body; a replay is told by its header, and its id is that of the first answer."""
    assert reading(503, f'{{"error":{{"code":"no_capacity","request_id":"{ID}"}}}}') == AnswerReading(
        503, "no_capacity", ID, "", replayed=False
    )
    stored = "req_" + "2" * 32
    replay = reading(200, f'{{"request_id":"{stored}","output":"{TEXT[::-1]}"}}', "Idempotent-Replayed: true\r\n")
    assert (replay.id, replay.replayed) == (stored, True)


@pytest.mark.parametrize("body", ["", "<html>", '{"output":5}', "[]"])
def test_what_is_not_ours(body: str) -> None:
    """A 200 without an output of ours is nobody's."""
    assert reading(200, body) == AnswerReading(200, "", ID, "?", replayed=False)


async def test_a_standstill_of_the_tool_is_seen() -> None:
    """With its begin and its end; a loop that is only busy for some milliseconds did not stand still."""
    seen: list[tuple[float, float]] = []
    watch = asyncio.create_task(watch_stalls(lambda since, until: seen.append((since, until))))
    await asyncio.sleep(0)
    began = time.monotonic()
    time.sleep(0.1)  # noqa: ASYNC251  # this is the standstill
    await eventually(lambda: seen, "the standstill is told")
    watch.cancel()

    since, until = seen[0]
    assert since <= began
    assert until >= began + 0.1
