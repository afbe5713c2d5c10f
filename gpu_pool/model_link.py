"""The model process's end of the socket: reads what is asked, sends what is said, and sees the supervisor go."""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from gpu_pool.model_process.messages import (
    HEADER,
    Asked,
    Drop,
    FrameError,
    Progress,
    Run,
    Said,
    body_length,
    pack,
    read_asked,
)

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
