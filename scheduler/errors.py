"""Error codes, their HTTP status, type and message, and the exceptions of Tierlane.

    TierlaneError
    |-- RequestError        a request cannot be served; has an ErrorCode
    |-- StartError          a role cannot start; the message says what to do
    +-- RedisUnavailable    Redis did not respond in time; the outcome of the call is unknown

The types are those that OpenAI's clients know.
"""

from enum import StrEnum
from typing import NamedTuple


class ErrorCode(StrEnum):
    """Why a request was rejected or failed; stored in the audit and sent as `error.code`."""

    INVALID_REQUEST = "invalid_request"
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
    CHANGED_MEANWHILE = "changed_meanwhile"


class HttpError(NamedTuple):
    """The HTTP response of one code. `retry`: None if the client's default for the status is right."""

    status: int
    type: str
    message: str
    retry: bool | None = None


_INVALID, _TIMEOUT, _BUSY, _SERVER = (
    "invalid_request_error",
    "timeout_error",
    "service_unavailable_error",
    "server_error",
)

HTTP: dict[ErrorCode, HttpError] = {
    ErrorCode.INVALID_REQUEST: HttpError(400, _INVALID, "The request is not valid."),
    ErrorCode.INVALID_API_KEY: HttpError(
        401,
        "authentication_error",
        "The API key is not valid: check that it was copied whole, has not expired, and was not revoked.",
    ),
    ErrorCode.CATALOG_UNAVAILABLE: HttpError(503, _BUSY, "This API key cannot be checked right now; try again soon."),
    ErrorCode.ACCOUNT_SUSPENDED: HttpError(403, "permission_error", "This account is suspended."),
    ErrorCode.NOT_FOUND: HttpError(404, _INVALID, "There is no resource at this path: /docs lists all paths."),
    ErrorCode.METHOD_NOT_ALLOWED: HttpError(
        405, _INVALID, "This path does not accept this method: the response header Allow lists those that it accepts."
    ),
    ErrorCode.MODEL_NOT_FOUND: HttpError(404, _INVALID, "There is no such model."),
    ErrorCode.REQUEST_TIMEOUT: HttpError(408, _INVALID, "The request took too long to arrive.", retry=False),
    ErrorCode.REQUEST_TOO_LARGE: HttpError(413, _INVALID, "The request is too large."),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: HttpError(
        415, _INVALID, "The body must be JSON: send the header `Content-Type: application/json`."
    ),
    ErrorCode.UNSUPPORTED_ENCODING: HttpError(
        415, _INVALID, "Compressed bodies are not accepted: send the body without Content-Encoding."
    ),
    ErrorCode.RATE_LIMIT_EXCEEDED: HttpError(429, "rate_limit_error", "A rate limit of this account is reached."),
    ErrorCode.QUOTA_EXCEEDED: HttpError(429, "insufficient_quota", "The quota is used up.", retry=False),
    ErrorCode.BACKPRESSURE: HttpError(429, "rate_limit_error", "The system is short of memory for new requests."),
    ErrorCode.REDUCED_CAPACITY: HttpError(503, _BUSY, "Limits are reduced because less capacity is available."),
    ErrorCode.SHED_FOR_PRIORITY: HttpError(503, _BUSY, "The request was rejected because too many are queued."),
    ErrorCode.QUEUE_FULL: HttpError(503, _BUSY, "The queue of this tier is full."),
    ErrorCode.NO_CAPACITY: HttpError(503, _BUSY, "No capacity is available right now."),
    ErrorCode.DRAINING: HttpError(503, _BUSY, "This gateway is shutting down; try again."),
    ErrorCode.QUEUE_TIMEOUT: HttpError(504, _TIMEOUT, "The request waited too long in its queue.", retry=False),
    ErrorCode.DEADLINE_EXCEEDED: HttpError(504, _TIMEOUT, "The deadline of the request has passed.", retry=False),
    ErrorCode.GPU_TIMEOUT: HttpError(504, _TIMEOUT, "The model took too long.", retry=False),
    ErrorCode.POISON_REQUEST: HttpError(422, _INVALID, "The model cannot process this input.", retry=False),
    ErrorCode.INVALID_OUTPUT: HttpError(502, _SERVER, "The model returned an invalid output."),
    ErrorCode.WORKER_LOST: HttpError(503, _SERVER, "The workers that ran this request were lost."),
    ErrorCode.GATEWAY_LOST: HttpError(503, _SERVER, "The gateway that held this request was lost."),
    ErrorCode.CANCELLED: HttpError(499, _INVALID, "The client closed the request."),
    ErrorCode.ABANDONED: HttpError(504, _TIMEOUT, "The request was never finished.", retry=False),
    ErrorCode.INTERNAL_ERROR: HttpError(500, _SERVER, "An internal error occurred."),
    ErrorCode.IDEMPOTENCY_IN_PROGRESS: HttpError(
        409, "idempotency_error", "The first request with this Idempotency-Key is still running.", retry=True
    ),
    ErrorCode.IDEMPOTENCY_KEY_REUSED: HttpError(
        422, "idempotency_error", "This Idempotency-Key was used with another body.", retry=False
    ),
    ErrorCode.CROSS_SITE: HttpError(403, "permission_error", "Another page sent this request.", retry=False),
    ErrorCode.CHANGED_MEANWHILE: HttpError(409, _INVALID, "The confirmed state has changed.", retry=False),
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
