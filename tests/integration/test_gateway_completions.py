"""`POST /v1/completions` with the real `openai` client: the text, its tokens, and errors that name the client's own fields."""

from typing import Any

import openai
import pytest

from integration.gateway_fixtures import Stack, model
from integration.openai_fixtures import caller, stack
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome

__all__ = ["caller", "stack"]


def cut_off(member: ClaimedRequest) -> Outcome:
    """Three tokens of an answer that would go on, after five of the prompt."""
    return Outcome(member.id, "", 1.5, 8, "v1", "abc", 3, "length")


@pytest.mark.parametrize("prompt", ["hello", ["hello"]])
async def test_a_prompt_is_completed(stack: Stack, caller: openai.AsyncOpenAI, prompt: Any) -> None:
    """The client's own types: text, why it ended, usage, when; and the request's id for who asks support."""
    stack.worker.answerer = cut_off

    made = await caller.completions.create(model="tiny", prompt=prompt)

    assert [(each.index, each.text, each.finish_reason) for each in made.choices] == [(0, "abc", "length")]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 3, 8)
    assert (made.object, made.model) == ("text_completion", "tiny")
    assert made.created > 1_700_000_000
    assert [made.id] == stack.worker.seen == [made._request_id]


async def test_what_the_client_wishes_reaches_the_model(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Parameters that were said, and no others; what changes nothing is taken and left alone."""
    seen: list[dict[str, Any]] = []

    def noting(member: ClaimedRequest) -> Outcome:
        seen.append(dict(decode_payload(member.body).parameters))
        return cut_off(member)

    stack.worker.answerer = noting
    await caller.completions.create(model="tiny", prompt="a")
    await caller.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=7,
        temperature=0.5,
        top_p=1,
        seed=3,
        stop="x",
        n=1,
        echo=False,
        user="u",
        extra_body={"safety_identifier": "s", "prompt_cache_key": "k"},
    )
    await caller.completions.create(model="tiny", prompt="a", stop=["x", "y"], best_of=1, presence_penalty=0)

    assert seen == [
        {},
        {"max_tokens": 7, "temperature": 0.5, "top_p": 1.0, "seed": 3, "stop": ["x"]},
        {"stop": ["x", "y"]},
    ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 1}, "logprobs"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"stop": list("abcde")}, "stop"),
        ({"temperature": "warm"}, "temperature"),
        ({"extra_body": {"beams": 4}}, "beams"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_by_name(
    stack: Stack, caller: openai.AsyncOpenAI, changes: dict[str, Any], param: str
) -> None:
    """A 400 whose exception carries code, field and request id; the model never sees it."""
    with pytest.raises(openai.BadRequestError) as caught:
        await caller.completions.create(**{"model": "tiny", "prompt": "a", **changes})

    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    assert (caught.value.request_id or "").startswith("req_")
    assert stack.worker.seen == []


async def test_a_stream_takes_one_prompt(caller: openai.AsyncOpenAI) -> None:
    """Several would be several streams, which one answer cannot be."""
    with pytest.raises(openai.BadRequestError) as caught:
        await caller.completions.create(model="tiny", prompt=["a", "b"], stream=True)

    assert caught.value.param == "stream"


@pytest.mark.parametrize(
    ("sentence", "param"),
    [
        ("parameters.top_p must be above 0 and at most 1.", "top_p"),
        ("The model does not speak this language.", None),
    ],
)
async def test_a_parameter_that_the_model_refuses_is_named_as_the_client_wrote_it(
    stack: Stack, caller: openai.AsyncOpenAI, sentence: str, param: str | None
) -> None:
    """The model knows `parameters.top_p`, this client `top_p`; what is no parameter's fault names none."""
    stack.worker.answerer = lambda member: Outcome(member.id, ErrorCode.INVALID_REQUEST, 1.0, 0, "v1", sentence)

    with pytest.raises(openai.BadRequestError) as caught:
        await caller.completions.create(model="tiny", prompt="a", top_p=0)

    assert caught.value.param == param
    assert sentence.removeprefix("parameters.") in str(caught.value)


async def test_a_model_must_be_named(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """One that is not served is a 404 with its field."""
    stack.catalog.set(models=(model("tiny"), model("other")))

    with pytest.raises(openai.NotFoundError) as caught:
        await caller.completions.create(model="gpt-9", prompt="a")

    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
