"""Completions and embeddings with fields that only an endpoint knows, with the real `openai` client and generated requests."""

import asyncio
import base64
import random
import struct
from typing import Any

import aiohttp
import openai
import pytest

from endpoint_stand_in import StandIn
from integration.endpoint_fixtures import stand_in
from integration.gateway_fixtures import Stack, model
from integration.gpu_pool_fixtures import faulty_models, start_worker
from integration.passed_on_fixtures import comparable, served, streamed, whole
from integration.streaming_fixtures import caller, stack

__all__ = ["caller", "faulty_models", "served", "stack", "stand_in", "start_worker"]

REQUESTS = 100


def generated(number: int) -> tuple[str, dict[str, Any]]:
    """A path and a request whose fields depend on its number."""
    pick = random.Random(number)
    if number % 4 == 0:
        texts: list[str] | str = [f"{number} é"[:length] for length in (1, 3, 2)[: pick.randint(1, 3)]]
        body = {"input": pick.choice([texts, "one text"]), "dimensions": pick.randint(2, 9)}
        return "embeddings", body | pick.choice([{}, {"encoding_format": "float"}, {"user": "u"}])
    options: dict[str, Any] = {
        "n": pick.randint(1, 3),
        "best_of": 3,
        "logprobs": pick.randint(0, 2),
        "echo": True,
        "suffix": " end",
        "frequency_penalty": pick.random(),
        "logit_bias": {"12": -5.5},
        "stop": ["\n\n"],
        "seed": number,
        "max_tokens": 100 + number,
    }
    return "completions", {"prompt": f"{number} \u2028 é"} | {
        name: value for name, value in options.items() if pick.random() < 0.4 or name == "suffix"
    }


@pytest.mark.timeout(120)
async def test_responses_equal_those_of_the_endpoint(stack: Stack, served: StandIn) -> None:
    """The same request, sent to the endpoint and through the gateway, has the same response, as a stream and whole."""
    gate = asyncio.Semaphore(16)

    async def differences(number: int) -> list[tuple[str, Any, Any]]:
        path, body = generated(number)
        async with gate:
            direct = comparable(await whole(endpoint, served.url, body | {"model": "stand-in-1"}, path))
            if path == "embeddings":
                direct["data"].sort(key=lambda row: row["index"])
            sends = (whole,) if path == "embeddings" else (whole, streamed)
            found = [
                comparable(await send(gateway, f"{stack.url}/v1", body | {"model": "tiny"}, path)) for send in sends
            ]
        return [(path, direct, each) for each in found if each != direct]

    async with (
        aiohttp.ClientSession() as endpoint,
        aiohttp.ClientSession(headers=stack.key()) as gateway,
    ):
        found = await asyncio.gather(*(differences(number) for number in range(REQUESTS)))

    assert [each for each in found if each] == []


async def test_lists(stack: Stack, caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """Each prompt of a list has its choices in order; each text of a list of embeddings is a call of its own."""
    made = await caller.completions.create(model="tiny", prompt=["a", "b"], n=2, echo=True, logprobs=1)
    vectors = await caller.embeddings.create(model="tiny", input=["a", "bb"], dimensions=3)
    packed: Any = await caller.with_raw_response.embeddings.create(
        model="tiny", input="a", dimensions=3, encoding_format="base64"
    )

    assert [(choice.index, choice.text[0]) for choice in made.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert [choice.logprobs is not None for choice in made.choices] == [True] * 4
    assert made.usage is not None
    assert made.usage.completion_tokens == 10
    assert [row.embedding for row in vectors.data] == [[1.0, 1.0, 0.5], [2.0, 1.0, 0.5]]
    assert sorted(body["input"] for body in served.asked("embeddings")) == ["a", "a", "bb"]
    raw = packed.http_response.json()["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(raw)) == (1.0, 1.0, 0.5)


async def test_prompts_of_token_ids(caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """They are passed on as they are, one request for each list, as evaluations of language models send them."""
    single = await caller.completions.create(model="tiny", prompt=[7, 8, 9])
    several: Any = await caller.completions.create(model="tiny", prompt=[[7, 8], [9]], echo=True, logprobs=1)

    assert single.choices[0].text == "9 8 7"
    assert [choice.logprobs.tokens[0] for choice in several.choices] == ["7", "9"]
    assert sorted(body["prompt"] for body in served.asked("completions")) == [[7, 8], [7, 8, 9], [9]]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_sampling_fields_of_servers_are_passed_on(stack: Stack, served: StandIn, path: str) -> None:
    """Load programs send them, also with values that have no effect; no capability is needed."""
    fields = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0, "min_tokens": 3, "ignore_eos": True}
    text: Any = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    async with aiohttp.ClientSession(headers=stack.key()) as http:
        await whole(http, f"{stack.url}/v1", {"model": "tiny"} | text | fields, path)

    assert served.asked(path)[-1].items() >= fields.items()


@pytest.mark.parametrize(
    ("path", "fields", "capabilities", "error"),
    [
        ("completions", {"logprobs": 1}, {"tools"}, "`logprobs` needs the capability `logprobs`"),
        ("completions", {"best_of": 2}, {"tools"}, "`best_of` needs the capability `choices`"),
        ("completions", {"beams": 4}, None, "The field `beams` is not known here"),
        ("completions", {"beams": 4}, {"extensions"}, None),
        ("embeddings", {"dimensions": 4}, {"tools"}, "`dimensions` needs the capability `dimensions`"),
        ("embeddings", {"beams": [1, "a"]}, None, "The field `beams` is not known here"),
        ("embeddings", {"beams": {"a": 1}}, {"extensions"}, "`beams` must be a text, a boolean"),
        ("embeddings", {"beams": [1, "a"]}, {"extensions"}, None),
    ],
)
async def test_the_row_of_the_model_limits_its_capabilities(
    stack: Stack, served: StandIn, path: str, fields: Any, capabilities: set[str] | None, error: str | None
) -> None:
    """A capability that is not in the row is rejected by name; unknown fields are passed on where the row allows them."""
    allowed = None if capabilities is None else frozenset(capabilities)
    stack.catalog.set(models=(model(capabilities=allowed),))
    body = {"model": "tiny", "prompt" if path == "completions" else "input": "a"} | fields
    async with (
        aiohttp.ClientSession(headers=stack.key()) as http,
        http.post(f"{stack.url}/v1/{path}", json=body) as response,
    ):
        document = await response.json()

    if error is None:
        assert response.status == 200, document
        assert served.asked(path)[-1]["beams"] == fields["beams"]
    else:
        assert (response.status, document["error"]["param"]) == (400, next(iter(fields)))
        assert error in document["error"]["message"]


@pytest.mark.parametrize("first_streams", [True, False])
async def test_replays(stack: Stack, served: StandIn, first_streams: bool) -> None:
    """The response to an Idempotency-Key is repeated in the form that the retry asks for, without another call."""
    body = {"model": "tiny", "prompt": "a", "n": 2, "logprobs": 1}
    async with aiohttp.ClientSession(headers=stack.key() | {"Idempotency-Key": "k"}) as http:
        sends = (streamed, whole) if first_streams else (whole, streamed)
        first, second = [comparable(await send(http, f"{stack.url}/v1", body, "completions")) for send in sends]
        async with http.post(f"{stack.url}/v1/completions", json=body | {"n": 3}) as other:
            assert other.status == 422

    assert first == second
    assert [len(choice["logprobs"]["tokens"]) for choice in first["choices"]] == [16, 16]
    assert len(served.asked("completions")) == 1


async def test_repeated_fields_are_bounded(stack: Stack, served: StandIn) -> None:
    """Fields that are sent with each of many prompts cannot multiply a body."""
    body = {"model": "tiny", "prompt": ["a"] * 100, "suffix": "x" * 100_000}
    async with (
        aiohttp.ClientSession(headers=stack.key()) as http,
        http.post(f"{stack.url}/v1/completions", json=body) as response,
    ):
        error = (await response.json())["error"]

    assert (response.status, error["code"], error["param"]) == (413, "request_too_large", "prompt")
    assert served.asked("completions") == []
