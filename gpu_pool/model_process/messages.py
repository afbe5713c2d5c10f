"""Messages between a worker and its model process (msgpack with a four-byte length), and the model process's end of the socket.

    worker -> model process    Run, and Drop or Withdraw while it works; TokenObjective when that changes
    model process -> worker    Ready once, then Progress and Pieces while it works and one Done or Refused for each
                               Run; Available and Slots when that changes; Fatal at its end

A model with slots gets one request in each Run, runs several of them at a time, and answers each by itself. Its Pieces
have the `seq` 0, and the `place` of a piece is the `seq` of its Run.

Schemas are closed and sizes limited, so neither side can make the other execute or allocate what it sends. Nothing here
imports asyncio, which the model process does not need.
"""

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from gpu_pool.backends.backend import ItemResult
from scheduler.errors import ErrorCode, TierlaneError

HEADER = struct.Struct(">I")
MAX_BODY_BYTES = 128 << 20  # 100 inputs of the largest accepted size, and a margin.

_encoder = msgspec.msgpack.Encoder()

PROGRESS_EVERY_S = 0.02  # Leases are renewed far less often.


class FrameError(TierlaneError):
    """A malformed frame; the connection cannot be used any more."""


class FrameTooLarge(FrameError):
    """A message does not fit into a frame; nothing was sent."""


class Run(msgspec.Struct, array_like=True, frozen=True, tag="run"):
    """Run these stored requests (scheduler.payload) as one batch; stop bisecting a failed one after `budget_ms`.

    `left_ms`: the time left of each request; empty: the budget applies to all.
    """

    seq: int
    budget_ms: int
    bodies: list[bytes]
    left_ms: list[int] = []


class Drop(msgspec.Struct, array_like=True, frozen=True, tag="drop"):
    """The clients of these positions of the batch `seq` have left; the items may end early."""

    seq: int
    places: list[int]


class Withdraw(msgspec.Struct, array_like=True, frozen=True, tag="withdraw"):
    """Hand back these Runs of a model with slots (Refused, not counted), unless they have sent output or have ended."""

    seqs: list[int]


class TokenObjective(msgspec.Struct, array_like=True, frozen=True, tag="objective"):
    """The objective for the milliseconds per token, for a model that adapts its slots to it; 0: none."""

    tpot_ms: float


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The model is loaded and warm.

    `slots`: it runs single requests, that many at a time at first; 0: it runs batches. `context_tokens`: the most of prompt
    and output together; 0: not known.
    """

    version: str
    slots: int = 0
    context_tokens: int = 0


class Slots(msgspec.Struct, array_like=True, frozen=True, tag="slots"):
    """From now on `count` requests may run at a time. `source`: the evidence for this number, a phrase for operators."""

    count: int
    source: str


class Progress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """The model has done `counter` steps since it started; not sent for every step."""

    counter: int


class Piece(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Text added to the output of the item at `place` of the batch, from character `offset` on.

    `stream` is the address from the stored request.
    """

    place: int
    stream: str
    offset: int
    text: str


class Pieces(msgspec.Struct, array_like=True, frozen=True, tag="pieces"):
    """Text that the batch `seq` added to its streams since the last such message."""

    seq: int
    pieces: list[Piece]


class Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """The batch `seq` took `gpu_ms`; one result for each item, in order.

    `largest`: how many items the device holds at once after it ran out of memory with more, else 0. `fault`: why the
    batch was bisected, without quoting an input; "" if it was not. `padding_waste`: the share (0..1) of padding in the
    computed positions, 0 if unknown.
    """

    seq: int
    gpu_ms: float
    results: list[ItemResult]
    largest: int = 0
    fault: str = ""
    padding_waste: float = 0.0


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """Nothing of the Run `seq` was answered, and it may be run again; `counted`: as a lost attempt."""

    seq: int
    reason: str
    counted: bool = False


class Available(msgspec.Struct, array_like=True, frozen=True, tag="available"):
    """Whether Runs are accepted from now on, and if not, why, and whether for a short time only; `cause`: as in WorkerReport.

    Before Ready: why loading waits. With `wanted` and a reason: what is wrong although Runs are accepted.
    """

    wanted: bool
    reason: str = ""
    brief: bool = False
    cause: str = ""


class Fatal(msgspec.Struct, array_like=True, frozen=True, tag="fatal"):
    """The process ends; `start_error`: a new process would end in the same way."""

    message: str
    start_error: bool = False


WorkerMessage = Run | Drop | Withdraw | TokenObjective
ModelMessage = Ready | Progress | Pieces | Done | Refused | Available | Slots | Fatal

_worker_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
_model_decoder: msgspec.msgpack.Decoder[ModelMessage] = msgspec.msgpack.Decoder(ModelMessage)


def pack(message: WorkerMessage | ModelMessage) -> bytes:
    """A whole frame. Raises FrameTooLarge."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise FrameTooLarge(f"A message of {len(body)} bytes is over the frame limit of {MAX_BODY_BYTES}.")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes | bytearray) -> int:
    """The length of the body that follows. Raises FrameError if it is over the limit."""
    (length,) = HEADER.unpack(header)
    if length > MAX_BODY_BYTES:
        raise FrameError(f"A frame announces {length} bytes, over the limit of {MAX_BODY_BYTES}.")
    return int(length)


def decode_worker_message(body: bytes) -> WorkerMessage:
    """Decode what a supervisor sent. Raises FrameError."""
    try:
        return _worker_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"A frame cannot be decoded: {type(error).__name__}.") from None


def decode_model_message(body: bytes) -> ModelMessage:
    """Decode what a model process sent. Raises FrameError."""
    try:
        return _model_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"A frame cannot be decoded: {type(error).__name__}.") from None


def send_done(send: Callable[[Done], None], done: Done) -> None:
    """Send `done`; if it does not fit into a frame, with an error for each item."""
    try:
        send(done)
    except FrameTooLarge:
        too_much = ItemResult("The model's output is too large.", 0, ErrorCode.INVALID_OUTPUT)
        send(Done(done.seq, done.gpu_ms, [too_much] * len(done.results), done.largest))


class ModelLink:
    """The model process's end of the socket. Messages are read in the main thread; another thread waits only for the
    end of the connection, so that the process ends even while the model computes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unread = select.poll()
        self._unread.register(connection, select.POLLIN)
        self._early: deque[Run] = deque()
        threading.Thread(target=self._exit_when_closed, name="supervisor-link", daemon=True).start()

    def runs(self) -> Iterator[Run]:
        """The batches to run, as they arrive, without end: the process exits when the worker is gone."""
        while True:
            message = self._early.popleft() if self._early else self.receive()
            if isinstance(message, Run):  # A Drop for a batch that has ended is ignored.
                yield message

    def drops(self) -> Iterator[Drop]:
        """The cancellations that have arrived for the running batch; never waits."""
        for message in self.arrived():
            if isinstance(message, Drop):
                yield message
            elif isinstance(message, Run):
                self._early.append(message)

    def arrived(self) -> Iterator[WorkerMessage]:
        """All messages that have arrived; never waits."""
        while self._unread.poll(0):
            yield self.receive()

    def send(self, message: ModelMessage) -> None:
        """Send one message; exits the process if the worker is gone. Raises FrameTooLarge."""
        frame = pack(message)
        try:
            self.connection.sendall(frame)
        except OSError:
            os._exit(0)

    def receive(self) -> WorkerMessage:
        """The next message; waits for it."""
        try:
            return decode_worker_message(self._exactly(body_length(self._exactly(HEADER.size))))
        except (OSError, EOFError, FrameError):
            os._exit(0)

    def _exit_when_closed(self) -> None:
        end = select.poll()
        end.register(self.connection, 0)  # Hang-up and errors are reported without being requested.
        while not end.poll():
            pass
        os._exit(0)  # Not sys.exit: the main thread may be inside a kernel for seconds.

    def _exactly(self, size: int) -> bytes:
        data = self.connection.recv(size)
        if len(data) == size:
            return data
        buffer = bytearray(data)
        while len(buffer) < size:
            more = self.connection.recv(size - len(buffer)) if buffer else b""
            if not more:
                raise EOFError
            buffer += more
        return bytes(buffer)


class ProgressCounter:
    """Counts steps and reports them at most every 20 ms; not in the first 20 ms of a batch."""

    def __init__(self, send: Callable[[Progress], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._steps = 0
        self._sent_at = float("-inf")

    def begin(self) -> None:
        """A batch begins."""
        self._sent_at = self._clock()

    def __call__(self) -> None:
        """One more step is done."""
        self._steps += 1
        now = self._clock()
        if now - self._sent_at >= PROGRESS_EVERY_S:
            self._sent_at = now
            self._send(Progress(self._steps))
