"""Reassembly of a stream from increments that may be lost, late, repeated or reordered."""

import asyncio
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.format import DocumentForm
from gateway.http.sse import EventStream
from gateway.inference.streaming import MOST_HELD, MOST_PARTS, StreamAssembly, StreamedResponse
from scheduler.protocol.increments import LOST, Increment

Step = tuple[int, int, str, str]
"""Attempt, offset, text, and the text that is sent to the client."""


@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        ([(1, 0, "ab", "ab"), (1, 2, "cd", "cd")], False),
        ([(1, 0, "ab", "ab"), (1, 0, "ab", "")], False),  # Repeated.
        ([(1, 0, "ab", "ab"), (1, 1, "bcd", "cd")], False),  # Overlapping.
        ([(1, 0, "ab", "ab"), (1, 3, "d", ""), (1, 2, "cd", "cd")], False),  # Out of order: the gap is awaited.
        ([(1, 2, "cd", "")], False),
        ([(1, 0, "ab", "ab"), (1, 0, "x", "")], True),  # The rerun of the same attempt produced other text.
        ([(1, 0, "ab", "ab"), (1, 0, "abc", "c")], False),  # The rerun produced the same text.
        ([(1, 0, "ab", "ab"), (2, 0, "ab", "")], True),  # The worker was lost.
        ([(1, 0, "ab", "ab"), (1, LOST, "", ""), (1, 2, "cd", "")], True),
        ([(1, LOST, "", ""), (2, 0, "ab", "ab"), (2, 2, "c", "c")], False),  # Lost before anything was sent.
        ([(2, 0, "ab", "ab"), (1, 2, "zz", ""), (1, LOST, "", "")], False),  # The lost worker still sends.
        ([(1, 0, "", ""), (2, 0, "ab", "ab")], False),  # Empty text.
        ([(1, 0, "é😀", "é😀"), (1, 2, "x", "x")], False),  # Characters are counted, not bytes.
    ],
)
def test_increments_become_contiguous_text(steps: list[Step], broken: bool) -> None:
    """The text that is sent for each increment, and whether the stream must fail."""
    assembly = StreamAssembly()

    sent = [assembly.take(attempt, offset, text) for attempt, offset, text, _ in steps]

    assert sent == [expected for *_, expected in steps]
    assert assembly.broken is broken


@pytest.mark.parametrize(
    ("received", "output", "attempts", "rest"),
    [
        ([], "abcd", 1, "abcd"),
        ([], "abcd", 3, "abcd"),
        ([], "", 1, ""),
        ([(1, 0, "ab")], "abcd", 1, "cd"),
        ([(1, 0, "abcd")], "abcd", 1, ""),
        ([(1, 0, "ab")], "xbcd", 1, None),
        ([(1, 0, "ab")], "a", 1, None),
        ([(1, 0, "ab")], "abcd", 2, None),
        ([(1, 0, "ab"), (1, LOST, "")], "abcd", 1, None),
    ],
)
def test_the_reply_completes_the_stream(
    received: list[tuple[int, int, str]], output: str, attempts: int, rest: str | None
) -> None:
    """The stored reply supplies the rest, unless it contradicts the text that was sent."""
    assembly = StreamAssembly()
    for increment in received:
        assembly.take(*increment)

    assert assembly.rest(output, attempts) == rest


@pytest.mark.parametrize("seed", range(50))
def test_lossy_channels_deliver_the_output(seed: int) -> None:
    """Dropped, repeated and shuffled increments: each prefix is correct, and the reply completes the output."""
    chance = random.Random(seed)
    output = "".join(chance.choices("abcé😀", k=60))
    cuts = [sorted(chance.sample(range(61), 2)) for _ in range(40)]
    increments = [(1, start, output[start:end]) for start, end in cuts if chance.random() < 0.7]
    assembly, sent = StreamAssembly(), ""

    for increment in increments:
        sent += assembly.take(*increment)
        assert output.startswith(sent)

    rest = assembly.rest(output, 1)
    assert rest is not None
    assert sent + rest == output


class Slow:
    """A stream whose client is too slow or not."""

    def __init__(self) -> None:
        self.full = False
        self.sent = b""

    def send(self, events: bytes) -> None:
        self.sent += events


async def test_text_for_a_client_that_is_slow_for_a_moment_is_kept() -> None:
    """It is written with the next text; what is beyond the limit is left to the stored reply."""
    call: Any = SimpleNamespace(
        api_format=SimpleNamespace(chunks=lambda *_: SimpleNamespace(delta=str.encode)),
        body=SimpleNamespace(document=None),
        passed_on=False,
    )
    pipeline: Any = SimpleNamespace(clock=float)
    pending: Any = SimpleNamespace(id="req_1", submission=SimpleNamespace(model="m", input_bytes=4))
    future: Any = asyncio.get_running_loop().create_future()
    response = StreamedResponse(pipeline, call, pending, future, keep=None, new_stream=EventStream)
    response._stream = stream = Slow()  # type: ignore[assignment]

    response.receive(Increment("req_1", "n", 1, 0, "ab"))
    stream.full = True
    response.receive(Increment("req_1", "n", 1, 2, "cd"))
    assert stream.sent == b"ab"
    stream.full = False
    response.receive(Increment("req_1", "n", 1, 4, "ef"))
    assert stream.sent == b"abcdef"

    stream.full = True
    for place in range(4):
        response.receive(Increment("req_1", "n", 1, 6 + place * MOST_HELD, "x" * MOST_HELD))
    stream.full = False
    response.receive(Increment("req_1", "n", 1, 6 + 4 * MOST_HELD, "x"))
    assert len(stream.sent) == 6 + 2 * MOST_HELD


def test_many_parts_are_compared() -> None:
    """An overlap is found in all of the text, however many parts it had."""
    assembly = StreamAssembly()
    output = "".join(f"{n} " for n in range(3 * MOST_PARTS))
    for at in range(0, len(output), 2):
        assert assembly.take(1, at, output[at : at + 2]) == output[at : at + 2]
    for at in (0, 3, len(output) // 2, len(output) - 1):
        assert assembly.take(1, at, output[at:] + "x"[: at == 3]) == "x"[: at == 3]
        output += "x"[: at == 3]
    assert not assembly.broken
    assert assembly.take(1, 5, output[5:50] + "!" + output[51:]) == ""
    assert assembly.broken


ROLE = '{"choices":[{"delta":{"role":"assistant","content":""}}]}\n'
LINES = '{"choices":[{"delta":{"content":"12345678"}}]}\n{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"1234"}}]}}]}\n'


@pytest.mark.parametrize(("passed_on", "used"), [(False, 1000 + math.ceil(len(LINES) / 4)), (True, 1003)])
async def test_tokens_of_a_stream_that_was_cancelled(passed_on: bool, used: int) -> None:
    """A quarter of the bytes; of a chat with an image of 4000 bytes its 1000 tokens, and of lines that of their texts."""
    document = DocumentForm("", {}, tokens=0)
    call: Any = SimpleNamespace(
        api_format=SimpleNamespace(chunks=lambda *_: None),
        body=SimpleNamespace(document=document),
        passed_on=passed_on,
    )
    pipeline: Any = SimpleNamespace(clock=float)
    pending: Any = SimpleNamespace(id="req_1", submission=SimpleNamespace(model="m", input_bytes=4000))
    future: Any = asyncio.get_running_loop().create_future()
    stream = StreamedResponse(pipeline, call, pending, future, keep=None, new_stream=EventStream)
    assert stream.used == 0
    if passed_on:
        stream.receive(Increment("req_1", "n", 1, 0, ROLE))
        assert stream.used == 0  # No text.
    stream.receive(Increment("req_1", "n", 1, stream._assembly.length, LINES))
    assert stream.used == used
