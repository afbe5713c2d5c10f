"""Redis or Valkey in cluster mode: connections to the primary that has the slot of Tierlane's keys.

    redis+cluster://[user:password@]host:port[,host:port...]

With TLS rediss+cluster://, and ?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE. One configuration endpoint of a
managed service is enough. All keys of a cell have one hash tag, so that they are in one slot, and a script may use all of
them.

A new connection asks one of the known servers which primary has the slot. MOVED means that a command was not executed:
it is sent again to the new primary. The server that MOVED names is asked first, because the others may not have learned of
the change yet. While single keys of the slot are being moved (ASK, TRYAGAIN), no server has all of them; scripts fail
before they write anything (prelude.lua), and Redis counts as not available until the move ends.
"""

import asyncio
from typing import Any, NamedTuple

from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ConnectionError,  # noqa: A004 - as everywhere in redis-py
    MovedError,
    RedisError,
    TryAgainError,
)

from scheduler.errors import StartError
from scheduler.redis_client.keys import CLUSTER_SCHEMES
from scheduler.redis_client.sentinel import (
    Address,
    PrimaryPool,
    SharedSentinelSSLConnection,
    SharedSSLConnection,
    answer_of,
    credentials_of,
    node,
    options_of,
)
from scheduler.redis_client.setup_faults import Server

DEFAULT_PORT = 6379
REDIRECTIONS = (AskError, TryAgainError)
"""Another server has the slot, or a part of its keys. MovedError is an AskError in redis-py."""


class ClusterUrl(NamedTuple):
    """A parsed URL of a cluster. `tls_files`: the options of TLS that it names."""

    nodes: list[Address]
    credentials: dict[str, str]
    tls: bool
    tls_files: dict[str, str]


def parse(url: str) -> ClusterUrl:
    """Parse the URL of a cluster. Raises StartError, which names the invalid part."""
    scheme, _, rest = url.partition("://")
    netloc, _, tail = rest.partition("?")
    netloc, _, database = netloc.partition("/")
    if database not in ("", "0"):
        raise StartError(f"The Redis URL names database {database!r}, but a cluster has only database 0: omit it.")
    user, at, hosts = netloc.rpartition("@")
    tls = scheme.startswith("rediss")
    return ClusterUrl(
        nodes=[node(host, "server", DEFAULT_PORT) for host in hosts.split(",")],
        credentials=credentials_of(user) if at else {},
        tls=tls,
        tls_files=options_of(tail.partition("#")[0], tls=tls),
    )


def as_cluster(url: str) -> str:
    """The URL of a server in cluster mode, with the scheme of a cluster. Raises StartError for a Unix socket."""
    scheme, separator, rest = url.partition("://")
    if f"{scheme}+cluster://" not in CLUSTER_SCHEMES:
        raise StartError(f"Redis at this {scheme} URL runs in cluster mode: use redis+cluster:// or rediss+cluster://.")
    return f"{scheme}+cluster{separator}{rest}"


class _FollowsSlot(SentinelManagedConnection):
    """A connection that is closed when its server does not have the slot any more."""

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except REDIRECTIONS as error:
            if isinstance(error, MovedError):
                self.connection_pool.moved(error)
            await self.disconnect(nowait=True)
            raise ConnectionError(f"Another server has the slot: {error}") from error


class SlotConnection(_FollowsSlot):
    """A connection to the primary of the slot."""


class SlotSSLConnection(_FollowsSlot, SharedSentinelSSLConnection):
    """The same with TLS."""


class SlotPool(PrimaryPool):
    """Connections to the primary of the slot of `tag`."""

    def __init__(self, where: ClusterUrl, tag: str, **options: Any) -> None:
        super().__init__(connection_class=SlotSSLConnection if where.tls else SlotConnection, **options)
        self.connection_kwargs |= where.credentials | where.tls_files
        self._asked: type[Connection] = SharedSSLConnection if where.tls else Connection
        self._seeds = where.nodes
        self.slot = key_slot(tag.encode())
        self._nodes: list[Address] = []

    def moved(self, error: MovedError) -> None:
        """Ask the server that MOVED names first. Without a host it is at that of the server that sent it."""
        host, port = error.node_addr
        if host in ("", "?") and self._primary:
            host = self._primary[0]
        self._nodes = list(dict.fromkeys([(host, port), *self._nodes]))

    async def _discover(self) -> Address:
        failure: Exception | None = None
        for each in dict.fromkeys((*self._nodes, *self._seeds)):
            try:
                async with asyncio.timeout(self._ask_s):
                    kwargs = {
                        name: value for name, value in self.connection_kwargs.items() if name != "connection_pool"
                    }
                    connection = self._asked(**kwargs | {"host": each[0], "port": each[1]})
                    slots: list[Any] = await answer_of(connection, "CLUSTER", "SLOTS")
                    found, self._nodes = primary_of(self.slot, slots, each)
            except (RedisError, OSError, TimeoutError) as error:
                failure = error
                continue
            # A server that does not respond, or names one that does not, is asked last by the next connection.
            self._nodes.append(self._nodes.pop(0))
            return found
        raise ConnectionError(f"No server of the cluster named the primary of slot {self.slot}: {failure}") from failure

    def servers(self) -> list[Server]:
        """Those of the URL."""
        return [Server("Redis", *each, issubclass(self._asked, SSLConnection)) for each in self._seeds]


def primary_of(slot: int, ranges: list[Any], asked: Address) -> tuple[Address, list[Address]]:
    """The primary of a slot and all servers, from the reply of `asked` to CLUSTER SLOTS.

    A server without a host has that of the server that was asked. Raises ConnectionError if no server has the slot.
    """
    primary, nodes = None, list[Address]()
    for first, last, *servers in ranges:
        hosts = [((server[0] or b"").decode(), int(server[1])) for server in servers]
        addresses = [(host if host not in ("", "?") else asked[0], port) for host, port in hosts]
        nodes.extend(addresses)
        if first <= slot <= last and addresses:
            primary = addresses[0]
    if primary is None:
        raise ConnectionError(f"No server has slot {slot}.")
    return primary, list(dict.fromkeys(nodes))
