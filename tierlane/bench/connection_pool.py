"""Who carries the next request: a free connection, a new one up to the cap, or the first that becomes free.

Waiting here counts as latency, since latency counts from the due time. Free connections take turns, so that all
gateways behind one port get their share.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from tierlane.bench.connection import Connection, Pending
from tierlane.bench.http_client import Response
from tierlane.bench.tally import Silence

OnAnswer = Callable[[Pending, Response], Pending | None]
"""Told of an answer; what it returns goes out next on the same connection."""
OnSilence = Callable[[Pending, Silence, str], None]


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
    ) -> None:
        """`timeout_s`: how long after its due time a request may end in an answer. `encode` makes its bytes."""
        self._address = (host, port)
        self._cap = cap
        self._timeout_s = timeout_s
        self._encode = encode
        self._on_answer = on_answer
        self._on_silence = on_silence
        self._free: deque[Connection] = deque()
        self._open: set[Connection] = set()
        # Bounded by `expire`: nothing stays longer than the timeout.
        self._backlog: deque[Pending] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self.waited = 0  # Requests that found no free connection.
        self.strays = 0  # Bytes on connections that had asked for nothing.

    def submit(self, pending: Pending) -> None:
        """Send a request now or as soon as there is a connection."""
        if self._free and not self._backlog:
            self._send(self._free.popleft(), pending)
            return
        self.waited += 1
        self._backlog.append(pending)
        self._grow()

    def expire(self, now_s: float) -> None:
        """End what was due more than the timeout ago (`now_s` on the clock of `Pending.due_s`)."""
        oldest_s = now_s - self._timeout_s
        while self._backlog and self._backlog[0].due_s < oldest_s:
            self._on_silence(self._backlog.popleft(), Silence.NOT_SENT, "")
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
            self._on_silence(pending, Silence.STOPPED, "")
        for connection in list(self._open):
            connection.stop()

    def answered(self, connection: Connection, pending: Pending, response: Response) -> None:
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

    def broken(self, connection: Connection, pending: Pending | None, why: Silence, detail: str) -> None:
        """Called by a connection."""
        self._open.discard(connection)
        if pending is not None:
            self._on_silence(pending, why, detail)
        elif connection in self._free:
            self._free.remove(connection)
        self._grow()

    def stray(self, connection: Connection) -> None:  # noqa: ARG002  # the owner's protocol
        """Called by a connection."""
        self.strays += 1

    def _send(self, connection: Connection, pending: Pending) -> None:
        pending.tally.sent += 1
        connection.send(pending, self._encode(pending))

    def _grow(self) -> None:
        """Open one connection where somebody waits for one that nobody opens."""
        opening = len(self._opening)
        if len(self._backlog) > opening and len(self._open) + opening < self._cap:
            task = asyncio.get_running_loop().create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._connected)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self), *self._address
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
            self._on_silence(self._backlog.popleft(), Silence.CONNECT, detail)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled():
            task.result()  # A fault of ours must not pass unseen.
        self._grow()
