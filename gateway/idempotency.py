"""The client's Idempotency-Key: what it may be, and what it is called in Redis.

The header of the IETF draft (draft-ietf-httpapi-idempotency-key-header) is a structured-field string, `"8e03978e"` with
quotes; most clients send it bare, and both name the same key. Keys are the customer's own: nobody can meet, or find out
about, another customer's. Only hashes are stored, since clients put order numbers and worse into them.
"""

import re
from hashlib import sha256
from typing import NamedTuple

import msgspec
from multidict import CIMultiDictProxy

from scheduler.errors import ErrorCode, RequestError
from scheduler.payload import Payload

HEADER = "Idempotency-Key"
MAX_CHARACTERS = 255
_HASH_CHARACTERS = 32  # 128 bits.
_QUOTED = re.compile(r'"((?:[!#-\[\]-~]|\\["\\])*)"')
_BARE = re.compile(r"[!#-~][!-~]*")
_ANYWHERE = ""  # Fingerprints are kept for a day, and those before had a field of where the answer is wanted.
_canonical = msgspec.msgpack.Encoder(order="deterministic").encode


class Idempotency(NamedTuple):
    """What admission is told: the key's name over all customers, and what its body is known by. Empty: none was sent."""

    value: str = ""
    fingerprint: str = ""


NONE = Idempotency()


def idempotency_key(headers: CIMultiDictProxy[str]) -> str | None:
    """The key that the client sent, or None. Raises RequestError that names the header."""
    values = headers.getall(HEADER, None)
    if values is None:
        return None
    if len(values) != 1:
        raise _invalid(f"Send at most one {HEADER} header.")
    key = _parsed(values[0])
    if not 1 <= len(key) <= MAX_CHARACTERS:
        raise _invalid(f"{HEADER} must be 1 to {MAX_CHARACTERS} visible ASCII characters, bare or in double quotes.")
    return key


def idempotency(customer_id: str, key: str, payload: Payload) -> Idempotency:
    """What `key` is called for this customer and this body. White space and the order of members do not matter, nor
    whether the answer is wanted as a stream: it is the same answer.
    """
    asked = (payload.model, payload.input, payload.parameters, payload.task, _ANYWHERE)
    return Idempotency(f"{customer_id}:{_hash(key.encode())}", _hash(_canonical(asked)))


def with_more(fingerprint: str, more: str) -> str:
    """What a body is known by where `more` than the model's payload makes it another one."""
    return _hash(f"{fingerprint} {more}".encode())


def _parsed(value: str) -> str:
    """The characters of a key; "" where it is none."""
    if quoted := _QUOTED.fullmatch(value):
        return re.sub(r"\\(.)", r"\1", quoted[1])
    return value if _BARE.fullmatch(value) else ""


def _hash(data: bytes) -> str:
    return sha256(data).hexdigest()[:_HASH_CHARACTERS]


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message, HEADER)
