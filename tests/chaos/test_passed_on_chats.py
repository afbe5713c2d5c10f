"""Chats that are passed on to an endpoint, while the processes between it and the client are killed."""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from admin import NO_LIMITS, add_customer
from chaos_kills import Kills
from endpoint_stand_in import MODEL, StandIn, rich_chat, serving
from scheduler.chat_document import joined
from stack import Stack, start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STREAMS, STREAMS_PER_S = 200, 10.0
CHUNK_S = 0.08  # With about 30 events, a stream lasts 2.5 s.
KILLS = ((3.0, "worker"), (7.0, "model"), (11.0, "gateway"), (15.0, "redis"))
LONG = {"TIERLANE_TOTAL_REQUEST_MS": "20000", "TIERLANE_GPU_TIMEOUT_MS": "15000"}
GATEWAYS_OWN = ("id", "object", "created", "model", "service_tier", "usage", "system_fingerprint")


class Stream(NamedTuple):
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


async def streamed(url: str, key: str, number: int) -> Stream:
    """Send the chat on a connection of its own, and read the stream to its end."""
    ports: list[int] = []

    def bound(address: Any) -> socket.socket:
        made = socket.socket(address[0], address[1], address[2])
        made.setblocking(False)
        made.bind(("127.0.0.1", 0))
        ports.append(made.getsockname()[1])
        return made

    opened_s = time.monotonic()
    text, status, broken = "", 200, ""
    connector = aiohttp.TCPConnector(force_close=True, socket_factory=bound)
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
    outcome = Stream(number, ports[-1] if ports else 0, opened_s, seconds)
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


def crossed(stream: Stream) -> bool:
    """Whether the client of a stream that ended early got anything but the start of its own response."""
    expected = arguments(rich_chat(chat(stream.number)))
    found = arguments(stream.document) if stream.document else []
    return any(not whole.startswith(text) for text, whole in zip(found, expected, strict=False))


@contextmanager
def passing_on(home: Path, url: str, environment: dict[str, str]) -> Iterator[Stack]:
    """Two gateways and two workers in front of the endpoint."""
    options = ("--backend", f"openai:{url}#{MODEL}", "--workers", "2", "--gateways", "2", "--max-batch-size", "8")
    with start_stack(home, *options, environment=environment) as stack:
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
