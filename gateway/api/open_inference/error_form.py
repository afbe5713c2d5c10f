"""The form of errors in the Open Inference Protocol."""

import msgspec
from msgspec import UNSET, UnsetType

from gateway.http.error_responses import ResponseForm
from scheduler.errors import ErrorCode, RequestError


class PlainError(msgspec.Struct, gc=False):
    """The body of an error of the Open Inference Protocol, whose `error` is a text."""

    error: str
    code: ErrorCode
    request_id: str
    param: str | None
    retry_after_ms: int | UnsetType = UNSET


def plain_error(error: RequestError, request_id: str, retry_after_ms: int | UnsetType) -> PlainError:
    """The body for a request error."""
    return PlainError(error.message, error.code, request_id, error.param, retry_after_ms)


TENSOR_FORM = ResponseForm(plain_error, lambda _request_id, _lines: "")
