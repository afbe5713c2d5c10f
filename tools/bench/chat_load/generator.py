"""Sends loads in closed and open loops from one event loop, and collects their answers."""

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvloop

from chat_load.connection import BROKEN, Answer, ChatConnection
from chat_load.plan import Chat, Load, arrivals, chats, request_bytes

REFUSED_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pause of a client in a closed loop after a refusal: as the server asks, within these limits."""
CONNECT_PAUSE_S = 0.1
FIRST_CONNECTIONS = 16
"""Connections that an open loop opens before it starts; more are opened on demand."""
MOST_CONNECTIONS = 4096


@dataclass(frozen=True)
class Span:
    """Seconds of a run: `warm_s` uncounted, then `seconds`, then at most `drain_s` until open loops are answered."""

    warm_s: float
    seconds: float
    drain_s: float = 0.0


@dataclass
class Ran:
    """A run: its answers, its window in monotonic seconds, and the results of the callbacks at both ends of the window.

    `unanswered`: requests that were not answered when it ended. `late_ms`: the longest delay of a request of an open loop.
    """

    answers: list[Answer] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float = 0.0
    before: Any = None
    after: Any = None
    unanswered: int = 0
    late_ms: float = 0.0


def run_loads(url: str, model: str, loads: Sequence[Load], span: Span, read: Callable[[], Any] = lambda: None) -> Ran:
    """Run all loads against a server; `read` is called in a thread at both ends of the window."""
    return uvloop.run(_Run(url, model, span).run(loads, read))


class _Run:
    def __init__(self, url: str, model: str, span: Span) -> None:
        self._address = urlsplit(url)
        self._model = model
        self._span = span
        self._ran = Ran()
        self._connections: set[ChatConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        self._stopped = False

    async def run(self, loads: Sequence[Load], read: Callable[[], Any]) -> Ran:
        """Run to the end of the window, and drain."""
        ran, span = self._ran, self._span
        began = time.monotonic()
        closed = [_ClosedClient(self, load, client) for load in loads for client in range(load.clients)]
        opened = [_OpenLoop(self, load, began) for load in loads if load.rate]
        for client in closed:
            client.begin(began)
        for loop in opened:
            loop.begin()
        ran.begin_s = began + span.warm_s
        await _until(ran.begin_s)
        ran.before = await asyncio.to_thread(read)
        ran.end_s = ran.begin_s + span.seconds
        await _until(ran.end_s)
        ran.after = await asyncio.to_thread(read)
        for client in closed:
            client.stop()
        deadline = ran.end_s + span.drain_s
        while any(loop.busy for loop in opened) and time.monotonic() < deadline:  # noqa: ASYNC110 - every answer changes it
            await asyncio.sleep(0.05)
        self._stopped = True
        ran.unanswered = sum(loop.busy for loop in opened)
        for connection in list(self._connections):
            connection.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)
        return ran

    def length_s(self) -> float:
        """Seconds from the start of the warm-up to the end of the window."""
        return self._span.warm_s + self._span.seconds

    def record(self, answer: Answer) -> None:
        """An answer."""
        if not self._stopped:
            self._ran.answers.append(answer)

    def late(self, seconds: float) -> None:
        """A request was sent so much too late."""
        self._ran.late_ms = max(self._ran.late_ms, seconds * 1000)

    def send(self, connection: ChatConnection, chat: Chat, due_s: float) -> None:
        """Send a chat."""
        connection.send(chat, request_bytes(chat, self._address.netloc, self._model), due_s)

    def connect(
        self, answered: Callable[[ChatConnection, Answer], None], ready: Callable[[ChatConnection], None]
    ) -> None:
        """Open a connection, then call `ready`."""
        task = asyncio.get_running_loop().create_task(self._connect(answered, ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(
        self, answered: Callable[[ChatConnection, Answer], None], ready: Callable[[ChatConnection], None]
    ) -> None:
        loop, address = asyncio.get_running_loop(), self._address
        while not self._stopped:
            try:
                _, made = await loop.create_connection(lambda: ChatConnection(answered), address.hostname, address.port)
            except OSError:
                await asyncio.sleep(CONNECT_PAUSE_S)
                continue
            self._connections = {each for each in self._connections if each.open} | {made}
            ready(made)
            return


class _ClosedClient:
    """One client: the next chat follows the answer to the last one."""

    def __init__(self, run: _Run, load: Load, client: int) -> None:
        self._run = run
        self._load = load
        self._chats = chats(load, client)
        self._ends_s: float | None = None
        self._stopped = False

    def begin(self, began_s: float) -> None:
        """Connect, and begin at the time of the load."""
        if self._load.end_s is not None:
            self._ends_s = began_s + self._load.end_s
        asyncio.get_running_loop().call_later(self._load.begin_s, self._connect)

    def stop(self) -> None:
        """Send no more."""
        self._stopped = True

    def _connect(self) -> None:
        self._run.connect(self._answered, self._next)

    def _next(self, connection: ChatConnection) -> None:
        now = time.monotonic()
        if self._stopped or (self._ends_s is not None and now >= self._ends_s):
            return
        if connection.open:
            self._run.send(connection, next(self._chats), now)
        else:
            self._connect()

    def _answered(self, connection: ChatConnection, answer: Answer) -> None:
        self._run.record(answer)
        loop = asyncio.get_running_loop()
        if answer.refused:
            pause_s = min(LONGEST_PAUSE_S, max(REFUSED_PAUSE_S, answer.retry_after_s))
            loop.call_later(pause_s, self._next, connection)
        elif answer.code == BROKEN:
            loop.call_later(CONNECT_PAUSE_S, self._next, connection)
        else:
            # Not at once: the answer is still being read.
            loop.call_soon(self._next, connection)


class _OpenLoop:
    """Chats at scheduled times, each on an idle connection. One timer for the next of them."""

    def __init__(self, run: _Run, load: Load, began_s: float) -> None:
        self._run = run
        self._began_s = began_s
        self._due: Iterator[float] = arrivals(load, run.length_s())
        self._chats = chats(load, 0)
        self._next_s = next(self._due, None)
        self._idle: list[ChatConnection] = []
        self._waiting: list[tuple[float, tuple[int, int], Chat]] = []
        self._connections = self._opening = 0
        self._sent = 0

    @property
    def busy(self) -> int:
        """Requests without an answer."""
        return self._sent + len(self._waiting)

    def begin(self) -> None:
        """Open the first connections, and start the timer."""
        for _ in range(FIRST_CONNECTIONS):
            self._connect()
        self._plan()

    def _plan(self) -> None:
        if self._next_s is not None:
            delay_s = self._began_s + self._next_s - time.monotonic()
            asyncio.get_running_loop().call_later(max(0.0, delay_s), self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        while self._next_s is not None and self._began_s + self._next_s <= now:
            chat = next(self._chats)
            heapq.heappush(self._waiting, (self._began_s + self._next_s, chat.number, chat))
            self._next_s = next(self._due, None)
        self._send_waiting()
        self._plan()

    def _send_waiting(self) -> None:
        while self._waiting and self._idle:
            connection = self._idle.pop()
            if not connection.open:
                self._connections -= 1
                continue
            due_s, _, chat = heapq.heappop(self._waiting)
            self._run.late(time.monotonic() - due_s)
            self._sent += 1
            self._run.send(connection, chat, due_s)
        for _ in range(min(len(self._waiting) - self._opening, MOST_CONNECTIONS - self._connections)):
            self._connect()

    def _connect(self) -> None:
        self._connections += 1
        self._opening += 1
        self._run.connect(self._answered, self._opened)

    def _opened(self, connection: ChatConnection) -> None:
        self._opening -= 1
        self._ready(connection)

    def _ready(self, connection: ChatConnection) -> None:
        self._idle.append(connection)
        if self._waiting:
            self._send_waiting()

    def _answered(self, connection: ChatConnection, answer: Answer) -> None:
        self._sent -= 1
        self._run.record(answer)
        asyncio.get_running_loop().call_soon(partial(self._ready, connection))


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
