"""Redis with Sentinel, and TLS connections that share one SSL context per process.

    redis+sentinel://[user:password@]host:port[,host:port...]/service[/db]

With TLS rediss+sentinel://, and as in redis-py's URLs ?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE. Connections
to the Sentinels use TLS only with &sentinel_tls=on. Connections always go to the current primary. A failover may lose the
last writes that the old primary had acknowledged: the gateways resubmit their pending requests.

An SSL context costs about 20 ms of CPU, and redis-py makes one for each connection; here it is shared. The files of a URL
are read again when they change, so that the next connection uses a renewed certificate.
"""

import os
import weakref
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import RedisSSLContext, SSLConnection
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.exceptions import (
    ConnectionError,  # noqa: A004 - as everywhere in redis-py
    MovedError,
)

from scheduler.errors import StartError
from scheduler.redis_client.pipeline import CLIENT_CLOSED

_NOT_OPTIONS = {"context"}
_FILES = ("keyfile", "certfile", "ca_certs", "ca_path")
_made: dict[str, tuple[tuple[Any, ...], RedisSSLContext]] = {}


def shared(wanted: RedisSSLContext) -> RedisSSLContext:
    """The context of this process with the options of `wanted`. Raises OSError if a file does not exist.

    There is one for each different Redis URL.
    """
    options = repr([getattr(wanted, name) for name in RedisSSLContext.__slots__ if name not in _NOT_OPTIONS])
    files = tuple(_version(getattr(wanted, name)) for name in _FILES)
    known = _made.get(options)
    if known is None or known[0] != files:
        known = _made[options] = (files, wanted)
    return known[1]


def _version(path: str | None) -> tuple[int, ...]:
    if not path:
        return ()
    found = os.stat(path)  # noqa: PTH116 - the path may be of a file or a folder, and may be text
    return found.st_mtime_ns, found.st_size, found.st_ino


def prepare(connection: object) -> None:
    """Create the context of this connection, if it uses TLS, because the first call may have too little time for it.

    Errors of its files are reported by each connection.
    """
    if isinstance(connection, SSLConnection):
        with suppress(OSError):
            shared(connection.ssl_context).get()


class SharedSSLConnection(SSLConnection):
    """A connection to a server with a fixed address."""

    def _connection_arguments(self) -> Any:
        self.ssl_context = shared(self.ssl_context)
        return super()._connection_arguments()


class SharedSentinelSSLConnection(SentinelManagedSSLConnection):
    """A connection to the primary that Sentinel names."""

    def _connection_arguments(self) -> Any:
        self.ssl_context = shared(self.ssl_context)
        return super()._connection_arguments()


SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
DEFAULT_PORT = 26379
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Parameters of a URL: trusted authorities, client certificate and key."""
ASK_TIMEOUT_S = 0.08
"""Timeout of each Sentinel: two that hang must leave time for the third within a command's 0.25 s."""


class SentinelUrl(NamedTuple):
    """A parsed Sentinel URL. `credentials`: for the servers, not for the Sentinels.

    `tls_files`: the TLS_FILES that it names. `sentinel_tls`: connections to the Sentinels use TLS.
    """

    nodes: list[tuple[str, int]]
    service: str
    database: int
    credentials: dict[str, str]
    tls: bool
    tls_files: dict[str, str]
    sentinel_tls: bool


def parse(url: str) -> SentinelUrl:
    """Parse a Sentinel URL. Raises StartError, which names the invalid part."""
    # Not with urllib: its newer versions reject a list of hosts with an IPv6 address.
    scheme, _, rest = url.partition("://")
    netloc, _, tail = rest.partition("/")
    user, at, hosts = netloc.rpartition("@")
    tail, _, query = tail.partition("#")[0].partition("?")
    path = [part for part in tail.split("/") if part]
    options = options_of(query, ("sentinel_tls",), tls=scheme.startswith("rediss"))
    if not path or len(path) > 2:
        raise StartError(
            "The Redis URL must end with the name of the service that Sentinel monitors, as in .../primary."
        )
    if len(path) == 2 and not path[1].isdigit():
        raise StartError(f"The Redis URL must contain the number of the database, not {path[1]!r}.")
    return SentinelUrl(
        nodes=[node(host, "Sentinel", DEFAULT_PORT) for host in hosts.split(",")],
        service=unquote(path[0]),
        database=int(path[1]) if len(path) == 2 else 0,
        credentials=credentials_of(user) if at else {},
        tls=scheme.startswith("rediss"),
        tls_files={name: file for name, file in options.items() if name in TLS_FILES},
        sentinel_tls=options.get("sentinel_tls") == "on",
    )


def options_of(query: str, others: tuple[str, ...] = (), *, tls: bool) -> dict[str, str]:
    """The parameters of a URL: with TLS, TLS_FILES and `others`. Raises StartError for unknown ones."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = (*TLS_FILES, *others) if tls else ()
    for name, value in options.items():
        if name not in known:
            raise StartError(f"The Redis URL has an unknown parameter {name!r}.")
        if name == "sentinel_tls" and value not in ("on", "off"):
            raise StartError(f"The Redis URL must set sentinel_tls to on or off, not {value!r}.")
    return options


def node(text: str, kind: str, default_port: int) -> tuple[str, int]:
    """Host and port of one server of a URL. Raises StartError, which calls it a `kind`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    if not host or not port.isdigit():
        raise StartError(f"The Redis URL names the {kind} {text!r}, which is not host:port.")
    return host.strip("[]"), int(port)


def credentials_of(text: str) -> dict[str, str]:
    """Options of redis-py for `user:password`."""
    user, _, password = text.partition(":")
    named = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in named.items() if value}


class ClientPool(BlockingConnectionPool):
    """The connections of one client. A task that outlives the client leaves no connection open."""

    ended = False

    def make_connection(self) -> Any:
        """Raises ConnectionError after the end of the client."""
        if self.ended:
            raise ConnectionError(CLIENT_CLOSED)
        return super().make_connection()  # type: ignore[no-untyped-call]

    def moved(self, error: MovedError) -> None:
        """Called with each MOVED. Only `SlotPool` has several servers, and follows it."""

    async def release(self, connection: Any) -> None:
        """Return a connection after its use."""
        await super().release(connection)
        if self.ended:
            await connection.disconnect(nowait=True)


class PrimaryPool(ClientPool):
    """Connections to a primary whose address each new connection asks for; `_discover` finds it.

    redis-py's own Sentinel pool raises at once if all connections are in use; this one waits.
    """

    # Attributes that SentinelManagedConnection requires.
    is_master = True
    check_connection = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.connection_kwargs["connection_pool"] = weakref.proxy(self)
        self._primary: tuple[str, int] | None = None

    async def get_master_address(self) -> tuple[str, int]:
        """Called by each new connection. Raises a ConnectionError of redis-py if the primary is not known."""
        found = await self._discover()
        if found != self._primary:
            self._primary = found
            await self.disconnect(inuse_connections=False)  # Idle connections are to the old primary.
        return found

    async def _discover(self) -> tuple[str, int]:
        raise NotImplementedError


class SentinelPool(PrimaryPool):
    """Connections to the primary that Sentinel names."""

    def __init__(self, where: SentinelUrl, **options: Any) -> None:
        connection = SharedSentinelSSLConnection if where.tls else SentinelManagedConnection
        super().__init__(connection_class=connection, db=where.database, **options)
        self.connection_kwargs |= where.credentials | where.tls_files
        self._service = where.service
        asking: dict[str, Any] = {"socket_timeout": ASK_TIMEOUT_S, "socket_connect_timeout": ASK_TIMEOUT_S}
        if where.sentinel_tls:
            asking |= {"ssl": True, **where.tls_files}
        self._sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
            where.nodes, sentinel_kwargs=asking | {"retry": options["retry"]}
        )
        if where.sentinel_tls:
            for each in self._sentinel.sentinels:
                each.connection_pool.connection_class = SharedSSLConnection

    async def _discover(self) -> tuple[str, int]:
        found: tuple[str, int] = await self._sentinel.discover_master(self._service)
        return found

    async def aclose(self) -> None:
        """Close the connections to the Sentinels too."""
        await super().aclose()
        await self._sentinel.aclose()
