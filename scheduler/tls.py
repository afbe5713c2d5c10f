"""TLS connections to Redis that share one SSL context in a process.

A context costs about 20 ms of CPU, since it reads the authorities of the system, and redis-py makes one for each
connection: while Redis is away, every attempt to connect would cost as much. The files that a URL names are read again
when they change, so that a renewed certificate is used by the next connection.
"""

import os
from contextlib import suppress
from typing import Any

from redis.asyncio.connection import RedisSSLContext, SSLConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection

_NOT_OPTIONS = {"context"}
_FILES = ("keyfile", "certfile", "ca_certs", "ca_path")
_made: dict[str, tuple[tuple[Any, ...], RedisSSLContext]] = {}


def shared(wanted: RedisSSLContext) -> RedisSSLContext:
    """The context of this process that has the options of `wanted`. Raises OSError where a file is not there.

    There are as many of them as there are different Redis URLs.
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
    """Make the context now, where this connection has one: the time of a first call may be too short for it.

    A fault of its files is reported by each connection.
    """
    if isinstance(connection, SSLConnection):
        with suppress(OSError):
            shared(connection.ssl_context).get()


class SharedSSLConnection(SSLConnection):
    """One to a server that is named by its address."""

    def _connection_arguments(self) -> Any:
        self.ssl_context = shared(self.ssl_context)
        return super()._connection_arguments()


class SharedSentinelSSLConnection(SentinelManagedSSLConnection):
    """One to the primary that Sentinel names."""

    def _connection_arguments(self) -> Any:
        self.ssl_context = shared(self.ssl_context)
        return super()._connection_arguments()
