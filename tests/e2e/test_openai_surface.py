"""OpenAI's clients and LangChain's before a whole stack with the shipped language model: nothing has to be learnt."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from stack import Stack


@pytest.fixture
def access(tiny_stack: Stack) -> dict[str, str]:
    """What such a client has to be told: where, and with which key."""
    return {"base_url": f"{tiny_stack.url}/v1", "api_key": tiny_stack.key("enterprise")}


@pytest.fixture
async def caller(access: dict[str, str]) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client as it comes."""
    async with openai.AsyncOpenAI(**access) as made:
        yield made


@pytest.fixture
async def transport() -> AsyncIterator[httpx.AsyncClient]:
    """LangChain's own would never be closed."""
    async with httpx.AsyncClient(timeout=30.0) as made:
        yield made


def by_hand(access: dict[str, str]) -> dict[str, Any]:
    """All that the synchronous client does, in one thread."""
    with openai.OpenAI(**access) as client:
        (model,) = client.models.list()
        chat = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Once upon a time"}], max_tokens=8
        )
        text = client.completions.create(model=model.id, prompt=["Once upon", "The sea"], max_tokens=8)
        vectors = client.embeddings.create(model=model.id, input=["The cat sat.", "The sea is deep."])
        said: list[Any] = [{"role": "user", "content": "Once upon a time"}]
        with client.chat.completions.create(model=model.id, messages=said, max_tokens=8, stream=True) as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        return {
            "model": client.models.retrieve(model.id),
            "chat": chat,
            "text": text,
            "vectors": vectors,
            "streamed": "".join(pieces),
        }


async def test_the_synchronous_client_finds_all_it_asks_for(access: dict[str, str]) -> None:
    """Models, chat, the same as a stream, completions of a list, embeddings: the client's own types, filled."""
    found = await asyncio.to_thread(by_hand, access)

    assert found["model"].object == "model"
    assert found["chat"].choices[0].message.content
    assert found["streamed"] == found["chat"].choices[0].message.content
    assert found["chat"].usage.completion_tokens <= 8
    assert [choice.index for choice in found["text"].choices] == [0, 1]
    assert all(choice.text for choice in found["text"].choices)
    lengths = [math.hypot(*vector.embedding) for vector in found["vectors"].data]
    assert lengths == [pytest.approx(1.0, abs=1e-4)] * 2


async def test_what_the_model_says_of_parameters_names_the_field(caller: openai.AsyncOpenAI) -> None:
    """A worker's refusal becomes the client's exception, in the words of this door."""
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        await caller.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=100_000
        )

    assert (caught.value.code, caught.value.param) == ("invalid_request", "max_tokens")


async def test_the_same_seed_brings_the_same_text(caller: openai.AsyncOpenAI) -> None:
    """Parameters reach the model."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "The sea", "temperature": 1.0, "max_tokens": 24}

    texts = [(await caller.completions.create(**asked, seed=seed)).choices[0].text for seed in (1, 1, 2)]

    assert texts[0] == texts[1] != texts[2]


async def test_langchain_talks_and_completes(access: dict[str, str], transport: httpx.AsyncClient) -> None:
    """Its chat model and its older one, each asked once and for several at once, and a stream."""
    chat = ChatOpenAI(model="tiny", max_tokens=8, http_async_client=transport, **access)
    text = OpenAI(model="tiny", max_tokens=8, http_async_client=transport, **access)

    said = await chat.ainvoke([("system", "Be brief."), ("human", "Once upon a time")])
    several = await chat.abatch(["The sea", "The king", "The old man"])
    completed = await text.agenerate(["Once upon", "The sea"])
    streamed = [chunk.content async for chunk in chat.astream([("system", "Be brief."), ("human", "Once upon a time")])]

    assert said.content
    assert "".join(map(str, streamed)) == said.content
    assert said.response_metadata["finish_reason"] in ("length", "stop")
    assert said.usage_metadata["total_tokens"] > 0
    assert all(message.content for message in several)
    assert [len(generations) for generations in completed.generations] == [1, 1]


async def test_langchain_embeds_text_when_it_is_told_to(access: dict[str, str], transport: httpx.AsyncClient) -> None:
    """With the option that the error names; ids of a tokenizer that is not the model's are refused before it is asked."""
    embeddings = OpenAIEmbeddings(model="tiny", check_embedding_ctx_length=False, http_async_client=transport, **access)

    vectors = await embeddings.aembed_documents(["The cat sat.", "The sea is deep."])
    one = await embeddings.aembed_query("The cat sat.")

    assert len(vectors) == 2
    assert one == pytest.approx(vectors[0], abs=1e-4)
