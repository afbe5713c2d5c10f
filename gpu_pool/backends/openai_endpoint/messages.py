"""Request bodies for an endpoint, in OpenAI's format. No I/O."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gpu_pool.backends.backend import Item, ItemResult
from scheduler.body_store import StoredChat, is_reference
from scheduler.chat_document import PRIORITY, ROLES, read_members
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.payload import DOCUMENTS, Task
from scheduler.prompt_messages import decode_messages

ROUTES = {
    Task.COMPLETE: "/completions",
    Task.CHAT: "/chat/completions",
    Task.EMBED: "/embeddings",
    Task.CHAT_DOCUMENT: "/chat/completions",
    Task.COMPLETION_DOCUMENT: "/completions",
}

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
"""Sampling parameters that clients may set. Never `n`, `stream`, `priority` or `model`."""

MISSING_BODY = ItemResult(
    "The body of this request is not on the worker's host: set TIERLANE_BODY_DIR of gateways and workers alike.",
    0,
    ErrorCode.NO_CAPACITY,
)

_PLAIN = PARAMETERS | {"messages", "prompt", "max_completion_tokens"}
_READ_BYTES = 1 << 20
_encode = msgspec.json.encode
_contents = msgspec.json.Decoder(list[dict[str, Any]])


def rejected_early(item: Item) -> ItemResult | None:
    """The error for an item that must not be sent, for the client; else None."""
    if item.task in DOCUMENTS or item.task is Task.EMBED:
        return None  # The gateway has checked the fields.
    unknown = sorted(item.parameters.keys() - PARAMETERS)
    if unknown:
        return ItemResult(f"parameters.{unknown[0]} is not known to this model.", 0, ErrorCode.INVALID_REQUEST)
    if item.task is Task.CHAT:
        try:
            decode_messages(item.input)
        except ValueError:
            return ItemResult("The stored request cannot be read.", 0, ErrorCode.INVALID_REQUEST)
    return None


class Body(NamedTuple):
    """The body of a call: its beginning, and a stored chat without its first brace."""

    begin: bytes
    chat: StoredChat | None = None

    @property
    def size(self) -> int:
        """Its Content-Length."""
        return len(self.begin) + (self.chat.size - 1 if self.chat is not None else 0)


class MissingBody(TierlaneError):
    """The chat is not on this host."""


def body_of(
    model: str,
    items: Sequence[Item],
    body_dir: str = "",
    *,
    stream: bool = False,
    usage: bool = True,
    priority: bool = False,
) -> Body:
    """The body of the call for these items, in parts. Raises MissingBody.

    `usage`: a stream ends with its tokens; `priority`: the server accepts the tier's, 1 first.
    """
    first = items[0]
    if first.task is Task.EMBED:
        return Body(_encode({"model": model, "input": _inputs(items), "encoding_format": "float", **first.parameters}))
    sent: Mapping[str, Any] = first.parameters
    if first.task is Task.COMPLETION_DOCUMENT:
        sent = read_members(first.input)
    elif first.task is Task.CHAT_DOCUMENT:
        sent = {name: value for name, value in sent.items() if name == PRIORITY}
    body: dict[str, Any] = {"model": model, **sent}
    if priority and first.priority:
        body["priority"] = first.priority
    if first.task is Task.CHAT:
        body["messages"] = [
            {"role": ROLES.get(each.role, each.role), "content": each.content} for each in decode_messages(first.input)
        ]
    elif first.task not in DOCUMENTS:
        body["prompt"] = _inputs(items)
    if stream:
        body["stream"] = True
        body |= {"stream_options": {"include_usage": True}} if usage else {}
    encoded = _encode(body)
    if first.task is not Task.CHAT_DOCUMENT:
        return Body(encoded)
    # The chat is not parsed: the gateway has removed the fields that are sent with it.
    encoded = encoded[:-1] + b","
    if not is_reference(first.input):
        return Body(encoded + first.input[1:].encode())
    try:
        return Body(encoded, StoredChat(body_dir, first.input))
    except OSError:
        raise MissingBody from None


def is_unusual(item: Item) -> bool:
    """Whether a request that is passed on has more than texts and sampling parameters, so that only it may fail."""
    if item.task not in DOCUMENTS:
        return False
    try:
        members = read_members(item.input)
        if "messages" in members:
            decode_messages(bytes(members["messages"]).decode())
    except ValueError:
        return True
    return not members.keys() <= _PLAIN


def document_of(item: Item, body_dir: str) -> bytes:
    """The chat or completion that is passed on. Raises OSError if its file is gone."""
    if not is_reference(item.input):
        return item.input.encode()
    return b"".join(StoredChat(body_dir, item.input).pieces(0, _READ_BYTES))


def names_sent(item: Item, body_dir: str) -> Collection[str]:
    """The names by which a server may name the fault of a request: its fields, and the types of the parts of its messages."""
    if item.task not in DOCUMENTS:
        return item.parameters
    try:
        members = read_members(document_of(item, body_dir))
        messages = _contents.decode(members.get("messages", b"[]"))
    except (OSError, ValueError):
        return item.parameters
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    types = (part.get("type") for part in parts if isinstance(part, dict))
    return {*item.parameters, *members, *(each for each in types if isinstance(each, str))}


def traceparent_of(items: Sequence[Item]) -> str:
    """The `traceparent` of a call for these items: that of the first sampled one; "" if there is none."""
    return next((item.trace.traceparent() for item in items if item.trace is not None), "")


def _inputs(items: Sequence[Item]) -> str | list[str]:
    return items[0].input if len(items) == 1 else [item.input for item in items]
