"""Standard Webhooks (standardwebhooks.com): which headers prove to a receiver that a callback is ours. Pure.

Each customer has a secret of its own, made of the deployment's secret and the customer's id: so none can sign what another
one believes, and nothing secret is stored.
"""

import base64
import binascii
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"
LEAST_BYTES, MOST_BYTES = 24, 64


def secret_bytes(secret: str) -> bytes:
    """The key of `whsec_<base64>`. Raises ValueError, which does not repeat it."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not LEAST_BYTES <= len(key) <= MOST_BYTES:
        raise ValueError(f"must be {PREFIX} and {LEAST_BYTES} to {MOST_BYTES} bytes in base64")
    return key


def customer_key(deployment: bytes, customer_id: str) -> bytes:
    """The key that signs what one customer is told."""
    return hmac.digest(deployment, f"tierlane callbacks of customer {customer_id}".encode(), "sha256")


def secret_text(key: bytes) -> str:
    """A key as receivers are given it: `whsec_<base64>`."""
    return PREFIX + base64.b64encode(key).decode()


def signed(keys: Sequence[bytes], message_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """The three headers, with a signature by each key; `at_s` is seconds since the epoch."""
    content = f"{message_id}.{at_s}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, content, "sha256")).decode() for key in keys)
    signature = " ".join(f"v1,{each}" for each in signatures)
    return {"webhook-id": message_id, "webhook-timestamp": str(at_s), "webhook-signature": signature}
