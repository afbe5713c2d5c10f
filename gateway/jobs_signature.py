"""Standard Webhooks (standardwebhooks.com): which headers prove to a receiver that a callback is ours. Pure."""

import base64
import binascii
import hmac

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


def signed(key: bytes, message_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """The three headers; `at_s` is seconds since the epoch."""
    content = f"{message_id}.{at_s}.".encode() + body
    signature = base64.b64encode(hmac.digest(key, content, "sha256")).decode()
    return {"webhook-id": message_id, "webhook-timestamp": str(at_s), "webhook-signature": f"v1,{signature}"}
