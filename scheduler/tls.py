"""TLS to Redis: one context for all connections with the same parameters.

redis-py makes a context for each connection, and reads all authorities of the system for it: 35 ms and more in which the
process does nothing else. While Redis was away and each try was a new connection, gateways were busy with that alone.
"""

import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from redis.asyncio.connection import RedisSSLContext, SSLConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection

_FILES = ("keyfile", "certfile", "ca_certs", "ca_path")
_OTHERS = ("cert_reqs", "check_hostname", "min_version", "ciphers", "password", "ca_data")

_kept: dict[tuple[Any, ...], tuple[tuple[Any, ...], ssl.SSLContext]] = {}


def _share(wanted: RedisSSLContext) -> None:
    """Give it the context of those before it, unless a file was renewed since. Raises OSError where one is not there."""
    names = [getattr(wanted, name) for name in _FILES]
    key = (*names, *(getattr(wanted, name) for name in _OTHERS))
    state = tuple((found.st_ino, found.st_mtime_ns) for found in map(os.stat, filter(None, names)))
    kept = _kept.get(key)
    if kept is not None and kept[0] == state:
        wanted.context = kept[1]
    else:
        _kept[key] = state, wanted.get()


def prepare(connection: object) -> None:
    """Make the context now, where this connection has one: a connection that makes it may not be there in time.

    What is wrong with the files is told by each connection.
    """
    if isinstance(connection, SSLConnection):
        with suppress(OSError):
            _share(connection.ssl_context)


class TlsConnection(SSLConnection):
    """A connection to the server that the URL names."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        _share(self.ssl_context)
        return super()._connection_arguments()


class PrimaryTlsConnection(SentinelManagedSSLConnection):
    """A connection to the primary that Sentinel names."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        _share(self.ssl_context)
        return super()._connection_arguments()
