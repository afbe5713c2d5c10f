"""`POST /v1/chat/completions` with the real `openai` client: the conversation reaches the model, and the answer the client."""

from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from integration.gateway_fixtures import Stack
from integration.openai_fixtures import caller, stack
from scheduler.payload import Payload, PromptMessage, Task, decode_messages, decode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome

__all__ = ["caller", "stack"]

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def asked(stack: Stack) -> list[Payload]:
    """What the worker was asked; it says hi, three tokens of eight, and is cut off."""
    seen: list[Payload] = []

    def hi(member: ClaimedRequest) -> Outcome:
        seen.append(decode_payload(member.body))
        return Outcome(member.id, "", 1.5, 8, "v7", "hi!", 3, "length")

    stack.worker.answerer = hi
    return seen


async def test_a_conversation_goes_on(stack: Stack, caller: openai.AsyncOpenAI, asked: list[Payload]) -> None:
    """The client's own types: the message, why it ended, usage, when, by what; and the messages as the worker got them."""
    made = await caller.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
            {"role": "assistant", "content": "hi", "name": "bot"},
            {"role": "developer", "content": "briefer"},
        ],
        max_completion_tokens=3,
        temperature=0.5,
    )

    (choice,) = made.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "hi!")
    assert (choice.finish_reason, made.object, made.system_fingerprint) == ("length", "chat.completion", "v7")
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 3, 8)
    assert [made.id] == stack.worker.seen == [made._request_id]
    assert made.service_tier == "default"
    (payload,) = asked
    assert (payload.task, payload.parameters) == (Task.CHAT, {"max_tokens": 3, "temperature": 0.5})
    assert decode_messages(payload.input) == [
        PromptMessage("system", "Be brief."),
        PromptMessage("user", "hello"),
        PromptMessage("assistant", "hi"),
        PromptMessage("developer", "briefer"),
    ]


async def test_an_answer_can_be_sent_back_as_it_was_dumped(caller: openai.AsyncOpenAI, asked: list[Payload]) -> None:
    """What clients do to go on: the whole message with its null fields."""
    first = await caller.chat.completions.create(model="tiny", messages=HELLO)
    dumped: Any = first.choices[0].message.model_dump()

    await caller.chat.completions.create(model="tiny", messages=[*HELLO, dumped, *HELLO])

    assert [message.content for message in decode_messages(asked[1].input)] == ["hello", "hi!", "hello"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": []}, "modalities"),
        ({"store": True}, "store"),
        ({"extra_body": {"safety_identifier": 1}}, "safety_identifier"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"extra_body": {"service_tier": "gold"}}, "service_tier"),
        ({"extra_body": {"beams": 4}}, "beams"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_by_name(
    stack: Stack, caller: openai.AsyncOpenAI, changes: dict[str, Any], param: str
) -> None:
    """A 400 whose exception carries code, field and request id; the model never sees it."""
    with pytest.raises(openai.BadRequestError) as caught:
        await caller.chat.completions.create(**{"model": "tiny", "messages": HELLO, **changes})

    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    assert (caught.value.request_id or "").startswith("req_")
    assert stack.worker.seen == []


async def test_fields_that_change_nothing_are_taken(caller: openai.AsyncOpenAI, asked: list[Payload]) -> None:
    """The client's own fields, with the values that ask for what happens anyway; the model is asked as without them."""
    changes: Any = {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "modalities": ["text"],
        "store": False,
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": False,
    }
    for more in (*({name: value} for name, value in changes.items()), changes, dict.fromkeys(changes)):
        await caller.chat.completions.create(model="tiny", messages=HELLO, **more)

    assert {tuple(each.parameters) for each in asked} == {()}
    assert len(asked) == len(changes) + 2


async def test_flex_lowers_the_tier_and_nothing_raises_it(stack: Stack, asked: list[Payload], client: Redis) -> None:
    """An enterprise key that says flex waits with the free; one that asks for priority is in the first tier already."""
    key = stack.catalog.keys["enterprise"].text
    async with openai.AsyncOpenAI(api_key=key, base_url=f"{stack.url}/v1", max_retries=0) as caller:
        tiers = []
        for wish in ("flex", "priority", "auto"):
            made = await caller.chat.completions.create(model="tiny", messages=HELLO, service_tier=wish)
            row = await client.hget(f"request:{made.id}", "who")
            tiers.append((row.split()[2].decode(), made.service_tier))

    assert tiers == [("free", "flex"), ("enterprise", "default"), ("enterprise", "default")]


async def test_every_door_knows_flex(stack: Stack) -> None:
    """The plain door too, on the fast lane as well as off it."""
    for headers in ({}, {"Idempotency-Key": "k"}):
        body = {"input": "hello", "service_tier": "flex"}
        sent = {**stack.key("enterprise"), **headers}
        async with stack.http.post(f"{stack.url}/v1/inference", json=body, headers=sent) as answer:
            assert (await answer.json())["metadata"]["tier"] == "free"
