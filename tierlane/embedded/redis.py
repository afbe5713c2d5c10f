"""The embedded Redis-compatible server: one process on a Unix socket, no TCP port.

State is kept in an append-only file, synced each second, unless the server is ephemeral. jemalloc is preloaded where
the system has it: the wheel's server was built with the C library's allocator, which takes a third of its time in a
pool of small rows that come and go. A library that cannot be loaded costs a line in the server's log, nothing else.

The server gets priority on processors that it shares with every role: a batch passes through Redis several times, and
each time it would wait for the end of somebody's slice. Linux weighs sessions before processes where it groups them
(sched(7), "The autogroup feature"), so both weights are set. Only root can lower a nice value; for others all stays as
it is.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from tierlane.child_process import POLL_S
from tierlane.embedded.process import (
    REDIS_NAMES,
    EmbeddedServerError,
    ServerProcess,
    find_redis,
    prepare_socket_dir,
    read_pid,
    usable_socket_dir,
)

LIBRARY = "libjemalloc.so.2"
ROOTS = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))


def find_jemalloc(roots: Iterable[Path] = ROOTS) -> Path | None:
    """Return the library's file, or None where the system has none (or another way of preloading)."""
    if sys.platform != "linux":
        return None
    return next((file for root in roots for file in _candidates(root) if file.is_file()), None)


def with_jemalloc(environment: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """Return the environment in which a program uses the library, behind whatever it is told to preload already."""
    if library is None:
        return dict(environment)
    told = environment.get("LD_PRELOAD", "")
    return {**environment, "LD_PRELOAD": f"{told}:{library}" if told else str(library)}


def _candidates(root: Path) -> list[Path]:
    # Debian has a folder for each architecture; a 64-bit Python's is the one that is named after it.
    return [root / f"{os.uname().machine}-linux-gnu" / LIBRARY, root / LIBRARY]


# Of -20 to 19. With 1,000 connections on two processors 5 to 10 % more requests, with 2,000 as many; -5 gives half of it.
# A rewrite of the append-only file inherits it, on at most one processor.
NICE = -10


def give_right_of_way(pid: int, proc: Path = Path("/proc"), nice: int = NICE) -> bool:
    """Let the process `pid`, which leads a session of its own, go before others; return whether that was allowed."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # A kernel without such groups has no such file.
        (proc / str(pid) / "autogroup").write_text(str(nice))
    return True


SOCKET_NAME = "redis.sock"
START_TIMEOUT_S = 30.0  # Reading back a large append-only file takes seconds.
STOP_GRACE_S = 3.0
MEMORY_LIMIT_BYTES = 4 << 30
COMPACT_VALUE_BYTES = 4096  # Rows with shorter bodies stay in one piece of memory: half of it, and less to do.
SLOW_SCRIPT_MS = 500  # After this long other clients are told BUSY instead of waiting; ours stay under one.


class EmbeddedRedis:
    """A server for one data directory. Its files are `<data_dir>/redis/` and, by default, `<data_dir>/redis.log`."""

    def __init__(
        self,
        data_dir: Path,
        socket_dir: Path,
        *,
        ephemeral: bool = False,
        log: Path | None = None,
        extra_args: Sequence[str] = (),
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> None:
        """`ephemeral`: keep nothing on disk. `extra_args`: appended to the command line, so they win. `binary`: the server
        to start instead of the one that is found.

        `launcher`: put before the command line. `environment`: besides our own, as it is at each start.
        """
        self.home = data_dir.absolute() / "redis"
        self._socket_dir = usable_socket_dir(socket_dir, SOCKET_NAME)
        self._ephemeral = ephemeral
        self._extra_args = tuple(extra_args)
        self._binary = binary
        self._launcher = tuple(launcher)
        self._environment = environment or {}
        self._process = ServerProcess("Embedded Redis", self.home, log or data_dir.absolute() / "redis.log")
        self.socket = self._socket_dir / SOCKET_NAME
        self.url = f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """Process id of the server. Raises EmbeddedServerError before the first start."""
        if not self._process.pid:
            raise EmbeddedServerError("The server has not been started.")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server's process runs now."""
        return self._process.alive

    @property
    def returncode(self) -> int | None:
        """Exit code of the latest run, None while it runs."""
        return self._process.returncode

    async def start(self) -> None:
        """Start the server and return when it answers PING. Raises EmbeddedServerError with the log's last lines."""
        if self.alive:
            return
        binary = self._binary or find_redis()
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        prepare_socket_dir(self._socket_dir)
        await self._process.clear_leftover(read_pid(self._pid_file), REDIS_NAMES)
        environment = with_jemalloc({**os.environ, **self._environment}, find_jemalloc())
        self._process.run([*self._launcher, str(binary), *self._arguments()], env=environment)
        give_right_of_way(self.pid)
        try:
            await self._ready()
        except BaseException:
            self._process.kill()
            raise

    def kill(self) -> None:
        """Kill the server at once. Harmless when it does not run."""
        self._process.kill()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask the server to end, kill it after `grace_s` seconds. Harmless when it does not run."""
        await self._process.stop(signal.SIGTERM, grace_s)
        self.socket.unlink(missing_ok=True)

    @property
    def _pid_file(self) -> Path:
        return self.home / "redis.pid"

    def _arguments(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.home),
            "pidfile": str(self._pid_file),
            "daemonize": "no",
            "maxmemory": str(min(MEMORY_LIMIT_BYTES, psutil.virtual_memory().total // 2)),
            "maxmemory-policy": "noeviction",
            "save": "",
            "appendonly": "no" if self._ephemeral else "yes",
            "appendfsync": "everysec",
            "lua-time-limit": str(SLOW_SCRIPT_MS),
            "hash-max-listpack-value": str(COMPACT_VALUE_BYTES),
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)] + list(self._extra_args)

    async def _ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await self._answers_ping():
            if not self.alive:
                raise self._process.failure("ended while starting")
            if time.monotonic() > deadline:
                raise self._process.failure(f"did not answer within {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _answers_ping(self) -> bool:
        # The raw protocol, since a client library would add its own retries and timeouts to the waiting.
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_unix_connection(self.socket)
                try:
                    writer.write(b"PING\r\n")
                    return (await reader.readline()).startswith(b"+PONG")
                finally:
                    writer.close()
                    await writer.wait_closed()
        return False
