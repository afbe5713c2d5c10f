"""How a job stands, as its customer reads it: in the answer to `GET /v1/result/{id}`, and in the callback."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.dialect import INFERENCE
from gateway.http.errors import Fault, fault_of
from scheduler.errors import ErrorCode, RequestError

Status = Literal["PENDING", "SUCCESS", "FAILURE"]


class Promise(msgspec.Struct, gc=False):
    """The body of the 202."""

    task_id: str
    status: Literal["PENDING"] = "PENDING"


class JobResult(msgspec.Struct, gc=False):
    """How a job stands: `output` where it succeeded, `error` where it failed."""

    status: Status
    output: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET


class Told(msgspec.Struct, gc=False):
    """The body of a callback: the same, with the task's id."""

    task_id: str
    status: Status
    output: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET


def job_result(job_id: str, status: str, output: bytes | None, error_code: str | None) -> JobResult:
    """`status` is that of the row."""
    text = (output or b"").decode(errors="replace")
    if status == "completed":
        return JobResult("SUCCESS", output=text)
    if status == "failed":
        return JobResult("FAILURE", error=fault_of(_failure(error_code or "", text), job_id))
    return JobResult("PENDING")


def _failure(code: str, sentence: str) -> RequestError:
    """What a client that waited would have been told."""
    try:
        known = ErrorCode(code)
    except ValueError:  # Written by a newer version.
        known = ErrorCode.INTERNAL_ERROR
    if known is ErrorCode.INVALID_REQUEST and sentence:
        return INFERENCE.bad_parameters(sentence)
    return RequestError(known)
