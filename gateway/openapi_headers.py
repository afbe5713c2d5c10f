"""Every header that an answer may carry beside those of HTTP itself, as the API's description declares it.

A new one is a line here; an answer that names a header which is not here cannot be described, and a test says so.
"""

from typing import Any

from gateway.openapi_door import Schema

SOMETIMES = "-if-known"
"""The end of a component's name where the header is not always there: a reference cannot say so by itself."""

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_GO_DURATION: Schema = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+(\.\d+)?(ms|s))$"}

_HEADERS: dict[str, tuple[str, Schema, Any]] = {
    "x-request-id": (
        "The request's id: what support asks for, and what the audit row is called.",
        {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
        "req_01a1fcc578457330952e380ef16929eb",
    ),
    "RateLimit-Policy": (
        "Each limit in force now (IETF draft 11): its name, its quota `q`, its window `w` in seconds.",
        _TEXT,
        '"requests";q=200;w=1, "concurrency";q=20;qu="concurrent-requests"',
    ),
    "RateLimit": (
        "What is left of each limit (IETF draft 11): `r` units, and `t` seconds until it is full again.",
        _TEXT,
        '"requests";r=199;t=1, "concurrency";r=19',
    ),
    "x-ratelimit-limit-requests": ("The burst of requests, as OpenAI's clients read it.", _COUNT, 200),
    "x-ratelimit-remaining-requests": ("How many of them are left.", _COUNT, 199),
    "x-ratelimit-reset-requests": ("Until all are back: a duration as Go writes it.", _GO_DURATION, "5ms"),
    "x-ratelimit-limit-tokens": ("Tokens a minute, where they have a limit.", _COUNT, 100_000),
    "x-ratelimit-remaining-tokens": ("How many of them are left.", _COUNT, 99_936),
    "x-ratelimit-reset-tokens": ("Until all are back: a duration as Go writes it.", _GO_DURATION, "38ms"),
    "Retry-After": ("When to try again, in seconds, by the measured drain rate, with jitter.", _COUNT, 2),
    "retry-after-ms": ("The same in milliseconds.", _COUNT, 1125),
    "x-should-retry": (
        "Sent where a client's own rule for the status would be wrong.",
        {"type": "string", "enum": ["true", "false"]},
        "false",
    ),
    "Server-Timing": (
        "Where the time went, in milliseconds: waiting in the tier's queue, on the way in a batch, on the GPU.",
        _TEXT,
        "queue;dur=1.0, batch;dur=5.7, gpu;dur=162.5",
    ),
    "Idempotent-Replayed": (
        "The answer is the stored one of the first request with this Idempotency-Key.",
        {"type": "string", "enum": ["true"]},
        "true",
    ),
    "Cache-Status": (
        "The answer was there already (RFC 9211), or is that of an equal request's run.",
        {"type": "string", "enum": ["tierlane; hit", "tierlane; fwd=miss; collapsed"]},
        "tierlane; hit",
    ),
    "WWW-Authenticate": ("How to authenticate.", {"type": "string", "enum": ["Bearer"]}, "Bearer"),
    "Location": ("Where the result of the job will be.", _TEXT, "/v1/result/req_01a1fcc578457330952e380ef16929eb"),
    "Preference-Applied": (
        "The preference that was heard.",
        {"type": "string", "enum": ["respond-async"]},
        "respond-async",
    ),
    "Allow": ("The methods that this address takes.", _TEXT, "GET, HEAD"),
    "Cache-Control": ("Whether the answer may be kept.", _TEXT, "no-store"),
    "Set-Cookie": (
        "The session of the page for on-call, for browsers.",
        _TEXT,
        "tierlane_session=...; Path=/internal/dashboard; Max-Age=43200; HttpOnly; SameSite=Strict",
    ),
    "ETag": (
        "Names this version of the page; sent back in If-None-Match it saves the body.",
        _TEXT,
        '"9a0364b9e99bb480"',
    ),
    "Content-Security-Policy": (
        "The page may load nothing from anywhere, and be framed by nobody.",
        _TEXT,
        "default-src 'none'; frame-ancestors 'none'",
    ),
    "X-Content-Type-Options": ("The content type is what it says.", {"type": "string", "enum": ["nosniff"]}, "nosniff"),
    "Referrer-Policy": (
        "Whoever is linked to is not told from where.",
        {"type": "string", "enum": ["no-referrer"]},
        "no-referrer",
    ),
}


HEADER_NAMES = tuple(_HEADERS)


def header_component(name: str) -> Schema:
    """The header object of a component's name. Raises KeyError for a header that is not in the table."""
    sentence, schema, example = _HEADERS[name.removesuffix(SOMETIMES)]
    required = not name.endswith(SOMETIMES)
    return {"description": sentence, "required": required, "schema": schema, "example": example}
