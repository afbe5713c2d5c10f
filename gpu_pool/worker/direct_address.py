"""The address of a worker's direct endpoint, as announced to gateways."""

import asyncio
import ipaddress
import socket

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
        host = local_host if local_host and not _is_loopback(local_host) else named or local_host or LOOPBACK
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def own_name() -> str:
    """The name of this host; "" if it does not resolve."""
    name = socket.gethostname()
    try:
        await asyncio.get_running_loop().getaddrinfo(name, None)
    except OSError:
        return ""
    return name
