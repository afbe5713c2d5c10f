"""200 streams at once: how long the first token takes from the model to its reader, and whether anything is lost.

The model notes on the machine's monotonic clock when it has the first word of an answer, the reader when it has the first
event with text. In the second half of the time every gateway's subscription is cut again and again; each answer is
compared, event by event, with what the model writes.
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
from cases.outcome import Check, Outcome, at_most, none_of, told
from cases.stand import SHADOW, Stand, started, used_us
from redis.asyncio import Redis

MODEL = typist.Typist.__name__
STREAMS = 200
MOST_MS = 20
CUT_EVERY_S = 1.0


class Read(NamedTuple):
    """One answer as its reader saw it; `first_at` in monotonic seconds."""

    prompt: str
    first_at: float
    text: str
    events: int
    ended: bool
    last_words: str


class Reader(asyncio.Protocol):
    """One stream. It does as little as can be: what was read is looked at when all is over."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.data = bytearray()
        self.first_at = 0.0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        transport.write(self._request)  # type: ignore[attr-defined]  # it is a stream's

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        self.data += data
        if not self.first_at and b'"text":"' in data:
            self.first_at = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """All is read."""
        if not self.over.done():
            self.over.set_result(None)


def request(port: int, key: str, prompt: str) -> bytes:
    """The bytes of a request for a stream, on a connection of its own."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": typist.WORDS}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def read(port: int, key: str, prompt: str) -> Read:
    """One stream from its request to its end."""
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: Reader(request(port, key, prompt)), "127.0.0.1", port)
    await reader.over
    lines = [line for line in bytes(reader.data).split(b"\n") if line.startswith(b"data: {")]
    texts = [each["choices"][0]["text"] for line in lines if (each := json.loads(line[6:])).get("choices")]
    return Read(
        prompt,
        reader.first_at,
        "".join(texts),
        sum(map(bool, texts)),
        b"[DONE]" in reader.data,
        reader.data[-300:].decode(),
    )


async def keep_reading(stand: Stand, seconds: float, name: str) -> list[Read]:
    """So many streams at once, each followed by the next, for so long."""
    found: list[Read] = []
    until = time.monotonic() + seconds
    port, key = int(stand.stack.http_url.rsplit(":", 1)[1]), stand.stack.keys["paid"]

    async def one(place: int) -> None:
        turn = 0
        await asyncio.sleep(place * typist.WORDS * typist.STEP_S / STREAMS)  # Not all of them in one moment.
        while time.monotonic() < until:
            turn += 1
            found.append(await read(port, key, f"{name}-{place}-{turn}"))

    await asyncio.gather(*(one(place) for place in range(STREAMS)))
    return found


async def cutting(url: str) -> None:
    """Cut every subscription, again and again."""
    client = Redis.from_url(url)
    while True:
        await asyncio.sleep(CUT_EVERY_S)
        await client.client_kill_filter(_type="pubsub")


async def measured(stand: Stand, seconds: float) -> tuple[list[Read], list[Read], dict[str, float]]:
    """What was read in peace, and under cuts; CPU in peace by role, in microseconds an event with text."""
    before = stand.reading()
    calm = await keep_reading(stand, seconds, "calm")
    cpu = used_us(before, stand.reading(), sum(each.events for each in calm))
    cutter = asyncio.create_task(cutting(stand.redis_url))
    try:
        return calm, await keep_reading(stand, seconds, "cut"), cpu
    finally:
        cutter.cancel()


def run(*, quick: bool) -> Outcome:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="tierlane-streams-") as home:
        notes = Path(home) / "notes"
        notes.touch()
        os.environ[typist.NOTES] = str(notes)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(typist.__file__).resolve().parent), *filter(None, sys.path)]
        )
        with started(workers=4, batch=64, backend="typist:Typist") as stand:
            stand.raise_limits(SHADOW)
            calm, cut, cpu = asyncio.run(measured(stand, 8 if quick else 30))
        said = {text: float(at) for text, at in (line.split() for line in notes.read_text().splitlines())}
    found = {"calm": figures(calm, said), "cut": figures(cut, said), "cpu_us": cpu}
    return Outcome(judge(found), found, [])


def figures(reads: list[Read], said: Mapping[str, float]) -> dict[str, Any]:
    """Of one half."""
    broken = [each for each in reads if not each.ended or each.text != typist.whole(each.prompt)]
    late = sorted((each.first_at - said[each.prompt]) * 1000 for each in reads if each.first_at and each.prompt in said)
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
    """Of sorted values; None of none."""
    return round(values[min(len(values) - 1, int(share * len(values)))], 2) if values else None


def judge(found: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """The first byte beside the first token; nothing lost, doubled or out of order, subscriptions cut or not."""
    calm, cut, cpu = found["calm"], found["cut"], found["cpu_us"]
    return [
        told("streams read to their end", f"{calm['streams']:,}, and {cut['streams']:,} while subscriptions are cut"),
        told("events with text, of 50 words", f"{calm['events']:.0f} a stream"),
        told("first byte after the first token, p50", f"{calm['p50_ms']:.1f} ms" if calm["p50_ms"] else "not measured"),
        at_most("first byte after the first token, p95", calm["p95_ms"], MOST_MS, " ms", 1),
        told("the same while subscriptions are cut, p95", f"{cut['p95_ms']:.1f} ms" if cut["p95_ms"] else ""),
        told("CPU of an event with text", ", ".join(f"{role} {us:.0f} us" for role, us in cpu.items())),
        none_of("answers that are not what the model wrote", calm["not_whole"]),
        none_of("the same while subscriptions are cut", cut["not_whole"]),
    ]
