"""200 concurrent streams: the time of the first token from the model to the client, and lost events.

The model logs the time of the first word of a response, the client that of the first event with text, both on the
monotonic clock of the machine. In the second half all subscriptions of gateways are cut repeatedly. Each response is
compared with the text of the model.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typist
from cases.outcome import Check, Outcome, at_most, figure, none_of
from cases.stack import SHADOW, Stack, started, used_us
from redis.asyncio import Redis

MODEL = typist.Typist.__name__
STREAMS = 200
MOST_MS = 20
CUT_EVERY_S = 1.0


class StreamedText(NamedTuple):
    """One received response; `first_at` in monotonic seconds."""

    prompt: str
    first_at: float
    text: str
    events: int
    ended: bool
    last_words: str


class Reader(asyncio.Protocol):
    """One stream. It only records data, which is parsed when the stream has ended."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.data = bytearray()
        self.first_at = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        transport.write(self._request)  # type: ignore[attr-defined]  # a stream transport

    def data_received(self, data: bytes) -> None:
        """Record the data, and the time of the first text."""
        self.data += data
        if not self.first_at and b'"text":"' in data:
            self.first_at = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The stream has ended."""
        if not self.ended.done():
            self.ended.set_result(None)


def request(port: int, key: str, prompt: str) -> bytes:
    """A request for a stream on a new connection."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": typist.WORDS}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def read(port: int, key: str, prompt: str) -> StreamedText:
    """Read one stream from its request to its end."""
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: Reader(request(port, key, prompt)), "127.0.0.1", port)
    await reader.ended
    lines = [line for line in bytes(reader.data).split(b"\n") if line.startswith(b"data: {")]
    texts = [each["choices"][0]["text"] for line in lines if (each := json.loads(line[6:])).get("choices")]
    return StreamedText(
        prompt,
        reader.first_at,
        "".join(texts),
        sum(map(bool, texts)),
        b"[DONE]" in reader.data,
        reader.data[-300:].decode(),
    )


async def keep_reading(stack: Stack, seconds: float, name: str) -> list[StreamedText]:
    """Read concurrent streams, each followed by the next one, for a number of seconds."""
    found: list[StreamedText] = []
    until = time.monotonic() + seconds
    port, key = int(stack.info.http_url.rsplit(":", 1)[1]), stack.info.keys["paid"]

    async def one(place: int) -> None:
        turn = 0
        await asyncio.sleep(place * typist.WORDS * typist.STEP_S / STREAMS)  # Not all at once.
        while time.monotonic() < until:
            turn += 1
            found.append(await read(port, key, f"{name}-{place}-{turn}"))

    await asyncio.gather(*(one(place) for place in range(STREAMS)))
    return found


async def cutting(url: str) -> None:
    """Cut all subscriptions repeatedly."""
    client = Redis.from_url(url)
    while True:
        await asyncio.sleep(CUT_EVERY_S)
        await client.client_kill_filter(_type="pubsub")


async def measured(stack: Stack, seconds: float) -> tuple[list[StreamedText], list[StreamedText], dict[str, float]]:
    """The streams without and with cuts, and without cuts the CPU by role, in microseconds an event with text."""
    before = stack.reading()
    calm = await keep_reading(stack, seconds, "calm")
    cpu = used_us(before, stack.reading(), sum(each.events for each in calm))
    cutter = asyncio.create_task(cutting(stack.redis_url))
    try:
        return calm, await keep_reading(stack, seconds, "cut"), cpu
    finally:
        cutter.cancel()


def run(*, quick: bool) -> Outcome:
    """Measure with a model that writes a word every 20 ms."""
    with tempfile.TemporaryDirectory(prefix="tierlane-streams-") as home:
        notes = Path(home) / "notes"
        notes.touch()
        os.environ[typist.NOTES] = str(notes)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(typist.__file__).resolve().parent), *filter(None, sys.path)]
        )
        with started(workers=4, batch=64, backend="typist:Typist") as stack:
            stack.raise_limits(SHADOW)
            calm, cut, cpu = asyncio.run(measured(stack, 8 if quick else 30))
        written = {text: float(at) for text, at in (line.split() for line in notes.read_text().splitlines())}
    found = {"calm": figures(calm, written), "cut": figures(cut, written), "cpu_us": cpu}
    return Outcome(judge(found), found, [])


def figures(reads: list[StreamedText], written: Mapping[str, float]) -> dict[str, Any]:
    """The figures of one half."""
    broken = [each for each in reads if not each.ended or each.text != typist.whole(each.prompt)]
    late = sorted(
        (each.first_at - written[each.prompt]) * 1000 for each in reads if each.first_at and each.prompt in written
    )
    return {
        "streams": len(reads),
        "p50_ms": percentile(late, 0.5),
        "p95_ms": percentile(late, 0.95),
        "p99_ms": percentile(late, 0.99),
        "events": sum(each.events for each in reads) / max(1, len(reads)),
        "not_whole": len(broken),
        "last_words": sorted({each.last_words for each in broken})[:3],
    }


def percentile(values: list[float], share: float) -> float | None:
    """A percentile of sorted values; None without values."""
    return round(values[min(len(values) - 1, int(share * len(values)))], 2) if values else None


def judge(found: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Judge the delay of the first token, and that nothing is lost, doubled or reordered, with and without cuts."""
    calm, cut, cpu = found["calm"], found["cut"], found["cpu_us"]
    return [
        figure("streams read to their end", f"{calm['streams']:,}, and {cut['streams']:,} while subscriptions are cut"),
        figure("events with text, of 50 words", f"{calm['events']:.0f} a stream"),
        figure(
            "first byte after the first token, p50", f"{calm['p50_ms']:.1f} ms" if calm["p50_ms"] else "not measured"
        ),
        at_most("first byte after the first token, p95", calm["p95_ms"], MOST_MS, " ms", 1),
        figure("the same while subscriptions are cut, p95", f"{cut['p95_ms']:.1f} ms" if cut["p95_ms"] else ""),
        figure("CPU of an event with text", ", ".join(f"{role} {us:.0f} us" for role, us in cpu.items())),
        none_of("answers that are not what the model wrote", calm["not_whole"]),
        none_of("the same while subscriptions are cut", cut["not_whole"]),
    ]
