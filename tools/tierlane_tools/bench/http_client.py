"""The HTTP/1.1 client of the bench: requests as prepared bytes, keep-alive connections and their pool.

One connection carries one request at a time, so whatever follows a complete answer is a fault, not the next answer.
Waiting for a connection counts as latency, since latency counts from the due time. Free connections take turns, so that
all gateways behind one port get their share.
"""

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from tierlane_tools.bench.measurement.statistics import TierStatistics, UnansweredCause
from tierlane_tools.bench.plan.inputs import NONCE_CHARACTERS, Inputs, json_text
from tierlane_tools.traces.replay import ReplayedRequest

TEXT = re.compile(rb'"(?:content|text|reasoning_content)":\s*"[^"]')
"""A part of the text in an event of a stream."""

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_USUAL_START = b"HTTP/1.1 200 "
_USUAL_LENGTH = b"\r\nContent-Length: "
_CONNECTION = b"onnection:"
_CHUNKED = b"\r\ntransfer-encoding: chunked"
_LAST_CHUNK = b"0\r\n\r\n"
_EVENTS, _ERROR = b"text/event-stream", b'data: {"error":'
_EVENT_END = b"\n\n\r\n"  # An event at the end of a chunk.
_MAX_ERROR_BYTES = 4096
_BODYLESS = (204, 304)


class WireError(Exception):
    """The received bytes are not a response that this generator supports; the message is one sentence."""


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


class BenchResponse(NamedTuple):
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

    __slots__ = ("_buffer", "_chunked", "_head_end", "_wanted")

    def __init__(self) -> None:
        self._buffer = b""
        self._wanted = 0  # Bytes without which another look at the buffer is useless.
        self._chunked = bytearray()  # An answer in chunked encoding whose head has been read; empty without one.
        self._head_end = 0

    def feed(self, data: bytes) -> BenchResponse | None:
        """Take what was read; return the answer once it is whole. Raises WireError."""
        if self._chunked:
            self._chunked += data
            return self._parse_chunked()
        if self._buffer:
            data = self._buffer + data
        elif (usual := _usual(data)) is not None:
            return usual
        if len(data) < self._wanted:
            self._buffer = data
            return None
        return self._parse(data)

    def _parse(self, data: bytes) -> BenchResponse | None:
        head_end = data.find(_HEAD_END)
        if head_end < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise WireError(f"The answer's head is larger than {MAX_HEAD_BYTES} bytes.")
            self._buffer = data
            return None
        head = data[:head_end].lower()
        code = head[9:12]  # HTTP/1.1 200 OK
        if not head.startswith(b"http/1.") or not code.isdigit() or head[12:13] not in (b" ", b"\r", b""):
            raise WireError(f"The answer does not begin like HTTP/1.1: {head[:40]!r}.")
        status = int(code)
        start = head_end + 4
        if status < 200:  # An interim answer, such as 100 Continue.
            self._buffer, self._wanted = b"", 0
            return self._parse(data[start:])
        if _CHUNKED in head:
            self._buffer, self._wanted = b"", 0
            self._chunked, self._head_end = bytearray(data), head_end
            return self._parse_chunked()
        end = start + _body_length(head, status)
        if len(data) < end:
            self._buffer, self._wanted = data, end
            return None
        if len(data) > end:
            raise WireError("More bytes came than the answer's Content-Length announces.")
        self._buffer, self._wanted = b"", 0
        return BenchResponse(status, data[:head_end], data[start:], _keeps_alive(head))

    def has_text(self) -> bool:
        """Whether a part of the text of a stream has come, of an answer that is not whole."""
        return TEXT.search(self._chunked, self._head_end) is not None

    def _parse_chunked(self) -> BenchResponse | None:
        data, head_end = self._chunked, self._head_end
        # A stream that fails ends with its error event, without a last chunk.
        failed = data.endswith(_EVENT_END) and _ERROR in data[-_MAX_ERROR_BYTES:] and _EVENTS in data[:head_end].lower()
        body = None
        if failed or data.endswith(_LAST_CHUNK):
            body = _joined(bytes(data) + (_LAST_CHUNK if failed else b""), head_end + 4)
        if body is None:
            if len(data) > MAX_BODY_BYTES:
                raise WireError(f"The answer's body is larger than {MAX_BODY_BYTES} bytes.")
            return None
        head = bytes(data[:head_end])
        self._chunked = bytearray()
        return BenchResponse(int(head[9:12]), head, body, keep_alive=not failed and _keeps_alive(head.lower()))


def _joined(data: bytes, at: int) -> bytes | None:
    """The body in chunked encoding from `at` to the end of `data`; None while it is incomplete. Raises WireError."""
    parts: list[bytes] = []
    while (end := data.find(b"\r\n", at)) >= 0:
        try:
            size = int(data[at:end], 16)
        except ValueError:
            raise WireError(f"The size of a chunk is not a number: {data[at:end][:20]!r}.") from None
        at = end + 4 + size
        if at > len(data):
            return None
        if not size:
            if at < len(data):
                raise WireError("More bytes came after the last chunk of the answer.")
            return b"".join(parts)
        parts.append(data[end + 2 : at - 2])
    return None


def _usual(data: bytes) -> BenchResponse | None:
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
    return BenchResponse(200, data[:head_end], body, keep_alive=True)


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


class Pending:
    """A request that is due. `due_s` on the load's clock; `tier` is its place in the mix.

    `replayed`: of a trace. `first_at`: when the first text of its stream came, on the clock of `perf_counter`; 0 before.
    """

    __slots__ = ("counters", "due_s", "first_at", "nonce", "replayed", "tier")

    def __init__(self, due_s: float, tier: int, nonce: bytes, counters: TierStatistics) -> None:
        self.due_s = due_s
        self.tier = tier
        self.nonce = nonce
        self.counters = counters
        self.replayed: ReplayedRequest | None = None
        self.first_at = 0.0


class Owner(Protocol):
    """Who is told."""

    def answered(self, connection: "BenchConnection", pending: Pending, response: BenchResponse) -> None:
        """The answer is whole; the connection carries nothing any more."""

    def broken(self, connection: "BenchConnection", pending: Pending | None, why: UnansweredCause, detail: str) -> None:
        """The connection is gone or of no use; `pending` is what it carried."""

    def stray(self, connection: "BenchConnection") -> None:
        """Bytes came on a connection that had asked for nothing."""


class BenchConnection(asyncio.Protocol):
    """The protocol of one connection; `pending` is what it carries now."""

    __slots__ = ("_owner", "_parser", "_transport", "pending")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = ResponseParser()
        self._transport: asyncio.Transport | None = None
        self.pending: Pending | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @property
    def is_open(self) -> bool:
        """Whether it can still carry a request."""
        return self._transport is not None

    def send(self, pending: Pending, request: bytes) -> None:
        """Send a request. The connection must be open and free."""
        self.pending = pending
        cast("asyncio.Transport", self._transport).write(request)

    def data_received(self, data: bytes) -> None:
        pending = self.pending
        if self._transport is None:
            return  # Given up; what still comes is of no interest.
        if pending is None:
            self._owner.stray(self)
            self.abort()
            return
        try:
            response = self._parser.feed(data)
        except WireError as error:
            self._end(UnansweredCause.MALFORMED, str(error))
            return
        if pending.replayed is not None and not pending.first_at:
            began = self._parser.has_text() if response is None else TEXT.search(response.body) is not None
            pending.first_at = time.perf_counter() if began else 0.0
        if response is not None:
            self.pending = None
            self._owner.answered(self, pending, response)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(UnansweredCause.CLOSED, f"The server closed the connection ({exc or 'end of stream'}).")

    def expire(self) -> None:
        """Give up what it carries: the answer took too long."""
        self._end(UnansweredCause.TIMEOUT, "")

    def stop(self) -> None:
        """Give up what it carries: the run is over."""
        self._end(UnansweredCause.STOPPED, "")

    def abort(self) -> None:
        """Close at once; the owner hears `broken` without a request."""
        self._end(UnansweredCause.CLOSED, "")

    def _end(self, why: UnansweredCause, detail: str) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return  # The owner was told before.
        pending, self.pending = self.pending, None
        transport.abort()
        self._owner.broken(self, pending, why, detail)


OnAnswer = Callable[[Pending, BenchResponse], Pending | None]
"""Told of an answer; what it returns goes out next on the same connection."""
OnSilence = Callable[[Pending, UnansweredCause, str], None]


class ConnectionPool:
    """At most `cap` connections to one server. Each request ends in exactly one call of `on_answer` or `on_silence`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        cap: int,
        timeout_s: float,
        encode: Callable[[Pending], bytes],
        on_answer: OnAnswer,
        on_silence: OnSilence,
        spare: int = 0,
    ) -> None:
        """`timeout_s`: how long after its due time a request may end in an answer. `encode` makes its bytes. `spare`: free
        connections that are opened before a request needs one.
        """
        self._address = (host, port)
        self._cap = cap
        self._timeout_s = timeout_s
        self._encode = encode
        self._on_answer = on_answer
        self._on_silence = on_silence
        self._spare = spare
        self._free: deque[BenchConnection] = deque()
        self._open: set[BenchConnection] = set()
        # Bounded by `expire`: nothing stays longer than the timeout.
        self._backlog: deque[Pending] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self.waited = 0  # Requests that found no free connection.
        self.strays = 0  # Bytes on connections that had asked for nothing.

    def submit(self, pending: Pending) -> None:
        """Send a request now or as soon as there is a connection."""
        if self._free and not self._backlog:
            self._send(self._free.popleft(), pending)
            self._grow(self._spare)  # Not after an attempt to connect, which a dead server would have repeated forever.
            return
        self.waited += 1
        self._backlog.append(pending)
        self._grow()

    async def open_spare(self) -> None:
        """Open the first spare connections."""
        await asyncio.gather(*(self._connect() for _ in range(min(self._spare, self._cap))))

    def expire(self, now_s: float) -> None:
        """End what was due more than the timeout ago (`now_s` on the clock of `Pending.due_s`)."""
        oldest_s = now_s - self._timeout_s
        while self._backlog and self._backlog[0].due_s < oldest_s:
            self._on_silence(self._backlog.popleft(), UnansweredCause.NOT_SENT, "")
        for connection in list(self._open):
            if connection.pending is not None and connection.pending.due_s < oldest_s:
                connection.expire()

    async def close(self) -> None:
        """Close everything; what has no answer yet is told as STOPPED."""
        tasks = list(self._opening)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        backlog, self._backlog = self._backlog, deque()
        for pending in backlog:
            self._on_silence(pending, UnansweredCause.STOPPED, "")
        for connection in list(self._open):
            connection.stop()

    def abandon(self, pending: Pending) -> None:
        """The client of a request leaves: its connection is closed, and it is told as STOPPED if it was sent."""
        for connection in self._open:
            if connection.pending is pending:
                connection.stop()
                return

    def answered(self, connection: BenchConnection, pending: Pending, response: BenchResponse) -> None:
        """Called by a connection."""
        following = self._on_answer(pending, response)
        if not response.keep_alive:
            connection.abort()
            if following is not None:
                self.submit(following)
        elif following is not None:
            self._send(connection, following)
        elif self._backlog:
            self._send(connection, self._backlog.popleft())
        else:
            self._free.append(connection)

    def broken(self, connection: BenchConnection, pending: Pending | None, why: UnansweredCause, detail: str) -> None:
        """Called by a connection."""
        self._open.discard(connection)
        if pending is not None:
            self._on_silence(pending, why, detail)
        elif connection in self._free:
            self._free.remove(connection)
        self._grow()

    def stray(self, connection: BenchConnection) -> None:  # noqa: ARG002  # the owner's protocol
        """Called by a connection."""
        self.strays += 1

    def _send(self, connection: BenchConnection, pending: Pending) -> None:
        pending.counters.sent += 1
        connection.send(pending, self._encode(pending))

    def _grow(self, spare: int = 0) -> None:
        """Open one connection where somebody waits for one that nobody opens, or fewer than `spare` are free."""
        opening = len(self._opening)
        wanted = max(len(self._backlog), spare - len(self._free))
        if wanted > opening and len(self._open) + opening < self._cap:
            task = asyncio.get_running_loop().create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._connected)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: BenchConnection(self), *self._address
                )
        except (OSError, TimeoutError) as error:
            self._refused(f"Cannot connect: {error or 'no answer in time'}.")
            return
        if not connection.is_open:
            self._refused("Cannot connect: the server closed the new connection.")
            return
        self._open.add(connection)
        if self._backlog:
            self._send(connection, self._backlog.popleft())
        else:
            self._free.append(connection)

    def _refused(self, detail: str) -> None:
        """A connection that could not be opened costs one request, or a dead server would cost none until its timeout."""
        if self._backlog:
            self._on_silence(self._backlog.popleft(), UnansweredCause.CONNECT, detail)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled():
            task.result()  # A fault of ours must not pass unseen.
        self._grow()
