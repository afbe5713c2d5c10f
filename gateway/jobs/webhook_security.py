"""What secures callbacks: signatures as in Standard Webhooks (standardwebhooks.com), and checks of addresses.

Each customer has secrets that are derived from the secret of the deployment, the customer's id, and their number. Therefore
a customer cannot sign callbacks of another, and no secret is stored. Only the standard library is used, since settings import
this.
"""

import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohappyeyeballs import AddrInfoType

PREFIX = "whsec_"
LEAST_BYTES, MOST_BYTES = 24, 64

NAT64 = ipaddress.ip_network("64:ff9b::/96")
NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # Protocol assignments. One cloud serves the credentials of its instances at 192.0.0.192.
        "168.63.129.16/32",  # A host of another cloud that only its own machines can reach.
        "192.88.99.0/24",  # 6to4 relays, deprecated by RFC 7526.
        "fec0::/10",  # Site-local, deprecated by RFC 3879 and still in use.
        "3fff::/20",  # Documentation, RFC 9637.
    )
]
"""Networks that the standard library considers public, some of them only in the oldest supported Python."""


def secret_bytes(secret: str) -> bytes:
    """The key of `whsec_<base64>`. Raises ValueError, without the secret in its message."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not LEAST_BYTES <= len(key) <= MOST_BYTES:
        raise ValueError(f"must be {PREFIX} and {LEAST_BYTES} to {MOST_BYTES} bytes in base64")
    if not any(key):  # HMAC fills up keys with zeros, so zeros are the same key as none.
        raise ValueError("must be random bytes: zeros are an empty key")
    return key


def customer_key(deployment: bytes, customer_id: str, number: int = 1) -> bytes:
    """A customer's key with this number, derived from the secret of the deployment.

    Raises ValueError without one: anybody could derive it.
    """
    if not deployment:
        raise ValueError("callbacks cannot be signed without TIERLANE_CALLBACK_SECRET")
    purpose = f"tierlane callbacks of customer {customer_id}" + (f", secret {number}" if number > 1 else "")
    return hmac.digest(deployment, purpose.encode(), "sha256")


def installation_key(deployment: bytes) -> bytes:
    """The key of webhooks to the installation itself. It is not the secret, with which the receiver could sign for all."""
    return customer_key(deployment, "installation")


def secret_text(key: bytes) -> str:
    """A key in the form that receivers use: `whsec_<base64>`."""
    return PREFIX + base64.b64encode(key).decode()


def signed(keys: Sequence[bytes], message_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """The three headers, with one signature for each key. `at_s` is seconds since the epoch."""
    content = f"{message_id}.{at_s}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, content, "sha256")).decode() for key in keys)
    signature = " ".join(f"v1,{each}" for each in signatures)
    return {"webhook-id": message_id, "webhook-timestamp": str(at_s), "webhook-signature": signature}


def is_public(text: str) -> bool:
    """Whether an address belongs to the internet: not private, loopback, link-local, multicast or reserved."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        # The IPv4 address that is embedded in it, if any.
        if address.teredo is not None:
            address = address.teredo[1]
        elif address in NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        else:
            address = address.ipv4_mapped or address.sixtofour or address
    if address.is_multicast or address.is_reserved or address.is_unspecified or not address.is_global:
        return False
    return not any(address in network for network in NOT_PUBLIC)


def checked_sockets(*, private: bool) -> "Callable[[AddrInfoType], socket.socket]":
    """A socket factory for a connector that raises OSError for addresses that are not public, unless `private`.

    The connector calls it directly before it connects, with the address itself. So it does not matter whether the URL has a
    name, an address, or a number that some resolver accepts.
    """

    def make(address: "AddrInfoType") -> socket.socket:
        family, kind, proto, _, place = address
        if not private and not is_public(str(place[0])):
            raise OSError(f"{place[0]} is not a public address.")
        return socket.socket(family, kind, proto)

    return make
