"""What a request asks of the model, as it is stored once in `request:<id>` and read once by the worker that runs it."""

from enum import IntEnum
from typing import Any

import msgspec


class Task(IntEnum):
    """What is to be done with the input. Numbers, since every waiting request carries one."""

    COMPLETE = 0  # Go on from a text; what a plain function does is this, too.
    CHAT = 1  # Answer a conversation: the input is JSON, a list of {"role", "content"}.
    EMBED = 2  # Make a vector of a text: the output is base64 of little-endian float32.


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """The model's name, the input, and parameters that only the backend understands.

    `stream`: where the output is wanted piece by piece, as far as the backend makes pieces (`Address` of
    scheduler/increments.py, written as one text); "" where it is not. `priority`: its tier's, 1 first, for servers that
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


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation; `role` is system, developer, user or assistant."""

    role: str
    content: str


_messages = msgspec.json.Decoder(list[Message])


def encode_messages(messages: list[Message]) -> str:
    """A conversation as the input of a request."""
    return msgspec.json.encode(messages).decode()


def decode_messages(text: str) -> list[Message]:
    """Raises ValueError for a text that is no conversation."""
    try:
        return _messages.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a conversation: {error}") from error
