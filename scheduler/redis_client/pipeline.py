"""A pipelined Redis client for frequent calls, with reconnect backoff.

Calls are sent at once and answered in the order of sending. redis-py makes the connection (address, TLS, login,
Sentinel); from then on its socket is read and written here, because `execute_command` costs several times what a script
call needs: the pool, hooks, retries, metrics, a task's timer.

A call that nobody waits for any more keeps its place in the order, so that its reply never reaches the next caller.
After a call without a reply in time the connection gets no new ones, and is closed once the others have theirs. One
connection attempt runs at a time: all waiting calls share its failure, and the next attempt follows after a pause with
full jitter.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, cast

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,  # noqa: A004 - as everywhere in redis-py
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 - see above
)


class Backoff:
    """Delays drawn from 0..ceiling, the ceiling doubling from `first_s` to `most_s` until reset."""

    def __init__(
        self, first_s: float = 0.05, most_s: float = 1.0, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """The next delay in seconds; never under a tenth of the first, so that a loop always yields for real."""
        delay = max(self._first_s / 10, self._draw(0.0, self._ceiling_s))
        self._ceiling_s = min(self._most_s, self._ceiling_s * 2)
        return delay

    def reset(self) -> None:
        self._ceiling_s = self._first_s

    async def sleep(self) -> None:
        await asyncio.sleep(self.next_s())


Argument = str | bytes | float

pack: Callable[[tuple[Argument, ...]], bytes] = cast("Any", hiredis.pack_command)
FIRST_PAUSE_S, MOST_PAUSE_S = 0.01, 0.1
"""The bounds of the pause after a failed attempt to connect. A call ends in 0.25 s, so that each has a try or two."""
_NOTHING = object()
_ERRORS: dict[str, type[RedisError]] = {
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "LOADING": BusyLoadingError,
}
_WRONG_SERVER = (ReadOnlyError, BusyLoadingError)  # A new connection may find a better one.


class ReplySink(Protocol):
    """Who is told of the one answer to a call: a future, or something lighter. `done`: it is not waited for any more."""

    def done(self) -> bool: ...

    def set_result(self, reply: Any, /) -> None: ...

    def set_exception(self, error: RedisError, /) -> None: ...


def _error(text: str) -> RedisError:
    code, _, rest = text.partition(" ")
    kind = _ERRORS.get(code)
    return kind(rest) if kind else ResponseError(text)


class PipelinedConnection(asyncio.Protocol):
    """One connection, from its login to its end, which Redis knows as `client_id`. `usable`: it takes new calls."""

    def __init__(self, connection: AbstractConnection, client_id: int) -> None:
        writer = connection._writer  # noqa: SLF001 - redis-py has no other way to its socket
        if writer is None:
            raise ConnectionError("The connection ended at once.")
        self._hang_up: Callable[[], None] = connection._close  # noqa: SLF001 - the only close that is no coroutine
        self._transport: Any = writer.transport
        self._answers: deque[ReplySink] = deque()
        self._unsent: list[bytes] = []
        self._reader = hiredis.Reader(replyError=_error, notEnoughData=_NOTHING)
        self._loop = asyncio.get_running_loop()
        self.client_id = client_id
        self.local_host = _host_of(self._transport.get_extra_info("sockname"))
        self.usable = True
        self._transport.set_protocol(self)

    def send(self, command: bytes) -> "asyncio.Future[Any]":
        """Send one command; its answer, or a RedisError."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers.append(answer)
        self._unsent.append(command)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)  # What is called in the same turn of the loop goes out in one write.
        return answer

    def tell(self, command: bytes, answer: ReplySink) -> None:
        """Send one command now; `answer` is told."""
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

    def overdue(self, answer: "asyncio.Future[Any]") -> None:
        """Fail a call whose answer was not there in time, and send no other one here."""
        if not answer.done():
            answer.set_exception(TimeoutError("Timeout reading from the server."))
            self.retire()

    def retire(self) -> None:
        """Take no new call, and close as soon as nobody waits here."""
        self.usable = False
        if all(answer.done() for answer in self._answers):
            self.close()

    def close(self) -> None:
        """End it now; whoever waits is told."""
        self.usable = False
        self._hang_up()
        self._fail(ConnectionError("The connection was closed."))

    def data_received(self, data: bytes) -> None:
        """Hand out what came, in the order of the calls."""
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _NOTHING:
                if not isinstance(reply, hiredis.PushNotification):
                    self._hand_out(reply)
        except (hiredis.ProtocolError, IndexError):  # IndexError: more answers than calls.
            self.close()
        if not self.usable:
            self.retire()

    def _hand_out(self, reply: Any) -> None:
        answer = self._answers.popleft()
        if isinstance(reply, _WRONG_SERVER):
            self.usable = False
        if answer.done():
            return
        if isinstance(reply, RedisError):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server went, or the network."""
        self.usable = False
        self._hang_up()
        self._fail(ConnectionError(f"Connection closed by server: {exc}" if exc else "Connection closed by server."))

    def _fail(self, error: RedisError) -> None:
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(error)


class PipelinedClient:
    """The calls of one client. `make` gives connections that are not connected yet; a call may take `timeout_s`."""

    def __init__(self, make: Callable[[], AbstractConnection], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._make = make
        self._wire: PipelinedConnection | None = None
        self._turn = asyncio.Lock()
        self._failures = 0  # Attempts to connect that failed, in all.
        self._failure = ""  # What the last one said; empty after a success.
        self._next_at = 0.0  # When the next one may begin, in the loop's time.
        self._backoff = Backoff(FIRST_PAUSE_S, MOST_PAUSE_S)

    async def call(self, command: tuple[Argument, ...], timeout_s: float | None = None) -> Any:
        """The answer to one command. Raises RedisError, OSError or TimeoutError; its outcome is then not known."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        wire = self._wire
        if wire is None or not wire.usable:
            async with asyncio.timeout(timeout_s):
                wire = await self._connected()
        answer = wire.send(pack(command))
        timer = asyncio.get_running_loop().call_later(timeout_s, wire.overdue, answer)
        try:
            return await answer
        finally:
            timer.cancel()

    def tell(self, packed: bytes, answer: ReplySink) -> bool:
        """Send a command that nobody awaits: no task, no timer. False where there is no connection to send it on.

        Whoever told sees to it that the answer comes in time, and else has the line `retire` its connection.
        """
        if self._wire is None or not self._wire.usable:
            return False
        self._wire.tell(packed, answer)
        return True

    def retire(self) -> None:
        """The connection does not answer: it gets no new calls, and is closed once the others have their answers."""
        if self._wire is not None:
            self._wire.retire()

    async def blocking_call(self, command: tuple[Argument, ...], timeout_s: float) -> Any:
        """The same for a read that blocks: once nobody waits for it, the server must not either."""
        try:
            return await self.call(command, timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def client_id(self) -> int | None:
        """As which client Redis knows the connection; None where there is none."""
        return None if self._wire is None else self._wire.client_id

    @property
    def local_host(self) -> str:
        """Our end of the connection, as an IP address; "" where there is none, or not over TCP."""
        return "" if self._wire is None else self._wire.local_host

    def close(self) -> None:
        """End the connection; the next call makes another one."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    async def _connected(self) -> PipelinedConnection:
        failures = self._failures
        async with self._turn:
            if self._wire is not None and self._wire.usable:
                return self._wire
            if self._failure and self._failures > failures:  # An attempt that this call waited for failed.
                raise ConnectionError(self._failure)
            await self._attempt()
            return cast("PipelinedConnection", self._wire)

    async def _attempt(self) -> None:
        loop = asyncio.get_running_loop()
        if (wait_s := self._next_at - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        try:
            self._wire = await _connect(self._make())
        except BaseException as error:
            self._next_at = loop.time() + self._backoff.next_s()
            if isinstance(error, RedisError | OSError):  # Else the call was given up, which says nothing to the others.
                self._failures += 1
                self._failure = str(error) or type(error).__name__
            raise
        self._failure, self._next_at = "", 0.0
        self._backoff.reset()


async def _connect(connection: AbstractConnection) -> PipelinedConnection:
    connect: Callable[[], Awaitable[None]] = connection.connect
    try:
        await connect()
        await connection.send_command("CLIENT", "ID")
        return PipelinedConnection(connection, int(await connection.read_response()))
    except BaseException:
        with suppress(RedisError, OSError):
            await connection.disconnect(nowait=True)
        raise


def _host_of(sockname: object) -> str:
    """The IP address of a socket's name; "" for one that is not of the Internet, or that holds in one link only."""
    host = str(sockname[0]) if isinstance(sockname, tuple) and sockname else ""
    return "" if "%" in host else host.removeprefix("::ffff:")
