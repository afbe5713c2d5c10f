"""The handlers of `/v1/files` and `/v1/batches`. All count against the limit of auxiliary requests.

Their responses have the limit headers of the customer, and their errors OpenAI's form.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import NamedTuple

from gateway.batch_api.documents import (
    BATCH_PAGE,
    FILE_PAGE,
    MAX_BATCH_PAGE,
    MAX_FILE_PAGE,
    BatchObject,
    FileDeleted,
    FileObject,
    ObjectList,
    batch_object,
    file_object,
    page_of,
    read_batch,
    read_page,
)
from gateway.batch_api.store import FileStore
from gateway.batch_api.uploads import Upload
from gateway.http.body.reading import check_media, read_body
from gateway.http.error_responses import ErrorResponses
from gateway.http.parsed_request import ParsedRequest
from gateway.http.problem_details import wants_problem
from gateway.http.response import Headers, HttpResponse
from gateway.http.router import RoutedRequest
from gateway.inference.entry import Entry
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED, idempotency_key
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault

JSONL = "application/octet-stream"
MAX_BODY_BYTES = 65_536
SLICE_BYTES = 65_536
"""Written at a time, so that a slow client shows progress to the write timeout."""


class Replayable(NamedTuple):
    """A created batch, and whether an earlier request with its Idempotency-Key created it."""

    batch: BatchObject
    replayed: bool


class FileContent(HttpResponse):
    """The content of a file, read while it is written. If it cannot be read on, the connection is closed."""

    __slots__ = ("_pieces", "_size")

    def __init__(self, size: int, pieces: AsyncIterator[bytes], headers: Headers) -> None:
        super().__init__(200, b"", headers, JSONL)
        self._size = size
        self._pieces = pieces

    def length(self) -> str:
        """The header line for the end of the body."""
        return f"Content-Length: {self._size}\r\n"

    async def write_to(self, request: ParsedRequest) -> None:
        """Write the response. Raises ConnectionResetError if the client left."""
        await super().write_to(request)
        if request.method == "HEAD":
            return
        connection = request.protocol
        try:
            async for piece in self._pieces:
                for start in range(0, len(piece), SLICE_BYTES):
                    transport = request.transport
                    if transport is None or transport.is_closing():
                        raise ConnectionResetError("The client left.")
                    transport.write(piece[start : start + SLICE_BYTES])
                    if connection.writing_paused:
                        await connection.drain()
        except RequestError as error:
            log_fault("a file cannot be read on", error)
            self.keep_alive = False
            connection.close()


def handler(
    operation: Callable[["BatchHandlers", RoutedRequest, Identity], Awaitable[object]],
) -> Callable[["BatchHandlers", RoutedRequest], Awaitable[HttpResponse]]:
    """The handler of an operation, which returns the document. Raises RequestError if the caller is unknown."""

    @wraps(operation)
    async def handle(self: "BatchHandlers", request: RoutedRequest) -> HttpResponse:
        identity = self._entry.authenticator.identify(request)
        limits = self._entry.limits_of(identity).headers(identity)
        try:
            self._check_open()
            document = await operation(self, request, identity)
        except RequestError as error:
            return self._faults.answer(error, request.request_id, limits, problem=wants_problem(request.headers))
        headers: Headers = [("x-request-id", request.request_id), ("Cache-Control", "no-store"), *limits]
        if isinstance(document, Replayable):
            headers += [IDEMPOTENT_REPLAYED] if document.replayed else []
            document = document.batch
        if isinstance(document, FileContent):
            document.headers = headers
            return document
        return HttpResponse.of(200, document, headers)

    return handle


class BatchHandlers:
    """The handlers. `changed` is called after a batch was created or cancelled."""

    def __init__(
        self,
        entry: Entry,
        store: FileStore,
        *,
        faults: ErrorResponses,
        changed: Callable[[], None],
    ) -> None:
        self._entry = entry
        self._store = store
        self._faults = faults
        self._changed = changed

    def _check_open(self) -> None:
        if self._entry.drain_state.closed:
            raise RequestError(ErrorCode.DRAINING)

    @handler
    async def upload(self, request: RoutedRequest, identity: Identity) -> FileObject:
        """POST /v1/files."""
        return file_object(await Upload(self._store, self._entry.bodies, identity).receive(request))

    @handler
    async def list_files(self, request: RoutedRequest, identity: Identity) -> ObjectList[FileObject]:
        """GET /v1/files."""
        query = request.request.query
        page, purpose = read_page(query, FILE_PAGE, MAX_FILE_PAGE), query.get("purpose", "")
        rows, limit = await self._store.list_files(identity, page, purpose if purpose.isprintable() else "-")
        return page_of([file_object(row) for row in rows], limit)

    @handler
    async def file(self, request: RoutedRequest, identity: Identity) -> FileObject:
        """GET /v1/files/{id}."""
        return file_object(await self._store.find_file(request.tail, identity))

    @handler
    async def delete_file(self, request: RoutedRequest, identity: Identity) -> FileDeleted:
        """DELETE /v1/files/{id}."""
        await self._store.delete_file(request.tail, identity)
        return FileDeleted(request.tail)

    @handler
    async def content(self, request: RoutedRequest, identity: Identity) -> FileContent:
        """GET /v1/files/{id}/content."""
        row = await self._store.find_file(request.tail, identity)
        return FileContent(row.bytes, self._store.pieces(row), [])

    @handler
    async def create(self, request: RoutedRequest, identity: Identity) -> Replayable:
        """POST /v1/batches."""
        key = idempotency_key(request.headers)
        check_media(request.headers, request.request.content_length or 0, MAX_BODY_BYTES)
        raw = await read_body(request.request, MAX_BODY_BYTES, self._entry.bodies.share(identity))
        row, replayed = await self._store.create(read_batch(raw), identity, key)
        self._changed()
        return Replayable(batch_object(row), replayed)

    @handler
    async def list_batches(self, request: RoutedRequest, identity: Identity) -> ObjectList[BatchObject]:
        """GET /v1/batches."""
        page = read_page(request.request.query, BATCH_PAGE, MAX_BATCH_PAGE)
        rows = await self._store.list_batches(identity, page)
        return page_of([batch_object(row) for row in rows], page.limit)

    @handler
    async def batch(self, request: RoutedRequest, identity: Identity) -> BatchObject:
        """GET /v1/batches/{id}."""
        return batch_object(await self._store.find_batch(request.tail, identity))

    @handler
    async def cancel(self, request: RoutedRequest, identity: Identity) -> BatchObject:
        """POST /v1/batches/{id}/cancel."""
        row = await self._store.cancel(request.tail, identity)
        self._changed()
        return batch_object(row)
