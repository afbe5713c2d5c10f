"""A conversation as the input of a request."""

import msgspec


class PromptMessage(msgspec.Struct, frozen=True):
    """One message of a conversation; `role` is system, developer, user or assistant."""

    role: str
    content: str


_messages = msgspec.json.Decoder(list[PromptMessage])


def encode_messages(messages: list[PromptMessage]) -> str:
    """A conversation as the input of a request."""
    return msgspec.json.encode(messages).decode()


def decode_messages(text: str) -> list[PromptMessage]:
    """Raises ValueError if the text is not a conversation."""
    try:
        return _messages.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a conversation: {error}") from error
