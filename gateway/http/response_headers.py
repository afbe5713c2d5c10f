"""Every response header of the API: description, JSON schema and example, for the OpenAPI document and for CORS."""

from typing import Any, NamedTuple

from gateway.http.body.content_coding import ACCEPTED

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TIME: Schema = {"type": "string", "format": "date-time"}
GO_DURATION: Schema = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+(\.\d+)?(ms|s))$"}


class ResponseHeader(NamedTuple):
    """The description of one header."""

    description: str
    example: Any
    schema: Schema = TEXT


def only(*values: str) -> Schema:
    """The schema of a header with these values and no others."""
    return {"type": "string", "enum": list(values)}


RESPONSE_HEADERS = {
    "x-request-id": ResponseHeader(
        "The id of the request, which is also the id of its audit row.",
        "req_01a1fcc578457330952e380ef16929eb",
        {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
    ),
    "RateLimit-Policy": ResponseHeader(
        "Each limit in force (IETF draft 11): its name, quota `q`, and window `w` in seconds.",
        '"requests";q=200;w=1, "concurrency";q=20;qu="concurrent-requests"',
    ),
    "RateLimit": ResponseHeader(
        "What is left of each limit (IETF draft 11): `r` units, and `t` seconds until it is full again.",
        '"requests";r=199;t=1, "concurrency";r=19',
    ),
    "x-ratelimit-limit-requests": ResponseHeader("The burst of requests, for OpenAI clients.", 200, COUNT),
    "x-ratelimit-remaining-requests": ResponseHeader("The requests left of the burst.", 199, COUNT),
    "x-ratelimit-reset-requests": ResponseHeader("Time until the burst is full, as a Go duration.", "5ms", GO_DURATION),
    "x-ratelimit-limit-tokens": ResponseHeader("The limit of tokens per minute.", 100_000, COUNT),
    "x-ratelimit-remaining-tokens": ResponseHeader("The tokens left of that limit.", 99_936, COUNT),
    "x-ratelimit-reset-tokens": ResponseHeader(
        "Time until all tokens are available, as a Go duration.", "38ms", GO_DURATION
    ),
    "request-id": ResponseHeader(
        "The same as `x-request-id`, for Anthropic's clients.",
        "req_01a1fcc578457330952e380ef16929eb",
        {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
    ),
    "anthropic-ratelimit-requests-limit": ResponseHeader("The burst of requests, for Anthropic's clients.", 200, COUNT),
    "anthropic-ratelimit-requests-remaining": ResponseHeader("The requests left of the burst.", 199, COUNT),
    "anthropic-ratelimit-requests-reset": ResponseHeader(
        "The time when the burst is full.", "2026-01-01T00:00:01Z", TIME
    ),
    "anthropic-ratelimit-tokens-limit": ResponseHeader("The limit of tokens per minute.", 100_000, COUNT),
    "anthropic-ratelimit-tokens-remaining": ResponseHeader("The tokens left of that limit.", 99_936, COUNT),
    "anthropic-ratelimit-tokens-reset": ResponseHeader(
        "The time when all tokens are available.", "2026-01-01T00:00:01Z", TIME
    ),
    "Accept-Encoding": ResponseHeader(
        "What the body of a request may be encoded with.", ACCEPTED, only(ACCEPTED, "identity")
    ),
    "Retry-After": ResponseHeader(
        "Seconds to wait before a retry, from the measured drain rate, with jitter; before a pending job is read again.",
        2,
        COUNT,
    ),
    "retry-after-ms": ResponseHeader("The same in milliseconds.", 1125, COUNT),
    "x-should-retry": ResponseHeader(
        "`false` where waiting does not help, `true` where a client must retry whatever the status.",
        "false",
        only("true", "false"),
    ),
    "Server-Timing": ResponseHeader(
        "Milliseconds in the tier queue, in a batch outside the GPU, and on the GPU.",
        "queue;dur=1.0, batch;dur=5.7, gpu;dur=162.5",
    ),
    "Idempotent-Replayed": ResponseHeader(
        "This is the stored response of the first request with this Idempotency-Key.", "true", only("true")
    ),
    "Cache-Status": ResponseHeader(
        "The result was cached (RFC 9211), or comes from the run of an equal request.",
        "tierlane; hit",
        only("tierlane; hit", "tierlane; fwd=miss; collapsed"),
    ),
    "Inference-Header-Content-Length": ResponseHeader(
        "The number of bytes of JSON in a body with binary tensor data.", 133, COUNT
    ),
    "WWW-Authenticate": ResponseHeader("The authentication scheme.", "Bearer", only("Bearer")),
    "Location": ResponseHeader("The URL of the job's result.", "/v1/result/req_01a1fcc578457330952e380ef16929eb"),
    "Preference-Applied": ResponseHeader("The preference that was applied.", "respond-async", only("respond-async")),
    "Allow": ResponseHeader("The methods of this path.", "GET, HEAD"),
    "Cache-Control": ResponseHeader("Whether the response may be cached.", "no-store"),
    "Set-Cookie": ResponseHeader(
        "The session of a browser, in the dashboard or in the admin API.",
        "tierlane_session=...; Path=/internal/dashboard; Max-Age=43200; HttpOnly; SameSite=Strict",
    ),
    "ETag": ResponseHeader(
        "The version of the page, for If-None-Match, or of the row, for If-Match.", '"9a0364b9e99bb480"'
    ),
    "Content-Security-Policy": ResponseHeader(
        "The page loads nothing and cannot be framed.", "default-src 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": ResponseHeader("Browsers must not guess the content type.", "nosniff", only("nosniff")),
    "Referrer-Policy": ResponseHeader("Links send no referrer.", "no-referrer", only("no-referrer")),
}
