"""A streamed response, from admission to its last event, and the assembly of its text from increments.

Until a stream is admitted, a rejection is an ordinary response. Increments are written when the subscriber reads them,
without a task or a timer in between. The end comes with the stored reply, as for any request, and fills what was lost
on the way.

Increments may be lost, late, duplicated, or of a run that was lost. Text that was sent is never taken back: what
overlaps is cut, a gap waits for the stored reply. Where a run is lost whose text was sent, nothing may follow.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import cast

from gateway.api.format import InferenceRequest
from gateway.api.inference import ApiFormat
from gateway.api.stream_chunks import DONE, Chunks, event
from gateway.catalog import IdentityView
from gateway.http.sse import EventStream
from gateway.inference.pending import Outcome, PendingRequest
from gateway.inference.pipeline import InferencePipeline
from gateway.inference.submission import BYTES_PER_TOKEN, REPLAYED
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault
from scheduler.protocol.admission import Verdict
from scheduler.protocol.replies import LOST, Increment, Reply
from scheduler.states import Admission


class StreamAssembly:
    """What was sent of one output, and what may be sent now. `broken`: nothing may, the stream cannot be gone on with."""

    def __init__(self) -> None:
        self._text = ""
        self._attempt = 0
        self.sent_bytes = 0
        """As UTF-8."""
        self.broken = False

    @property
    def length(self) -> int:
        """Characters that were sent."""
        return len(self._text)

    def take(self, attempt: int, offset: int, text: str) -> str:
        """What is to be sent of an increment; "" for nothing."""
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
        """What is still to be sent of the whole output, that run number `attempts` made; None where it does not go on."""
        if self.broken or (self.length and (attempts != self._attempt or not self._agrees(0, output[: self.length]))):
            self.broken = True
            return None
        return self._sent(attempts, output[self.length :]) if len(output) >= self.length else None

    def _sent(self, attempt: int, text: str) -> str:
        if text:
            self._attempt = attempt
            self._text += text
            self.sent_bytes += len(text) if text.isascii() else len(text.encode())
        return text

    def _agrees(self, offset: int, text: str) -> bool:
        return self._text.startswith(text, offset)


FindStored = Callable[[IdentityView, PendingRequest, Verdict], Awaitable[Reply]]


class StreamedResponse:
    """The stream of one waiter, which has not entered yet. `stored` finds the answer that its Idempotency-Key has."""

    def __init__(
        self,
        inference: InferencePipeline,
        api_format: ApiFormat,
        identity: IdentityView,
        pending: PendingRequest,
        asked: InferenceRequest,
        *,
        stored: FindStored,
    ) -> None:
        self._inference = inference
        self._api_format = api_format
        self._identity = identity
        self._pending = pending
        self._asked = asked
        self._stored = stored
        self._future = cast("asyncio.Future[Outcome]", pending.future)
        self._begun = asyncio.Event()
        self._assembly = StreamAssembly()
        self._stream: EventStream | None = None
        self._early = ""  # Came before the head was written.
        self._reply: Reply | None = None
        self._chunks: Chunks = self._form(pending.id)

    def admitted(self) -> None:
        """Redis keeps it: from now on the client is told."""
        self._begun.set()

    def hear(self, increment: Increment) -> None:
        """The output has grown. Never raises, because it is called in the loop that serves everybody."""
        stream = self._stream
        if stream is not None and stream.full and increment.offset != LOST:
            return  # What a slow reader misses is a gap like any other: the end fills it.
        try:
            self._told(stream, self._assembly.take(increment.attempt, increment.offset, increment.text))
        except Exception as error:  # noqa: BLE001
            log_fault("increment not written", error, request_id=self._pending.id)

    async def answer(self) -> EventStream:
        """Ask for admission; the stream that is to be played. Raises RequestError for what is refused or fails at once."""
        inference, pending = self._inference, self._pending
        pending.reader, pending.streams = self, True
        try:
            inference.enter(pending)
            self._future.add_done_callback(lambda _: self._begun.set())
            await self._begun.wait()
            if self._future.done():
                self._reply = await self._ended(self._future.result())
            return self._prepared()
        except BaseException:
            self._leave()
            raise

    def _prepared(self) -> EventStream:
        stream = EventStream(self._play)
        request_id = self._pending.id
        if self._reply is not None and self._reply.id != request_id:
            request_id = self._reply.id
            self._chunks = self._form(request_id)
            stream.headers.append(REPLAYED)
        stream.lines = f"x-request-id: {request_id}\r\n{self._limits()}"
        return stream

    async def _play(self, stream: EventStream) -> None:
        try:
            stream.start()
            stream.send(self._chunks.opening())
            self._stream = stream
            self._told(stream, self._early)
            reply = self._reply or await self._ended(await self._future)
            stream.send(self._last_events(reply))
            self._told_all(reply)
        except RequestError as error:
            self._fail(stream, error)
        except (ConnectionError, asyncio.CancelledError):
            self._inference.ends.left(self._api_format.endpoint, self._pending.id, self._identity, self._pending)
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told as everything else
            log_fault("stream failed", error, request_id=self._pending.id)
            self._fail(stream, RequestError(ErrorCode.INTERNAL_ERROR))
        finally:
            self._leave()
        stream.end()

    def _told(self, stream: EventStream | None, text: str) -> None:
        if stream is None:
            self._early += text
        elif text:
            stream.send(self._chunks.delta(text))
        if self._assembly.broken and not self._future.done():
            self._inference.give_up(self._pending, ErrorCode.WORKER_LOST)

    def _last_events(self, reply: Reply) -> bytes:
        rest = self._assembly.rest(reply.output, reply.attempts)
        if rest is None:
            raise RequestError(ErrorCode.WORKER_LOST)
        return (self._chunks.delta(rest) if rest else b"") + self._chunks.closing(reply) + DONE

    async def _ended(self, outcome: Outcome) -> Reply:
        """Raises RequestError for every end but a completed one."""
        if isinstance(outcome, Verdict) and outcome.outcome is Admission.REPLAYED:
            return await self._stored(self._identity, self._pending, outcome)
        return self._inference.completed(self._identity, self._pending, outcome, self._api_format)

    def _told_all(self, reply: Reply) -> None:
        seconds = self._inference.clock() - self._pending.started
        self._inference.ends.completed(self._api_format.endpoint, self._identity, (self._pending,), (reply,), seconds)

    def _fail(self, stream: EventStream, error: RequestError) -> None:
        self._inference.ends.failed(self._api_format.endpoint, self._pending.id, self._identity, self._pending, error)
        stream.send(event(self._inference.faults.answer(error, self._pending.id).body))
        stream.keep_alive = False

    @property
    def used(self) -> int:
        """Estimated as admission does: bytes of the input and of what was sent, by four."""
        sent = self._assembly.sent_bytes
        return math.ceil((self._pending.submission.input_bytes + sent) / BYTES_PER_TOKEN) if sent else 0

    def _leave(self) -> None:
        self._stream = None
        self._inference.leave(self._pending)
        self._pending.reader = None

    def _limits(self) -> str:
        return self._inference.customer_limits.lines(self._identity, self._pending.verdict)

    def _form(self, request_id: str) -> Chunks:
        if self._api_format.chunks is None:
            raise RuntimeError("This is a bug: a stream at a door that has none.")
        return self._api_format.chunks(request_id, self._pending.submission.model, self._asked)
