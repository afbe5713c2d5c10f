"""Errors of requests with what their responses need: the time until a retry, and the rate limit state."""

from gateway.http.response import Headers
from scheduler.errors import ErrorCode, RequestError


class RejectionError(RequestError):
    """A request error with the time until a retry can succeed, in milliseconds, and the violated rate limit policies.

    `headers`: the rate limit state, if it is known where the error is raised.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str | None = None,
        retry_after_ms: int | None = None,
        violated: tuple[str, ...] = (),
        headers: Headers | None = None,
    ) -> None:
        super().__init__(code, message)
        self.retry_after_ms = retry_after_ms
        self.violated = violated
        self.headers = headers
