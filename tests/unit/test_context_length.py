"""The error of a request that exceeds the model's context, from every engine's message to the words that agents recognise."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.inference import INFERENCE
from gateway.http.error_responses import fault_of
from gateway.translations.message_endpoints import error_body
from gpu_pool.backends.backend import ItemResult
from gpu_pool.backends.openai_endpoint.errors import read_refusal
from scheduler.context_length import ContextOverflow, read_overflow

ENGINES = {
    "vLLM 0.8": "This model's maximum context length is 4096 tokens. However, you requested 5100 tokens (5000 in the "
    "messages, 100 in the completion). Please reduce the length of the messages or completion.",
    "vLLM 0.32": "You passed 5100 input tokens and requested 100 output tokens. However, the model's context length is only "
    "4096 tokens.",
    "vLLM, prompt": "The decoder prompt (length 5100) is longer than the maximum model length of 4096.",
    "SGLang": "The input (5100 tokens) is longer than the model's context length (4096 tokens).",
    "SGLang, total": "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total "
    "of 5100 tokens: 5000 tokens from the input messages and 100 tokens for the completion.",
    "llama.cpp": "request (5100 tokens) exceeds the available context size (4096 tokens), try increasing it",
    "TGI": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5100 `inputs` tokens and 100 "
    "`max_new_tokens`",
    "TGI, input": "Input validation error: `inputs` must have less than 4096 tokens. Given: 5100",
    "vLLM, max_tokens": "'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum context length is 4096 "
    "tokens and your request has 100 input tokens (5000 > 4096 - 100).",
    "SGLang, input": "Input length (5100 tokens) exceeds the maximum allowed length (4096 tokens). Use a shorter input.",
    "TensorRT-LLM": "Prompt length (5100) exceeds maximum input length (4096).",
    "TensorRT-LLM, sum": "The sum of prompt length (5100.0), query length (0) and max_tokens (100) should not exceed max_seq_len "
    "(4096)",
    "Mistral": "Prompt contains 5100 tokens and 0 draft tokens, too large for model with 4096 maximum context length",
    "Gemini": "The input token count (5100) exceeds the maximum number of tokens allowed (4096).",
}


@pytest.mark.parametrize("status", [400, 413, 422, 500])
@pytest.mark.parametrize("message", ENGINES.values(), ids=ENGINES)
def test_each_engines_way_is_recognised(message: str, status: int) -> None:
    """With the numbers, whatever the status."""
    body = json.dumps({"error": {"message": message, "type": "BadRequestError", "param": "input_tokens"}}).encode()

    found = read_refusal(status, {}, body, tuple, 0.0)

    assert isinstance(found, ItemResult)
    assert (found.error_code, read_overflow(found.output)) == ("context_length_exceeded", ContextOverflow(5100, 4096))
    assert "maximum context length is 4096 tokens" in found.output


@pytest.mark.parametrize(
    "message",
    ["the file name is too long", "temperature must be at most 2", "logprobs exceeds the maximum of 20 tokens"],
)
def test_other_messages_are_not_about_the_context(message: str) -> None:
    """A client that shortens its conversation after each of them would never end."""
    assert read_overflow(message) is None


def test_a_message_without_numbers_is_recognised() -> None:
    """By the code; no number is invented."""
    body = json.dumps({"error": {"message": "prompt is too long"}}).encode()
    found: Any = read_refusal(400, {}, body, tuple, 0.0)

    assert (found.error_code, read_overflow(found.output)) == ("context_length_exceeded", ContextOverflow())


@pytest.mark.parametrize(
    ("overflow", "anthropic"),
    [
        (ContextOverflow(5100, 4096), "prompt is too long: 5100 tokens > 4096 maximum"),
        (ContextOverflow(), "prompt is too long"),
    ],
)
def test_each_api_has_its_own_words(overflow: ContextOverflow, anthropic: str) -> None:
    """OpenAI's code and message; the message that Anthropic's clients look for."""
    reply: Any = SimpleNamespace(error_code="context_length_exceeded", output=overflow.sentence())
    error = INFERENCE.failure(reply)

    fault = fault_of(error, "req_1")
    assert (fault.code, fault.type, fault.message) == (
        "context_length_exceeded",
        "invalid_request_error",
        overflow.sentence(),
    )
    assert error_body(error, "req_1").error.message == anthropic
