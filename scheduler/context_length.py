"""The error of a request that does not fit into the model's context, with the numbers that engines name.

Coding agents shorten a conversation when they recognise this error: by the code `context_length_exceeded`, and by words of its
message, which differ between OpenAI's and Anthropic's API.
"""

import re
from typing import NamedTuple

_COUNT = r"(\d{1,9})"
_OVERFLOW = re.compile(
    r"context.?length|context.?size|context.?window|max_model_len|max_seq_len|maximum model length|must have less than"
    r"|tokens` must be <=|maximum input length"
    r"|\b(?:prompt|inputs?|messages?|conversation|request|tokens?)\b[^.]{0,60}\btoo long"
    r"|\b(?:prompt|inputs?|messages?|conversation|request|tokens?)\b[^.]{0,60}exceed[^.]{1,40}(?:context|tokens|length)"
)
_LIMITS = (
    rf"context (?:length|size|window) \D{{0,12}}{_COUNT}",
    rf"{_COUNT} maximum context",
    rf"maximum model length of {_COUNT}",
    rf"must be <= {_COUNT}",
    rf"must have less than {_COUNT}",
    rf"> {_COUNT} maximum",
    rf"maximum (?:allowed )?(?:number of )?tokens[^\d]{{0,24}}{_COUNT}",
    rf"maximum (?:allowed |input )length \({_COUNT}",
    rf"max_seq_len \({_COUNT}",
)
_USED = (
    rf"{_COUNT} input tokens",
    rf"requested (?:a total of )?{_COUNT} (?:output )?tokens",
    rf"requested a total of {_COUNT}",
    rf"\({_COUNT} tokens\)",
    rf"\((?:total )?length {_COUNT}\)",
    rf"(?:prompt length|token count|number of tokens) \({_COUNT}",
    rf"resulted in {_COUNT} tokens",
    rf"contains (?:at least )?{_COUNT}",
    rf"given: {_COUNT}",
    rf"the request has {_COUNT} tokens",
    rf"too long: {_COUNT}",
)


_SUM = re.compile(rf"max_(?:completion_)?tokens\W{{0,3}} is too large: {_COUNT}.*has {_COUNT} input tokens", re.DOTALL)
"""vLLM's message where the input fits, but not together with `max_tokens`."""


class ContextOverflow(NamedTuple):
    """`tokens` of the request, and the `most` that the model takes; 0 if unknown."""

    tokens: int = 0
    most: int = 0

    def sentence(self) -> str:
        """The message, as OpenAI's clients recognise it."""
        if not self.most:
            return "The request exceeds the model's context length. Shorten the conversation, or lower max_tokens."
        of_request = f"the request has {self.tokens} tokens" if self.tokens else "the request has more"
        return (
            f"This model's maximum context length is {self.most} tokens; {of_request}. Shorten the conversation, or lower "
            "max_tokens."
        )

    def prompt_too_long(self) -> str:
        """The message, as Anthropic's clients recognise it."""
        if not (self.tokens and self.most):
            return "prompt is too long"
        return f"prompt is too long: {self.tokens} tokens > {self.most} maximum"


def read_overflow(text: str) -> ContextOverflow | None:
    """The numbers in an engine's message, or in `sentence`; None for a message about something else."""
    text = text.lower()
    if _OVERFLOW.search(text) is None:
        return None
    both = _SUM.search(text)
    used = int(both[1]) + int(both[2]) if both is not None else _first(_USED, text)
    return ContextOverflow(used, _first(_LIMITS, text))


def _first(patterns: tuple[str, ...], text: str) -> int:
    return next((int(found[1]) for pattern in patterns if (found := re.search(pattern, text))), 0)
