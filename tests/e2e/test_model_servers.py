"""Tierlane before real model servers, beside the server alone, and what health says of the states of servers and engines:
`make engines`.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from real_engines.processes import ENGINES, MODEL, RunningEngine, running_engine
from real_engines.servers import SERVERS

from eventually import eventually
from stack import Stack, start_stack

pytestmark = [pytest.mark.engines, pytest.mark.timeout(700)]
ALL = {**ENGINES, **SERVERS}
STARTS_S = 300.0
STOPPED_S = 5.0
TAKES_KEY = ("llama_cpp", "vllm", "infinity")
WITHOUT_MODEL = "has no model 'random'; it has renamed"


class ServedModel:
    """A server that can be killed and started again on its port."""

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self._home = home
        self._up = ExitStack()
        self._starts = 0
        self.engine = self.start()

    def start(self, **changes: str) -> RunningEngine:
        """Start it, with another `model` or a `key`; it has the same address each time."""
        port = int(self.engine.url.rpartition(":")[2]) if self._starts else 0
        self._starts += 1
        home = self._home / str(self._starts)
        self.engine = self._up.enter_context(running_engine(ALL[self.name], home, port=port, **changes))
        return self.engine

    def kill(self) -> None:
        """End it without a chance to close its connections."""
        os.killpg(self.engine.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it."""
        self._up.close()


@pytest.fixture(scope="module", params=ALL)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """One running server."""
    running = ServedModel(request.param, tmp_path_factory.mktemp(request.param))
    yield running
    running.close()


@pytest.fixture(scope="module")
def stack(server: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack before it, with one worker."""
    home: Path = tmp_path_factory.mktemp("stack")
    with start_stack(home, "--backend", server.engine.backend, "--workers", "1") as started:
        yield started


async def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and document of a response."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        return response.status, await response.json(content_type=None)


async def outputs(server: ServedModel, url: str, headers: dict[str, str] | None, *texts: str) -> list[Any]:
    """What the server, or Tierlane before it, answers to each text; requests run at the same time."""

    async def output(text: str) -> Any:
        if server.name == "infinity":
            status, document = await post(f"{url}/v1/embeddings", {"model": MODEL, "input": text}, headers)
            return document["data"][0]["embedding"] if status == 200 else document
        if server.name != "mlserver":
            chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
            status, document = await post(f"{url}/v1/chat/completions", {"model": MODEL, **chat}, headers)
            return document["choices"][0]["message"]["content"] if status == 200 else document
        tensor = {"name": "text_input" if headers else "text", "datatype": "BYTES", "shape": [1], "data": [text]}
        status, document = await post(f"{url}/v2/models/{MODEL}/infer", {"inputs": [tensor]}, headers)
        if status != 200:
            return document
        values = document["outputs"][0]["data"][0]
        return json.loads(values)["output"] if headers else values

    return await asyncio.gather(*map(output, texts))


async def through(stack: Stack, server: ServedModel, *texts: str) -> list[Any]:
    """The same through Tierlane."""
    return await outputs(server, stack.url, stack.headers("enterprise"), *texts)


async def reason_in_health(stack: Stack, reason: str) -> None:
    """Wait until health says it."""

    async def said() -> bool:
        health = await stack.health()
        return any(reason in each for each in health["reasons"])

    await eventually(said, f"health has the reason {reason!r}", STARTS_S)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
async def test_outputs_are_those_of_the_server(server: ServedModel, stack: Stack) -> None:
    """One request alone, and several at a time."""
    texts = [f"text {number}" for number in range(12)]
    expected = [(await outputs(server, server.engine.url, None, text))[0] for text in texts]

    assert await through(stack, server, texts[0]) == expected[:1]
    found = await through(stack, server, *texts)
    if server.name == "infinity":
        # Its batches change the last digits of float32.
        assert [pytest.approx(each, abs=1e-5) for each in expected] == found
    else:
        assert found == expected


@pytest.mark.parametrize("server", ["mlserver"], indirect=True)
async def test_bad_input_of_mlserver_fails_alone(server: ServedModel, stack: Stack) -> None:
    """The server answers 500 with a traceback for all of the call; the client gets none of it."""
    first, bad, last = await through(stack, server, "abc", "bad", "def")

    assert (first, last) == ("cba", "fed")
    assert bad["code"] == "poison_request"
    assert "Traceback" not in str(bad)


@pytest.mark.parametrize("server", ["infinity"], indirect=True)
async def test_input_over_the_context_of_infinity(server: ServedModel, stack: Stack) -> None:
    """It cuts the text to the context of its model, as it does alone."""
    (alone,) = await outputs(server, server.engine.url, None, "x " * 200)

    assert await through(stack, server, "x " * 200) == [pytest.approx(alone, abs=1e-5)]


async def answers(stack: Stack, server: ServedModel, expected: Any) -> None:
    """Wait until requests have this output."""

    async def answered() -> bool:
        (found,) = await through(stack, server, "before")
        return bool(not isinstance(found, dict) and found == expected)

    await eventually(answered, "requests are answered again", STARTS_S)
    await stack.healthy(1)


@pytest.fixture
async def expected(server: ServedModel, stack: Stack) -> Any:
    """The output before a test, which is that after it."""
    (output,) = await through(stack, server, "before")
    return pytest.approx(output, abs=1e-5) if server.name == "infinity" else output


async def test_a_stopped_server_is_said_in_health(server: ServedModel, stack: Stack, expected: Any) -> None:
    """For five seconds: its request waits, and ends with its output."""
    os.killpg(server.engine.pid, signal.SIGSTOP)
    call = asyncio.create_task(through(stack, server, "before"))
    await reason_in_health(stack, "The endpoint does not respond")
    await asyncio.sleep(STOPPED_S / 2)
    os.killpg(server.engine.pid, signal.SIGCONT)

    assert await call == [expected]
    await stack.healthy(1)


async def test_a_killed_server_is_said_in_health(server: ServedModel, stack: Stack, expected: Any) -> None:
    """Requests wait or are rejected, until it is back."""
    server.kill()
    calls = asyncio.create_task(through(stack, server, *["before"] * 4))
    await reason_in_health(stack, "The endpoint cannot be reached")
    server.start()

    waited = [each if isinstance(each, dict) else "" for each in await calls]
    assert {each and each["error"]["code"] for each in waited} <= {"", "no_capacity"}
    await answers(stack, server, expected)


@asynccontextmanager
async def killed(stack: Stack, server: ServedModel) -> AsyncIterator[None]:
    """Kill it while a request is on its way, which shows that it is gone; start it again at the end."""
    server.kill()
    call = asyncio.create_task(through(stack, server, "before"))
    await reason_in_health(stack, "The endpoint cannot be reached")
    yield
    call.cancel()
    server.kill()
    server.start()


async def test_a_renamed_model_is_said_in_health(server: ServedModel, stack: Stack, expected: Any) -> None:
    """It is not used under its new name, also by servers that ignore the name; under the old one it is used again."""
    async with killed(stack, server):
        server.start(model="renamed")
        await reason_in_health(stack, WITHOUT_MODEL)

    await answers(stack, server, expected)


@pytest.mark.parametrize("server", TAKES_KEY, indirect=True)
async def test_a_wrong_key_is_said_in_health(server: ServedModel, stack: Stack, expected: Any) -> None:
    """With the setting that corrects it."""
    async with killed(stack, server):
        server.start(key="of-the-server")
        await reason_in_health(stack, "The endpoint rejects the key: set TIERLANE_ENDPOINT_API_KEY")

    await answers(stack, server, expected)
