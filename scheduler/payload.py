"""The payload of a request, stored once in `request:<id>` and read once by its worker; its trace context.

An encoded payload is an array. For a sampled request one more element follows, its traceparent, which is found without
decoding and which decoders skip. Other payloads cannot end like one: their last elements are numbers, and texts that
clients do not write.
"""

from enum import IntEnum
from functools import lru_cache
from typing import Any
from zlib import crc32

import msgspec

from scheduler.tracing import Context, read_traceparent

_encoder = msgspec.msgpack.Encoder()
encode_payload = _encoder.encode

_ARRAYS = range(0x91, 0x9F)  # Arrays of one to fourteen elements, to which one can be added.
_TEXT_OF_55 = b"\xd9\x37"  # The header of a msgpack str of 55 bytes.
_LENGTH = 55
_ADDED = len(_TEXT_OF_55) + _LENGTH

MOST_CUSTOMERS = 4096
"""Whose numbers are kept."""


class Task(IntEnum):
    """What the model does with the input. Numbers, because every queued request contains one."""

    COMPLETE = 0  # Continue a text; also the task of plain functions.
    CHAT = 1  # Respond to a conversation: the input is JSON, a list of {"role", "content"}.
    EMBED = 2  # Compute the vector of a text: the output is base64 of little-endian float32.
    CHAT_DOCUMENT = 3  # Pass a chat on whole: input and output are those of scheduler/chat_document.py.
    COMPLETION_DOCUMENT = 4  # The same for `/completions`, with one prompt.


DOCUMENTS = frozenset({Task.CHAT_DOCUMENT, Task.COMPLETION_DOCUMENT})
"""Tasks whose request and response are passed on whole; only models with a server behind them have them."""


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """The model's name, the input, and parameters that only the backend interprets.

    `stream`: the target of increments (`IncrementTarget` of scheduler/protocol/increments.py as text), or "" for none.
    `priority`: of the tier, 1 first, for servers with their own scheduling; 0 if it is not known. `customer`: a number that
    distinguishes customers, 0 if it is not known; a text in a payload of an older gateway is its trace context.
    """

    model: str
    input: str
    parameters: dict[str, Any]
    task: Task = Task.COMPLETE
    stream: str = ""
    priority: int = 0
    customer: int | str = 0

    def with_input(self, text: str) -> "Payload":
        """A copy with another input."""
        return Payload(self.model, text, self.parameters, self.task, self.stream, self.priority, self.customer)

    def encode_for(self, target: str, priority: int, customer_id: str) -> bytes:
        """The encoded payload with the target of increments ("" for none), the priority of the tier, and its customer.

        A tuple is encoded like the struct, and costs less than a copy.
        """
        number = _customer_number(customer_id)
        return encode_payload((self.model, self.input, self.parameters, self.task, target, priority, number))


@lru_cache(MOST_CUSTOMERS)
def _customer_number(customer_id: str) -> int:
    return crc32(customer_id.encode())


_decoder = msgspec.msgpack.Decoder(Payload)


def decode_payload(body: bytes) -> Payload:
    """Raises ValueError if the bytes are not a payload."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a payload: {error}") from error


def add_context(body: bytes, context: Context) -> bytes:
    """The body with this context, which replaces one that it has. Bytes that are not a payload are returned unchanged."""
    if not body or body[0] not in _ARRAYS:
        return body
    text = _TEXT_OF_55 + context.traceparent().encode()
    if context_in(body) is not None:
        return body[:-_ADDED] + text
    return bytes((body[0] + 1,)) + body[1:] + text


def context_in(body: bytes) -> Context | None:
    """The trace context of a stored body; None if the request is not sampled."""
    if body[-_ADDED:-_LENGTH] != _TEXT_OF_55:
        return None
    return read_traceparent(body[-_LENGTH:].decode("ascii", "replace"))
