"""Redis with Sentinel, and TLS connections that share one SSL context per process.

    redis+sentinel://[user:password@]host:port[,host:port...]/service[/db][?sentinel_user=NAME&sentinel_password=TEXT]

With TLS rediss+sentinel://, and as in redis-py's URLs ?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE. Connections
to the Sentinels use TLS only with &sentinel_tls=on. Connections always go to the current primary. A failover may lose the
last writes that the old primary had acknowledged: the gateways resubmit their pending requests.

Each new connection asks one Sentinel, over a connection that is closed then; redis-py's own client keeps it, but its errors
have the state of all Sentinels and no reason.

An SSL context costs about 20 ms of CPU, and redis-py makes one for each connection; here it is shared. The files of a URL
are read again when they change, so that the next connection uses a renewed certificate.
"""

import asyncio
import os
import socket
import ssl
import weakref
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

import redis.exceptions
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import Connection, RedisSSLContext, SSLConnection
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection
from redis.exceptions import (
    ConnectionError,  # noqa: A004 - as everywhere in redis-py
    MovedError,
    RedisError,
    ResponseError,
)

from scheduler.errors import StartError
from scheduler.redis_client.distance import TRIPS_TO_CONNECT, TRIPS_TO_FIND, Distance
from scheduler.redis_client.pipeline import CLIENT_CLOSED
from scheduler.redis_client.setup_faults import Server, SetupFault, login_fault

SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
DEFAULT_PORT = 26379
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Parameters of a URL: trusted authorities, client certificate and key."""

SENTINEL_LOGIN = {"sentinel_user": "username", "sentinel_password": "password"}
"""Parameters of a URL: the login at the Sentinels, with redis-py's names."""

ASK_TIMEOUT_S = 0.08
"""Timeout of each server that is asked, without the distance: two that hang must leave time for the third within a
command's 0.25 s."""

UNKNOWN_SERVICE = "No such master"
DOWN = frozenset((b"s_down", b"o_down"))
"""Flags of a primary that may hang: an attempt to connect to it would last until after the failover."""

Address = tuple[str, int]

_ARGUMENTS = ", with args"  # What follows in an error about an unknown command may be a login.
_CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # Not a rejection: a server or proxy that stops.
_NOT_OPTIONS = {"context"}
_FILES = ("keyfile", "certfile", "ca_certs", "ca_path")
_made: dict[str, tuple[tuple[Any, ...], RedisSSLContext]] = {}


def shared(wanted: RedisSSLContext) -> RedisSSLContext:
    """The context of this process with the options of `wanted`. Raises OSError if a file does not exist.

    There is one for each different Redis URL.
    """
    options = repr([getattr(wanted, name) for name in RedisSSLContext.__slots__ if name not in _NOT_OPTIONS])
    paths = [path for name in _FILES if (path := getattr(wanted, name))]
    stats = [os.stat(path) for path in paths]  # noqa: PTH116 - a path may be of a file or a folder, and may be text
    files = tuple((found.st_mtime_ns, found.st_size, found.st_ino) for found in stats)
    known = _made.get(options)
    if known is None or known[0] != files:
        known = _made[options] = (files, wanted)
    return known[1]


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


class SentinelUrl(NamedTuple):
    """A parsed Sentinel URL. `credentials`: for the servers, not for the Sentinels, which have `sentinel_login`.

    `tls_files`: the TLS_FILES that it names. `sentinel_tls`: connections to the Sentinels use TLS.
    """

    nodes: list[tuple[str, int]]
    service: str
    database: int
    credentials: dict[str, str]
    tls: bool
    tls_files: dict[str, str]
    sentinel_tls: bool
    sentinel_login: dict[str, str]


def parse(url: str) -> SentinelUrl:
    """Parse a Sentinel URL. Raises StartError, which names the invalid part."""
    # Not with urllib: its newer versions reject a list of hosts with an IPv6 address.
    scheme, _, rest = url.partition("://")
    netloc, _, tail = rest.partition("/")
    user, at, hosts = netloc.rpartition("@")
    tail, _, query = tail.partition("#")[0].partition("?")
    path = [part for part in tail.split("/") if part]
    options = options_of(query, tuple(SENTINEL_LOGIN), ("sentinel_tls",), tls=scheme.startswith("rediss"))
    if "sentinel_user" in options and not options.get("sentinel_password"):
        raise StartError("The Redis URL names a sentinel_user, but no sentinel_password.")
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
        sentinel_login={
            SENTINEL_LOGIN[name]: text for name, text in options.items() if name in SENTINEL_LOGIN and text
        },
    )


def options_of(
    query: str, always: tuple[str, ...] = (), with_tls: tuple[str, ...] = (), *, tls: bool
) -> dict[str, str]:
    """The parameters of a URL: `always`, and with TLS, TLS_FILES and `with_tls`. Raises StartError for unknown ones."""
    # Not with urllib, which reads a plus sign as a space.
    pairs = (part.partition("=") for part in query.split("&") if part)
    options = {name: unquote(value) for name, _, value in pairs}
    known = (*always, *TLS_FILES, *with_tls) if tls else always
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
    distance: Distance
    """Of the server, which the client measures."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.distance = Distance()

    def make_connection(self) -> Any:
        """Raises ConnectionError after the end of the client."""
        if self.ended:
            raise ConnectionError(CLIENT_CLOSED)
        return super().make_connection()  # type: ignore[no-untyped-call]

    def moved(self, error: MovedError) -> None:
        """Called with each MOVED. Only `SlotPool` has several servers, and follows it."""

    def servers(self) -> list[Server]:
        """The servers that the URL names, and those that were found; without a Unix socket."""
        host, port = (self.connection_kwargs.get(name) for name in ("host", "port"))
        tls = issubclass(self.connection_class, SSLConnection)
        return [Server("Redis", str(host), int(port), tls)] if host and port else []

    async def release(self, connection: Any) -> None:
        """Return a connection after its use."""
        await super().release(connection)
        if self.ended:
            await connection.disconnect(nowait=True)


async def answer_of(connection: Connection, *command: str) -> Any:
    """The reply to one command on a connection of its own, which is closed then. The caller limits the time."""
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_command(*command)
        return await connection.read_response()
    finally:
        with suppress(RedisError, OSError):
            await connection.disconnect(nowait=True)


class PrimaryDown(ConnectionError):
    """The Sentinels know the primary, and that it does not respond."""


class PrimaryPool(ClientPool):
    """Connections to a primary whose address each new connection asks for; `_discover` finds it.

    redis-py's own Sentinel pool raises at once if all connections are in use; this one waits.
    """

    # Attributes that SentinelManagedConnection requires.
    is_master = True
    check_connection = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.distance = Distance(TRIPS_TO_CONNECT + TRIPS_TO_FIND)
        self.connection_kwargs["connection_pool"] = weakref.proxy(self)
        self._primary: Address | None = None

    @property
    def _ask_s(self) -> float:
        return ASK_TIMEOUT_S + self.distance.find_s

    async def get_master_address(self) -> Address:
        """Called by each new connection. Raises a ConnectionError of redis-py if the primary is not known."""
        found = await self._discover()
        if found != self._primary:
            self._primary = found
            await self.disconnect(inuse_connections=False)  # Idle connections are to the old primary.
        return found

    def servers(self) -> list[Server]:
        """The last primary."""
        tls = issubclass(self.connection_class, SSLConnection)
        return [Server("Redis", *self._primary, tls)] if self._primary else []

    async def _discover(self) -> Address:
        raise NotImplementedError


class SentinelPool(PrimaryPool):
    """Connections to the primary that Sentinel names."""

    def __init__(self, where: SentinelUrl, **options: Any) -> None:
        connection = SharedSentinelSSLConnection if where.tls else SentinelManagedConnection
        super().__init__(connection_class=connection, db=where.database, **options)
        self._where = where
        self._nodes = list(where.nodes)
        common = {
            name: value for name, value in self.connection_kwargs.items() if name not in {"connection_pool", "db"}
        }
        self._asking = common | where.sentinel_login | (where.tls_files if where.sentinel_tls else {})
        self._asked: type[Connection] = SharedSSLConnection if where.sentinel_tls else Connection
        self.connection_kwargs |= where.credentials | where.tls_files

    def servers(self) -> list[Server]:
        """The Sentinels, and the last primary."""
        return [*(Server("Sentinel", *each, self._where.sentinel_tls) for each in self._nodes), *super().servers()]

    async def _discover(self) -> Address:
        failures: list[str] = []
        fault: RedisError | None = None
        for each in tuple(self._nodes):
            try:
                async with asyncio.timeout(self._ask_s):
                    return await self._ask(each)
            except (SetupFault, PrimaryDown) as error:
                fault = error
            except (RedisError, OSError, TimeoutError) as error:
                failures.append(f"{each[0]}:{each[1]} {_brief(error)}")
            self._nodes.append(self._nodes.pop(0))  # The next connection asks this one last.
        raise fault or SetupFault(
            f"No Sentinel answered ({', '.join(failures)}): start them, or correct their addresses in TIERLANE_REDIS_URL."
        )

    async def _ask(self, address: Address) -> Address:
        host, port = address
        connection = self._asked(**self._asking | {"host": host, "port": port})
        try:
            reply = await answer_of(connection, "SENTINEL", "MASTER", self._where.service)
        except (RedisError, OSError) as error:
            if fault := fault_of(error, f"Sentinel at {host}:{port}", self._where.service):
                raise SetupFault(fault) from error
            raise
        return primary_of(reply)


def fault_of(error: BaseException, whom: str, service: str) -> str | None:
    """The sentence for an error of a Sentinel that answered; None if it did not answer."""
    if UNKNOWN_SERVICE in str(error):
        return f"{whom} does not monitor {service!r}: correct the service in TIERLANE_REDIS_URL."
    if fault := login_fault(error, whom, "sentinel_user and sentinel_password"):
        return fault
    cause = _cause(error)
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, _CLOSED):
        return (
            f"{whom} rejected the TLS connection: correct sentinel_tls, ssl_certfile and ssl_keyfile in "
            "TIERLANE_REDIS_URL."
        )
    if isinstance(error, ResponseError):
        text = str(error).partition(_ARGUMENTS)[0]
        return f'{whom} answered "{text}": correct its address in TIERLANE_REDIS_URL if it is not a Sentinel.'
    return None


def primary_of(reply: Any) -> Address:
    """The address in a reply to SENTINEL MASTER: a map, or a list in RESP2. Raises PrimaryDown."""
    state = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    flags = state[b"flags"].split(b",")
    if b"master" not in flags or not DOWN.isdisjoint(flags):
        raise PrimaryDown("The Sentinels report that the primary is down.")
    return state[b"ip"].decode(), int(state[b"port"])


def _brief(error: BaseException) -> str:
    """Why a server did not answer, in a few words."""
    cause = _cause(error)
    if isinstance(error, TimeoutError | redis.exceptions.TimeoutError):
        return "did not reply in time"
    if isinstance(cause, ConnectionRefusedError):
        return "refused the connection"
    return "has no address" if isinstance(cause, socket.gaierror) else "closed the connection"


def _cause(error: BaseException) -> BaseException:
    """What redis-py made an error of."""
    return error.__cause__ or error.__context__ or error
