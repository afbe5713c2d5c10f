"""What a request asks of the model, as it is stored once in `request:<id>` and read once by the worker that runs it."""

from typing import Any

import msgspec


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """The model's name, the input text, and parameters that only the backend understands."""

    model: str
    input: str
    parameters: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)
encode_payload = _encoder.encode


def decode_payload(body: bytes) -> Payload:
    """Raises ValueError for bytes that are not a payload."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a payload: {error}") from error
