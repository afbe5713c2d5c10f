"""A TCP proxy that can be a bad network: slow, deaf in one direction, broken, or closed.

One stands between one client process and one server, so that a partition can be one-sided and hit one client alone.
Faults are held, not set: two of them may overlap on one proxy, and each ends by itself.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

HOST = "127.0.0.1"
HIGH_WATER_BYTES = 1 << 20  # So much may wait in one direction before its sender is held up.
CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Weather:
    """What is wrong with the network now. `refuse`: new connections are refused, as by a host without a listener."""

    delay_s: float = 0.0
    drop_requests: bool = False
    drop_replies: bool = False
    refuse: bool = False


FAIR = Weather()


class FaultProxy:
    """Listens on a port of loopback for the server behind `socket`, a Unix socket; the port stays the same."""

    def __init__(self, name: str, socket: Path) -> None:
        self.name = name
        self.port = 0
        self._socket = socket
        self._held: list[Weather] = []
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()

    @property
    def weather(self) -> Weather:
        """The sum of the faults that are held now."""
        held = self._held
        return Weather(
            delay_s=max((one.delay_s for one in held), default=0.0),
            drop_requests=any(one.drop_requests for one in held),
            drop_replies=any(one.drop_replies for one in held),
            refuse=any(one.refuse for one in held),
        )

    async def start(self) -> None:
        """Listen, the first time on a free port."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._accept, HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more, and reset every connection."""
        self._stop_listening()
        self.cut()

    def cut(self) -> int:
        """Reset every connection on both sides; how many there were."""
        links = list(self._links)
        for link in links:
            link.abort()
        return len(links)

    @contextmanager
    def held(self, weather: Weather) -> Iterator[None]:
        """Have this weather, in addition to what there is, while the block runs."""
        self._held.append(weather)
        if weather.refuse:
            self._stop_listening()
            self.cut()
        try:
            yield
        finally:
            self._held.remove(weather)

    async def settle(self) -> None:
        """Listen again where nothing refuses any more; to be called after a `held` block."""
        if not self.weather.refuse:
            await self.start()

    def _accept(self) -> asyncio.Protocol:
        link = _Link(self._socket, lambda: self.weather if self._held else FAIR, self._links.discard)
        self._links.add(link)
        return link.client

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class _Link:
    """One connection of a client with its counterpart at the server."""

    def __init__(self, socket: Path, weather: Callable[[], Weather], gone: Callable[["_Link"], None]) -> None:
        self._socket = socket
        self._gone = gone
        self._connecting: asyncio.Task[None] | None = None
        self.client = _ProxyEnd(self, lambda: (weather().drop_requests, weather().delay_s))
        self.server = _ProxyEnd(self, lambda: (weather().drop_replies, weather().delay_s))
        self.client.other, self.server.other = self.server, self.client

    def opened(self, end: "_ProxyEnd") -> None:
        if end is self.client:
            self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_unix_connection(lambda: self.server, str(self._socket))
        except (OSError, TimeoutError):
            self.abort()

    def abort(self) -> None:
        """Reset both sides."""
        for end in (self.client, self.server):
            end.abort()
        self._gone(self)

    def ended(self) -> None:
        """One side has closed: so does the other, after what is on its way."""
        self._gone(self)
        for end in (self.client, self.server):
            end.finish()


class _ProxyEnd(asyncio.Protocol):
    """One side of a link: what comes in here goes out at `other`, later or never. Order is kept whatever changes."""

    other: "_ProxyEnd"

    def __init__(self, link: _Link, fate: Callable[[], tuple[bool, float]]) -> None:
        self._link = link
        self._fate = fate
        self._transport: asyncio.Transport | None = None
        self._on_the_way: deque[tuple[float, bytes]] = deque()
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._torn = False
        self._aborted = False
        self._finishing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it.
        if self._aborted:
            self._transport.abort()
            return
        self._link.opened(self)
        self._deliver()

    def data_received(self, data: bytes) -> None:
        dropped, delay_s = self._fate()
        if dropped:
            self._torn = True
        elif self._torn:
            # What was lost is lost, and half a message must never meet the other half of a later one.
            self._link.abort()
        else:
            self.other.send(data, delay_s)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._link.ended()

    def pause_writing(self) -> None:
        self.other.hold_up(on=True)

    def resume_writing(self) -> None:
        self.other.hold_up(on=False)

    def hold_up(self, *, on: bool) -> None:
        if self._transport is None:
            return
        with suppress(RuntimeError):  # It was paused, or read, already.
            if on:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def send(self, data: bytes, delay_s: float) -> None:
        """Write `data` when `delay_s` has passed, and never before what was sent earlier."""
        if self._transport is not None and self._transport.is_closing():
            return
        if self._transport is not None and not delay_s and not self._on_the_way:
            self._transport.write(data)
            return
        due = asyncio.get_running_loop().time() + delay_s
        if self._on_the_way:
            due = max(due, self._on_the_way[-1][0])
        self._on_the_way.append((due, data))
        self._waiting += len(data)
        if self._waiting > HIGH_WATER_BYTES:
            self.other.hold_up(on=True)
        self._deliver()

    def _deliver(self) -> None:
        """Write what is due, and come back for the rest."""
        if self._transport is None or self._transport.is_closing():
            return
        loop = asyncio.get_running_loop()
        was_waiting = self._waiting
        while self._on_the_way and self._on_the_way[0][0] <= loop.time():
            _, data = self._on_the_way.popleft()
            self._waiting -= len(data)
            self._transport.write(data)
        if was_waiting > HIGH_WATER_BYTES >= self._waiting:
            self.other.hold_up(on=False)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._on_the_way:
            self._timer = loop.call_at(self._on_the_way[0][0], self._deliver)
        elif self._finishing:
            self._transport.close()

    def finish(self) -> None:
        """Close after what is on its way."""
        self._finishing = True
        if self._transport is None:
            self._aborted = True
        self._deliver()

    def abort(self) -> None:
        """Close at once, with a reset."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()
