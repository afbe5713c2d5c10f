"""What a request asks and what its response is written from, in any API format; the token usage of OpenAI."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.payload import Task
from scheduler.protocol.replies import Reply


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """A body, read and checked.

    `more`: further inputs of a list, each of them a request of its own, all of them admitted or none. `service_tier`:
    OpenAI's word for how much the client cares. The last two are about the form of the answer: whether a stream ends with
    a chunk of its usage, and whether vectors are lists of numbers instead of base64.
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
    """What an answer is written from: a reply for each input, in order, the first of which gives the answer its id.

    `latency_ms` is the gateway's own, from the whole request to now; `lines` are more header lines, each with its end.
    """

    replies: Sequence[Reply]
    asked: InferenceRequest
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
    """What was read and written. A model that does not tell them apart has read them all."""
    written = sum(reply.output_tokens for reply in replies)
    total = sum(reply.tokens_used for reply in replies)
    return TokenUsage(max(0, total - written), written, total)
