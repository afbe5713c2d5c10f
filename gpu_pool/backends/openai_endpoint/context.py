"""The context length of an endpoint's model: the most tokens of prompt and output together, where the server tells it.

vLLM, SGLang                  GET /v1/models      max_model_len
OpenRouter, LM Studio, Groq   GET /v1/models      context_length, max_context_length, context_window
llama.cpp                     GET <root>/props    default_generation_settings.n_ctx, of one slot
TGI                           GET <root>/info     max_total_tokens
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gpu_pool.backends.openai_endpoint.client import CALL_FAILURES, Transport

LISTED = ("max_model_len", "context_length", "max_context_length", "context_window")
READ_S = 1.0
MOST_TOKENS = 1 << 30
"""A larger number is no context length."""

_document = msgspec.json.Decoder(dict[str, Any])


def listed_context(entry: Mapping[str, Any]) -> int:
    """The context length in an entry of the list of models; 0 if it has none."""
    return next((tokens for name in LISTED if (tokens := _tokens(entry.get(name)))), 0)


async def read_context(transport: Transport, root: str) -> int:
    """The context length that servers report beside the list of models; 0 if there is none. Never raises."""
    settings = (await _read(transport, f"{root}/props")).get("default_generation_settings")
    if isinstance(settings, dict) and (tokens := _tokens(settings.get("n_ctx"))):
        return tokens
    return _tokens((await _read(transport, f"{root}/info")).get("max_total_tokens"))


async def _read(transport: Transport, url: str) -> dict[str, Any]:
    try:
        reply = await transport.get(url, READ_S)
        return _document.decode(reply.body) if reply.status == 200 else {}
    except (*CALL_FAILURES, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _tokens(value: object) -> int:
    """A number of tokens; 0 for anything else."""
    return int(value) if isinstance(value, int | float) and 1 <= value <= MOST_TOKENS else 0
