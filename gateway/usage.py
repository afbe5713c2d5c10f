"""Tokens as OpenAI's clients expect to be told of them."""

from collections.abc import Sequence

import msgspec

from scheduler.protocol.replies import Reply


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
