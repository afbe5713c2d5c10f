"""One keep-alive connection: sends a chat, and records when its first and last text arrived. Nothing is parsed before the end."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from engine.calls import output_text

from chat_load.plan import Chat

_TEXT = re.compile(rb'"content":\s*"([^"]+)"')
_CODE = re.compile(rb'"code":\s*"?([A-Za-z0-9_]+)')
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*(\d+)", re.IGNORECASE)
_END = b"0\r\n\r\n"
BROKEN = "connection_lost"


class Answer(NamedTuple):
    """What became of one chat. Times are monotonic seconds; `due_s` is when it was sent, in an open loop when it should have
    been. `status` 0: no response. `code`: of an error, "" for a right answer.
    """

    chat: Chat
    due_s: float
    first_s: float
    last_s: float
    status: int
    code: str
    retry_after_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it is the whole and right text."""
        return not self.code

    @property
    def refused(self) -> bool:
        """Whether the server accepts no more requests."""
        return self.status in (429, 503)

    @property
    def latency_ms(self) -> float:
        """Milliseconds to the end."""
        return (self.last_s - self.due_s) * 1000

    @property
    def first_ms(self) -> float:
        """Milliseconds to the first text."""
        return (self.first_s - self.due_s) * 1000

    @property
    def token_ms(self) -> float:
        """Milliseconds for each token after the first."""
        return (self.last_s - self.first_s) * 1000 / max(1, self.chat.tokens - 1)


class ChatConnection(asyncio.Protocol):
    """`answered` is called with each answer, and with a connection that can send the next chat if it is still `open`."""

    def __init__(self, answered: Callable[["ChatConnection", Answer], None]) -> None:
        self._answered = answered
        self._transport: asyncio.Transport | None = None
        self._chat: Chat | None = None
        self._due_s = self._first_s = 0.0
        self._data = bytearray()
        self._body_at = -1
        self._ends_at = -1

    @property
    def open(self) -> bool:
        """Whether the connection is open."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to send."""
        self._transport = transport  # type: ignore[assignment]  # a stream transport

    def send(self, chat: Chat, request: bytes, due_s: float) -> None:
        """Send a chat; the last one must have been answered."""
        self._chat, self._due_s, self._first_s = chat, due_s, 0.0
        self._data.clear()
        self._body_at = self._ends_at = -1
        if self._transport is None:
            self._end(BROKEN)
        else:
            self._transport.write(request)
            if chat.load.leaves_s:
                asyncio.get_running_loop().call_later(chat.load.leaves_s, self._leave, chat)

    def _leave(self, chat: Chat) -> None:
        if self._chat is chat and self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Leave, whatever runs."""
        self._chat = None
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Record a part of the response."""
        if self._chat is None:
            return
        received = self._data
        received += data
        if self._body_at < 0 and not self._read_head():
            return
        if not self._first_s and _TEXT.search(received, self._body_at):
            self._first_s = time.monotonic()
        if self._ends_at < 0:
            # Chunked; the mark cannot be a part of JSON text, in which line ends are escaped.
            if received.endswith(_END) and (received[-7:-5] == b"\r\n" or len(received) == self._body_at + 5):
                self._end("")
        elif len(received) >= self._ends_at:
            self._end("")

    def _read_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._body_at = end + 4
        length = _LENGTH.search(self._data, 0, end + 2)
        if length:
            self._ends_at = self._body_at + int(length[1])
        elif not _CHUNKED.search(self._data, 0, end + 2):
            self._ends_at = 1 << 62  # Until the connection is closed.
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The server closed the connection."""
        self._transport = None
        if self._chat is not None:
            self._end("" if self._ends_at == 1 << 62 else BROKEN)

    def _end(self, code: str) -> None:
        chat, self._chat = self._chat, None
        assert chat is not None
        now = time.monotonic()
        head, body = bytes(self._data[: self._body_at]), bytes(self._data[self._body_at :])
        status = int(head[9:12]) if self._body_at > 0 else 0
        if self._transport is not None and _CLOSE.search(head):
            # Some servers wait for the client to close, and lose what it sends meanwhile.
            self._transport.abort()
            self._transport = None
        retry = _RETRY_AFTER.search(head)
        code = code or _verdict(chat, status, body)
        self._answered(
            self, Answer(chat, self._due_s, self._first_s or now, now, status, code, float(retry[1]) if retry else 0.0)
        )


def _verdict(chat: Chat, status: int, body: bytes) -> str:
    """The code of an error, "" for a right answer."""
    if status == 200 and (_is_right(chat, body) or _is_right(chat, _joined(body))):
        return ""
    found = _CODE.search(body)
    return found[1].decode() if found and b'"error"' in body else "wrong_text" if status == 200 else "unknown"


def _is_right(chat: Chat, body: bytes) -> bool:
    text = b"".join(_TEXT.findall(body))
    return text == output_text(chat.prompt, chat.tokens).encode() if chat.load.exact else len(text) == chat.tokens


def _joined(body: bytes) -> bytes:
    """A body without the frames of chunked encoding, whose limits may divide a word."""
    parts, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0:
        try:
            size = int(body[at:end].split(b";")[0], 16)
        except ValueError:
            return body
        parts.append(body[end + 2 : end + 2 + size])
        at = end + size + 4
    return b"".join(parts)
