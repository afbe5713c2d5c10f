"""Chats that are passed on to an endpoint, while the processes between it and the client are killed."""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from redis.asyncio import Redis

import image_load
from admin import NO_LIMITS, add_customer
from chaos_kills import Kills
from endpoint_stand_in import MODEL, StandIn, rich_chat, serving
from eventually import eventually
from image_load import Orders, attached, own_port
from measured_load import MeasuredLoad, Stream, figures, p99_ms
from scheduler.chat_events import joined
from stack import Stack, start_stack
from tierlane_local.up.members import body_dir

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STREAMS, STREAMS_PER_S = 200, 10.0
CHUNK_S = 0.08  # With about 30 events, a stream lasts 2.5 s.
KILLS = (
    (3.0, "worker", "worker-1"),
    (7.0, "model", "worker-2-model"),
    (11.0, "gateway", "gateway-1"),
    (15.0, "redis", "redis"),
)
LONG = {"TIERLANE_TOTAL_REQUEST_MS": "20000", "TIERLANE_GPU_TIMEOUT_MS": "15000"}
GATEWAYS_OWN = ("id", "object", "created", "model", "service_tier", "usage", "system_fingerprint")


class ToolStream(NamedTuple):
    """What the client of one stream got: `document` joins its chunks, `ended` if [DONE] came, `error` if an error did.

    `broken`: the connection was cut. `port` is that of the client, `opened_s` the time of its connection.
    """

    number: int
    port: int
    opened_s: float
    seconds: float
    document: dict[str, Any] = {}  # noqa: RUF012 - a tuple's default is never changed
    ended: bool = False
    error: str = ""
    broken: str = ""


def chat(number: int) -> dict[str, Any]:
    """A chat with two tools; the response depends on its number."""
    tools = [
        {"type": "function", "function": {"name": f"tool_{number}_{at}", "parameters": {"type": "object"}}}
        for at in range(2)
    ]
    return {"messages": [{"role": "user", "content": f"{number} é"}], "tools": tools}


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """What must not differ."""
    return {name: value for name, value in document.items() if name not in GATEWAYS_OWN}


async def streamed(url: str, key: str, number: int) -> ToolStream:
    """Send the chat on a connection of its own, and read the stream to its end."""
    ports: list[int] = []

    opened_s = time.monotonic()
    text, status, broken = "", 200, ""
    connector = aiohttp.TCPConnector(force_close=True, socket_factory=own_port(ports))
    async with aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {key}"}) as session:
        try:
            body = chat(number) | {"model": MODEL, "stream": True}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                status = response.status
                async for line in response.content:
                    text += line.decode()
        except aiohttp.ClientError as error:
            broken = type(error).__name__
    seconds = time.monotonic() - opened_s
    outcome = ToolStream(number, ports[-1] if ports else 0, opened_s, seconds)
    if status != 200:
        return outcome._replace(error=f"{status} {json.loads(text)['error']['code']}")
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    errors = [json.loads(event)["error"]["code"] for event in events if '"error"' in event]
    chunks = [event for event in events if event != "[DONE]" and '"error"' not in event]
    return outcome._replace(
        document=joined("\n".join(chunks)),
        ended=bool(events) and events[-1] == "[DONE]" and not errors,
        error=f"event {errors[0]}" if errors else "",
        broken=broken,
    )


def arguments(document: dict[str, Any]) -> list[str]:
    """The names and arguments of all tool calls."""
    calls = [call for choice in document["choices"] for call in choice["message"].get("tool_calls", ())]
    return [text for call in calls for text in (call["function"]["name"], call["function"].get("arguments", ""))]


def crossed(stream: ToolStream) -> bool:
    """Whether the client of a stream that ended early got anything but the start of its own response."""
    expected = arguments(rich_chat(chat(stream.number)))
    found = arguments(stream.document) if stream.document else []
    return any(not whole.startswith(text) for text, whole in zip(found, expected, strict=False))


@contextmanager
def passing_on(home: Path, url: str, environment: dict[str, str], *, beside: str = "") -> Iterator[Stack]:
    """Two gateways and two workers in front of the endpoint; with `beside`, a pool of two more workers with this backend."""
    backend = f"openai:{url}#{MODEL}"
    options = ("--backend", beside, "--pools", f"images={backend}*2") if beside else ("--backend", backend)
    numbers = ("--workers", "2", "--gateways", "2", "--max-batch-size", "8")
    with start_stack(home, *options, *numbers, environment=environment) as stack:
        yield stack


async def test_streams_with_tool_calls_while_processes_are_killed(tmp_path: Path) -> None:
    """Each client assembles what the endpoint sent for its chat, or is told of an error; only a gateway's death is silent."""
    with serving(StandIn(chunk_s=CHUNK_S)) as stand_in, passing_on(tmp_path / "s", stand_in.url, LONG) as stack:
        await stack.healthy(2)
        customer = await add_customer(stack, "streams", "enterprise", **NO_LIMITS)
        kills, sent, began = Kills(stack), [], time.monotonic()
        killing = asyncio.create_task(kills.run(KILLS))
        for number in range(STREAMS):
            await asyncio.sleep(max(0.0, began + number / STREAMS_PER_S - time.monotonic()))
            sent.append(asyncio.create_task(streamed(stack.url, customer.key, number)))
        streams = await asyncio.gather(*sent)
        await killing
    whole = [each for each in streams if each.ended]
    lengths = sorted(each.seconds for each in whole)
    codes = Counter(each.error for each in streams if each.error)
    broken = [each for each in streams if each.broken]
    print(f"{len(whole)} whole, {dict(codes)}, {len(broken)} broken: {Counter(each.broken for each in broken)}")
    print(f"median of a whole stream {lengths[len(lengths) // 2]:.1f} s, longest {lengths[-1]:.1f} s")

    assert set(kills.at_s) == {"worker", "model", "gateway", "redis"}
    wrong = [each for each in whole if comparable(each.document) != comparable(rich_chat(chat(each.number)))]
    assert wrong == []
    assert [each for each in streams if not each.ended and crossed(each)] == []
    assert [each for each in streams if not (each.ended or each.error or each.broken)] == []
    assert [each for each in broken if not kills.broke(each.port, each.opened_s)] == []
    assert broken  # The gateway was killed while it streamed.
    assert len(whole) > STREAMS / 2


RATE = float(os.environ.get("IMAGES_PER_S", "25"))
WARM_S, MEASURED_S, FAULTS_S = 5.0, 30.0, 30.0
INTERVALS = {
    "warm": WARM_S,
    "alone before": MEASURED_S,
    "images begin": WARM_S,
    "images": MEASURED_S,
    "images and kills": FAULTS_S,
    "images end": WARM_S,
    "alone after": MEASURED_S,
}
IMAGES_FROM_S, IMAGES_S = WARM_S + MEASURED_S, WARM_S + MEASURED_S + FAULTS_S
IMAGE_KILLS = (
    (IMAGES_FROM_S + WARM_S + MEASURED_S + 2.0, "worker", "worker-images-1"),
    (IMAGES_FROM_S + WARM_S + MEASURED_S + 12.0, "gateway", "gateway-1"),
)
SMALL = (50.0, 128)
"""Requests/s, and bytes of their input."""

MAY_GROW = 50 << 20
LARGE = {
    "TIERLANE_MAX_BODY_BYTES": str(8 << 20),
    "TIERLANE_BODY_MEMORY_BYTES": str(400 << 20),
    "TIERLANE_KEY_BODY_MEMORY_BYTES": str(300 << 20),
    "TIERLANE_CUSTOMER_BODY_MEMORY_BYTES": str(310 << 20),
    "TIERLANE_BODY_STORE_BYTES": str(2 << 30),
    "TIERLANE_ENDPOINT_MAX_CALLS": "256",
    "TIERLANE_TOTAL_REQUEST_MS": "10000",
    "TIERLANE_GPU_TIMEOUT_MS": "8000",
}
OF_KILLED = {"worker_lost", "queue_timeout"}
"""Codes of requests that ran on the killed worker, or waited for the other one."""


async def used_memory(redis: Redis, samples: list[int]) -> None:
    """Sample the memory of Redis ten times a second."""
    while True:
        samples.append(int((await redis.info("memory"))["used_memory"]))
        await asyncio.sleep(0.1)


@asynccontextmanager
async def image_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """The process with endpoint and load, and the endpoint's port."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, image_load.__file__, stdin=pipe, stdout=pipe, limit=16 << 20
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process, int(await process.stdout.readline())
        process.stdin.close()
        await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.kill()


async def test_images_stay_out_of_redis_and_lose_no_small_request(tmp_path: Path) -> None:
    """Redis hardly grows, no request is lost, and no file is left, though a worker and a gateway are killed. The delay of small
    requests beside the images is printed.

    The small requests have a pool of their own, since in the same one they would wait for its endpoint.
    """
    async with image_process() as (process, port):
        with passing_on(tmp_path / "s", f"http://127.0.0.1:{port}/v1", LARGE, beside="simulated:2") as stack:
            await stack.healthy(4)
            images = await add_customer(stack, "images", "paid", **NO_LIMITS)
            small = await add_customer(stack, "small", "enterprise", **NO_LIMITS)
            load = MeasuredLoad(
                stack.url, {"small": Stream(small.key, SMALL[0])}, tuple(INTERVALS.values()), seed=1, size=SMALL[1]
            )
            orders = Orders(stack.url, images.key, time.monotonic() + IMAGES_FROM_S, IMAGES_S, RATE)
            samples: list[int] = []
            async with Redis.from_url(stack.redis_url) as redis:
                watching = asyncio.create_task(used_memory(redis, samples))
                kills = Kills(stack)
                killing = asyncio.create_task(kills.run(IMAGE_KILLS))
                measured, outcomes = await asyncio.gather(load.run(), attached(process, orders))
                await killing
                watching.cancel()
            left_s = time.monotonic()
            directory = body_dir(stack.data_dir)
            left = len(list(directory.iterdir()))
            await eventually(lambda: not list(directory.iterdir()), "no file is left", 100.0)
            left_s = time.monotonic() - left_s
        assert not directory.exists()
    intervals = dict(zip(INTERVALS, measured, strict=True))
    for name, interval in intervals.items():
        print(figures(name, interval, INTERVALS[name]))
    alone_ms = sum(p99_ms(intervals[name]["small"]) for name in ("alone before", "alone after")) / 2
    ratio = p99_ms(intervals["images"]["small"]) / alone_ms
    codes = Counter(each.code for each in outcomes if each.code)
    cut = [each for each in outcomes if each.status == 0]
    grown = max(samples) - samples[0]
    seconds = sorted(each.seconds for each in outcomes if each.status == 200)
    print(
        f"{len(outcomes)} images at {RATE:.0f}/s, {len(seconds)} answered, median {seconds[len(seconds) // 2]:.2f} s, {codes}"
    )
    print(f"Redis grew by {grown / 2**20:.1f} MiB; small requests p99 x {ratio:.2f}")
    print(f"{left} files of the killed gateway were left, and removed within {left_s:.0f} s")

    assert set(kills.at_s) == {"worker", "gateway"}
    assert grown < MAY_GROW
    assert len(outcomes) == int(RATE * IMAGES_S)
    assert [each for each in cut if not kills.broke(each.port, each.opened_s)] == []
    assert {each.code for each in outcomes if each.status not in (0, 200)} <= OF_KILLED
    assert codes["crossed"] == 0
    assert all(each.status == 200 for each in outcomes if each.opened_s + each.seconds < kills.at_s["worker"])
    assert (intervals["images"]["small"].failures, intervals["images"]["small"].missing) == (0, 0)
