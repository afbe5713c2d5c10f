"""A streamed response, from admission to its last event, and the assembly of its text from increments.

Until the first text, for at most the time of a ping, an error is an ordinary response. After that it is an event, and the
body ends incomplete. Increments are written when the subscriber reads them,
without a task or a timer in between. The stored reply ends the stream, as for any request, and fills the gaps.

Increments may be lost, late, duplicated, or from a run that was lost. Text that was sent cannot be revoked: overlaps are
cut, and gaps are filled from the stored reply. If text of a lost run was sent, the stream ends with an error.
"""

import asyncio
from collections.abc import Awaitable, Callable

from gateway.api.stream_chunks import Chunks
from gateway.http.sse import EventStream
from gateway.inference.call import InferenceCall
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED
from gateway.inference.pending import Outcome, PendingRequest
from gateway.inference.pipeline import InferencePipeline
from scheduler.chat_document import DOCUMENT
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.increments import LOST, Increment
from scheduler.protocol.replies import Reply
from scheduler.token_estimates import estimate, line_tokens

NewStream = Callable[[Callable[[EventStream], Awaitable[None]]], EventStream]
"""The stream of a response, which the argument writes."""

MOST_PARTS = 64
MOST_HELD = 65_536
"""Characters kept for a client that is slow for a moment; it gets the others with the end."""


class StreamAssembly:
    """The text of one output that was sent so far. `broken`: no more text may be sent; the stream must end."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._attempt = 0
        self.length = 0
        """Number of characters sent."""
        self.sent_bytes = 0
        """As UTF-8."""
        self.broken = False

    @property
    def text(self) -> str:
        """All that was sent."""
        return "".join(self._parts)

    def take(self, attempt: int, offset: int, text: str) -> str:
        """The part of an increment to send; may be empty."""
        if self.broken or (self.length and attempt < self._attempt):
            return ""
        if self.length and (offset == LOST or attempt > self._attempt):
            self.broken = True
            return ""
        if offset == LOST or offset > self.length:
            return ""
        seen = self.length - offset
        if seen and not self._agrees(offset, text[:seen]):
            self.broken = True
            return ""
        return self._sent(attempt, text[seen:])

    def rest(self, output: str, attempts: int) -> str | None:
        """The rest of the whole output of run number `attempts`; None if it does not continue the text that was sent."""
        if self.broken or (self.length and (attempts != self._attempt or not self._agrees(0, output[: self.length]))):
            self.broken = True
            return None
        return self._sent(attempts, output[self.length :]) if len(output) >= self.length else None

    def _sent(self, attempt: int, text: str) -> str:
        if text:
            self._attempt = attempt
            self._parts.append(text)
            if len(self._parts) > MOST_PARTS:
                self._parts = ["".join(self._parts)]
            self.length += len(text)
            self.sent_bytes += len(text) if text.isascii() else len(text.encode())
        return text

    def _agrees(self, offset: int, text: str) -> bool:
        """Whether this text was sent at this offset. Costs as much as the text that was sent since."""
        first, start = len(self._parts), self.length
        while start > offset:
            first -= 1
            start -= len(self._parts[first])
        skip, at = offset - start, 0
        for part in self._parts[first:]:
            expected = text[at : at + len(part) - skip]
            if not part.startswith(expected, skip):
                return False
            at, skip = at + len(expected), 0
        return at == len(text)


class StreamedResponse:
    """The stream of one pending request, built before it is admitted. `future` is resolved with its outcome.

    `keep` is awaited before its end is sent.
    """

    def __init__(
        self,
        pipeline: InferencePipeline,
        call: InferenceCall,
        pending: PendingRequest,
        future: "asyncio.Future[Outcome]",
        *,
        keep: Callable[[Reply], Awaitable[None]] | None,
        new_stream: NewStream,
    ) -> None:
        self._pipeline = pipeline
        self._call = call
        self._keep = keep
        self._new_stream = new_stream
        self._document = call.body.document if call.passed_on else None
        self._pending = pending
        self._future = future
        self._started = asyncio.Event()
        self._assembly = StreamAssembly()
        self._lines = ""  # Headers.
        self._opening = b""  # Events that are sent before the next ones.
        self._stream: EventStream | None = None
        self._held = ""  # Text that arrived before the headers were written, or that the client was too slow for.
        self._reply: Reply | None = None
        self._first_at: float | None = None  # When the first text was sent.
        self._chunks: Chunks = self._new_chunks(pending.id, passed_on=call.passed_on)
        pending.reader, pending.streams = self, True

    def admitted(self) -> None:
        """Redis has stored the request: the stream may start."""
        self._started.set()

    def receive(self, increment: Increment) -> None:
        """Send an increment of the output. Never raises, because it is called in the loop that serves all requests."""
        too_slow = len(self._held) > MOST_HELD and self._stream is not None and self._stream.full
        if too_slow and increment.offset != LOST:
            return  # The stored reply fills the gap.
        try:
            self._send(self._assembly.take(increment.attempt, increment.offset, increment.text))
        except Exception as error:  # noqa: BLE001  # the loop must go on
            log_fault("increment not written", error, request_id=self._pending.id)
            self._assembly.broken = True  # The text is lost, so the stream must not end as if it were complete.

    async def wait(self) -> None:
        """Wait until the request is admitted or has an outcome. Raises RequestError if it was rejected or failed."""
        self._future.add_done_callback(lambda _: self._started.set())
        await self._started.wait()
        if self._future.done():
            self._reply = await self._pipeline.reply(self._call, self._pending, self._future.result())

    def response(self) -> EventStream:
        """The stream, which is written after its headers."""
        stream = self._new_stream(self._play)
        request_id = self._pending.id
        if self._reply is not None and self._reply.id != request_id:
            request_id = self._reply.id
            self._chunks = self._new_chunks(request_id, passed_on=self._reply.finish_reason == DOCUMENT)
            stream.headers.append(IDEMPOTENT_REPLAYED)
        limits = self._pipeline.customer_limits.lines(self._call.identity, self._pending.verdict)
        form = self._call.api_format.form
        self._lines = f"x-request-id: {request_id}\r\n{limits}" + (form.lines(request_id, limits) if form else "")
        stream.lines = self._lines
        return stream

    async def _play(self, stream: EventStream) -> None:
        try:
            stream.start()
            self._opening, self._stream = self._chunks.opening(), stream
            self._send("")
            reply = self._reply or await self._pipeline.reply(
                self._call, self._pending, await stream.outcome(self._future)
            )
            rest = self._held + self._rest(reply)
            if self._keep is not None:
                await self._keep(reply)
            events, first_at = self._chunks.delta(rest) if rest else b"", self._first_at
            self._write(stream, events + self._chunks.closing(reply) + self._chunks.END)
            self._record_completed(reply, first_at)
            stream.end()
        except RequestError as error:
            self._fail(stream, error)
        except (ConnectionError, asyncio.CancelledError):
            call = self._call
            self._pipeline.events.left(call.api_format.endpoint, self._pending.id, call.identity, self._pending)
            raise
        except Exception as error:  # noqa: BLE001  # every error ends the stream with an event
            log_fault("stream failed", error, request_id=self._pending.id)
            self._fail(stream, RequestError(ErrorCode.INTERNAL_ERROR))
        finally:
            self.close()

    def _write(self, stream: EventStream, events: bytes) -> None:
        if events:
            if self._first_at is None:
                self._first_at = self._pipeline.clock()
            stream.send(self._opening + events)
            self._opening = b""

    def _send(self, text: str) -> None:
        stream = self._stream
        if self._held:
            text, self._held = self._held + text, ""
        if stream is None or stream.full:
            self._held = text
        elif text:
            self._write(stream, self._chunks.delta(text))
        if self._assembly.broken and not self._future.done():
            self._pipeline.give_up(self._pending, ErrorCode.WORKER_LOST)

    def _rest(self, reply: Reply) -> str:
        """The text that was not sent yet. Raises RequestError if the reply does not continue the text that was sent."""
        rest = self._assembly.rest(reply.output, reply.attempts)
        if rest is None:
            # The client gets another end than Redis has.
            self._pipeline.give_up(self._pending, ErrorCode.WORKER_LOST)
            raise RequestError(ErrorCode.WORKER_LOST)
        return rest

    def _record_completed(self, reply: Reply, first_at: float | None) -> None:
        """`first_at`: when text was sent before the reply came; None if all of it came with the reply."""
        call, pending = self._call, self._pending
        now = self._pipeline.clock()
        first_at = now if first_at is None else first_at
        self._pipeline.events.streamed(
            call.api_format.endpoint,
            call.identity,
            pending,
            reply,
            first_s=first_at - pending.started,
            seconds=now - pending.started,
        )

    def _fail(self, stream: EventStream, error: RequestError) -> None:
        """Send the error, with its status if no event was sent."""
        call = self._call
        if not stream.begun:
            response = self._pipeline.reject(call, error)
            response.lines += stream.lines.removeprefix(self._lines)  # Those that the server has added.
            stream.replace(response)
            return
        self._pipeline.events.failed(call.api_format.endpoint, self._pending.id, call.identity, self._pending, error)
        response = self._pipeline.error_responses.answer(error, self._pending.id, form=call.api_format.form)
        self._write(stream, self._chunks.failure(response))
        stream.abort = True

    @property
    def used(self) -> int:
        """Tokens of the input and of the text that was sent, estimated as at admission; 0 if no text was sent."""
        sent, read = self._assembly.sent_bytes, self._pending.submission.input_bytes
        if not sent:
            return 0
        if self._document is None:
            return estimate(read + sent)
        written = line_tokens(self._assembly.text)
        return max(1, estimate(read) + self._document.tokens) + written if written else 0

    def close(self) -> None:
        """Remove the pending request; cancel it if it has no outcome. Drop references that would form a cycle."""
        self._pipeline.leave(self._pending)
        self.cancel()

    def cancel(self) -> None:
        """Wait no more for the outcome. The pending request is to be left."""
        self._stream = None
        self._future.cancel()  # Does nothing if it is resolved; else its callback, which references this, is dropped.

    def _new_chunks(self, request_id: str, *, passed_on: bool) -> Chunks:
        call = self._call
        if call.api_format.chunks is None:
            raise RuntimeError("This is a bug: this endpoint has no streams.")
        return call.api_format.chunks(request_id, self._pending.submission.model, call.body, passed_on)
