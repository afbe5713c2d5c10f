"""Where a callback may connect to: every address is judged as it is connected to.

Without that, an allowed name that leads to a private address would open what is behind this gateway, and one that changes
between the look and the connection would do so however often it is looked at.
"""

import ipaddress
import socket
from collections.abc import Callable

from aiohappyeyeballs import AddrInfoType

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
SocketFactory = Callable[[AddrInfoType], socket.socket]


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


def judged_sockets(*, private: bool) -> SocketFactory:
    """Makes the sockets of a connector, each for an address that may be connected to. `private`: for all of them.

    It is the last that is asked before connecting, and is asked of the address itself: whether the URL had a name, an
    address, or a number that some resolver takes for one makes no difference. What it makes raises OSError.
    """

    def make(address: AddrInfoType) -> socket.socket:
        family, kind, proto, _, place = address
        if not private and not is_public(str(place[0])):
            raise OSError(f"{place[0]} is not a public address.")
        return socket.socket(family, kind, proto)

    return make
