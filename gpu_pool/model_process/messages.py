"""Messages between a worker and its model process (msgpack behind a four-byte length), and the latter's socket end.

    worker -> model process    Run, and Drop while it works
    model process -> worker    Ready once, then Progress and Pieces while it works and one Done or Refused for each
                               Run; Available when that changes; Fatal at its end

Schemas are closed and sizes capped, so neither side can be made to run or to allocate what the other one sends. Nothing
here imports asyncio, which the model process does not need; it sees when the worker is gone.
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
MAX_BODY_BYTES = 128 << 20  # 100 inputs of the largest size that a gateway takes, and room.


class FrameError(TierlaneError):
    """A frame is not what the protocol says; the connection is of no more use."""


class FrameTooLarge(FrameError):
    """A message does not fit into a frame; nothing of it was sent."""


class Run(msgspec.Struct, array_like=True, frozen=True, tag="run"):
    """Run these stored requests (scheduler.payload) as one batch; stop taking a failed one apart after `budget_ms`.

    `left_ms`: how long each of them can still be used; none: all for as long as the budget lasts.
    """

    seq: int
    budget_ms: int
    bodies: list[bytes]
    left_ms: list[int] = []


class Drop(msgspec.Struct, array_like=True, frozen=True, tag="drop"):
    """Nobody waits any more for these places of the batch `seq`: what they make may end as it is."""

    seq: int
    places: list[int]


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The model is loaded and warm, and takes at most so many batches at a time."""

    version: str
    most: int = 1


class Progress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """The model has done `counter` steps since it started; sent when it moves, and not at every step."""

    counter: int


class Piece(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What was added to the output of the item at `place` of the batch, from character `offset` on.

    `stream` is where it is wanted, as the stored request says.
    """

    place: int
    stream: str
    offset: int
    text: str


class Pieces(msgspec.Struct, array_like=True, frozen=True, tag="pieces"):
    """What the batch `seq` has added to its streams since the last such message."""

    seq: int
    pieces: list[Piece]


class Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """The batch `seq` took `gpu_ms`; one result for each item, in order.

    `largest`: how many items the device holds in one go, once it ran out of memory with more; else 0. `fault`: why the
    batch was taken apart, never in words that could quote an input; "": it ran as it came. `padding_waste`: the share (0..1)
    of the computed positions that were padding, 0 where the backend does not say.
    """

    seq: int
    gpu_ms: float
    results: list[ItemResult]
    largest: int = 0
    fault: str = ""
    padding_waste: float = 0.0


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """Nothing of the batch `seq` was answered, and it may be run again; `counted`: as an attempt that was lost."""

    seq: int
    reason: str
    counted: bool = False


class Available(msgspec.Struct, array_like=True, frozen=True, tag="available"):
    """Whether batches are wanted from now on, and if not, why, and whether for a moment only; they are after Ready."""

    wanted: bool
    reason: str = ""
    brief: bool = False


class Fatal(msgspec.Struct, array_like=True, frozen=True, tag="fatal"):
    """The process ends itself and says why; `start_error`: a new process would end in the same way."""

    message: str
    start_error: bool = False


Asked = Run | Drop
Said = Ready | Progress | Pieces | Done | Refused | Available | Fatal

_encoder = msgspec.msgpack.Encoder()
_asked: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_said: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def pack(message: Asked | Said) -> bytes:
    """A whole frame. Raises FrameTooLarge."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise FrameTooLarge(f"A message of {len(body)} bytes is over the frame limit of {MAX_BODY_BYTES}.")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes | bytearray) -> int:
    """The length of the body that follows. Raises FrameError for one over the limit."""
    (length,) = HEADER.unpack(header)
    if length > MAX_BODY_BYTES:
        raise FrameError(f"A frame announces {length} bytes, over the limit of {MAX_BODY_BYTES}.")
    return int(length)


def read_asked(body: bytes) -> Asked:
    """Decode what a supervisor sent. Raises FrameError."""
    try:
        return _asked.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"A frame cannot be decoded: {type(error).__name__}.") from None


def read_said(body: bytes) -> Said:
    """Decode what a model process sent. Raises FrameError."""
    try:
        return _said.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"A frame cannot be decoded: {type(error).__name__}.") from None


def too_large(done: Done) -> Done:
    """What is said in place of an answer that does not fit into a frame."""
    too_much = ItemResult("The model's answer is too large.", 0, ErrorCode.INVALID_OUTPUT)
    return Done(done.seq, done.gpu_ms, [too_much] * len(done.results), done.largest)


PROGRESS_EVERY_S = 0.02  # A lease is renewed far less often; more frames than this tell nobody anything.


class ModelLink:
    """Runs are read where they are run; a thread of its own only waits for the other end to close, so that the process
    ends even while the model computes. It asks for no event but that, and is not woken by data.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unread = select.poll()
        self._unread.register(connection, select.POLLIN)
        self._early: deque[Run] = deque()
        threading.Thread(target=self._wait_for_the_end, name="supervisor-link", daemon=True).start()

    def runs(self) -> Iterator[Run]:
        """The batches to run, as they come, without end: the process ends when the supervisor goes."""
        while True:
            asked = self._early.popleft() if self._early else self._next()
            if isinstance(asked, Run):  # What is dropped of a batch that has ended is no news.
                yield asked

    def drops(self) -> Iterator[Drop]:
        """What was dropped of the batch that runs, as far as it is there: never waits."""
        while self._unread.poll(0):
            asked = self._next()
            if isinstance(asked, Drop):
                yield asked
            else:
                self._early.append(asked)

    def send(self, message: Said) -> None:
        """Send one message; ends the process where nobody is left to hear it. Raises FrameTooLarge."""
        frame = pack(message)
        try:
            self.connection.sendall(frame)
        except OSError:
            os._exit(0)

    def _next(self) -> Asked:
        try:
            return read_asked(self._exactly(body_length(self._exactly(HEADER.size))))
        except (OSError, EOFError, FrameError):
            os._exit(0)

    def _wait_for_the_end(self) -> None:
        end = select.poll()
        end.register(self.connection, 0)  # Hang-up and errors are told without being asked for.
        while not end.poll():
            pass
        os._exit(0)  # Not sys.exit: the main thread may be inside a kernel for seconds.

    def _exactly(self, size: int) -> bytes:
        data = self.connection.recv(size)
        if len(data) == size:
            return data
        return self._rest(bytearray(data), size)

    def _rest(self, buffer: bytearray, size: int) -> bytes:
        while len(buffer) < size:
            more = self.connection.recv(size - len(buffer)) if buffer else b""
            if not more:
                raise EOFError
            buffer += more
        return bytes(buffer)


class ProgressCounter:
    """Counts steps, and tells the supervisor at most every 20 ms; nothing in the first 20 ms of a batch."""

    def __init__(self, send: Callable[[Progress], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._steps = 0
        self._sent_at = float("-inf")

    def begin(self) -> None:
        """A batch begins; its supervisor knows."""
        self._sent_at = self._clock()

    def __call__(self) -> None:
        """One more step is done."""
        self._steps += 1
        now = self._clock()
        if now - self._sent_at >= PROGRESS_EVERY_S:
            self._sent_at = now
            self._send(Progress(self._steps))
