"""The HTTP/1.1 server of the engine: one protocol object a connection, one timer for all steps, no task for a request.

The next step begins when the last one should have ended, not when its writes were done: on a real machine the GPU does not
wait for the processor that writes. If the process is more than a step late, it begins anew from now.
"""

import asyncio
import os
import re
import socket
import struct
import time
from collections import deque
from dataclasses import asdict, dataclass
from urllib.parse import parse_qs

import msgspec

from engine import metrics
from engine.calls import BadRequest, Call, Responses, error_document, error_event, read_call
from engine.faults import BROKEN, BROKEN_AT, REFUSED, RESET, Change, Faults
from engine.steps import Pace, Sample, Scheduler

MOST_HEAD_BYTES = 1 << 16
MOST_BODY_BYTES = 1 << 26
HISTORY = 200_000
"""Samples that are kept: an hour of steps."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 411: b"Length Required", 413: b"Content Too Large"}
_REASONS |= {405: b"Method Not Allowed", 429: b"Too Many Requests", 503: b"Service Unavailable"}
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_JSON, _TEXT = b"application/json", b"text/plain; version=0.0.4; charset=utf-8"
_encode = msgspec.json.encode
_change = msgspec.json.Decoder(Change)


@dataclass(frozen=True)
class About:
    """What the engine reports of itself. `metrics` is one of `metrics.FORMS`, `kv_tokens` the size of the cache."""

    model: str = "stand-in"
    owner: str = "vllm"
    metrics: str = "vllm"
    default_tokens: int = 80
    kv_tokens: int = 262_144


class Engine:
    """All state of the process. Call `add` and `answer` in its event loop."""

    def __init__(self, about: About, pace: Pace) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._step_ends_s = 0.0
        self._calls = 0
        self._open: set[Call] = set()
        self._responses = Responses(about.model, int(time.time()))
        self.about = about
        self.scheduler = Scheduler(pace)
        self.faults = Faults(pace, self._loop.time)
        self.history: deque[Sample] = deque(maxlen=HISTORY)

    def accept(self, connection: "Connection", body: bytes, *, chat: bool) -> Call | None:
        """Queue the sequences of a request; None if it was answered with an error."""
        about, scheduler = self.about, self.scheduler
        if refused := self.faults.refusal(len(scheduler.running) + scheduler.waiting):
            scheduler.totals.refused[refused] = scheduler.totals.refused.get(refused, 0) + 1
            wait_s = self.faults.retry_after_s
            more = b"retry-after: %g\r\n" % wait_s if wait_s else b""
            connection.reply(refused, error_document("The engine is busy.", refused), more=more)
            return None
        try:
            call = read_call(
                body,
                chat=chat,
                model=about.model,
                default_tokens=about.default_tokens,
                priorities=scheduler.pace.priority,
            )
        except BadRequest as error:
            connection.reply(error.status, error_document(str(error), error.status))
            return None
        if call.fault in REFUSED:
            status, reason = REFUSED[call.fault]
            connection.reply(status, error_document(reason, status))
            return None
        if call.fault == RESET:
            connection.reset()
            return None
        self._calls += 1
        call.connection, call.number = connection, self._calls
        self._open.add(call)
        if call.stream:
            self._responses.prepare(call)
            connection.write(_STREAM)
        for sequence in call.sequences:
            if call.stream:
                self.faults.mark(sequence)
            scheduler.add(sequence, call.priority)
        if self._timer is None:
            self._begin(self._loop.time())
        return call

    def abort(self, call: Call) -> None:
        """The client of a call left."""
        self._open.discard(call)
        for sequence in call.sequences:
            self.scheduler.abort(sequence)

    def _begin(self, at_s: float) -> None:
        running = self.scheduler.begin_step()
        self.history.append(Sample(at_s, running, self.scheduler.waiting, self.scheduler.totals.generated_tokens))
        if not running:
            self._timer = None
            return
        self._step_ends_s = max(at_s, self.faults.stalled_until) + self.scheduler.pace.duration_s(running)
        self._timer = self._loop.call_at(self._step_ends_s, self._end)

    def _end(self) -> None:
        now = self._loop.time()
        if now < self.faults.stalled_until:
            self._timer = self._loop.call_at(self.faults.stalled_until, self._end)
            return
        event = self._responses.event
        for sequence in self.scheduler.end_step():
            call: Call = sequence.call
            if call.stream:
                call.connection.write(event(call, sequence))
            if sequence.done == sequence.reset_at:
                call.connection.reset()
            elif call.fault == BROKEN and call.stream and sequence.done == BROKEN_AT < sequence.length:
                self.abort(call)
                call.connection.write(error_event("The engine failed on this input."))
                call.connection.ended()
            elif sequence.done == sequence.length:
                self._finish(call)
        planned = self._step_ends_s
        late = now - planned > self.scheduler.pace.duration_s(len(self.scheduler.running))
        self._begin(now if late else planned)

    def _finish(self, call: Call) -> None:
        call.left -= 1
        if call.left:
            return
        self._open.discard(call)
        if call.stream:
            call.connection.ended()
        else:
            call.connection.reply(200, self._responses.whole(call))

    def change(self, change: Change) -> None:
        """Apply a change of a test."""
        self.faults.apply(change)
        if change.forget:
            self.history.clear()
        if change.reset_now:
            for call in list(self._open):
                call.connection.reset()

    def state(self) -> dict[str, object]:
        """What `GET /control` returns. `now_s` is of the clock of the history."""
        scheduler = self.scheduler
        return {
            "now_s": self._loop.time(),
            "running": len(scheduler.running),
            "waiting": scheduler.waiting,
            "pace": asdict(scheduler.pace),
            "totals": asdict(scheduler.totals),
        }

    def models(self) -> bytes:
        """The document of `GET /v1/models`."""
        about = self.about
        model = {"id": about.model, "object": "model", "created": 0, "owned_by": about.owner, "max_model_len": 131_072}
        return _encode({"object": "list", "data": [model]})


class Connection(asyncio.Protocol):
    """One connection: its requests are answered one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._input = bytearray()
        self._call: Call | None = None
        self._close = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = transport  # type: ignore[assignment]  # a stream transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The client left."""
        self._transport = None
        if self._call is not None:
            call, self._call = self._call, None
            self._engine.abort(call)

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        self._input += data
        if len(self._input) > MOST_HEAD_BYTES + MOST_BODY_BYTES:
            self.reset()
        elif self._call is None:
            self._read()

    def _read(self) -> None:
        """Answer every complete request, until one of them runs."""
        while self._call is None and self._transport is not None:
            end = self._input.find(b"\r\n\r\n")
            if end < 0:
                if len(self._input) > MOST_HEAD_BYTES:
                    self.reset()
                return
            head = bytes(self._input[: end + 2])
            found = _LENGTH.search(head)
            size = int(found[1]) if found else 0
            if len(self._input) < end + 4 + size:
                return
            body = bytes(self._input[end + 4 : end + 4 + size])
            del self._input[: end + 4 + size]
            self._close = _CLOSE.search(head) is not None
            method, _, rest = head.partition(b" ")
            if method == b"POST" and not found:
                self._close = True
                self.reply(411, b"")
            else:
                self._route(method, rest[: rest.find(b" ")].decode("latin-1"), body)

    def _route(self, method: bytes, target: str, body: bytes) -> None:
        engine = self._engine
        path, _, query = target.partition("?")
        if path in ("/v1/chat/completions", "/v1/completions") and method == b"POST":
            self._call = engine.accept(self, body, chat=path != "/v1/completions")
        elif path == "/health":
            self.reply(200, b"", _TEXT)
        elif path == "/v1/models":
            self.reply(200, engine.models())
        elif path == "/metrics" and engine.about.metrics != "none":
            about = engine.about
            self.reply(200, metrics.page(about.metrics, about.model, engine.scheduler, about.kv_tokens).encode(), _TEXT)
        elif path == "/control":
            self._control(method, body)
        elif path == "/control/history":
            since = float(parse_qs(query).get("since", ["0"])[0])
            self.reply(200, _encode([sample for sample in engine.history if sample.at_s >= since]))
        else:
            self.reply(404, error_document("Not Found", 404))

    def _control(self, method: bytes, body: bytes) -> None:
        if method == b"POST":
            try:
                self._engine.change(_change.decode(body))
            except msgspec.MsgspecError as error:
                self.reply(400, error_document(str(error), 400))
                return
        self.reply(200, _encode(self._engine.state()))

    def write(self, data: bytes) -> None:
        """Write a part of a response."""
        if self._transport is not None:
            self._transport.write(data)

    def reply(self, status: int, body: bytes, kind: bytes = _JSON, more: bytes = b"") -> None:
        """Write a whole response."""
        form = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
        self.write(form % (status, _REASONS.get(status, b"Error"), kind, len(body), more, body))
        self.ended()

    def ended(self) -> None:
        """A response is complete; the next request may follow."""
        call, self._call = self._call, None
        if self._transport is None:
            return
        if self._close:
            self._transport.close()
        elif call is not None and self._input:
            asyncio.get_running_loop().call_soon(self._read)

    def reset(self) -> None:
        """Close with a TCP reset."""
        if self._transport is None:
            return
        # The transport's own socket object has no setsockopt; the option belongs to the connection.
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


async def serve(about: About, pace: Pace, host: str, port: int) -> tuple[asyncio.Server, str]:
    """Listen; returns the server and its URL."""
    loop = asyncio.get_running_loop()
    engine = Engine(about, pace)
    server = await loop.create_server(lambda: Connection(engine), host, port, backlog=4096, reuse_port=True)
    return server, f"http://{host}:{server.sockets[0].getsockname()[1]}"
