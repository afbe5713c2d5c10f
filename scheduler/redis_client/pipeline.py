"""A pipelined Redis client for frequent calls, with reconnect backoff.

Calls are sent at once, and replies arrive in the same order. redis-py opens the connection (address, TLS, login,
Sentinel); then its socket is read and written here, because `execute_command` costs several times as much as a script call
needs: pool, hooks, retries, metrics, the timer of a task.

A call that was abandoned keeps its place in the order, so that its reply does not reach the next caller. After a timeout,
a connection gets no new calls, and is closed once the others have their replies. One connection attempt runs at a time: all
waiting calls share its failure, and the next attempt follows after a pause with full jitter.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, cast

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,  # noqa: A004 - as everywhere in redis-py
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 - see above
    TryAgainError,
)

from scheduler.redis_client.backoff import Backoff
from scheduler.redis_client.distance import NEAR_S, Distance
from scheduler.redis_client.setup_faults import SetupFault

Argument = str | bytes | float
OnMoved = Callable[[MovedError], None]

pack: Callable[[tuple[Argument, ...]], bytes] = cast("Any", hiredis.pack_command)
FIRST_PAUSE_S, MOST_PAUSE_S = 0.01, 0.1
"""The pause after a failed attempt to connect. A call near Redis ends in 0.25 s, so that it gets one or two attempts."""
CLIENT_CLOSED = "The client was closed."
_NOTHING = object()
_ERRORS: dict[str, type[RedisError]] = {
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "LOADING": BusyLoadingError,
    "MOVED": MovedError,
    "ASK": AskError,
    "TRYAGAIN": TryAgainError,
}
_WRONG_SERVER = (ReadOnlyError, BusyLoadingError, MovedError)  # A new connection may reach another server.
_FAULTS = (SetupFault, AuthenticationError, NoPermissionError)  # Of the configuration: their sentences need the type.


class ReplySink(Protocol):
    """Receives the reply of a call: a future, or a lighter object. `done`: the reply is not needed any more."""

    def done(self) -> bool: ...

    def set_result(self, reply: Any, /) -> None: ...

    def set_exception(self, error: RedisError, /) -> None: ...


def error_of(text: str) -> RedisError:
    """The exception for an error reply."""
    code, _, rest = text.partition(" ")
    kind = _ERRORS.get(code)
    return kind(rest) if kind else ResponseError(text)


class PipelinedConnection(asyncio.Protocol):
    """One connection after its login; `client_id` at the server. `usable`: it accepts new calls.

    `moved`: is called with each MOVED, before the call gets it.
    """

    def __init__(self, connection: AbstractConnection, client_id: int, moved: OnMoved) -> None:
        writer = connection._writer  # noqa: SLF001 - redis-py has no other way to its socket
        if writer is None:
            raise ConnectionError("The connection ended at once.")
        self._close_redis: Callable[[], None] = connection._close  # noqa: SLF001 - the only close that is not a coroutine
        self._transport: Any = writer.transport
        self._answers: deque[ReplySink] = deque()
        self._unsent: list[bytes] = []
        self._reader = hiredis.Reader(replyError=error_of, notEnoughData=_NOTHING)
        self._loop = asyncio.get_running_loop()
        self.client_id = client_id
        self._moved = moved
        sockname = self._transport.get_extra_info("sockname")
        host = str(sockname[0]) if isinstance(sockname, tuple) and sockname else ""
        self.local_host = "" if "%" in host else host.removeprefix("::ffff:")
        """The IP address of this end; "" if it is not an Internet socket, or the address is link-local."""
        self.usable = True
        self._transport.set_protocol(self)

    def send(self, command: bytes) -> "asyncio.Future[Any]":
        """Queue one command. The future receives its reply, or a RedisError."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers.append(answer)
        self._unsent.append(command)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)  # Calls of the same loop iteration are sent in one write.
        return answer

    def send_now(self, command: bytes, answer: ReplySink) -> None:
        """Send one command at once; `answer` receives its reply."""
        if self._unsent:
            self._flush()
        self._answers.append(answer)
        self._write(command)

    def _flush(self) -> None:
        commands, self._unsent = self._unsent, []
        if commands:
            self._write(commands[0] if len(commands) == 1 else b"".join(commands))

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def time_out(self, answer: "asyncio.Future[Any]") -> None:
        """Fail a call without a reply in time, and send no others on this connection."""
        if not answer.done():
            answer.set_exception(TimeoutError("Timeout reading from the server."))
            self.retire()

    def retire(self) -> None:
        """Accept no new calls, and close once no reply is awaited."""
        self.usable = False
        if all(answer.done() for answer in self._answers):
            self.close()

    def close(self) -> None:
        """Close now; awaited calls fail."""
        self.usable = False
        self._close_redis()
        self._fail(ConnectionError("The connection was closed."))

    def data_received(self, data: bytes) -> None:
        """Pass replies to the calls, in their order."""
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _NOTHING:
                if isinstance(reply, hiredis.PushNotification):
                    continue
                answer = self._answers.popleft()
                if isinstance(reply, _WRONG_SERVER):
                    self.usable = False
                    if isinstance(reply, MovedError):
                        self._moved(reply)
                if answer.done():
                    continue
                if isinstance(reply, RedisError):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
        except (hiredis.ProtocolError, IndexError):  # IndexError: more replies than calls.
            self.close()
        if not self.usable:
            self.retire()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed by the server or the network."""
        self.usable = False
        self._close_redis()
        self._fail(ConnectionError(f"Connection closed by server: {exc}" if exc else "Connection closed by server."))

    def _fail(self, error: RedisError) -> None:
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(error)


class PipelinedClient:
    """The calls of one client. `make`: returns unconnected connections; `timeout_s`: of a call, without the distance.

    `moved`: is called with each MOVED, so that the next connection is to the server that it names.
    """

    def __init__(
        self,
        make: Callable[[], AbstractConnection],
        timeout_s: float,
        moved: OnMoved,
        distance: Distance | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.distance = Distance(round_trip_s=0.0) if distance is None else distance
        self._make = make
        self._moved = moved
        self._wire: PipelinedConnection | None = None
        self._connecting = asyncio.Lock()
        self._failures = 0  # The number of failed attempts to connect.
        self._failure: RedisError | None = None  # Of the last attempt; None after a success.
        self._next_at = 0.0  # When the next attempt may start, in the loop's time.
        self._backoff = Backoff(FIRST_PAUSE_S, MOST_PAUSE_S)
        self._ended = False

    async def call(self, command: tuple[Argument, ...], timeout_s: float | None = None) -> Any:
        """Send a command and return its reply. Raises RedisError, OSError or TimeoutError; then its outcome is unknown."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        packed = pack(command)
        try:
            return await self._call(packed, timeout_s)
        except MovedError:  # It was not executed. The next connection is to the server that has the slot now.
            return await self._call(packed, timeout_s)

    async def _call(self, packed: bytes, timeout_s: float) -> Any:
        wire = self._wire
        if wire is None or not wire.usable:
            async with asyncio.timeout(timeout_s + self.distance.connect_s):
                wire = await self._connected()
        answer = wire.send(packed)
        timer = asyncio.get_running_loop().call_later(timeout_s + self.distance.call_s, wire.time_out, answer)
        try:
            return await answer
        finally:
            timer.cancel()

    def send_now(self, packed: bytes, answer: ReplySink) -> bool:
        """Send a command without a task or timer. Returns False without a connection.

        The caller must check that the reply arrives in time, and `retire` the connection otherwise.
        """
        if self._wire is None or not self._wire.usable:
            return False
        self._wire.send_now(packed, answer)
        return True

    def retire(self) -> None:
        """Send no new calls on the connection, because it does not respond; it is closed once the others have replies."""
        if self._wire is not None:
            self._wire.retire()

    async def blocking_call(self, command: tuple[Argument, ...], timeout_s: float) -> Any:
        """Call a command that blocks. If the call is abandoned, the connection is closed, so that the server stops too."""
        try:
            return await self.call(command, timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def client_id(self) -> int | None:
        """The id of the connection at the server; None without a connection."""
        return None if self._wire is None else self._wire.client_id

    @property
    def local_host(self) -> str:
        """The local IP address of the connection; "" without one, or if it is not TCP."""
        return "" if self._wire is None else self._wire.local_host

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def end(self) -> None:
        """Close the connection; later calls fail, also those that are connecting."""
        self._ended = True
        self.close()

    async def _connected(self) -> PipelinedConnection:
        failures = self._failures
        async with self._connecting:
            if self._wire is not None and self._wire.usable:
                return self._wire
            if self._ended:
                raise ConnectionError(CLIENT_CLOSED)
            if self._failure and self._failures > failures:  # The attempt that this call waited for failed.
                raise type(self._failure)(*self._failure.args)
            loop = asyncio.get_running_loop()
            if (wait_s := self._next_at - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            try:
                wire = self._wire = await _connect(self._make(), self._moved, self.distance)
            except BaseException as error:
                self._next_at = loop.time() + self._backoff.next_s()
                if isinstance(error, asyncio.CancelledError | TimeoutError):
                    self.distance.timed_out()
                # Otherwise the call was cancelled, which does not concern others.
                if isinstance(error, RedisError | OSError):
                    self._failures += 1
                    kind = type(error) if isinstance(error, _FAULTS) else ConnectionError
                    self._failure = kind(str(error) or type(error).__name__)
                raise
            self._failure, self._next_at = None, 0.0
            self._backoff.reset()
            if self._ended:
                self.close()
                raise ConnectionError(CLIENT_CLOSED)
            return wire


async def _connect(connection: AbstractConnection, moved: OnMoved, distance: Distance) -> PipelinedConnection:
    connect: Callable[[], Awaitable[None]] = connection.connect
    try:
        await connect()
        client_id, took_s = await _client_id(connection)
        if took_s > NEAR_S:
            took_s = min(took_s, (await _client_id(connection))[1])
        distance.measured(took_s)
        return PipelinedConnection(connection, client_id, moved)
    except BaseException:
        with suppress(RedisError, OSError):
            await connection.disconnect(nowait=True)
        raise


async def _client_id(connection: AbstractConnection) -> tuple[int, float]:
    """The id of a connection, and the time of this call in seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await connection.send_command("CLIENT", "ID")
    return int(await connection.read_response()), loop.time() - began
