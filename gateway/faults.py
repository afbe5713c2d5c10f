"""The one place that turns an error code into an HTTP answer: body, Retry-After with jitter, x-should-retry."""

import math
from collections.abc import Callable

from gateway.answer import Answer, Headers, encode_json
from scheduler.errors import HTTP, ErrorCode, RequestError

JITTER = 0.25  # Up to this share is added to what a client is told to wait, so that clients do not return together.
MAX_RETRY_AFTER_MS = 60_000
FALLBACK_RETRY_AFTER_MS = 1000

# How long to wait where nothing was measured: what is over in a moment anywhere else, and the rest a second.
_RETRY_AFTER_MS = {
    ErrorCode.DRAINING: 100,
    ErrorCode.WORKER_LOST: 200,
    ErrorCode.GATEWAY_LOST: 200,
    ErrorCode.QUOTA_EXCEEDED: MAX_RETRY_AFTER_MS,
}

_TRY_LATER = {code for code, row in HTTP.items() if row.status in (429, 503)} | {ErrorCode.IDEMPOTENCY_IN_PROGRESS}


class Refusal(RequestError):
    """A request error that also knows when trying again makes sense (milliseconds from now)."""

    def __init__(self, code: ErrorCode, message: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(code, message)
        self.retry_after_ms = retry_after_ms


class Faults:
    """Builds error answers. `jitter` returns a number from 0 to 1 and is called once for an answer that needs one."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter

    def answer(self, error: RequestError, request_id: str, headers: Headers | None = None) -> Answer:
        """The answer for `error`; `headers` (rate-limit state) are sent with it."""
        row = HTTP[error.code]
        retry_after_ms = self._retry_after_ms(error) if error.code in _TRY_LATER else None
        answer = Answer(row.status, _body(error, request_id, retry_after_ms))
        answer.headers = [("x-request-id", request_id), *(headers or ()), *_retry_headers(error.code, retry_after_ms)]
        if row.status == 401:
            answer.headers.append(("WWW-Authenticate", "Bearer"))
        return answer

    def _retry_after_ms(self, error: RequestError) -> int:
        wanted = error.retry_after_ms if isinstance(error, Refusal) else None
        if not wanted or wanted < 0:
            wanted = _RETRY_AFTER_MS.get(error.code, FALLBACK_RETRY_AFTER_MS)
        return math.ceil(min(wanted, MAX_RETRY_AFTER_MS) * (1 + JITTER * self._jitter()))


def _body(error: RequestError, request_id: str, retry_after_ms: int | None) -> bytes:
    fields: dict[str, object] = {
        "message": error.message,
        "type": HTTP[error.code].type,
        "param": error.param,
        "code": error.code,
        "request_id": request_id,
    }
    if retry_after_ms is not None:
        fields["retry_after_ms"] = retry_after_ms
    return encode_json({"error": fields})


def _retry_headers(code: ErrorCode, retry_after_ms: int | None) -> Headers:
    headers: Headers = []
    if retry_after_ms is not None:
        headers += [
            ("Retry-After", str(math.ceil(retry_after_ms / 1000))),
            ("retry-after-ms", str(retry_after_ms)),
        ]
    if (retry := HTTP[code].retry) is not None:
        headers.append(("x-should-retry", "true" if retry else "false"))
    return headers
