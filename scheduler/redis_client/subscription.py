"""A subscription of one channel, read without redis-py, whose reader costs several times as much as the message.

As for the pipelined client, redis-py opens the connection; then its socket is read here. Messages are passed on from the
socket's callback, one in each iteration of the event loop: what a message made clients send is read before the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, RedisError  # noqa: A004 - redis-py's, which is in FAULTS

from scheduler.redis_client.pipeline import error_of, pack
from scheduler.redis_client.sentinel import ClientPool

_NOTHING = object()


class Subscription(asyncio.Protocol):
    """One connection with one channel. `over`: is resolved with the reason of its end, as an exception.

    `ponged`: whether every `ping` was answered.
    """

    def __init__(self, connection: AbstractConnection, channel: str, take: Callable[[bytes], None]) -> None:
        """`take` is called with each message. An exception that it raises ends the subscription."""
        writer = connection._writer  # noqa: SLF001 - redis-py has no other way to its socket
        if writer is None:
            raise ConnectionError("The connection ended at once.")
        self._close_redis: Callable[[], None] = connection._close  # noqa: SLF001 - the only close that is not a coroutine
        self._transport: Any = writer.transport
        self._take = take
        self._reader = hiredis.Reader(replyError=error_of, notEnoughData=_NOTHING)
        self._next: Any = _NOTHING
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.subscribed: asyncio.Future[None] = self._loop.create_future()
        self.ponged = True
        self._transport.set_protocol(self)
        self._transport.write(pack((b"SUBSCRIBE", channel)))

    def ping(self) -> None:
        """Send a ping."""
        self.ponged = False
        if not self._transport.is_closing():
            self._transport.write(pack((b"PING",)))

    def close(self) -> None:
        """Close the connection."""
        self._end(ConnectionError("The subscription was closed."))

    def data_received(self, data: bytes) -> None:
        """Take the first message; the others follow, and nothing more is read before."""
        self._reader.feed(data)
        if self._next is _NOTHING and self._read():
            self._take_next()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed by the server or the network."""
        self._end(ConnectionError(f"Connection closed by server: {exc}" if exc else "Connection closed by server."))

    def _read(self) -> bool:
        try:
            self._next = self._reader.gets()
        except hiredis.ProtocolError as error:
            self._end(ConnectionError(f"The reply cannot be read: {error}"))
        return self._next is not _NOTHING

    def _take_next(self) -> None:
        if self.over.done():
            return
        reply, self._next = self._next, _NOTHING
        if isinstance(reply, RedisError):
            self._end(reply)
            return
        kind = reply[0] if isinstance(reply, list) else reply
        if kind == b"message":
            try:
                self._take(reply[2])
            except Exception as error:  # noqa: BLE001 - raised where `over` is awaited
                self._end(error)
                return
        elif kind == b"subscribe" and not self.subscribed.done():
            self.subscribed.set_result(None)
        elif kind in (b"pong", b"PONG"):  # A string in RESP3, in a list in RESP2.
            self.ponged = True
        if self._read():
            self._transport.pause_reading()
            self._loop.call_soon(self._take_next)
        else:
            self._transport.resume_reading()

    def _end(self, error: Exception) -> None:
        if not self.over.done():
            self._close_redis()
            for waiting in (self.over, self.subscribed):
                if not waiting.done():
                    waiting.set_exception(error)
                    waiting.exception()  # Marks it as retrieved if nothing awaits it.


async def subscribe(client: Redis, channel: str, take: Callable[[bytes], None]) -> Subscription:
    """A subscription that Redis has acknowledged. Raises RedisError, OSError. The caller limits the time."""
    pool = cast("ClientPool", client.connection_pool)
    loop, connection = asyncio.get_running_loop(), pool.make_connection()
    connect: Callable[[], Awaitable[None]] = connection.connect
    try:
        await connect()
        began = loop.time()
        subscription = Subscription(connection, channel, take)
        await subscription.subscribed
        pool.distance.measured(loop.time() - began)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            pool.distance.timed_out()
        connection._close()  # noqa: SLF001 - as above
        raise
    return subscription
