"""`POST /v1/embeddings` with the real `openai` client: vectors in both forms, and clear words for token ids."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from integration.gateway_fixtures import Stack, openai_client, running_stack
from scheduler.errors import ErrorCode
from scheduler.payload import Task, decode_payload, write_vector
from scheduler.protocol.batches import ClaimedRequest, Outcome


def embedded(member: ClaimedRequest) -> Outcome:
    """A vector of the text's length and of one half; four tokens."""
    payload = decode_payload(member.body)
    if payload.task is not Task.EMBED:
        return Outcome(member.id, "", 1.5, 4, "v1", "text")
    return Outcome(member.id, "", 1.5, 4, "v1", write_vector([float(len(payload.input)), 0.5]))


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker that makes vectors."""
    async with running_stack(client, redis_url) as running:
        running.worker.answerer = embedded
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, without retries of its own."""
    async with openai_client(stack) as made:
        yield made


@pytest.mark.parametrize("form", [None, "base64", "float"])
async def test_vectors_come_in_order(stack: Stack, caller: openai.AsyncOpenAI, form: Any) -> None:
    """The client asks for base64 by itself and reads it; numbers where it is told to; each text is a request."""
    asked = {} if form is None else {"encoding_format": form}

    made = await caller.embeddings.create(model="tiny", input=["a", "bb", "ccc"], **asked)

    vectors: list[Any] = [each.embedding for each in made.data]
    if form == "base64":
        assert vectors[0] == write_vector([1.0, 0.5])
    else:
        assert vectors == [[1.0, 0.5], [2.0, 0.5], [3.0, 0.5]]
    assert [each.index for each in made.data] == [0, 1, 2]
    assert (made.object, made.data[0].object, made.model) == ("list", "embedding", "tiny")
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (12, 12)
    assert len(stack.worker.seen) == 3


async def test_one_text_needs_no_list(caller: openai.AsyncOpenAI) -> None:
    """As with OpenAI."""
    made = await caller.embeddings.create(model="tiny", input="abcd")

    assert [each.embedding for each in made.data] == [[4.0, 0.5]]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"input": [1, 2, 3]}, "input", "check_embedding_ctx_length=False"),
        ({"input": [[1, 2], [3]]}, "input", "check_embedding_ctx_length=False"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"dimensions": 2}, "dimensions", "not supported"),
        ({"encoding_format": "hex"}, "encoding_format", "hex"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_by_name(
    stack: Stack, caller: openai.AsyncOpenAI, changes: dict[str, Any], param: str, words: str
) -> None:
    """A 400 that says what to do; token ids are what LangChain sends unless it is told not to."""
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await caller.embeddings.create(**{"model": "tiny", "input": "a", **changes})

    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    assert stack.worker.seen == []


async def test_a_model_without_vectors_says_so(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """The worker's sentence, as a fault of the request."""
    stack.worker.answerer = lambda member: Outcome(
        member.id, ErrorCode.INVALID_REQUEST, 1.5, 0, "v1", "This model makes no embeddings."
    )

    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        await caller.embeddings.create(model="tiny", input="a")
