"""The description of `/v1/files` and `/v1/batches`. Two methods of one path with different bodies are two entries."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.batch_api.documents import (
    BATCH_PAGE,
    FILE_PAGE,
    MAX_BATCH_PAGE,
    MAX_FILE_PAGE,
    MAX_KEPT_S,
    MAX_METADATA,
    MIN_KEPT_S,
    WINDOW,
    BatchBody,
    BatchObject,
    FileDeleted,
    FileObject,
)
from gateway.batch_api.handlers import JSONL
from gateway.batch_api.lines import ENDPOINTS
from gateway.batch_api.uploads import FORM
from gateway.http.pages import ObjectList
from gateway.http.response_headers import Schema
from gateway.openapi.endpoint_kinds import (
    IDEMPOTENCY_KEY_PARAMETER,
    LIMIT_HEADERS,
    TOKEN_LIMIT_HEADERS,
    account_endpoint,
    page_parameters,
)
from gateway.openapi.model import ApiEndpoint, Parameter, ResponseDescription
from gateway.openapi.schemas import NOT_EMPTY, only
from scheduler.errors import ErrorCode

EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")
BODY_ERRORS = (
    ErrorCode.NOT_FOUND,
    ErrorCode.REQUEST_TOO_LARGE,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE,
    ErrorCode.UNSUPPORTED_ENCODING,
)
Seconds = Annotated[int, msgspec.Meta(ge=MIN_KEPT_S, le=MAX_KEPT_S)]
Binary = Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary", "minLength": 1})]

EXPIRY_TOGETHER: Schema = {"dependentRequired": {name: list(EXPIRY) for name in EXPIRY}}
FILE_ID = Parameter("id", "path", "The id of a file.", NOT_EMPTY)
BATCH_ID = Parameter("id", "path", "The id of a batch.", NOT_EMPTY)
ORDER = Parameter("order", "query", "`desc`, the newest first, or `asc`.", only("asc", "desc"))
METADATA: Schema = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
    ]
}
FILE_CONTENT = ResponseDescription(
    description="The content.",
    content={JSONL: str},
    headers=("x-request-id", "Cache-Control", *LIMIT_HEADERS),
    optional_headers=TOKEN_LIMIT_HEADERS,
)


class UploadForm(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of an upload, in any order."""

    file: Binary
    purpose: str
    anchor: Literal["created_at"] | UnsetType = msgspec.field(default=UNSET, name="expires_after[anchor]")
    seconds: Seconds | UnsetType = msgspec.field(default=UNSET, name="expires_after[seconds]")


def _endpoint(path: str, summary: str, kind: Any, *errors: ErrorCode, **fields: Any) -> ApiEndpoint:
    return account_endpoint(
        path,
        summary,
        kind,
        *(errors or (ErrorCode.NOT_FOUND,)),
        ErrorCode.DRAINING,
        headers=("Cache-Control",),
        **fields,
    )


BATCHES: tuple[ApiEndpoint, ...] = (
    _endpoint(
        "/v1/files",
        "List the files; POST uploads one for a batch",
        ObjectList[FileObject],
        parameters=(*page_parameters(FILE_PAGE, MAX_FILE_PAGE), ORDER),
    ),
    _endpoint(
        "/v1/files",
        "Upload a file for a batch",
        FileObject,
        *BODY_ERRORS,
        ErrorCode.QUOTA_EXCEEDED,
        methods=("POST",),
        body=UploadForm,
        media=FORM,
        rules={"purpose": only("batch")},
        conditions=(EXPIRY_TOGETHER,),
    ),
    _endpoint(
        "/v1/files/{id}", "Read a file's description; DELETE deletes the file", FileObject, parameters=(FILE_ID,)
    ),
    _endpoint("/v1/files/{id}", "Delete a file", FileDeleted, methods=("DELETE",), parameters=(FILE_ID,)),
    _endpoint("/v1/files/{id}/content", "Read a file", str, parameters=(FILE_ID,), responses={200: FILE_CONTENT}),
    _endpoint(
        "/v1/batches",
        "List the batches; POST runs the requests of a file",
        ObjectList[BatchObject],
        parameters=page_parameters(BATCH_PAGE, MAX_BATCH_PAGE),
    ),
    _endpoint(
        "/v1/batches",
        "Run the requests of a file (OpenAI format)",
        BatchObject,
        *BODY_ERRORS,
        ErrorCode.IDEMPOTENCY_KEY_REUSED,
        methods=("POST",),
        parameters=(IDEMPOTENCY_KEY_PARAMETER,),
        optional_headers=("Idempotent-Replayed",),
        body=BatchBody,
        example={"input_file_id": "file-01a2", "endpoint": ENDPOINTS[0], "completion_window": WINDOW},
        rules={"endpoint": only(*ENDPOINTS), "completion_window": only(WINDOW), "metadata": METADATA},
        description="The lines run with low urgency: one refused by a limit waits. Each is charged as a request.",
    ),
    _endpoint("/v1/batches/{id}", "Read a batch", BatchObject, parameters=(BATCH_ID,)),
    _endpoint("/v1/batches/{id}/cancel", "Cancel a batch", BatchObject, methods=("POST",), parameters=(BATCH_ID,)),
)
"""Files and batches."""
