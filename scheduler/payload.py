"""The payload of a request, stored once in `request:<id>` and read once by its worker; its trace context; vectors.

An encoded payload is an array; one element more, always the last, is the traceparent of a sampled request. Decoders
skip it, and it is found without decoding. No payload ends like one by itself: its own last elements are numbers, and
texts that no client writes. A vector is base64 of little-endian float32, the form in which OpenAI's clients ask for it.
"""

import base64
import struct
from collections.abc import Sequence
from enum import IntEnum
from math import isfinite
from typing import Any

import msgspec

from scheduler.tracing import Context, read_traceparent


class Task(IntEnum):
    """What is to be done with the input. Numbers, since every waiting request carries one."""

    COMPLETE = 0  # Go on from a text; what a plain function does is this, too.
    CHAT = 1  # Answer a conversation: the input is JSON, a list of {"role", "content"}.
    EMBED = 2  # Make a vector of a text: the output is base64 of little-endian float32.


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """The model's name, the input, and parameters that only the backend understands.

    `stream`: where the output is wanted piece by piece, as far as the backend makes pieces (`Address` of
    scheduler/protocol/replies.py, written as one text); "" where it is not. `priority`: its tier's, 1 first, for servers that
    have an order of their own; 0 where it is not told.
    """

    model: str
    input: str
    parameters: dict[str, Any]
    task: Task = Task.COMPLETE
    stream: str = ""
    priority: int = 0

    def with_input(self, text: str) -> "Payload":
        """The same of another input."""
        return Payload(self.model, text, self.parameters, self.task, self.stream, self.priority)

    def on_its_way(self, address: str, priority: int) -> "Payload":
        """The same, wanted piece by piece at `address`, or whole (""), by a tier of this priority."""
        return Payload(self.model, self.input, self.parameters, self.task, address, priority)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)
encode_payload = _encoder.encode


def decode_payload(body: bytes) -> Payload:
    """Raises ValueError for bytes that are not a payload."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a payload: {error}") from error


class PromptMessage(msgspec.Struct, frozen=True):
    """One message of a conversation; `role` is system, developer, user or assistant."""

    role: str
    content: str


_messages = msgspec.json.Decoder(list[PromptMessage])


def encode_messages(messages: list[PromptMessage]) -> str:
    """A conversation as the input of a request."""
    return msgspec.json.encode(messages).decode()


def decode_messages(text: str) -> list[PromptMessage]:
    """Raises ValueError for a text that is no conversation."""
    try:
        return _messages.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a conversation: {error}") from error


_ARRAYS = range(0x91, 0x9F)  # Of one to fourteen elements, which may get one more.
_TEXT_OF_55 = b"\xd9\x37"  # A str of msgpack and its length.
_LENGTH = 55
_ADDED = len(_TEXT_OF_55) + _LENGTH


def add_context(body: bytes, context: Context) -> bytes:
    """The body with a context, in place of the one that it may have. One that is no payload stays what it is."""
    if not body or body[0] not in _ARRAYS:
        return body
    text = _TEXT_OF_55 + context.traceparent().encode()
    if context_in(body) is not None:
        return body[:-_ADDED] + text
    return bytes((body[0] + 1,)) + body[1:] + text


def context_in(body: bytes) -> Context | None:
    """The context of a stored body; None for a request that nobody traces."""
    if body[-_ADDED:-_LENGTH] != _TEXT_OF_55:
        return None
    return read_traceparent(body[-_LENGTH:].decode("ascii", "replace"))


def write_vector(values: Sequence[float]) -> str:
    """The text. Raises OverflowError for a number that float32 has no room for, ValueError for one that is none, and for no numbers."""
    if not values:
        raise ValueError("not a vector: it is empty.")
    if not all(map(isfinite, values)):
        raise ValueError("not a vector: a value is not finite.")
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")


def read_vector(text: str) -> list[float]:
    """The numbers. Raises ValueError for what is no such text."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) % 4:
        raise ValueError("not a vector: its bytes are no whole number of float32.")
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
