"""Tierlane before real engines with continuous batching, beside the engine alone: `make engines`.

Each engine runs at most SLOTS sequences at a time of a model whose outputs are as long as `max_tokens` says.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
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
    connection = await asyncpg.connect(asyncpg_dsn(stack.info.database_url))
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


@pytest.fixture(autouse=True)
async def idle(engine: RunningEngine) -> None:
    """The engine has nothing left to do from the test before."""
    await running(engine, 0, "the engine is idle", 60.0)


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
    """Wait until the engine counts at least so many running sequences, or none."""
    seen: list[tuple[int, int]] = []

    async def reached() -> bool:
        load = await asyncio.to_thread(engine.load)
        seen.append((load.running, load.waiting))
        return load.running >= count > 0 or load.running == count

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

    assert "maximum context length is" in text
    assert "invalid_request" in text
    assert response.status == 400 or (stream and response.status == 200)
    assert len((await output_of(http, through, "A", SHORT, chat=chat)).text) == SHORT


async def test_the_context_length_is_the_engines(http: aiohttp.ClientSession, through: Target) -> None:
    """Of one sequence, as the list of models shows it."""
    async with http.get(f"{through.url}/models", headers=through.headers) as response:
        models = (await response.json())["data"]
    assert [each["max_model_len"] for each in models] == [CONTEXT]


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


@asynccontextmanager
async def started(outputs: Iterable[Coroutine[Any, Any, Output]]) -> AsyncIterator[list[asyncio.Task[Output]]]:
    """Run requests in tasks, which are cancelled at the end of the block."""
    tasks = [asyncio.create_task(output) for output in outputs]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_all_sequences_of_the_engine_run(
    http: aiohttp.ClientSession, engine: RunningEngine, through: Target
) -> None:
    """Twice as many requests as the engine has sequences fill all of them, by the engine's own count."""
    tokens = LONG // 4
    async with started(output_of(http, through, f"Story {number}", tokens, chat=True) for number in range(16)) as tasks:
        await running(engine, SLOTS, "all sequences of the engine run")

        assert {len(each.text) for each in await asyncio.gather(*tasks)} == {tokens}


def long_outputs(
    http: aiohttp.ClientSession, target: Target, *, chat: bool, stream: bool
) -> list[Coroutine[Any, Any, Output]]:
    """Four long requests."""
    return [output_of(http, target, f"Long {number}", LONG, chat=chat, stream=stream) for number in range(4)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_short_request_does_not_wait_for_long_ones(
    http: aiohttp.ClientSession, engine: RunningEngine, through: Target, stream: bool
) -> None:
    """It joins them in the engine, and ends while all of them still run."""
    async with started(long_outputs(http, through, chat=True, stream=stream)) as tasks:
        await running(engine, len(tasks), "the long requests run")

        output = await output_of(http, through, "Short", SHORT, chat=True, stream=stream)

        assert len(output.text) == SHORT
        assert [task.done() for task in tasks] == [False] * len(tasks)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_the_sequence_of_a_stream_whose_client_leaves_ends(
    http: aiohttp.ClientSession, engine: RunningEngine, through: Target, chat: bool
) -> None:
    """Within a second, by the engine's own count."""
    async with started(long_outputs(http, through, chat=chat, stream=True)):
        await running(engine, 1, "a request runs")

    await running(engine, 0, "the engine runs nothing", 1.0)


# Not llama.cpp, which notices that only while nobody reads a stream or its metrics
# (findings/llama-cpp-unstreamed-disconnect.sh).
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
async def test_the_sequence_of_a_whole_response_whose_client_leaves_ends(
    http: aiohttp.ClientSession, engine: RunningEngine, through: Target
) -> None:
    """Within a second, by the engine's own count."""
    async with started(long_outputs(http, through, chat=True, stream=False)):
        await running(engine, 1, "a request runs")

    await running(engine, 0, "the engine runs nothing", 1.0)
