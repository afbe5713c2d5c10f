"""The bytes of requests, and the fields of their responses."""

import json
from typing import NamedTuple

import msgspec

from tierlane_tools.bench.http_client import BenchResponse, header
from tierlane_tools.chaos.history import LoadCustomer

NONCE_CHARACTERS = 16
UNKNOWN_OWNER = "?"
PATH = "/v1/inference"
OK_STATUS = 200


class AnswerError(msgspec.Struct):
    code: str = ""
    request_id: str = ""


class _Body(msgspec.Struct):
    """The fields of a result or an error."""

    request_id: str = ""
    output: str | None = None
    error: AnswerError | None = None


class AnswerReading(NamedTuple):
    """The fields of one response. `owner`: the nonce of the request whose whole input is in the output, reversed."""

    status: int
    code: str
    id: str
    owner: str
    replayed: bool
    begun: bool = False


_decoder = msgspec.json.Decoder(_Body)


def request_bytes(host: str, customer: LoadCustomer, text: str, trace: str, key: str) -> bytes:
    """A request, head and body; `trace` has 32 hex digits, `key` is an Idempotency-Key or ""."""
    return post_bytes((PATH, json.dumps({"input": text}).encode()), host, customer, trace, key)


def post_bytes(post: tuple[str, bytes], host: str, customer: LoadCustomer, trace: str, key: str) -> bytes:
    """A POST of this path and body; the rest as for `request_bytes`."""
    path, body = post
    idempotency = f"Idempotency-Key: {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {customer.key}\r\n"
        f"Content-Type: application/json\r\ntraceparent: 00-{trace}-{trace[:16]}-01\r\n{idempotency}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


def read_answer(response: BenchResponse, text: str) -> AnswerReading:
    """Parse a response to the request with the input `text`."""
    try:
        body = _decoder.decode(response.body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        body = _Body()
    error = body.error or AnswerError()
    in_header = (header(response.head, b"x-request-id") or b"").decode("latin-1")
    return AnswerReading(
        status=response.status,
        code=error.code,
        id=body.request_id or error.request_id or in_header,
        owner=_owner(body.output, text) if response.status == OK_STATUS else "",
        replayed=header(response.head, b"idempotent-replayed") == b"true",
    )


def _owner(output: str | None, text: str) -> str:
    """The owner of an output; unknown where the nonce is right but the text is not, because inputs were mixed."""
    if output is None:
        return UNKNOWN_OWNER
    if output == text[::-1]:
        return text[:NONCE_CHARACTERS]
    nonce, colon, _ = output[::-1].partition(":")
    foreign = len(nonce) == NONCE_CHARACTERS and bool(colon) and not text.startswith(nonce)
    return nonce if foreign else UNKNOWN_OWNER
