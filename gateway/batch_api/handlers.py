"""The handlers of `/v1/files` and `/v1/batches`. All count against the limit of auxiliary requests.

Their responses have the limit headers of the customer, and their errors OpenAI's form.
"""

from collections.abc import AsyncIterator, Callable

from gateway.batch_api.documents import (
    BATCH_PAGE,
    FILE_PAGE,
    MAX_BATCH_PAGE,
    MAX_FILE_PAGE,
    BatchObject,
    FileDeleted,
    FileObject,
    batch_object,
    file_object,
    read_batch,
)
from gateway.batch_api.store import FileStore
from gateway.batch_api.uploads import Upload
from gateway.http.body.reading import check_media, read_body
from gateway.http.error_responses import ErrorResponses
from gateway.http.pages import ObjectList, page_of, read_page
from gateway.http.parsed_request import ParsedRequest
from gateway.http.response import Headers, HttpResponse
from gateway.http.router import RoutedRequest
from gateway.inference.customer_endpoints import CustomerEndpoints, customer_endpoint
from gateway.inference.entry import Entry
from gateway.inference.idempotency import IDEMPOTENT_REPLAYED, idempotency_key
from ledger.catalog.snapshot import Identity
from scheduler.errors import RequestError
from scheduler.fault_log import log_fault

JSONL = "application/octet-stream"
MAX_BODY_BYTES = 65_536
SLICE_BYTES = 65_536
"""Written at a time, so that a slow client shows progress to the write timeout."""


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


class BatchHandlers(CustomerEndpoints):
    """The handlers. `changed` is called after a batch was created or cancelled."""

    def __init__(
        self,
        entry: Entry,
        store: FileStore,
        *,
        faults: ErrorResponses,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(entry, faults)
        self._store = store
        self._changed = changed

    @customer_endpoint
    async def upload(self, request: RoutedRequest, identity: Identity) -> FileObject:
        """POST /v1/files."""
        return file_object(await Upload(self._store, self.entry.bodies, identity).receive(request))

    @customer_endpoint
    async def list_files(self, request: RoutedRequest, identity: Identity) -> ObjectList[FileObject]:
        """GET /v1/files."""
        query = request.request.query
        page, purpose = read_page(query, FILE_PAGE, MAX_FILE_PAGE), query.get("purpose", "")
        rows, limit = await self._store.list_files(identity, page, purpose if purpose.isprintable() else "-")
        return page_of([file_object(row) for row in rows], limit)

    @customer_endpoint
    async def file(self, request: RoutedRequest, identity: Identity) -> FileObject:
        """GET /v1/files/{id}."""
        return file_object(await self._store.find_file(request.tail, identity))

    @customer_endpoint
    async def delete_file(self, request: RoutedRequest, identity: Identity) -> FileDeleted:
        """DELETE /v1/files/{id}."""
        await self._store.delete_file(request.tail, identity)
        return FileDeleted(request.tail)

    @customer_endpoint
    async def content(self, request: RoutedRequest, identity: Identity) -> FileContent:
        """GET /v1/files/{id}/content."""
        row = await self._store.find_file(request.tail, identity)
        return FileContent(row.bytes, self._store.pieces(row), [])

    @customer_endpoint
    async def create(self, request: RoutedRequest, identity: Identity) -> HttpResponse:
        """POST /v1/batches."""
        key = idempotency_key(request.headers)
        check_media(request.headers, request.request.content_length or 0, MAX_BODY_BYTES)
        raw = await read_body(request.request, MAX_BODY_BYTES, self.entry.bodies.share(identity))
        row, replayed = await self._store.create(read_batch(raw), identity, key)
        self._changed()
        return HttpResponse.of(200, batch_object(row), [IDEMPOTENT_REPLAYED] if replayed else [])

    @customer_endpoint
    async def list_batches(self, request: RoutedRequest, identity: Identity) -> ObjectList[BatchObject]:
        """GET /v1/batches."""
        page = read_page(request.request.query, BATCH_PAGE, MAX_BATCH_PAGE)
        rows = await self._store.list_batches(identity, page)
        return page_of([batch_object(row) for row in rows], page.limit)

    @customer_endpoint
    async def batch(self, request: RoutedRequest, identity: Identity) -> BatchObject:
        """GET /v1/batches/{id}."""
        return batch_object(await self._store.find_batch(request.tail, identity))

    @customer_endpoint
    async def cancel(self, request: RoutedRequest, identity: Identity) -> BatchObject:
        """POST /v1/batches/{id}/cancel."""
        row = await self._store.cancel(request.tail, identity)
        self._changed()
        return batch_object(row)
