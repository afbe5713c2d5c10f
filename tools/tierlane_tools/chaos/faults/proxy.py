"""A TCP proxy with network faults: delay, loss in one direction, resets, refused connections.

Each proxy connects one client process with one server, so a partition may be one-sided and affect one client. Faults may
overlap on one proxy; each ends by itself.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

HOST = "127.0.0.1"
HIGH_WATER_BYTES = 1 << 20  # The most data that is buffered in one direction.
CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class NetworkFault:
    """A state of the network. `refuse`: new connections are refused, as by a host without a listener."""

    delay_s: float = 0.0
    drop_requests: bool = False
    drop_replies: bool = False
    refuse: bool = False


NO_FAULT = NetworkFault()


class FaultProxy:
    """Listens on a port of loopback for the server behind `socket`, a Unix socket; the port stays the same."""

    def __init__(self, name: str, socket: Path) -> None:
        self.name = name
        self.port = 0
        self._socket = socket
        self._active: list[NetworkFault] = []
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()

    @property
    def network(self) -> NetworkFault:
        """The sum of the active faults."""
        active = self._active
        return NetworkFault(
            delay_s=max((one.delay_s for one in active), default=0.0),
            drop_requests=any(one.drop_requests for one in active),
            drop_replies=any(one.drop_replies for one in active),
            refuse=any(one.refuse for one in active),
        )

    async def start(self) -> None:
        """Listen, the first time on a free port."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._accept, HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening, and reset every connection."""
        self._stop_listening()
        self.cut()

    def cut(self) -> int:
        """Reset every connection on both sides; returns their number."""
        links = list(self._links)
        for link in links:
            link.abort()
        return len(links)

    @contextmanager
    def inject(self, fault: NetworkFault) -> Iterator[None]:
        """Apply a fault, in addition to active ones, while the block runs."""
        self._active.append(fault)
        if fault.refuse:
            self._stop_listening()
            self.cut()
        try:
            yield
        finally:
            self._active.remove(fault)

    async def reopen(self) -> None:
        """Listen again unless another fault refuses; call it after an `inject` block."""
        if not self.network.refuse:
            await self.start()

    def _accept(self) -> asyncio.Protocol:
        link = _Link(self._socket, lambda: self.network if self._active else NO_FAULT, self._links.discard)
        self._links.add(link)
        return link.client

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class _Link:
    """One connection of a client with its counterpart at the server."""

    def __init__(self, socket: Path, network: Callable[[], NetworkFault], gone: Callable[["_Link"], None]) -> None:
        self._socket = socket
        self._gone = gone
        self._connecting: asyncio.Task[None] | None = None
        self.client = _ProxyEnd(self, lambda: (network().drop_requests, network().delay_s))
        self.server = _ProxyEnd(self, lambda: (network().drop_replies, network().delay_s))
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
        """Close the other side after the data in transit."""
        self._gone(self)
        for end in (self.client, self.server):
            end.finish()


class _ProxyEnd(asyncio.Protocol):
    """One side of a link: its data is written to `other`, later or never, but always in order."""

    other: "_ProxyEnd"

    def __init__(self, link: _Link, effect: Callable[[], tuple[bool, float]]) -> None:
        self._link = link
        self._effect = effect
        self._transport: asyncio.Transport | None = None
        self._in_transit: deque[tuple[float, bytes]] = deque()
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._incomplete = False
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
        dropped, delay_s = self._effect()
        if dropped:
            self._incomplete = True
        elif self._incomplete:
            # After a loss, later data would complete half a message.
            self._link.abort()
        else:
            self.other.send(data, delay_s)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._link.ended()

    def pause_writing(self) -> None:
        self.other.pause_reading(on=True)

    def resume_writing(self) -> None:
        self.other.pause_reading(on=False)

    def pause_reading(self, *, on: bool) -> None:
        if self._transport is None:
            return
        with suppress(RuntimeError):  # Already in this state.
            if on:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def send(self, data: bytes, delay_s: float) -> None:
        """Write `data` after `delay_s`, but not before earlier data."""
        if self._transport is not None and self._transport.is_closing():
            return
        if self._transport is not None and not delay_s and not self._in_transit:
            self._transport.write(data)
            return
        due = asyncio.get_running_loop().time() + delay_s
        if self._in_transit:
            due = max(due, self._in_transit[-1][0])
        self._in_transit.append((due, data))
        self._waiting += len(data)
        if self._waiting > HIGH_WATER_BYTES:
            self.other.pause_reading(on=True)
        self._deliver()

    def _deliver(self) -> None:
        """Write the data that is due, and set a timer for the rest."""
        if self._transport is None or self._transport.is_closing():
            return
        loop = asyncio.get_running_loop()
        was_waiting = self._waiting
        while self._in_transit and self._in_transit[0][0] <= loop.time():
            _, data = self._in_transit.popleft()
            self._waiting -= len(data)
            self._transport.write(data)
        if was_waiting > HIGH_WATER_BYTES >= self._waiting:
            self.other.pause_reading(on=False)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._in_transit:
            self._timer = loop.call_at(self._in_transit[0][0], self._deliver)
        elif self._finishing:
            self._transport.close()

    def finish(self) -> None:
        """Close after the data in transit."""
        self._finishing = True
        if self._transport is None:
            self._aborted = True
        self._deliver()

    def abort(self) -> None:
        """Reset the connection."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()
