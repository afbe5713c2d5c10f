"""Every line of the table of capabilities before real engines, alone and through Tierlane: `make engines`.

What an engine of these does not support, it refuses or ignores; through Tierlane it does the same.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from real_engines.processes import ENGINES, MODEL, RunningEngine, running_engine
from real_engines.servers import SERVERS

from eventually import eventually
from scheduler.capabilities import Capability
from stack import Stack, start_stack

pytestmark = [pytest.mark.engines, pytest.mark.timeout(700)]
LANGUAGE_MODELS = {**ENGINES, "transformers": SERVERS["transformers"]}
CHATS, TEXTS, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOKENS = 12
NEARLY_GREEDY = {"temperature": 0.01, "seed": 7}
"""vLLM makes one choice at temperature 0."""
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["celsius"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLED = [
    {"role": "user", "content": "The weather?"},
    {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "celsius"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "20"},
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"size": {"type": "string", "enum": ["small", "large"]}},
            "required": ["size"],
            "additionalProperties": False,
        },
    },
}


def part(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The messages of a chat with a part of this kind."""
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": kind, kind: value}]}
        ]
    }


REQUESTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tools": (CHATS, {"tools": [WEATHER]}),
    "tools-named": (CHATS, {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 64}),
    "tools-required": (CHATS, {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 64}),
    "tools-none": (CHATS, {"tools": [WEATHER], "tool_choice": "none"}),
    "tools-called": (CHATS, {"tools": [WEATHER], "messages": CALLED}),
    "structured_output": (CHATS, {"response_format": SCHEMA, "max_tokens": 64}),
    "structured_output-text": (CHATS, {"response_format": {"type": "text"}}),
    "logprobs": (CHATS, {"logprobs": True, "top_logprobs": 2}),
    "logprobs-texts": (TEXTS, {"logprobs": 2}),
    "choices": (CHATS, {"n": 2, **NEARLY_GREEDY}),
    "choices-texts": (TEXTS, {"n": 2, **NEARLY_GREEDY}),
    "penalties": (CHATS, {"frequency_penalty": 1.5, "presence_penalty": 0.5}),
    "penalties-texts": (TEXTS, {"frequency_penalty": 1.5}),
    "logit_bias": (CHATS, {"logit_bias": {"40": 100}}),
    "reasoning": (CHATS, {"reasoning_effort": "low"}),
    "images": (CHATS, part("image_url", {"url": PIXEL})),
    "audio": (CHATS, part("input_audio", {"data": "UklGRg==", "format": "wav"})),
    "files": (CHATS, part("file", {"filename": "a.txt", "file_data": "data:text/plain;base64,YQ=="})),
    "dimensions": (VECTORS, {"input": "a", "dimensions": 8}),
    "extensions": (CHATS, {"made_up": {"a": [1]}}),
    "sampling": (CHATS, {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}),
    "stop": (CHATS, {"stop": ["a", "e"]}),
    "seed": (TEXTS, {"seed": 7}),
    "echo": (TEXTS, {"echo": True}),
    "suffix": (TEXTS, {"suffix": "end"}),
    "tokens": (TEXTS, {"prompt": [40, 41, 42]}),
    "several": (TEXTS, {"prompt": ["one", "two"]}),
}
"""By the capability that they need, or what they have."""
NOT_STREAMED = ("dimensions", "several")
SPLIT = ("several",)
"""Each prompt is a request of its own: llama.cpp alone counts the tokens of one, `transformers serve` takes one."""
REFUSED_AS = {
    "images": "image_url",
    "audio": "input_audio",
    "files": "file",
    "dimensions": "embeddings",
    "extensions": "made_up",
    "sampling": "ignore_eos",
    "tokens": "prompt",
}
"""What a refusal names."""
UNNAMED_FAULT = "Internal Server Error"
"""Also of a stream that is broken off."""


class Reply(NamedTuple):
    """What is equal in the response of an engine and that of Tierlane: status, choices or vectors, tokens."""

    status: int
    output: Any
    tokens: tuple[int, int] | None


@pytest.fixture(scope="module", params=LANGUAGE_MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One running engine."""
    with running_engine(LANGUAGE_MODELS[request.param], tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack before it, whose model has every capability."""
    home: Path = tmp_path_factory.mktemp("stack")
    with start_stack(home, "--backend", engine.backend, "--workers", "1") as started:
        asyncio.run(allow_everything(started))
        yield started


async def allow_everything(stack: Stack) -> None:
    """Give the model every capability, and wait until the gateway obeys its row."""
    command = ("model", "set", MODEL, "--capabilities", ",".join(Capability), "--data-dir", str(stack.data_dir))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tierlane", *command)
    assert await process.wait() == 0
    body = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1, "made_up": 1}

    async def allowed() -> bool:
        found = await reply(stack.url, CHATS, body, stack.headers("enterprise"))
        return found.status == 200 or "not accepted by the model" in found.output  # By the engine.

    await eventually(allowed, "an unknown field is passed on", 30.0)


async def reply(url: str, route: str, changes: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    """The response to a request with these fields at temperature 0, whole or as a stream."""
    body: dict[str, Any] = {"model": MODEL}
    if route != VECTORS:
        body |= {"max_tokens": TOKENS, "temperature": 0}
        body |= (
            {"messages": [{"role": "user", "content": "Once upon a time"}]} if route == CHATS else {"prompt": "Once"}
        )
    body |= changes
    async with aiohttp.ClientSession() as http, http.post(url + route, json=body, headers=headers) as response:
        try:
            text = await response.text()
        except aiohttp.ClientPayloadError:
            return Reply(500, UNNAMED_FAULT, None)
    if response.status != 200:
        return Reply(response.status, text, None)
    if response.content_type == "text/event-stream":
        return streamed(response.status, text)
    document = json.loads(text)
    usage = document["usage"]
    output = document["data"] if route == VECTORS else [compared(each) for each in document["choices"]]
    return Reply(response.status, output, (usage["prompt_tokens"], usage.get("completion_tokens", 0)))


def compared(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice without the ids of its calls, which are random, and without members that say nothing."""
    message = {name: value for name, value in (choice.get("message") or {}).items() if value}
    for call in message.get("tool_calls", ()):
        call.pop("id")
    rest = {name: value for name, value in choice.items() if value is not None and name != "message"}
    return rest | ({"message": message} if message else {})


def streamed(status: int, text: str) -> Reply:
    """The texts of the choices of a stream, with their reasons to end, and the arguments of their calls."""
    texts: dict[tuple[int, str], str] = {}
    tokens = None
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if usage := chunk.get("usage"):
            tokens = (usage["prompt_tokens"], usage["completion_tokens"])
        if "error" in chunk:
            return Reply(500, UNNAMED_FAULT, None)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or choice
            calls = [call["function"] for call in delta.get("tool_calls") or ()]
            found = {
                "text": delta.get("content") or delta.get("text") or "",
                "reasoning": delta.get("reasoning_content") or delta.get("reasoning") or "",
                "calls": "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls),
                "reason": choice.get("finish_reason") or "",
            }
            for name, piece in found.items():
                texts[choice["index"], name] = texts.get((choice["index"], name), "") + piece
    return Reply(status, {key: value for key, value in texts.items() if value}, tokens)


def rounded(value: Any) -> Any:
    """Floats with three decimals: the last ones depend on what runs beside a sequence."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.fixture
def both(engine: RunningEngine, stack: Stack) -> Any:
    """Sends a request to the engine and through Tierlane."""

    async def send(route: str, changes: Mapping[str, Any]) -> tuple[Reply, Reply]:
        alone = await reply(engine.url, route, changes, {})
        if alone.output == UNNAMED_FAULT:  # An input that fails is known by the answers to others.
            assert (await reply(stack.url, CHATS, {}, stack.headers("enterprise"))).status == 200
        return alone, await reply(stack.url, route, changes, stack.headers("enterprise"))

    return send


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_request(both: Any, name: str, stream: bool) -> None:
    """Equal choices, reasons to end and counts of tokens; what the engine refuses is refused by name."""
    route, changes = REQUESTS[name]
    streams = {"stream": True, "stream_options": {"include_usage": True}} if stream and name not in NOT_STREAMED else {}

    alone, through = await both(route, {**changes, **streams})

    if alone.status == 200 or name in SPLIT:
        assert through.status == 200
        assert alone.status != 200 or rounded(through.output) == rounded(alone.output)
        assert through.tokens == alone.tokens or name in SPLIT
        return
    if through.output == UNNAMED_FAULT:
        assert stream
        assert alone == through
        return
    code = json.loads(through.output)["error"]["code"]
    if alone.output == UNNAMED_FAULT:
        assert (through.status, code) == (422, "poison_request")
    else:
        assert (through.status, code) == (400, "invalid_request"), alone
        assert REFUSED_AS.get(name, name.partition("-")[0]) in through.output, alone
