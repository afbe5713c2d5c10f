"""An embedded cluster on loopback: primaries, each with a replica that takes over when its primary is lost.

The servers are those of embedded/redis.py, in cluster mode, on TCP ports with a password. Ports are chosen at the first
start and kept in `cluster.json`, because the servers remember the addresses of each other. All keys of a cell are in one
slot: primaries without a cell have no keys, but their votes elect the replica that takes over, which takes three of them.

A primary that restarts empty before the others miss it would keep its slots and empty its replica. So an ephemeral one that
ended is started again when its replica has taken over.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tierlane_local.embedded.error import EmbeddedServerError
from tierlane_local.embedded.redis import EmbeddedRedis

SLOTS = 16384
NODE_TIMEOUT_MS = 2000
"""After so long without a response a server counts as lost; its replica takes over about a second later. Shorter ones
mistake a paused server for a lost one."""
FAILOVER_WITHIN_S = 6.0
"""After so long without a failover, an empty primary is better than none."""
PATIENCE_S = 30.0
COMMAND_TIMEOUT_S = 2.0
VIEW_TIMEOUT_S = 0.5
POLL_S = 0.05
HOST = "127.0.0.1"
FAILING = frozenset({"fail", "fail?"})


class ClusterFile(msgspec.Struct):
    """What is kept between starts: the password, and the port and bus port of each server."""

    password: str
    ports: list[tuple[int, int]]


def slot_ranges(primaries: int) -> list[tuple[int, int]]:
    """The slots of each primary, first and last, as equal as possible."""
    edges = [SLOTS * number // primaries for number in range(primaries + 1)]
    return [(first, last - 1) for first, last in pairwise(edges)]


class NodeView(NamedTuple):
    """A server as a server of the cluster sees it: a line of CLUSTER NODES. `primary`: the id of that of a replica."""

    id: str
    port: int
    flags: frozenset[str]
    primary: str
    epoch: int
    slots: tuple[tuple[int, int], ...]  # First and last.

    @property
    def is_failing(self) -> bool:
        """Whether it counts as lost, or is about to."""
        return bool(self.flags & FAILING)

    def has(self, slot: int) -> bool:
        """Whether it is the primary of the slot."""
        return any(first <= slot <= last for first, last in self.slots)


def parse_nodes(text: str) -> list[NodeView]:
    """The lines of CLUSTER NODES."""
    return [_node(*line.split()) for line in text.splitlines() if line]


def _node(id_: str, address: str, flags: str, primary: str, *rest: str) -> NodeView:
    _, _, epoch, _, *slots = rest
    port = int(address.partition("@")[0].rpartition(":")[2])
    ranges = [slot.partition("-") for slot in slots if not slot.startswith("[")]  # In brackets: slots that move.
    found = tuple((int(first), int(last or first)) for first, _, last in ranges)
    return NodeView(id_, port, frozenset(flags.split(",")), primary, int(epoch), found)


def awaits_failover(nodes: Iterable[NodeView], lost: str) -> bool:
    """Whether the server with the id `lost`, which has ended, still has slots that a replica of it can take."""
    found = list(nodes)
    return any(node.id == lost and node.slots for node in found) and any(
        node.primary == lost and not node.is_failing for node in found
    )


class ClusterServer(EmbeddedRedis):
    """One of the servers. `id`: its id in the cluster, "" until that is formed."""

    def __init__(
        self, data_dir: Path, socket_dir: Path, *, ephemeral: bool, log: Path | None, binary: Path | None,
        extra_args: Sequence[str], password: str, replaced: Callable[[str], Awaitable[None]],
    ) -> None:  # fmt: skip
        """`replaced`: waits until no slot waits for a replica of the server with this id."""
        super().__init__(data_dir, socket_dir, ephemeral=ephemeral, log=log, binary=binary, extra_args=extra_args)
        self._replaced = replaced
        self.url = f"unix://:{password}@{self.socket}"
        self.id = ""

    async def start(self) -> None:
        """Start the server; one that restarts empty does so after its replica has taken over. Raises EmbeddedServerError."""
        if self.id and self._ephemeral and not self.alive:
            await self._replaced(self.id)
        await super().start()


class EmbeddedCluster:
    """`primaries` primaries, at least 3, and as many replicas. The first half of `nodes` begins as primaries."""

    def __init__(
        self, data_dir: Path, socket_dir: Path, primaries: int, *, password: str, ephemeral: bool = False,
        log: Path | None = None, binary: Path | None = None, bind: Callable[[int], list[int]] | None = None,
    ) -> None:  # fmt: skip
        if primaries < 3:
            raise EmbeddedServerError(f"A cluster needs at least 3 primaries to elect a new one, not {primaries}.")
        self._home = data_dir.absolute() / "cluster"
        self._file = self._home / "cluster.json"
        self._primaries = primaries
        self._found = self._read(password, bind or free_ports)
        self._is_new = ephemeral or not self._file.exists()
        self.nodes = [
            ClusterServer(
                self._home / str(number),
                socket_dir / f"c{number}",
                ephemeral=ephemeral,
                log=log,
                binary=binary,
                extra_args=self._options(*ports),
                password=self._found.password,
                replaced=self._replaced,
            )
            for number, ports in enumerate(self._found.ports)
        ]
        for number, server in enumerate(self.nodes, 1):
            server.name = f"redis-{number}"
        addresses = ",".join(f"{HOST}:{port}" for port, _ in self._found.ports)
        self.url = f"redis+cluster://:{self._found.password}@{addresses}"

    def _read(self, password: str, bind: Callable[[int], list[int]]) -> ClusterFile:
        count = 2 * self._primaries
        if self._file.exists():
            found = msgspec.json.decode(self._file.read_bytes(), type=ClusterFile)
            if len(found.ports) == count:
                return found
            raise EmbeddedServerError(
                f"The cluster in {self._home} has {len(found.ports) // 2} primaries, not {self._primaries}: start it with "
                "that number, or use another data directory."
            )
        ports = bind(2 * count)
        return ClusterFile(password, list(zip(ports[::2], ports[1::2], strict=True)))

    def _options(self, port: int, bus_port: int) -> list[str]:
        return [
            *("--port", str(port), "--bind", HOST, "--cluster-enabled", "yes", "--cluster-port", str(bus_port)),
            *("--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-require-full-coverage", "no"),
            *("--cluster-allow-replica-migration", "no", "--repl-diskless-sync-delay", "0"),
            *("--requirepass", self._found.password, "--masterauth", self._found.password),
        ]

    async def start(self) -> None:
        """Start all servers, and form the cluster. Raises EmbeddedServerError."""
        await asyncio.gather(*[node.start() for node in self.nodes])
        await self.form()

    async def form(self) -> None:
        """Return when each slot has a primary and a replica. The servers must respond. Raises EmbeddedServerError."""
        if self._is_new:
            for number, (first, last) in enumerate(slot_ranges(self._primaries)):
                await self.command(number, "CLUSTER", "ADDSLOTSRANGE", first, last)
            for number, (port, bus_port) in enumerate(self._found.ports):
                await self.command(number, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number:
                    await self.command(0, "CLUSTER", "MEET", HOST, port, bus_port)
            await self._until(self._all_met, "the servers know each other")
            for number in range(self._primaries):
                primary = await self.command(number, "CLUSTER", "MYID")
                await self.command(self._primaries + number, "CLUSTER", "REPLICATE", primary.decode())
            self._file.write_bytes(msgspec.json.encode(self._found))
            self._file.chmod(0o600)
            self._is_new = False
        await self._until(self._is_complete, "every replica is synchronized")
        await self._until(self._learn_ids, "every server says its id")

    async def stop(self) -> None:
        """Stop all servers."""
        await asyncio.gather(*[node.stop() for node in self.nodes])

    async def command(self, number: int, *command: str | int, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:
        """The reply of one server. Raises RedisError, OSError or TimeoutError."""
        client = Redis(
            unix_socket_path=str(self.nodes[number].socket),
            password=self._found.password,
            socket_timeout=None,
            driver_info=None,
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await client.execute_command(*command)  # type: ignore[no-untyped-call]
        finally:
            await client.aclose()

    async def _replaced(self, lost: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FAILOVER_WITHIN_S):
                while await self._awaits_failover(lost):  # noqa: ASYNC110 - the servers only answer questions
                    await asyncio.sleep(POLL_S)

    async def _awaits_failover(self, lost: str) -> bool:
        asked = [
            self.command(number, "CLUSTER", "NODES", timeout_s=VIEW_TIMEOUT_S)
            for number, server in enumerate(self.nodes)
            if server.alive
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        views = [parse_nodes(view.decode()) for view in found if isinstance(view, bytes)]
        if not views:  # They are too busy, unless there are none.
            return any(server.alive for server in self.nodes)
        return any(awaits_failover(view, lost) for view in views)

    async def _all_met(self) -> bool:
        count = str(len(self.nodes)).encode()
        infos = [await self.command(number, "CLUSTER", "INFO") for number in range(len(self.nodes))]
        return all(_field(info, b"cluster_known_nodes") == count for info in infos)

    async def _learn_ids(self) -> bool:
        for number, server in enumerate(self.nodes):
            server.id = (await self.command(number, "CLUSTER", "MYID")).decode()
        return True

    async def _is_complete(self) -> bool:
        for number in range(len(self.nodes)):
            info = await self.command(number, "CLUSTER", "INFO")
            replication = await self.command(number, "INFO", "replication")
            is_synced = replication["role"] == "master" or replication["master_link_status"] == "up"
            if _field(info, b"cluster_state") != b"ok" or not is_synced:
                return False
        slots = await self.command(0, "CLUSTER", "SLOTS")
        return len(slots) >= self._primaries and all(len(servers) > 1 for _, _, *servers in slots)

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with suppress(RedisError, OSError, TimeoutError):
                        if await condition():
                            return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EmbeddedServerError(f"The embedded cluster did not start: {what} was not reached.") from None


def _field(info: bytes, name: bytes) -> bytes:
    lines = [line.partition(b":") for line in info.splitlines()]
    return next((value.strip() for key, _, value in lines if key == name), b"")


def free_ports(count: int) -> list[int]:
    """Different free ports on loopback."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
