"""The header Idempotency-Key (draft-ietf-httpapi-idempotency-key-header), and the stored response that a repeated key gets.

A key may be quoted or bare; both forms name the same key. Keys belong to a customer. Only hashes are stored, because clients
put order numbers and personal data into them. A replayed response has the id of the stored request in its body and
`x-request-id`, so that support can find it. The replay itself was not accepted and has no audit row.
"""

import re
from typing import NamedTuple

from multidict import CIMultiDictProxy

from gateway.inference.hashing import canonical, hash_of
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.fault_log import log_fault
from scheduler.payload import Payload
from scheduler.protocol.replies import Results, StoredReply

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARACTERS = 255
_QUOTED = re.compile(r'"((?:[!#-\[\]-~]|\\["\\])*)"')
_BARE = re.compile(r"[!#-~][!-~]*")
_ANYWHERE = ""  # Keeps fingerprints equal to those of earlier versions, which hashed one more field.
IDEMPOTENT_REPLAYED = ("Idempotent-Replayed", "true")


class Idempotency(NamedTuple):
    """The key, unique over all customers, and the fingerprint of its body."""

    value: str
    fingerprint: str


def idempotency_key(headers: CIMultiDictProxy[str]) -> str | None:
    """The key that the client sent, or None. Raises RequestError that names the header."""
    values = headers.getall(IDEMPOTENCY_KEY, None)
    if values is None:
        return None
    if len(values) != 1:
        raise _invalid(f"Send at most one {IDEMPOTENCY_KEY} header.")
    if quoted := _QUOTED.fullmatch(values[0]):
        key = re.sub(r"\\(.)", r"\1", quoted[1])
    else:
        key = values[0] if _BARE.fullmatch(values[0]) else ""
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise _invalid(
            f"{IDEMPOTENCY_KEY} must be 1 to {MAX_KEY_CHARACTERS} visible ASCII characters, bare or in double quotes."
        )
    return key


def idempotency(customer_id: str, key: str, payload: Payload) -> Idempotency:
    """The stored key and the body's fingerprint. White space, member order and `stream` do not change the fingerprint."""
    parts = (payload.model, payload.input, payload.parameters, payload.task, _ANYWHERE)
    return Idempotency(f"{customer_id}:{hash_of(key.encode())}", hash_of(canonical(parts)))


def with_more(fingerprint: str, more: str) -> str:
    """The fingerprint of a body that differs by `more` than the model's payload."""
    return hash_of(f"{fingerprint} {more}".encode())


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message, IDEMPOTENCY_KEY)


async def stored_reply(results: Results, request_id: str, customer_id: str) -> StoredReply:
    """The stored reply. Raises RequestError `no_capacity` if it cannot be read now.

    The nonce is that of the first call, so only the customer can be compared; the stored key contains the customer too.
    """
    try:
        stored = await results.stored(request_id)
    except RedisUnavailable:
        stored = None
    if stored is not None and stored.reply.customer_id != customer_id:
        log_fault("a stored reply belongs to another customer", None, request_id=request_id)
        stored = None
    if stored is None:
        raise RequestError(ErrorCode.NO_CAPACITY)
    return stored
