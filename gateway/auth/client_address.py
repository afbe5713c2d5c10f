"""The address of a client behind load balancers: from X-Forwarded-For, as far as trusted proxies wrote it."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

X_FORWARDED_FOR = "X-Forwarded-For"

Network = IPv4Network | IPv6Network


def networks_of(text: str) -> tuple[Network, ...]:
    """Parse a comma-separated list of networks or addresses. Raises ValueError, whose text says what is accepted."""
    try:
        return tuple(ip_network(each.strip()) for each in text.split(",") if each.strip())
    except ValueError as error:
        raise ValueError(f"must be networks such as 10.0.0.0/8, separated by commas: {error}") from None


def client_address(peer: str | None, forwarded: Sequence[str], trusted: Sequence[Network]) -> str | None:
    """Return the rightmost address that is not a trusted proxy. Each proxy appends the address of its peer.

    Addresses before that one are text of the client. `peer`: the address of the connection; `forwarded`: the values of the
    header in their order.
    """
    hops = [hop.strip() for value in forwarded for hop in value.split(",")]
    address, ip = peer, ip_of(peer)
    while hops and ip is not None and any(ip in network for network in trusted):
        hop = hops.pop()
        if hop.startswith("["):  # Some proxies append the port, and then IPv6 addresses are in brackets.
            hop = hop[1:].partition("]")[0]
        elif hop.count(":") == 1:
            hop = hop.partition(":")[0]
        ip = ip_of(hop)
        if ip is not None:
            address = hop
    return address


def is_https(peer: str | None, forwarded: Sequence[str], trusted: Sequence[Network]) -> bool:
    """Whether a trusted proxy at `peer` got the request over TLS. `forwarded`: the values of X-Forwarded-Proto."""
    ip = ip_of(peer)
    if ip is None or not any(ip in network for network in trusted):
        return False
    return ",".join(forwarded).rpartition(",")[2].strip().lower() == "https"


def ip_of(address: str | None) -> IPv4Address | IPv6Address | None:
    """The address, an IPv4 address also if it is written as an IPv6 address; None for other text."""
    try:
        ip = ip_address(address or "")
    except ValueError:
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip
