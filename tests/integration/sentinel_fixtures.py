"""A primary, its replica and a Sentinel: three real servers on loopback, for failovers."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from eventually import eventually
from scheduler.redis_client.connections import command_client
from stack import free_port
from tierlane_local.embedded.binaries import find_redis

SERVICE = "primary"
DOWN_AFTER_MS = 300


class Failover:
    """The three servers."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.ports = [free_port(), free_port()]
        self.sentinel_port = free_port()
        self.url = f"redis+sentinel://127.0.0.1:{self.sentinel_port}/{SERVICE}"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        primary, replica = self.ports
        self._run(primary, "--repl-diskless-sync-delay", "0")
        self._run(replica, "--replicaof", f"127.0.0.1 {primary}")
        await eventually(lambda: self._synced(replica), "the replica is synchronized")
        config = self._home / "sentinel.conf"
        config.write_text(
            f"port {self.sentinel_port}\nbind 127.0.0.1\ndir {self._home}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        self._processes[self.sentinel_port] = self._spawn([str(config), "--sentinel"])
        await eventually(self._knows_replica, "Sentinel knows the replica", 20.0)

    def kill_primary(self) -> None:
        """Send SIGKILL to the first primary."""
        self._processes[self.ports[0]].kill()

    def signal_primary(self, sign: int) -> None:
        """Send SIGSTOP or SIGCONT to the first primary."""
        self._processes[self.ports[0]].send_signal(sign)

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _run(self, port: int, *options: str) -> None:
        home = self._home / str(port)
        home.mkdir()
        common = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", ""]
        self._processes[port] = self._spawn([*common, *options])

    def _spawn(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        with (self._home / "servers.log").open("ab") as log:
            return subprocess.Popen([str(find_redis()), *arguments], stdout=log, stderr=log)

    async def _synced(self, replica: int) -> bool:
        return b"master_link_status:up" in await _reply(replica, "INFO", "replication")

    async def _knows_replica(self) -> bool:
        return str(self.ports[1]).encode() in await _reply(self.sentinel_port, "SENTINEL", "REPLICAS", SERVICE)


async def _reply(port: int, *command: str) -> bytes:
    """The raw reply to one command; b"" if the server does not listen yet."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((" ".join(command) + "\r\n").encode())
            data = await reader.read(65536)
            writer.close()
            return data
    return b""


@pytest.fixture
async def failover(tmp_path: Path) -> AsyncIterator[Failover]:
    """Three servers."""
    servers = Failover(tmp_path)
    try:
        await servers.start()
        yield servers
    finally:
        servers.stop()


@pytest.fixture
async def failover_client(failover: Failover) -> AsyncIterator[Redis]:
    """A command client of the current primary."""
    client = command_client(failover.url)
    yield client
    await client.aclose()
