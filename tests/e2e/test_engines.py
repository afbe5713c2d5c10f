"""Tierlane before real engines with continuous batching, beside the engine alone: `make engines`.

Each engine runs at most SLOTS sequences at a time of a model whose outputs are as long as `max_tokens` says.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import asyncpg
import pytest
from real_engines.model import CONTEXT
from real_engines.processes import ENGINES, MODEL, RunningEngine, running_engine

from eventually import eventually
from ledger.postgres import asyncpg_dsn
from stack import Stack, start_stack

SLOTS = 8
PROMPTS = ("Once upon a time", "What happens when the queue is full?", "A", "Zwei Hasen; " * 20)
SHORT, LONG = 5, 1000
"""Tokens. The engines need 2 to 20 ms for one."""
PATIENCE = {"TIERLANE_TOTAL_REQUEST_MS": "60000", "TIERLANE_GPU_TIMEOUT_MS": "59000"}

pytestmark = [pytest.mark.engines, pytest.mark.timeout(700)]
needs_slots = pytest.mark.xfail(reason="a batch ends with its longest request", strict=False)


class Target(NamedTuple):
    """A server and the headers of its clients."""

    url: str
    headers: dict[str, str]


class Output(NamedTuple):
    """What a client gets."""

    text: str
    finish_reason: str
    tokens: tuple[int, int]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One running engine."""
    with running_engine(ENGINES[request.param], tmp_path_factory.mktemp(request.param), SLOTS) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack before it, with one worker."""
    home: Path = tmp_path_factory.mktemp("stack")
    with start_stack(home, "--backend", engine.backend, "--workers", "1", environment=PATIENCE) as started:
        asyncio.run(wait_long(started))
        yield started


async def wait_long(stack: Stack) -> None:
    """Let requests wait for a minute for the engine, which is slow where other processes use the processors."""
    connection = await asyncpg.connect(asyncpg_dsn(stack.read()["database_url"]))
    await connection.execute("UPDATE tiers SET max_queue_ms = 60000")
    await connection.close()


@pytest.fixture
def alone(engine: RunningEngine) -> Target:
    """The engine."""
    return Target(engine.api, {})


@pytest.fixture
def through(stack: Stack) -> Target:
    """The same engine through Tierlane."""
    return Target(f"{stack.url}/v1", stack.headers("enterprise"))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client with a connection for each request: llama.cpp closes that of a stream, though it says that it keeps it."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        yield session


def call(prompt: str, tokens: int, *, chat: bool, stream: bool = False) -> tuple[str, dict[str, Any]]:
    """Route and body of a request."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return "/chat/completions" if chat else "/completions", body


async def output_of(
    http: aiohttp.ClientSession, target: Target, prompt: str, tokens: int, *, chat: bool, stream: bool = False
) -> Output:
    """The output of a request that must succeed."""
    route, body = call(prompt, tokens, chat=chat, stream=stream)
    async with http.post(target.url + route, json=body, headers=target.headers) as response:
        text = await response.text()
    assert response.status == 200, text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")] if stream else [text]
    if stream:
        assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    choices = list(chain.from_iterable(chunk["choices"] for chunk in chunks))
    pieces = [(each.get("delta") or each.get("message") or each) for each in choices]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return Output(
        "".join((piece.get("content") or piece.get("text") or "") for piece in pieces),
        next(each["finish_reason"] for each in reversed(choices) if each["finish_reason"]),
        (usage["prompt_tokens"], usage["completion_tokens"]),
    )


async def running(engine: RunningEngine, count: int, what: str, timeout_s: float = 10.0) -> None:
    """Wait until the engine counts so many running sequences."""
    seen: list[tuple[int, int]] = []

    async def reached() -> bool:
        load = await asyncio.to_thread(engine.load)
        seen.append((load.running, load.waiting))
        return load.running == count

    try:
        await eventually(reached, what, timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}; running and waiting were {sorted(set(seen))}") from None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_outputs_are_those_of_the_engine(
    http: aiohttp.ClientSession, alone: Target, through: Target, chat: bool, stream: bool
) -> None:
    """At temperature 0: text, finish reason and both counts of tokens."""
    for prompt in PROMPTS:
        expected = await output_of(http, alone, prompt, 40, chat=chat, stream=stream)

        assert len(expected.text) == 40
        assert await output_of(http, through, prompt, 40, chat=chat, stream=stream) == expected


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_an_input_beyond_the_context_is_rejected(
    http: aiohttp.ClientSession, through: Target, chat: bool, stream: bool
) -> None:
    """The client's error, which names the context; the next request is served."""
    route, body = call("x " * CONTEXT, SHORT, chat=chat, stream=stream)

    async with http.post(through.url + route, json=body, headers=through.headers) as response:
        text = await response.text()

    assert "exceed the model's context" in text
    assert "invalid_request" in text
    assert response.status == 400 or (stream and response.status == 200)
    assert len((await output_of(http, through, "A", SHORT, chat=chat)).text) == SHORT


async def test_concurrent_requests_of_mixed_lengths_get_their_own_outputs(
    http: aiohttp.ClientSession, alone: Target, through: Target
) -> None:
    """16 at a time, twice as many as the engine runs: each output is that of the engine alone for its prompt."""
    requests = [
        (f"Story {number}", 5 + number * number, {"chat": number % 2 == 0, "stream": number % 4 < 2})
        for number in range(16)
    ]
    expected = [await output_of(http, alone, prompt, tokens, **form) for prompt, tokens, form in requests]

    found = await asyncio.gather(
        *(output_of(http, through, prompt, tokens, **form) for prompt, tokens, form in requests)
    )

    different = [pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]]
    assert different == []


@needs_slots
async def test_all_sequences_of_the_engine_run(
    http: aiohttp.ClientSession, engine: RunningEngine, through: Target
) -> None:
    """Twice as many requests as the engine has sequences fill all of them, by the engine's own count."""
    tasks = [
        asyncio.create_task(output_of(http, through, f"Story {number}", LONG // 4, chat=True)) for number in range(16)
    ]

    await running(engine, SLOTS, "all sequences of the engine run")

    assert {len(each.text) for each in await asyncio.gather(*tasks)} == {LONG // 4}


@needs_slots
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_short_request_does_not_wait_for_long_ones(
    http: aiohttp.ClientSession, engine: RunningEngine, through: Target, stream: bool
) -> None:
    """It joins them in the engine, and ends while all of them still run."""
    tasks = [
        asyncio.create_task(output_of(http, through, f"Long {number}", LONG, chat=True, stream=stream))
        for number in range(4)
    ]
    await running(engine, len(tasks), "the long requests run")

    output = await output_of(http, through, "Short", SHORT, chat=True, stream=stream)

    ended = [task.done() for task in tasks]
    await asyncio.gather(*tasks)
    assert len(output.text) == SHORT
    assert ended == [False] * 4


@pytest.mark.parametrize(
    "stream", [pytest.param(False, id="whole", marks=needs_slots), pytest.param(True, id="streamed")]
)
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_the_sequence_of_a_client_that_leaves_ends(
    http: aiohttp.ClientSession, engine: RunningEngine, through: Target, chat: bool, stream: bool
) -> None:
    """Within a second, by the engine's own count."""
    tasks = [
        asyncio.create_task(output_of(http, through, f"Long {number}", LONG, chat=chat, stream=stream))
        for number in range(4)
    ]
    try:
        await running(engine, len(tasks), "the requests run")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        await running(engine, 0, "the engine runs nothing", 1.0)
    finally:
        await running(engine, 0, "the engine is idle", 60.0)
