"""API keys, `tl_<id>_<secret><checksum>`: created, parsed, verified.

The id (12 of [a-z0-9]) is public. The secret is 28 of base62, 166 random bits, so a fast hash is sufficient; only its
SHA-256 is stored. The checksum is the CRC-32 of everything before it, as six digits of base62: mistyped keys are rejected
without a lookup, and secret scanners can detect keys. migrations/versions/0004 issues keys of the same form.
"""

import re
import secrets
from hashlib import sha256
from hmac import compare_digest
from itertools import product
from typing import NamedTuple
from zlib import crc32

from ledger.catalog.snapshot import Identity, Snapshot
from scheduler.errors import ErrorCode, RequestError

BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 12
SECRET_LENGTH = 28
CHECKSUM_LENGTH = 6
MAX_PARSED = 10_000

_FORM = re.compile(
    rf"(tl_([a-z0-9]{{{ID_LENGTH}}})_([0-9A-Za-z]{{{SECRET_LENGTH}}}))([0-9A-Za-z]{{{CHECKSUM_LENGTH}}})", re.ASCII
)
_PAIRS = tuple(
    first + second for first, second in product(BASE62, repeat=2)
)  # Two digits at a time: half the divisions.
_UNKNOWN_HASH = sha256(secrets.token_bytes(32)).digest()


class KeyParts(NamedTuple):
    """The public id of a key and the SHA-256 of its secret."""

    id: str
    secret_hash: bytes


class NewKey(NamedTuple):
    """A new key. `text` is shown to its owner once; `id` and `secret_hash` are stored."""

    text: str
    id: str
    secret_hash: bytes


_parsed: dict[bytes, KeyParts] = {}


def checksum(body: str) -> str:
    """CRC-32 of `tl_<id>_<secret>` as six digits of base62."""
    rest, low = divmod(crc32(body.encode("ascii")), 3844)
    high, middle = divmod(rest, 3844)
    return _PAIRS[high] + _PAIRS[middle] + _PAIRS[low]


def new_secret() -> str:
    """166 bits from the operating system's random source, in base62."""
    return "".join(secrets.choice(BASE62) for _ in range(SECRET_LENGTH))


def mint() -> NewKey:
    """Create a key from the operating system's random source."""
    key_id = "".join(secrets.choice(BASE36) for _ in range(ID_LENGTH))
    secret = new_secret()
    body = f"tl_{key_id}_{secret}"
    return NewKey(body + checksum(body), key_id, sha256(secret.encode()).digest())


def parse(presented: str) -> KeyParts | None:
    """Parse a key; None if its form or its checksum is invalid. Parsed keys are cached by their hash, not by their text."""
    name = sha256(presented.encode("utf-8", "surrogatepass")).digest()
    parts = _parsed.get(name)
    if parts is None and (form := _FORM.fullmatch(presented)) is not None:
        body, key_id, secret, check = form.groups()
        if checksum(body) != check:
            return None
        if len(_parsed) >= MAX_PARSED:
            _parsed.clear()
        parts = _parsed[name] = KeyParts(key_id, sha256(secret.encode()).digest())
    return parts


class KnownCallerError(RequestError):
    """A request of a known customer is rejected: it is suspended, or its key is revoked or expired."""

    def __init__(self, code: ErrorCode, identity: Identity) -> None:
        super().__init__(code)
        self.identity = identity


def verify(presented: str | KeyParts, snapshot: Snapshot, now: float, *, fresh: bool = True) -> Identity:
    """The identity that belongs to a key, which may be parsed already. `now` is seconds since the epoch.

    Raises RequestError: INVALID_API_KEY for a key that is malformed, unknown, wrong, revoked or expired; ACCOUNT_SUSPENDED;
    and, unless `fresh`, CATALOG_UNAVAILABLE for an unknown key, which may be newer than the snapshot. It is a
    KnownCallerError if the secret is right.
    """
    parts = parse(presented) if isinstance(presented, str) else presented
    if parts is None:
        raise RequestError(ErrorCode.INVALID_API_KEY)
    key = snapshot.keys.get(parts.id)
    # Compared for an unknown key too, so that the response time does not show which ids exist.
    same = compare_digest(parts.secret_hash, _UNKNOWN_HASH if key is None else key.secret_hash)
    if key is None:
        raise RequestError(ErrorCode.INVALID_API_KEY if fresh else ErrorCode.CATALOG_UNAVAILABLE)
    if not same:
        raise RequestError(ErrorCode.INVALID_API_KEY)
    if key.revoked or now >= key.expires_at:
        raise KnownCallerError(ErrorCode.INVALID_API_KEY, key.identity)
    if key.suspended:
        raise KnownCallerError(ErrorCode.ACCOUNT_SUSPENDED, key.identity)
    return key.identity
