"""The embedded Redis-compatible server: one process on a Unix socket, without a TCP port.

Data is stored in an append-only file, synced each second, unless the server is ephemeral.

As root, the server gets a higher CPU priority than the roles: a batch uses Redis several times, and each time it would
wait for the time slice of another process. With autogrouping (sched(7)), Linux schedules sessions before processes, so
both nice values are set.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tierlane_local.embedded.binaries import REDIS_NAMES, find_redis
from tierlane_local.embedded.jemalloc import find_jemalloc, with_jemalloc
from tierlane_local.embedded.process import EmbeddedServer
from tierlane_local.embedded.socket_dir import prepare_socket_dir, usable_socket_dir

# Measured on two processors: 5 to 10 % more requests with 1,000 connections, no difference with 2,000; half with -5.
# A rewrite of the append-only file inherits the value, on at most one processor.
NICE = -10

SOCKET_NAME = "redis.sock"
STOP_GRACE_S = 3.0
MEMORY_LIMIT_BYTES = 4 << 30
COMPACT_VALUE_BYTES = 4096  # Hashes with shorter values use the compact encoding: half the memory, and faster.
SLOW_SCRIPT_MS = 500  # While a script runs longer, Redis returns BUSY to other clients.


def raise_priority(pid: int) -> None:
    """Lower the nice values of a process and of its session, if that is allowed and the kernel has autogroups."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
        Path(f"/proc/{pid}/autogroup").write_text(str(NICE))


class EmbeddedRedis(EmbeddedServer):
    """The Redis-compatible server of a data directory."""

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
        """`ephemeral`: nothing is stored on disk. `extra_args` are appended, so they take precedence.

        `launcher`: a command that executes the server. `environment`: added to that of the current process, read at each
        start. `binary`: the server to use instead of the installed one.
        """
        super().__init__("redis", "Embedded Redis", data_dir, log)
        self._socket_dir = usable_socket_dir(socket_dir, SOCKET_NAME)
        self._ephemeral = ephemeral
        self._extra_args = tuple(extra_args)
        self._binary = binary
        self._launcher = tuple(launcher)
        self._environment = environment or {}
        self._pid_file = self.home / "redis.pid"
        self.socket = self._socket_dir / SOCKET_NAME
        self.url = f"unix://{self.socket}"

    async def start(self) -> None:
        """Start the server and return when it responds to PING. Raises EmbeddedServerError."""
        if self.alive:
            return
        binary = self._binary or find_redis()
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        prepare_socket_dir(self._socket_dir)
        await self._end_leftover(self._pid_file, REDIS_NAMES)
        environment = with_jemalloc({**os.environ, **self._environment}, find_jemalloc())
        self._run([*self._launcher, str(binary), *self._arguments()], env=environment)
        raise_priority(self.pid)
        await self._wait_ready()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Shut down; kill the server after `grace_s` seconds."""
        await super().stop(grace_s)
        self.socket.unlink(missing_ok=True)

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

    async def _responds(self) -> bool:
        # The raw protocol, because a client library adds its own retries and timeouts.
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_unix_connection(self.socket)
                try:
                    writer.write(b"PING\r\n")
                    return (await reader.readline()).startswith((b"+PONG", b"-NOAUTH"))
                finally:
                    writer.close()
                    await writer.wait_closed()
        return False
