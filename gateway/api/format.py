"""The common form of requests and results of all API formats, and OpenAI's token usage."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.payload import Task
from scheduler.protocol.replies import Reply


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """A decoded and checked body.

    `more`: further inputs of a list, each a request of its own; all of them are admitted or none. `include_usage`: whether a
    stream ends with a chunk of its usage. `floats`: whether vectors are lists of numbers instead of base64.
    """

    input: str
    model: str | UnsetType = UNSET
    parameters: Mapping[str, Any] = {}
    task: Task = Task.COMPLETE
    more: tuple[str, ...] = ()
    service_tier: str | None = None
    stream: bool = False
    include_usage: bool = False
    floats: bool = False


class InferenceResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a request: a reply per input, in order; the first one has the id of the response.

    `latency_ms` is the time since arrival; `lines` are more header lines, each with its end.
    """

    replies: Sequence[Reply]
    request: InferenceRequest
    model: str
    tier: str
    latency_ms: float
    lines: str


class TokenUsage(msgspec.Struct, gc=False):
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage(replies: Sequence[Reply]) -> TokenUsage:
    """The sum of tokens. A model that does not distinguish them reports all as prompt tokens."""
    written = sum(reply.output_tokens for reply in replies)
    total = sum(reply.tokens_used for reply in replies)
    return TokenUsage(max(0, total - written), written, total)
