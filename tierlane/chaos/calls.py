"""One try as bytes, and what its answer says: the wire of the chaos load."""

import json
from typing import NamedTuple

import msgspec

from tierlane.bench.http_client import Response, header
from tierlane.chaos.plan import Customer

NONCE_CHARACTERS = 16
NOBODY = "?"
PATH = "/v1/inference"


class _Error(msgspec.Struct):
    code: str = ""
    request_id: str = ""


class _Body(msgspec.Struct):
    """What is read of a body, whichever of the two kinds it is."""

    request_id: str = ""
    output: str | None = None
    error: _Error | None = None


class Reading(NamedTuple):
    """What one answer says. `owner` is the nonce of the request whose whole input comes back reversed."""

    status: int
    code: str
    id: str
    owner: str
    replayed: bool


_decoder = msgspec.json.Decoder(_Body)


def request_bytes(host: str, customer: Customer, text: str, trace: str, key: str) -> bytes:
    """The whole request, head and body; `trace` is 32 hex digits, `key` an Idempotency-Key or ""."""
    body = json.dumps({"input": text}).encode()
    idempotency = f"Idempotency-Key: {key}\r\n" if key else ""
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {customer.key}\r\n"
        f"Content-Type: application/json\r\ntraceparent: 00-{trace}-{trace[:16]}-01\r\n{idempotency}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


def read_answer(response: Response, text: str) -> Reading:
    """Read an answer to the request whose input was `text`."""
    try:
        body = _decoder.decode(response.body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        body = _Body()
    error = body.error or _Error()
    in_header = (header(response.head, b"x-request-id") or b"").decode("latin-1")
    return Reading(
        status=response.status,
        code=error.code,
        id=body.request_id or error.request_id or in_header,
        owner=_owner(body.output, text) if response.status == 200 else "",
        replayed=header(response.head, b"idempotent-replayed") == b"true",
    )


def _owner(output: str | None, text: str) -> str:
    """Whose output it is. The right nonce with another text around it is nobody's: two inputs were mixed."""
    if output is None:
        return NOBODY
    if output == text[::-1]:
        return text[:NONCE_CHARACTERS]
    nonce, colon, _ = output[::-1].partition(":")
    foreign = len(nonce) == NONCE_CHARACTERS and bool(colon) and not text.startswith(nonce)
    return nonce if foreign else NOBODY
