"""What an endpoint is sent for the items of a batch: bodies in OpenAI's form, and which items go in one call. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpu_pool.backends.backend import Item, ItemResult
from scheduler.errors import ErrorCode
from scheduler.payload import Task, decode_messages

ROUTES = {Task.COMPLETE: "/completions", Task.CHAT: "/chat/completions", Task.EMBED: "/embeddings"}

PARAMETERS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    }
)
"""What callers may say of how text is made. Never `n`, `stream`, `priority` or `model`, which are not theirs to choose."""

_ROLES = {"developer": "system"}  # OpenAI's newer name, which the templates of open models do not know.


def refused_early(item: Item) -> ItemResult | None:
    """The end of an item that must not be sent, as the caller may read it; else None."""
    unknown = sorted(item.parameters.keys() - PARAMETERS)
    if unknown:
        return ItemResult(f"parameters.{unknown[0]} is not known to this model.", 0, ErrorCode.INVALID_REQUEST)
    if item.task is Task.CHAT:
        try:
            decode_messages(item.input)
        except ValueError:
            return ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)
    return None


def together(items: Sequence[Item], places: Iterable[int], *, lists: bool, tiers: bool = False) -> list[list[int]]:
    """The places of `items` that may share a call: texts with equal parameters, and all that is embedded.

    A conversation, and what somebody reads along, has a call to itself; so has everything without `lists`. `tiers`: tiers share none.
    """
    groups: dict[bytes, list[int]] = {}
    for place in places:
        item = items[place]
        alone = not lists or item.task is Task.CHAT or item.listener is not None
        groups.setdefault(b"%d" % place if alone else _kind(item, tiers=tiers), []).append(place)
    return list(groups.values())


def body_of(
    model: str, items: Sequence[Item], *, stream: bool = False, usage: bool = True, priority: bool = False
) -> dict[str, Any]:
    """One call for these items, which `together` has put together.

    `usage`: a stream is to end with its tokens; `priority`: the server takes the tier's, 1 first.
    """
    first = items[0]
    if first.task is Task.EMBED:
        return {"model": model, "input": _inputs(items), "encoding_format": "float"}
    body: dict[str, Any] = {"model": model, **first.parameters}
    if priority and first.priority:
        body["priority"] = first.priority
    if first.task is Task.CHAT:
        body["messages"] = [
            {"role": _ROLES.get(each.role, each.role), "content": each.content} for each in decode_messages(first.input)
        ]
    else:
        body["prompt"] = _inputs(items)
    if stream:
        body["stream"] = True
        body |= {"stream_options": {"include_usage": True}} if usage else {}
    return body


def traceparent_of(items: Sequence[Item]) -> str:
    """The `traceparent` of a call for these items: that of the first which is sampled; "" where none is."""
    return next((item.trace.traceparent() for item in items if item.trace is not None), "")


def _inputs(items: Sequence[Item]) -> str | list[str]:
    return items[0].input if len(items) == 1 else [item.input for item in items]


def _kind(item: Item, *, tiers: bool) -> bytes:
    if item.task is Task.EMBED:
        return b"embed"
    return b"text %d " % (item.priority if tiers else 0) + msgspec.json.encode(item.parameters, order="sorted")
