"""Redis behind Sentinel: the URL form, and a pool whose connections always go to the primary of the moment.

    redis+sentinel://[user:password@]host:port[,host:port...]/service[/db]

With TLS rediss+sentinel://, and as in redis-py's URLs ?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE. Sentinels are asked
in the clear even so, unless &sentinel_tls=on says that they speak TLS, too.

A failover may lose what the old primary had acknowledged last: those who hold the requests submit them again.
"""

import weakref
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection

from scheduler.errors import StartError
from scheduler.tls import SharedSentinelSSLConnection, SharedSSLConnection

SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
DEFAULT_PORT = 26379
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Parameters of a URL: the authorities to believe, and the certificate to show."""
ASK_TIMEOUT_S = 0.08
"""For each Sentinel asked: two that hang must leave time for the third within one command's 0.25 s."""


class SentinelUrl(NamedTuple):
    """A Sentinel URL taken apart; `credentials` are for the servers, not for the Sentinels.

    `tls_files`: of TLS_FILES, those that it names. `sentinel_tls`: the Sentinels speak TLS, too.
    """

    nodes: list[tuple[str, int]]
    service: str
    database: int
    credentials: dict[str, str]
    tls: bool
    tls_files: dict[str, str]
    sentinel_tls: bool


def parse(url: str) -> SentinelUrl:
    """Raises StartError, which names the part at fault."""
    # By hand: newer versions of urllib refuse a list of hosts in which one is an IPv6 address.
    scheme, _, rest = url.partition("://")
    netloc, _, tail = rest.partition("/")
    user, at, hosts = netloc.rpartition("@")
    tail, _, query = tail.partition("#")[0].partition("?")
    path = [part for part in tail.split("/") if part]
    options = _options(query, tls=scheme.startswith("rediss"))
    if not path or len(path) > 2:
        raise StartError("The Redis URL must end in the name of the service that Sentinel watches, as in .../primary.")
    if len(path) == 2 and not path[1].isdigit():
        raise StartError(f"The Redis URL must name its database by number, not {path[1]!r}.")
    return SentinelUrl(
        nodes=[_node(host) for host in hosts.split(",")],
        service=unquote(path[0]),
        database=int(path[1]) if len(path) == 2 else 0,
        credentials=_credentials(user) if at else {},
        tls=scheme.startswith("rediss"),
        tls_files={name: file for name, file in options.items() if name in TLS_FILES},
        sentinel_tls=options.get("sentinel_tls") == "on",
    )


def _options(query: str, *, tls: bool) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = (*TLS_FILES, "sentinel_tls") if tls else ()
    for name, value in options.items():
        if name not in known:
            raise StartError(f"The Redis URL has a parameter {name!r} that nothing reads.")
        if name == "sentinel_tls" and value not in ("on", "off"):
            raise StartError(f"The Redis URL must say on or off with sentinel_tls, not {value!r}.")
    return options


def _node(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdigit():
        raise StartError(f"The Redis URL names {text!r} as a Sentinel, which is not host:port.")
    return host.strip("[]"), int(port)


def _credentials(text: str) -> dict[str, str]:
    user, _, password = text.partition(":")
    named = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in named.items() if value}


class PrimaryPool(BlockingConnectionPool):
    """Connections to the primary; who that is is asked of Sentinel for each new connection.

    redis-py's own Sentinel pool raises at once when all connections are in use, where this one waits.
    """

    # What SentinelManagedConnection looks for in its pool.
    is_master = True
    check_connection = False

    def __init__(self, where: SentinelUrl, **options: Any) -> None:
        connection = SharedSentinelSSLConnection if where.tls else SentinelManagedConnection
        super().__init__(connection_class=connection, db=where.database, **options)
        self.connection_kwargs |= where.credentials | where.tls_files
        self.connection_kwargs["connection_pool"] = weakref.proxy(self)
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
        self._primary: tuple[str, int] | None = None

    async def get_master_address(self) -> tuple[str, int]:
        """Called by each new connection. Raises MasterNotFoundError, a ConnectionError, where no Sentinel knows one."""
        found: tuple[str, int] = await self._sentinel.discover_master(self._service)
        if found != self._primary:
            self._primary = found
            await self.disconnect(inuse_connections=False)  # Idle ones lead to the old primary.
        return found

    async def aclose(self) -> None:
        """Close the connections to the Sentinels, too."""
        await super().aclose()
        await self._sentinel.aclose()
