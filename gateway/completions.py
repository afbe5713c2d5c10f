"""`POST /v1/completions` in OpenAI's form (https://platform.openai.com/docs/api-reference/completions): one prompt, one text.

Fields that change nothing here are taken and left alone; those that would change the text and cannot be obeyed are
refused by name, since a client that asked for three choices and got one would not notice.
"""

from typing import Any

import msgspec

from gateway.answer import Answer, encode_json
from gateway.dialect import Dialect
from gateway.inference_body import InferenceBody, Integer, Parameters, Scalar, check_model
from gateway.strict_json import check_duplicates, check_text, decode, invalid
from gateway.success import completed
from scheduler.replies import Reply
from scheduler.request_id import created_ms

Tokens = list[Integer]
MAX_STOPS = 4  # As OpenAI has it.


class CompletionBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What OpenAI's clients send; None is the same as absent."""

    model: str
    prompt: str | list[str | Integer | Tokens]
    max_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Integer | None = None
    stop: str | list[str] | None = None
    n: Integer | None = None
    best_of: Integer | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    suffix: str | None = None
    logprobs: Integer | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


class Choice(msgspec.Struct, gc=False):
    """The text, and why it ends there: `stop` or `length`."""

    text: str
    index: int
    logprobs: None
    finish_reason: str


class TokenUsage(msgspec.Struct, gc=False):
    """Tokens of this request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(msgspec.Struct, gc=False):
    """The answer. `created` is in seconds of Unix time, as the request's id carries it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage


_decoder = msgspec.json.Decoder(CompletionBody)
_PARAMETERS = ("max_tokens", "temperature", "top_p", "seed")
# What may be said, since it is what happens anyway.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "stream": (None, False),
    "suffix": (None, ""),
    "logprobs": (None,),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
}
NOT_TEXT = "`prompt` must be text, not token ids: every model here has a tokenizer of its own."


def read_completion(raw: bytes, max_input_bytes: int) -> InferenceBody:
    """Raises RequestError that names the field."""
    body = decode(_decoder, raw)
    check_duplicates(raw)
    check_model("model", body.model)
    for name, harmless in _HARMLESS.items():
        if getattr(body, name) not in harmless:
            raise invalid(name, f"`{name}` with this value is not supported here: leave it out.")
    prompt = _one_prompt(body.prompt)
    check_text("prompt", prompt, max_input_bytes)
    return InferenceBody(prompt, body.model, _parameters(body))


def _one_prompt(prompt: str | list[Any]) -> str:
    if isinstance(prompt, str):
        return prompt
    if any(not isinstance(each, str) for each in prompt):
        raise invalid("prompt", NOT_TEXT)
    if len(prompt) != 1:
        raise invalid("prompt", "`prompt` must be one text: send a request for each.")
    return str(prompt[0])


def _parameters(body: CompletionBody) -> Parameters:
    """Those that were said: what a model does without them is its own."""
    parameters: Parameters = {name: value for name in _PARAMETERS if (value := getattr(body, name)) is not None}
    if body.stop:
        parameters["stop"] = [body.stop] if isinstance(body.stop, str) else _few(body.stop)
    return parameters


def _few(stops: list[str]) -> list[Scalar]:
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"`stop` must not hold more than {MAX_STOPS} texts.")
    return list(stops)


def write_completion(reply: Reply, model: str, _tier: str, latency_ms: float, lines: str) -> Answer:
    """The answer for a completed request."""
    document = Completion(
        id=reply.id,
        object="text_completion",
        created=created_ms(reply.id) // 1000,
        model=model,
        choices=[Choice(reply.output, 0, None, reply.finish_reason)],
        usage=usage(reply),
    )
    return completed(reply, encode_json(document), latency_ms, lines)


def usage(reply: Reply) -> TokenUsage:
    """What was read and written. A model that does not tell them apart has read them all."""
    return TokenUsage(max(0, reply.tokens_used - reply.output_tokens), reply.output_tokens, reply.tokens_used)


COMPLETIONS = Dialect(read_completion, write_completion, flat=True)
