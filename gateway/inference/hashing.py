"""Hashes of requests, for coalescing keys and idempotency keys."""

from hashlib import sha256

import msgspec

HASH_CHARACTERS = 32  # 128 bits.
canonical = msgspec.msgpack.Encoder(order="deterministic").encode
"""The bytes of a value; the order of the members of an object does not change them."""


def hash_of(data: bytes) -> str:
    """The hash, as hexadecimal digits."""
    return sha256(data).hexdigest()[:HASH_CHARACTERS]
