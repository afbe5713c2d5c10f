"""Where a callback may connect to: its name is looked up once, judged, and only what was judged is connected to.

Without that, an allowed name that leads to a private address would open what is behind this gateway, and one that changes
between the look and the connection would do so however often it is looked at.
"""

import asyncio
import ipaddress
import socket

from aiohttp.abc import AbstractResolver, ResolveResult

NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What the standard library takes for public, some of it only in the oldest version that we run with.
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # Protocols' own; one cloud keeps its instances' credentials at 192.0.0.192.
            "168.63.129.16/32",  # Another cloud's host, which only its own machines can reach.
            "192.88.99.0/24",  # Relays of 6to4, given up by RFC 7526.
            "fec0::/10",  # Site-local, given up by RFC 3879 and still in use.
            "3fff::/20",  # Documentation, RFC 9637.
        ),
    )
)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(text: str) -> bool:
    """Whether an address is one of the internet's: not private, loopback, link-local, multicast or reserved."""
    try:
        address = _inner(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return False
    if address.is_multicast or address.is_reserved or address.is_unspecified or not address.is_global:
        return False
    return not any(address in network for network in NOT_PUBLIC)


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        teredo = address.teredo
        if teredo is not None:
            return teredo[1]
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


class JudgedResolver(AbstractResolver):
    """Gives a connection only addresses that it may use. `private`: all of them."""

    def __init__(self, *, private: bool) -> None:
        self._private = private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError where the name leads nowhere, or nowhere it may."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        results = [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=kind, proto=proto, flags=socket.AI_NUMERICHOST
            )
            for kind, _, proto, _, address in found
            if self._private or is_public(str(address[0]))
        ]
        if not results:
            raise OSError("The name has no public address.")
        return results

    async def close(self) -> None:
        """Nothing is held."""
