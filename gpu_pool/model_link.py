"""The model process's end of the socket: a thread that reads runs and sees the supervisor go, and what is sent back."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

from gpu_pool.frames import HEADER, FrameError, Progress, Run, Said, body_length, pack, read_run

PROGRESS_EVERY_S = 0.02  # A lease is renewed far less often; more frames than this tell nobody anything.
_AHEAD = 2


class ModelLink:
    """Reads from its own thread, so that end-of-file ends the process even while the model computes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._runs: queue.Queue[Run] = queue.Queue(_AHEAD)
        threading.Thread(target=self._read, name="supervisor-link", daemon=True).start()

    def runs(self) -> Iterator[Run]:
        """The batches to run, as they come, without end: the process ends when the supervisor goes."""
        while True:
            yield self._runs.get()

    def send(self, message: Said) -> None:
        """Send one message; ends the process where nobody is left to hear it. Raises FrameTooLarge."""
        frame = pack(message)
        try:
            self._connection.sendall(frame)
        except OSError:
            os._exit(0)

    def _read(self) -> None:
        try:
            while True:
                header = self._exactly(HEADER.size)
                self._runs.put(read_run(self._exactly(body_length(header))))
        except (OSError, EOFError, FrameError):
            os._exit(0)  # Not sys.exit: the main thread may be inside a kernel for seconds.

    def _exactly(self, size: int) -> bytes:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            received = self._connection.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
        return bytes(buffer)


class ProgressCounter:
    """Counts steps, and tells the supervisor at most every 20 ms."""

    def __init__(self, send: Callable[[Progress], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._steps = 0
        self._sent_at = float("-inf")

    def __call__(self) -> None:
        """One more step is done."""
        self._steps += 1
        now = self._clock()
        if now - self._sent_at >= PROGRESS_EVERY_S:
            self._sent_at = now
            self._send(Progress(self._steps))
