"""The documents of OpenAI's batch API: files, batches, lists of both; the states of a batch; checks of request bodies."""

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from gateway.batch_api.lines import ENDPOINTS, LineFault, endpoint_of
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.validation import invalid
from ledger.batches import BatchRow
from ledger.files import FileRow

WINDOW = "24h"
MIN_KEPT_S, MAX_KEPT_S = 3600, 30 * 86_400
MAX_METADATA = 16
BATCH_PAGE, MAX_BATCH_PAGE = 20, 100
MAX_FILE_PAGE = 10_000
FILE_PAGE = 1000
"""Files of a page; `has_more` tells clients to read the next one."""

_faults = msgspec.json.Decoder(list[LineFault])
_metadata = msgspec.json.Decoder(dict[str, str])


class FileObject(msgspec.Struct, gc=False):
    """A file. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileDeleted(msgspec.Struct, gc=False):
    """A file that was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class Faults(msgspec.Struct, gc=False):
    """Faults of an input file, each with its line."""

    data: list[LineFault]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, gc=False):
    """Lines of a batch. `total` is 0 until the file was checked."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True, gc=False):
    """A batch. Times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Faults | None
    input_file_id: str
    completion_window: str = WINDOW
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


def file_object(row: FileRow) -> FileObject:
    """The document of a file."""
    created, expires = _seconds(row.created_at), _seconds(row.expires_at)
    return FileObject(row.id, row.bytes, created or 0, expires or 0, row.filename, row.purpose)


def batch_object(row: BatchRow) -> BatchObject:
    """The document of a batch."""
    return BatchObject(
        id=row.id,
        endpoint=row.endpoint,
        errors=None if row.errors is None else Faults(_faults.decode(row.errors)),
        input_file_id=row.input_file_id,
        status=row.status,
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        created_at=_seconds(row.created_at) or 0,
        in_progress_at=_seconds(row.in_progress_at),
        expires_at=_seconds(row.deadline) or 0,
        finalizing_at=_seconds(row.finalizing_at),
        completed_at=_seconds(row.completed_at),
        failed_at=_seconds(row.failed_at),
        expired_at=_seconds(row.expired_at),
        cancelling_at=_seconds(row.cancelling_at),
        cancelled_at=_seconds(row.cancelled_at),
        request_counts=RequestCounts(row.total, row.completed, row.failed),
        metadata=None if row.metadata is None else _metadata.decode(row.metadata),
    )


def _seconds(time: datetime | None) -> int | None:
    return None if time is None else int(time.timestamp())


class Expiry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """When a file expires: so many seconds after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=MIN_KEPT_S, le=MAX_KEPT_S)]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Expiry | None = None


_body = msgspec.json.Decoder(BatchBody)


def read_batch(raw: bytes) -> BatchBody:
    """Decode and check the body. Raises RequestError that names the field."""
    body = decode(_body, raw)
    check_duplicates(raw)
    endpoint = endpoint_of(body.endpoint)
    if not endpoint:
        raise invalid("endpoint", f"`endpoint` must be one of: {', '.join(ENDPOINTS)}.")
    if body.completion_window != WINDOW:
        raise invalid("completion_window", f"`completion_window` must be {WINDOW}.")
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"`metadata` must not have more than {MAX_METADATA} members.")
    for name, value in metadata.items():
        if len(name) > 64 or len(value) > 512:
            raise invalid("metadata", "Names in `metadata` have at most 64 characters, values at most 512.")
        if "\0" in name + value:
            raise invalid("metadata", "`metadata` must have no control characters.")
    return msgspec.structs.replace(body, endpoint=endpoint)


def read_expiry(anchor: str | None, seconds: str | None) -> int | None:
    """Seconds from the fields `expires_after` of an upload; None without them. Raises RequestError."""
    if anchor is None and seconds is None:
        return None
    try:
        return msgspec.convert({"anchor": anchor, "seconds": seconds}, Expiry, strict=False).seconds
    except msgspec.ValidationError:
        message = f"`expires_after` needs the anchor `created_at` and {MIN_KEPT_S} to {MAX_KEPT_S} seconds."
        raise invalid("expires_after", message) from None
