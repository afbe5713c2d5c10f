"""HTTP/1.1 as bytes: requests prepared but for their nonce, and just enough of a response parser.

One connection carries one request at a time, so whatever follows a complete answer is a fault, not the next answer.
"""

import json
from typing import NamedTuple

from tierlane.bench.inputs import NONCE_CHARACTERS, Inputs, json_text

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_USUAL_START = b"HTTP/1.1 200 "
_USUAL_LENGTH = b"\r\nContent-Length: "
_CONNECTION = b"onnection:"
_BODYLESS = (204, 304)


class WireError(Exception):
    """What came is not an answer that this generator reads; the message is one sentence."""


class RequestForm:
    """The request of one tier as bytes; only the nonce differs from one to the next."""

    def __init__(self, host: str, path: str, key: str, inputs: Inputs, model: str | None = None) -> None:
        """`host` as in the Host header. Raises ValueError for a key that cannot stand in a header."""
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError("An API key may hold printable ASCII characters only.")
        start = b'{"model":' + json.dumps(model).encode() + b"," if model else b"{"
        start += b'"input":"'
        end = json_text(inputs.filler) + b'"}'
        length = len(start) + NONCE_CHARACTERS + len(end)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        )
        self._before = head.encode("ascii") + start
        self._after = end

    def encode(self, nonce: bytes) -> bytes:
        """The whole request, head and body."""
        return self._before + nonce + self._after


class Response(NamedTuple):
    """One answer. `sent_head` is as it came, from the status line to the last header."""

    status: int
    sent_head: bytes
    body: bytes
    keep_alive: bool

    @property
    def head(self) -> bytes:
        """The head in lower case, made when somebody asks: nobody does for a good answer."""
        return self.sent_head.lower()


class ResponseParser:
    """Puts answers together from reads of any size."""

    __slots__ = ("_buffer", "_wanted")

    def __init__(self) -> None:
        self._buffer = b""
        self._wanted = 0  # Bytes without which another look at the buffer is useless.

    def feed(self, data: bytes) -> Response | None:
        """Take what was read; return the answer once it is whole. Raises WireError."""
        if self._buffer:
            data = self._buffer + data
        elif (usual := _usual(data)) is not None:
            return usual
        if len(data) < self._wanted:
            self._buffer = data
            return None
        return self._parse(data)

    def _parse(self, data: bytes) -> Response | None:
        head_end = data.find(_HEAD_END)
        if head_end < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise WireError(f"The answer's head is larger than {MAX_HEAD_BYTES} bytes.")
            self._buffer = data
            return None
        head = data[:head_end].lower()
        status = _status(head)
        start = head_end + 4
        if status < 200:  # An interim answer, such as 100 Continue.
            self._buffer, self._wanted = b"", 0
            return self._parse(data[start:])
        end = start + _body_length(head, status)
        if len(data) < end:
            self._buffer, self._wanted = data, end
            return None
        if len(data) > end:
            raise WireError("More bytes came than the answer's Content-Length announces.")
        self._buffer, self._wanted = b"", 0
        return Response(status, data[:head_end], data[start:], _keeps_alive(head))


def _usual(data: bytes) -> Response | None:
    """A whole 200 in one read, which nearly every answer is, for a tenth of the price; None sends it the long way."""
    if not data.startswith(_USUAL_START):
        return None
    head_end = data.find(_HEAD_END)
    at = data.find(_USUAL_LENGTH, 0, head_end)
    if head_end < 0 or at < 0 or data.find(_CONNECTION, 0, head_end) >= 0:
        return None
    value = data[at + len(_USUAL_LENGTH) : data.find(b"\r\n", at + 2)]
    body = data[head_end + 4 :]
    if not value.isdigit() or int(value) != len(body):
        return None
    return Response(200, data[:head_end], body, keep_alive=True)


def _status(head: bytes) -> int:
    # HTTP/1.1 200 OK
    status = head[9:12]
    if not head.startswith(b"http/1.") or not status.isdigit() or head[12:13] not in (b" ", b"\r", b""):
        raise WireError(f"The answer does not begin like HTTP/1.1: {head[:40]!r}.")
    return int(status)


def _body_length(head: bytes, status: int) -> int:
    at = head.find(_LENGTH)
    if at < 0:
        if status in _BODYLESS:
            return 0
        if b"\r\ntransfer-encoding:" in head:
            raise WireError("The answer is chunked, which this generator does not read; it needs a Content-Length.")
        raise WireError("The answer has no Content-Length.")
    end = head.find(b"\r\n", at + 2)
    value = head[at + len(_LENGTH) : end if end >= 0 else len(head)].strip()
    if not value.isdigit():
        raise WireError(f"The answer's Content-Length is not a number: {value[:20]!r}.")
    if int(value) > MAX_BODY_BYTES:
        raise WireError(f"The answer's body is larger than {MAX_BODY_BYTES} bytes.")
    return int(value)


def _keeps_alive(head: bytes) -> bool:
    return head.startswith(b"http/1.1") and b"\r\nconnection: close" not in head


def header(head: bytes, name: bytes) -> bytes | None:
    """The value of a header of a response (`name` in lower case), itself in lower case; None where it is missing."""
    at = head.find(b"\r\n" + name + b":")
    if at < 0:
        return None
    start = at + len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else len(head)].strip()
