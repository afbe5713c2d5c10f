"""`GET /v1/jobs`: the asynchronous jobs of a customer whose rows are kept, without their results."""

from datetime import datetime
from typing import Literal

import msgspec

from gateway.jobs.documents import Status
from ledger.jobs import ListedJob

JOB_PAGE, MAX_JOB_PAGE = 20, 100
JOB_IDS = "^(req_[0-9a-f]{32})?$"
_ENDED: dict[str, Status] = {"completed": "SUCCESS", "failed": "FAILURE"}


class JobCallback(msgspec.Struct, gc=False):
    """The callback of a job. `status`: HTTP status of the last attempt; null: no attempt yet, or no response.

    `unknown`: it ended before a version that stores the status.
    """

    state: Literal["pending", "delivered", "failed", "unknown"]
    attempts: int
    status: int | None


class JobItem(msgspec.Struct, kw_only=True, gc=False):
    """A job. `id` is its `task_id`; times are Unix seconds; null: not yet. The result is at `/v1/result/{id}` until `expires_at`."""

    id: str
    status: Status
    model: str
    tier: str
    created_at: int
    completed_at: int | None
    expires_at: int | None
    tokens_used: int | None
    error_code: str | None
    callback: JobCallback | None
    object: Literal["job"] = "job"


def job_item(row: ListedJob) -> JobItem:
    """The item of a row."""
    return JobItem(
        id=row.id,
        status=_ENDED.get(row.status, "PENDING"),
        model=row.model,
        tier=row.tier,
        created_at=int(row.created_at.timestamp()),
        completed_at=seconds(row.completed_at),
        expires_at=seconds(row.expires_at),
        tokens_used=row.tokens_used,
        error_code=row.error_code,
        callback=_callback(row) if row.has_callback else None,
    )


def _callback(row: ListedJob) -> JobCallback:
    status = row.callback_status
    if row.callback_at is not None or not row.callback_tries:
        return JobCallback("pending", row.callback_tries, status or None)
    if status is None:
        return JobCallback("unknown", row.callback_tries, None)
    return JobCallback("delivered" if 200 <= status < 300 else "failed", row.callback_tries, status or None)


def seconds(time: datetime | None) -> int | None:
    """Unix seconds."""
    return None if time is None else int(time.timestamp())
