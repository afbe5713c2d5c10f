"""Error codes, their HTTP status, type and message, and the exceptions of Tierlane.

    TierlaneError
    |-- RequestError        a request cannot be served; has an ErrorCode
    |-- StartError          a role cannot start; the message says what to do
    +-- RedisUnavailable    Redis did not respond in time; the outcome of the call is unknown

The types are those that OpenAI's clients know. `python -m scheduler` writes the table of codes in docs/errors.md.
"""

from enum import StrEnum
from typing import NamedTuple

_INVALID, _TIMEOUT, _BUSY, _SERVER = (
    "invalid_request_error",
    "timeout_error",
    "service_unavailable_error",
    "server_error",
)


class ErrorCode(StrEnum):
    """Why a request was rejected or failed; stored in the audit and sent as `error.code`."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_API_KEY = "invalid_api_key"
    CATALOG_UNAVAILABLE = "catalog_unavailable"
    ACCOUNT_SUSPENDED = "account_suspended"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_TIMEOUT = "request_timeout"
    REQUEST_TOO_LARGE = "request_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    QUOTA_EXCEEDED = "quota_exceeded"
    BACKPRESSURE = "backpressure"
    REDUCED_CAPACITY = "reduced_capacity"
    SHED_FOR_PRIORITY = "shed_for_priority"
    QUEUE_FULL = "queue_full"
    NO_CAPACITY = "no_capacity"
    DRAINING = "draining"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    GPU_TIMEOUT = "gpu_timeout"
    MODEL_TOO_SLOW = "model_too_slow"
    POISON_REQUEST = "poison_request"
    INVALID_OUTPUT = "invalid_output"
    WORKER_LOST = "worker_lost"
    GATEWAY_LOST = "gateway_lost"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"
    INTERNAL_ERROR = "internal_error"
    IDEMPOTENCY_IN_PROGRESS = "idempotency_in_progress"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    CROSS_SITE = "cross_site"
    PERMISSION_DENIED = "permission_denied"
    CHANGED_MEANWHILE = "changed_meanwhile"
    CONFLICT = "conflict"
    PRECONDITION_FAILED = "precondition_failed"
    SIGN_IN_FAILED = "sign_in_failed"
    IDENTITY_PROVIDER_UNAVAILABLE = "identity_provider_unavailable"


REFUSED = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.REQUEST_TOO_LARGE})
"""Refusals by the model: the request is charged, but no tokens. As in refund.lua."""

CHARGED_FAILURES = REFUSED | {ErrorCode.POISON_REQUEST}
"""Failures of the input: its customer pays the GPU time. As in settlement.lua."""


class HttpError(NamedTuple):
    """The HTTP response of one code, its cause, and what to do.

    `retry`: False if waiting does not mend it, True if a client must retry although it would not by the status, else None.
    """

    status: int
    type: str
    message: str
    cause: str
    action: str
    retry: bool | None = None


HTTP: dict[ErrorCode, HttpError] = {
    ErrorCode.INVALID_REQUEST: HttpError(
        400,
        _INVALID,
        "The request is not valid.",
        "Malformed body, unknown field, wrong type, or a parameter that the model rejects.",
        "Correct the field in `param`; do not retry.",
        retry=False,
    ),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: HttpError(
        400,
        _INVALID,
        "The request exceeds the model's context length. Shorten the conversation, or lower max_tokens.",
        "The input and `max_tokens` together have more tokens than the model's context; the message has the numbers.",
        "Shorten the conversation, or lower `max_tokens`.",
        retry=False,
    ),
    ErrorCode.INVALID_API_KEY: HttpError(
        401,
        "authentication_error",
        "The API key is not valid: check that it was copied whole, has not expired, and was not revoked.",
        "No key or JWT, or it is malformed, unknown, revoked or expired.",
        "Send `Authorization: Bearer KEY` with a valid key.",
        retry=False,
    ),
    ErrorCode.CATALOG_UNAVAILABLE: HttpError(
        503,
        _BUSY,
        "This API key cannot be checked right now; try again soon.",
        "PostgreSQL, or the key set of a JWT, is not available.",
        "Retry; operator: check PostgreSQL or the JWKS URL.",
    ),
    ErrorCode.ACCOUNT_SUSPENDED: HttpError(
        403,
        "permission_error",
        "This account is suspended.",
        "An administrator suspended the customer.",
        "Ask the administrator.",
        retry=False,
    ),
    ErrorCode.NOT_FOUND: HttpError(
        404,
        _INVALID,
        "There is no resource at this path: /docs lists all paths.",
        "The path, request, result or worker does not exist.",
        "Check the path and the id; results expire.",
        retry=False,
    ),
    ErrorCode.METHOD_NOT_ALLOWED: HttpError(
        405,
        _INVALID,
        "This path does not accept this method: the response header Allow lists those that it accepts.",
        "The path accepts other methods.",
        "Use a method of the `Allow` header.",
        retry=False,
    ),
    ErrorCode.MODEL_NOT_FOUND: HttpError(
        404,
        _INVALID,
        "There is no such model.",
        "No enabled model has this name, the key may not use it, or there is no default model.",
        "Choose a name from `GET /v1/models`.",
        retry=False,
    ),
    ErrorCode.REQUEST_TIMEOUT: HttpError(
        408,
        _INVALID,
        "The request took too long to arrive.",
        "Headers or body arrived too slowly; the connection is closed.",
        "Send the request faster, or a smaller body.",
        retry=False,
    ),
    ErrorCode.REQUEST_TOO_LARGE: HttpError(
        413,
        _INVALID,
        "The request is too large.",
        "The body, an input or the list exceeds its maximum size.",
        "Send a smaller input or a shorter list; operator: raise `TIERLANE_MAX_BODY_BYTES`.",
        retry=False,
    ),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: HttpError(
        415,
        _INVALID,
        "The body must be JSON: send the header `Content-Type: application/json`.",
        "`Content-Type` is missing or another one; `curl -d` alone sends a form. Earlier versions returned "
        "`unsupported_encoding` here: a client that checks the code accepts both.",
        "Send JSON with `Content-Type: application/json`.",
        retry=False,
    ),
    ErrorCode.UNSUPPORTED_ENCODING: HttpError(
        415,
        _INVALID,
        "The content coding is not supported: send the body in gzip, deflate or zstd, or without Content-Encoding.",
        "The body has another coding than gzip, deflate or zstd, or several, or a transfer encoding other than chunked; a file "
        "is only accepted uncompressed.",
        "Send the body uncompressed, or in one of the codings that `Accept-Encoding` of the response names.",
        retry=False,
    ),
    ErrorCode.RATE_LIMIT_EXCEEDED: HttpError(
        429,
        "rate_limit_error",
        "A rate limit of this account is reached.",
        "A limit of the key or customer is reached, or the address failed to authenticate too often.",
        "Wait for `Retry-After`, send slower, or request a higher limit.",
    ),
    ErrorCode.TOO_MANY_CONNECTIONS: HttpError(
        429,
        "rate_limit_error",
        "This account has too many open connections: use open ones again, and close those that are not needed.",
        "The customer has its part of a gateway's connections open; this one is closed.",
        "Use open connections again; operator: raise `TIERLANE_CUSTOMER_CONNECTION_SHARE`.",
    ),
    ErrorCode.QUOTA_EXCEEDED: HttpError(
        429,
        "insufficient_quota",
        "The quota is used up.",
        "A quota is used up until its window ends, or has too little left for the request.",
        "Wait for the next window, or request a larger quota.",
        retry=False,
    ),
    ErrorCode.BACKPRESSURE: HttpError(
        429,
        "rate_limit_error",
        "The system is short of memory for new requests.",
        "Redis uses over 80 % of its memory.",
        "Wait for `Retry-After`; operator: raise `maxmemory`.",
    ),
    ErrorCode.REDUCED_CAPACITY: HttpError(
        503,
        _BUSY,
        "Limits are reduced because less capacity is available.",
        "The tier's share of the capacity is used up, or a limit rejects only because it is reduced.",
        "Wait for `Retry-After`; operator: add workers.",
    ),
    ErrorCode.SHED_FOR_PRIORITY: HttpError(
        503,
        _BUSY,
        "The request was rejected because too many are queued.",
        "More requests wait than the tier's shed rules allow.",
        "Wait for `Retry-After`; operator: add workers.",
    ),
    ErrorCode.QUEUE_FULL: HttpError(
        503,
        _BUSY,
        "The queue of this tier is full.",
        "The queue is full, the predicted wait too long, or too many requests wait for admission.",
        "Wait for `Retry-After`; operator: add workers.",
    ),
    ErrorCode.NO_CAPACITY: HttpError(
        503,
        _BUSY,
        "No capacity is available right now.",
        "No GPU is healthy, Redis is not available, or the gateway has too many connections or bodies in transit.",
        "Wait for `Retry-After`; operator: check `/internal/health`.",
    ),
    ErrorCode.DRAINING: HttpError(
        503,
        _BUSY,
        "This gateway is shutting down; try again.",
        "The gateway is shutting down.",
        "Retry; another gateway serves the request.",
    ),
    ErrorCode.QUEUE_TIMEOUT: HttpError(
        504,
        _TIMEOUT,
        "The request waited for a worker for longer than `max_queue_ms` allows: try again later.",
        "The request waited longer than `max_queue_ms`; where that is null, than the backend of its pool allows.",
        "Retry later; operator: add workers or raise `max_queue_ms`.",
        retry=False,
    ),
    ErrorCode.DEADLINE_EXCEEDED: HttpError(
        504,
        _TIMEOUT,
        "The deadline of the request has passed: its own, or that of TIERLANE_TOTAL_REQUEST_MS. Request a shorter output, or send a job.",
        "The total time is over, or too little is left for a run.",
        "Retry later or send a job; operator: compare `TIERLANE_TOTAL_REQUEST_MS` with the model's time.",
        retry=False,
    ),
    ErrorCode.GPU_TIMEOUT: HttpError(
        504,
        _TIMEOUT,
        "The model took too long.",
        "The batch ran too long or made no progress.",
        "Send a smaller input; operator: compare `TIERLANE_GPU_TIMEOUT_MS` with the model's time.",
        retry=False,
    ),
    ErrorCode.MODEL_TOO_SLOW: HttpError(
        503,
        _BUSY,
        "The model is too slow for the time limit of a request, so requests are rejected.",
        "A batch of one takes longer than `TIERLANE_GPU_TIMEOUT_MS`, and no other worker can serve.",
        "Operator: raise `TIERLANE_GPU_TIMEOUT_MS` or use a faster device.",
        retry=False,
    ),
    ErrorCode.POISON_REQUEST: HttpError(
        422,
        _INVALID,
        "The model cannot process this input.",
        "The model fails on this input alone.",
        "Change the input; operator: `tierlane dlq` has it.",
        retry=False,
    ),
    ErrorCode.INVALID_OUTPUT: HttpError(
        502,
        _SERVER,
        "The model returned an invalid output.",
        "The model did not return one valid result for each input.",
        "Operator: run `tierlane check model`.",
    ),
    ErrorCode.WORKER_LOST: HttpError(
        503,
        _SERVER,
        "The workers that ran this request were lost.",
        "Three workers or model processes were lost while they ran it, or the retry budget was empty.",
        "Retry once; operator: read the worker's log and `tierlane dlq`.",
    ),
    ErrorCode.GATEWAY_LOST: HttpError(
        503,
        _SERVER,
        "The gateway that held this request was lost.",
        "The gateway that held the request is gone, and only the audit shows this; or it was suspended for 2 s.",
        "Retry with the same `Idempotency-Key`.",
    ),
    ErrorCode.CANCELLED: HttpError(
        499,
        _INVALID,
        "The request was cancelled: its client disconnected, or its job or batch was cancelled.",
        "The client disconnected, which only the audit shows, or it cancelled the job or batch.",
        "Nothing; raise the client's timeout if it was not intended.",
    ),
    ErrorCode.ABANDONED: HttpError(
        504,
        _TIMEOUT,
        "The request was never finished.",
        "No process ended the request, so the auditor closed it; only the audit shows this.",
        "Operator: look for lost processes at that time.",
        retry=False,
    ),
    ErrorCode.INTERNAL_ERROR: HttpError(
        500,
        _SERVER,
        "An internal error occurred.",
        "Tierlane has a fault; the log names the place.",
        "Retry once; report the `request_id` to the operator.",
    ),
    ErrorCode.IDEMPOTENCY_IN_PROGRESS: HttpError(
        409,
        "idempotency_error",
        "The first request with this Idempotency-Key is still running.",
        "The first request with this `Idempotency-Key` is still running.",
        "Wait for `Retry-After` and retry.",
        retry=True,
    ),
    ErrorCode.IDEMPOTENCY_KEY_REUSED: HttpError(
        422,
        "idempotency_error",
        "This Idempotency-Key was used with another body.",
        "This `Idempotency-Key` was used with another body.",
        "Use a new key for each request.",
        retry=False,
    ),
    ErrorCode.PERMISSION_DENIED: HttpError(
        403,
        "permission_error",
        "The caller may not do that.",
        "The customer does not manage its own keys (`manages_keys`), or the request has a JWT instead of a key; in the admin API, the "
        "role of the operator does not allow it, or no group of the person who signs in has a role.",
        "Ask the administrator; in the admin API, use the token of an operator with the role that the message names.",
        retry=False,
    ),
    ErrorCode.CROSS_SITE: HttpError(
        403,
        "permission_error",
        "Another page sent this request.",
        "The dashboard did not send this action, or a change with the cookie of the admin API has no `X-Tierlane-Request: 1`.",
        "Use the dashboard's own page, or send the header.",
        retry=False,
    ),
    ErrorCode.CHANGED_MEANWHILE: HttpError(
        409,
        _INVALID,
        "The confirmed state has changed.",
        "The object of a dashboard action changed after it was confirmed; nothing was done.",
        "Look at the new state and repeat the action.",
        retry=False,
    ),
    ErrorCode.CONFLICT: HttpError(
        409,
        _INVALID,
        "The change is not possible now.",
        "The admin API: the change is not possible as things are, such as a name in use.",
        "The message says what is in the way.",
        retry=False,
    ),
    ErrorCode.PRECONDITION_FAILED: HttpError(
        412,
        _INVALID,
        "The row was changed since it was read: read it again.",
        "The admin API: the row does not have the ETag of `If-Match`.",
        "Read the row again, and repeat the change if it is still meant.",
        retry=False,
    ),
    ErrorCode.SIGN_IN_FAILED: HttpError(
        401,
        "authentication_error",
        "The sign-in failed: begin it again.",
        "The admin API: the sign-in through the identity provider expired, was cancelled or used twice, or the ID token is not valid.",
        "Sign in again; the message says what to compare if it fails again.",
        retry=False,
    ),
    ErrorCode.IDENTITY_PROVIDER_UNAVAILABLE: HttpError(
        503,
        _BUSY,
        "The identity provider does not respond.",
        "The admin API: the identity provider does not respond, or its metadata does not fit `TIERLANE_ADMIN_OIDC_ISSUER`.",
        "Retry; operator: check the provider. Operators can sign in with a token meanwhile.",
    ),
}


def http_status(error_code: str) -> int:
    """The HTTP status of a stored error code: 200 for "", 500 for a code that this version does not have."""
    if not error_code:
        return 200
    try:
        return HTTP[ErrorCode(error_code)].status
    except ValueError:
        return 500


class TierlaneError(Exception):
    """The base class of Tierlane's exceptions."""


class StartError(TierlaneError):
    """A role cannot start; the message is one sentence that says what to do."""


class RedisUnavailable(TierlaneError):
    """Redis did not respond in time, or not at all; it is unknown whether the call took effect."""


class RequestError(TierlaneError):
    """A request cannot be served. `code`: why; `param`: the invalid field; `message`: the text for the client."""

    def __init__(self, code: ErrorCode, message: str | None = None, param: str | None = None) -> None:
        super().__init__(message or HTTP[code].message)
        self.code = code
        self.param = param

    @property
    def message(self) -> str:
        return str(self.args[0])
