"""The documents of jobs: the 202, the result, and the body of a callback."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.inference import INFERENCE
from gateway.http.error_responses import Fault, fault_of
from ledger.jobs import JobRow
from scheduler.errors import ErrorCode

Status = Literal["PENDING", "SUCCESS", "FAILURE"]

POLL_LATER = ("Retry-After", "1")
"""Of a job that has not ended: seconds until its result should be read again."""


class Promise(msgspec.Struct, gc=False):
    """The body of the 202."""

    task_id: str
    status: Literal["PENDING"] = "PENDING"


class JobMetadata(msgspec.Struct, gc=False):
    """Details of a job that has ended. `latency_ms`: from its submission to its end."""

    tokens_used: int
    latency_ms: float
    model: str
    tier: str


class JobResult(msgspec.Struct, gc=False):
    """The status of a job: `output` if it succeeded, `error` if it failed."""

    status: Status
    output: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET
    metadata: JobMetadata | UnsetType = UNSET


class CallbackBody(msgspec.Struct, gc=False):
    """The body of a callback: the job's result with its id."""

    task_id: str
    status: Status
    output: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET
    metadata: JobMetadata | UnsetType = UNSET


def job_result(row: JobRow) -> JobResult:
    """The document of a job, from its row."""
    if not row.ended:
        return JobResult("PENDING")
    text = (row.output or b"").decode(errors="replace")
    metadata = JobMetadata(row.tokens_used or 0, round(max(0.0, row.latency_ms or 0.0), 2), row.model, row.tier)
    if row.status == "completed":
        return JobResult("SUCCESS", output=text, metadata=metadata)
    try:
        code = ErrorCode(row.error_code or "")
    except ValueError:  # Written by a newer version.
        code = ErrorCode.INTERNAL_ERROR
    return JobResult("FAILURE", error=fault_of(INFERENCE.refusal(code, text), row.id), metadata=metadata)
