"""The address of a worker's direct endpoint, as announced to gateways."""

import asyncio
import ipaddress
import socket
from contextlib import suppress

from gpu_pool.config import WorkerConfig

LOOPBACK = "127.0.0.1"


def announced(config: WorkerConfig, port: int, local_host: str, named: str) -> str:
    """The address for gateways. `local_host`: from where Redis is reached; `named`: this host's name, "" if it does not
    resolve.

    A worker that listens on all addresses is best reached at the address from which it reaches Redis. A Redis on the
    same host says nothing about other hosts; the host name may.
    """
    host = config.direct_advertise or config.direct_host
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - only compared
        is_loopback = not local_host
        with suppress(ValueError):  # It may be a name.
            is_loopback = ipaddress.ip_address(local_host).is_loopback
        host = named or local_host or LOOPBACK if is_loopback else local_host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def own_name() -> str:
    """The name of this host; "" if it does not resolve."""
    name = socket.gethostname()
    try:
        await asyncio.get_running_loop().getaddrinfo(name, None)
    except OSError:
        return ""
    return name
