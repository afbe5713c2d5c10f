"""Chats for an endpoint travel whole, with the real `openai` client: tools, structured output, choices, log probabilities."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import BaseModel
from redis.asyncio import Redis

from configs import endpoint_access
from endpoint_stand_in import StandIn
from eventually import eventually
from integration.endpoint_fixtures import stand_in
from integration.gateway_fixtures import Stack, model, openai_client, running_stack
from integration.gpu_pool_fixtures import StartWorker, faulty_models, start_worker
from integration.passed_on_fixtures import comparable, served, streamed, whole
from integration.streaming_fixtures import caller, scheduling, stack
from scheduler.body_store import is_reference

__all__ = ["caller", "faulty_models", "served", "stack", "stand_in", "start_worker"]

REQUESTS = 1000
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def generated(number: int) -> dict[str, Any]:
    """A request whose fields depend on its number."""
    pick = random.Random(number)
    history = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "21 °C"},
    ]
    body: dict[str, Any] = {
        "messages": [
            *HELLO,
            *(history if pick.random() < 0.3 else ()),
            {"role": "user", "content": f"{number} \u2028 é"},
        ]
    }
    options: dict[str, Any] = {
        "n": pick.randint(1, 3),
        "tools": [TOOL] * pick.randint(1, 3),
        "tool_choice": "required",
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_object"},
        "reasoning_effort": pick.choice(["low", "high"]),
        "frequency_penalty": pick.random(),
        "logit_bias": {"12": -5.5},
        "stop": ["\n\n"],
        "seed": number,
        "temperature": pick.random(),
        "max_tokens": 100 + number,
        "parallel_tool_calls": False,
    }
    chosen = {name: value for name, value in options.items() if pick.random() < 0.4}
    if "tools" not in chosen:  # Without tools these have no effect, and are not passed on.
        chosen = {name: value for name, value in chosen.items() if name not in ("tool_choice", "parallel_tool_calls")}
    return body | chosen


@pytest.mark.timeout(300)
async def test_responses_equal_those_of_the_endpoint(stack: Stack, served: StandIn) -> None:
    """The same request, sent to the endpoint and through the gateway, has the same response, as a stream and whole."""
    gate = asyncio.Semaphore(32)

    async def differences(number: int) -> tuple[int, str] | None:
        body = generated(number)
        async with gate:
            direct = comparable(await whole(endpoint, served.url, body | {"model": "stand-in-1"}))
            for send in (whole, streamed):
                through = comparable(await send(gateway, f"{stack.url}/v1", body | {"model": "tiny"}))
                if through != direct:
                    return number, f"{send.__name__}: {json.dumps(through)} instead of {json.dumps(direct)}"
        return None

    async with (
        aiohttp.ClientSession() as endpoint,
        aiohttp.ClientSession(headers=stack.key()) as gateway,
    ):
        found = await asyncio.gather(*(differences(number) for number in range(REQUESTS)))

    assert [each for each in found if each is not None] == []


class Weather(BaseModel):
    """The structured output that the client asks for."""

    answer: str


async def test_openai_client(stack: Stack, caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """Tools, `parse()`, several choices, log probabilities, reasoning and the usage's details reach the client."""
    tools: Any = [TOOL]
    called = await caller.chat.completions.create(model="tiny", messages=HELLO, tools=tools, n=2)
    stream = await caller.chat.completions.create(
        model="tiny", messages=HELLO, tools=tools, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    parsed = await caller.chat.completions.parse(model="tiny", messages=HELLO, response_format=Weather)
    # As the client sends it back: with the fields that it added.
    history: Any = [*HELLO, parsed.choices[0].message.model_dump(exclude_unset=True, warnings=False), *HELLO]
    await caller.chat.completions.create(model="tiny", messages=history)
    options: Any = {"logprobs": True, "reasoning_effort": "low"}
    thought = await caller.chat.completions.create(model="tiny", messages=HELLO, **options)

    assert [choice.finish_reason for choice in called.choices] == ["tool_calls"] * 2
    calls: Any = called.choices[1].message.tool_calls
    arguments = "".join(
        call.function.arguments or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == 1
        for call in choice.delta.tool_calls or ()
        if call.function is not None
    )
    assert arguments == calls[0].function.arguments
    assert chunks[-1].usage == called.usage
    assert called.usage is not None
    assert called.usage.completion_tokens_details is not None
    assert called.usage.completion_tokens_details.reasoning_tokens == 3
    answer: Any = parsed.choices[0].message.parsed
    assert isinstance(answer, Weather)
    choice: Any = thought.choices[0]
    assert len(choice.logprobs.content) == len(choice.message.content)
    assert choice.message.reasoning_content.startswith("thinking low")
    assert thought.id.startswith("req_")
    assert thought.model == "tiny"


@pytest.mark.parametrize("first_streams", [True, False])
async def test_replays_of_a_chat_with_tools(stack: Stack, served: StandIn, first_streams: bool) -> None:
    """The response to an Idempotency-Key is repeated in the form that the retry asks for, without another call."""
    body = {"model": "tiny", "messages": HELLO, "tools": [TOOL]}
    async with aiohttp.ClientSession(headers=stack.key() | {"Idempotency-Key": "k"}) as http:
        sends = (streamed, whole) if first_streams else (whole, streamed)
        first, second = [comparable(await send(http, f"{stack.url}/v1", body)) for send in sends]

    assert first == second
    assert first["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert len(served.asked("chat/completions")) == 1


@pytest.mark.parametrize(
    ("fields", "capabilities", "error"),
    [
        ({"tools": [TOOL]}, frozenset({"images"}), "`tools` needs the capability `tools`"),
        ({"beams": 4}, None, "The field `beams` is not known here"),
        ({"beams": 4}, frozenset({"extensions"}), None),
    ],
)
async def test_the_row_of_the_model_limits_its_capabilities(
    stack: Stack, caller: openai.AsyncOpenAI, served: StandIn, fields: Any, capabilities: Any, error: str | None
) -> None:
    """A capability that is not in the row is rejected by name; unknown fields are passed on where the row allows them."""
    stack.catalog.set(models=(model(capabilities=capabilities),))
    request = caller.chat.completions.create(model="tiny", messages=HELLO, extra_body=fields)
    if error is None:
        await request
        assert served.asked("chat/completions")[-1]["beams"] == 4
        return
    with pytest.raises(openai.BadRequestError, match=error):
        await request


def stored_in(directory: Path) -> list[str]:
    """The names of chats; other files are there to be written over."""
    return [path.name for path in directory.iterdir() if is_reference(path.name)]


async def test_large_images_stay_out_of_redis(
    client: Redis, redis_url: str, start_worker: StartWorker, stand_in: StandIn, tmp_path: Path
) -> None:
    """The endpoint gets an image of a megabyte whole, Redis hardly grows, and no file is left; without room it is a 503."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (1 << 20)}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]}]
    sizes = {"max_body_bytes": 4 << 20, "max_input_bytes": 1 << 16, "body_dir": tmp_path / "bodies"} | {
        "body_store_bytes": 3 << 20
    }
    async with (
        running_stack(client, redis_url, total_ms=30_000, **sizes) as stack,
        scheduling(client),
        openai_client(stack) as caller,
    ):
        stack.worker.hold, stack.worker.backend = True, f"openai:{stand_in.url}"
        await eventually(lambda: stack.gateway.heartbeat.passes_on, "the pool passes chats on")
        request: Any = {"model": "tiny", "messages": messages, "tools": [TOOL]}
        waiting = [asyncio.create_task(caller.chat.completions.create(**request)) for _ in range(2)]
        await eventually(lambda: len(stored_in(tmp_path / "bodies")) == 2, "both are stored")
        stored = [await client.hget(key, "body") for key in await client.keys("request:*")]
        with pytest.raises(openai.InternalServerError, match="Too many large requests"):
            await caller.with_options(max_retries=0).chat.completions.create(**request)
        worker = await start_worker(
            backend=f"openai:{stand_in.url}", endpoint=endpoint_access(body_dir=str(tmp_path / "bodies"))
        )
        await worker.reaches("ready")
        responses = await asyncio.gather(*waiting)

        assert [choice.finish_reason for each in responses for choice in each.choices] == ["tool_calls"] * 2
        assert stand_in.asked("chat/completions")[-1]["messages"] == messages
        assert all(len(body) < 1000 for body in stored if body is not None)
        assert stored_in(tmp_path / "bodies") == []
