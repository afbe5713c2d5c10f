"""From a decoded request to what admission is asked: the limits in force, the estimate of tokens, deadline and trace."""

import math
import os

from multidict import CIMultiDictProxy

from gateway.catalog import IdentityView
from gateway.idempotency import NONE, idempotency
from ratelimit.effective import Effective
from scheduler.increments import Address
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import Submission

BYTES_PER_TOKEN = 4
NONCE_BYTES = 8
DEFAULT_OUTPUT_TOKENS = 16
MOST_OUTPUT_TOKENS = 2**31  # Larger wishes would only lose digits in a bucket that is kept as a float.
_OUTPUT_FIELDS = ("max_tokens", "max_new_tokens")


class Nonces:
    """Random texts of 16 hexadecimal digits, many from one call to the system: a call for each costs as much as decoding
    the request.
    """

    def __init__(self, a_call: int = 512) -> None:
        self._a_call = a_call
        self._drawn: list[str] = []

    def draw(self) -> str:
        """One that was not drawn before."""
        if not self._drawn:
            digits = os.urandom(NONCE_BYTES * self._a_call).hex()
            self._drawn = [digits[i : i + 2 * NONCE_BYTES] for i in range(0, len(digits), 2 * NONCE_BYTES)]
        return self._drawn.pop()


_nonces = Nonces()


def build_submission(
    request_id: str,
    identity: IdentityView,
    payload: Payload,
    limits: Effective,
    *,
    total_ms: int,
    key: str | None = None,
    trace: str = "",
    stream_to: str = "",
) -> Submission:
    """What admission is asked for one request.

    `key` is its Idempotency-Key, where it has one; `stream_to` the gateway that wants its output piece by piece, or "".
    """
    value, fingerprint = NONE if key is None else idempotency(identity.customer_id, key, payload)
    text = payload.input
    input_bytes = len(text) if text.isascii() else len(text.encode())
    nonce = _nonces.draw()
    address = Address(stream_to, nonce).written() if stream_to else ""
    return Submission(
        id=request_id,
        tier=identity.tier,
        customer_id=identity.customer_id,
        api_key_id=identity.key_id,
        nonce=nonce,
        model=payload.model,
        input_bytes=input_bytes,
        total_ms=total_ms,
        queue_ms=identity.max_queue_ms,
        rate=limits.rate,
        burst=limits.burst,
        trace_id=trace,
        idempotency=value,
        fingerprint=fingerprint,
        tokens=_charged(token_estimate(payload, input_bytes), limits.tokens_per_minute),
        max_concurrency=limits.max_concurrency,
        tokens_per_minute=limits.tokens_per_minute,
        quotas=limits.quotas,
        key_rate=limits.key_rate,
        key_burst=limits.key_burst,
        body=encode_payload(payload.on_its_way(address, identity.priority)),
    )


def token_estimate(payload: Payload, input_bytes: int) -> int:
    """Tokens that the request is charged until it is known what it used: a quarter of its bytes, and all it may write."""
    return math.ceil(input_bytes / BYTES_PER_TOKEN) + _output_tokens(payload)


def _charged(estimate: int, tokens_per_minute: float) -> int:
    """At most a whole minute: one that asks for all there is and is then cancelled would shut its customer out for days."""
    return min(estimate, max(1, int(tokens_per_minute))) if tokens_per_minute else estimate


def _output_tokens(payload: Payload) -> int:
    for name in _OUTPUT_FIELDS:
        wanted = payload.parameters.get(name)
        # 500.0 is a whole number to JSON, and servers read "500" as one; True is an int to Python.
        if type(wanted) is str and wanted.isascii() and wanted.isdigit():
            wanted = float(wanted)
        if type(wanted) is int or type(wanted) is float:
            return math.ceil(min(max(0, wanted), MOST_OUTPUT_TOKENS))
    return DEFAULT_OUTPUT_TOKENS


def is_retry(headers: CIMultiDictProxy[str]) -> bool:
    """Whether OpenAI's client says that it sent this before: `x-stainless-retry-count` over 0."""
    count = headers.get("x-stainless-retry-count")
    return count is not None and count.isascii() and count.isdigit() and count.strip("0") != ""
