"""Files and batches in PostgreSQL for the handlers, and the content of files as pieces.

All methods raise RequestError `catalog_unavailable` while PostgreSQL is not available, and errors in OpenAI's form for what a
customer may not do. Three connections: a long upload must not delay the lines of batches, nor a lookup.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from typing import TypeVar

from gateway.batch_api.documents import FILE_PAGE, BatchBody
from gateway.config import BatchConfig
from gateway.http.pages import PageQuery
from gateway.http.response import encode_json
from gateway.http.validation import invalid
from gateway.inference.idempotency import IDEMPOTENCY_KEY
from ledger import batches, files
from ledger.batches import BatchRow, NewBatch
from ledger.catalog.snapshot import Identity
from ledger.files import FileRow
from ledger.jobs import JobSession, StoreUnavailable
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, RequestError
from scheduler.request_id import PREFIX, new_request_id

T = TypeVar("T")
NOT_NOW = "Files and batches cannot be stored or read right now; try again soon."
NO_FILE = "There is no such file, or it is not kept any more."
NO_BATCH = "There is no such batch, or it is not kept any more."
NOT_SERVED = "This gateway serves no files and batches."
PIECE_BYTES = 512 << 10
"""Of the content of a file that is in memory."""


def new_id(prefix: str) -> str:
    """A new id. Ids sort in the order of their creation."""
    return prefix + new_request_id().removeprefix(PREFIX)


class FileStore:
    """Files and batches of all customers, if they are served."""

    def __init__(self, config: BatchConfig, pool: str, *, served: bool) -> None:
        self.served = served
        self._pool = pool
        self.config = config
        self._calls = JobSession(self.config.database_url, "tierlane-batch-api")
        self._contents = JobSession(self.config.database_url, "tierlane-files")
        self.lines = JobSession(self.config.database_url, "tierlane-batches")

    async def add_chunk(self, file_id: str, number: int, data: bytes) -> None:
        """Store a chunk of an upload. Raises RequestError `quota_exceeded` if its customer stores too much."""
        most = self.config.max_stored_bytes
        if not await self._run(self._contents, lambda c: files.add_chunk(c, file_id, number, data, most)):
            message = f"Your files would have more than {most} bytes in all: delete some, or wait until they expire."
            raise RequestError(ErrorCode.QUOTA_EXCEEDED, message, "file")

    async def begin_file(self, customer_id: str) -> str:
        """Begin an upload. Returns the id of the file."""
        file_id = new_id("file-")
        await self._run(self._calls, lambda c: files.insert_file(c, file_id, customer_id))
        return file_id

    async def complete_file(self, file_id: str, filename: str, kept_s: float) -> FileRow:
        """The upload has ended. Raises RequestError if the file was deleted meanwhile."""
        row = await self._run(self._calls, lambda c: files.complete_file(c, file_id, filename, kept_s))
        if row is None:
            raise RequestError(ErrorCode.NOT_FOUND, NO_FILE)
        return row

    async def drop_file(self, file_id: str) -> None:
        """Let a file whose upload failed expire."""
        await self._run(self._calls, lambda c: files.drop_file(c, file_id))

    async def find_file(self, file_id: str, identity: Identity, param: str | None = None) -> FileRow:
        """The customer's file. Raises RequestError `not_found`, with `param`."""
        row = await self._run(self._calls, lambda c: files.find_file(c, _text(file_id), identity.customer_id))
        if row is None:
            raise RequestError(ErrorCode.NOT_FOUND, NO_FILE, param)
        return row

    async def list_files(self, identity: Identity, page: PageQuery, purpose: str) -> tuple[list[FileRow], int]:
        """The customer's files, one more than fit the page, and the size of the page."""
        limit = min(page.limit, FILE_PAGE)

        async def operation(connection: Connection) -> list[FileRow]:
            return await files.list_files(
                connection,
                identity.customer_id,
                after=page.after,
                oldest_first=page.oldest_first,
                purpose=purpose,
                limit=limit + 1,
            )

        return await self._run(self._calls, operation), limit

    async def delete_file(self, file_id: str, identity: Identity) -> None:
        """Delete the customer's file. Raises RequestError if there is none, or if an open batch reads it."""
        await self.find_file(file_id, identity)
        reader = await self._run(self._calls, lambda c: files.delete_file(c, file_id, identity.customer_id))
        if reader is not None:
            raise invalid(None, f"The file is the input of {reader}: cancel it, or wait until it has ended.")

    async def pieces(self, file: FileRow) -> AsyncIterator[bytes]:
        """The content of a file."""
        number, batch_id = 0, file.batch_id
        if batch_id is None:
            while chunk := await self.chunk(file.id, number):
                yield chunk
                number += 1
            return

        async def operation(connection: Connection) -> list[tuple[int, bytes]]:
            page = files.read_output(connection, str(batch_id), number, PIECE_BYTES, of_errors=file.of_errors)
            return list(await page)

        while lines := await self._run(self._contents, operation):
            yield b"".join(output + b"\n" for _, output in lines)
            number = lines[-1][0]

    async def chunk(self, file_id: str, number: int) -> bytes | None:
        """A chunk of an uploaded file, None after the last one."""
        return await self._run(self._contents, lambda c: files.read_chunk(c, file_id, number))

    async def create(self, body: BatchBody, identity: Identity, key: str | None) -> tuple[BatchRow, bool]:
        """Create and commit a batch; or find that of an earlier request with its Idempotency-Key, and return True with it.

        Raises RequestError that names the field, or if the customer has too many open batches.
        """
        file = await self.find_file(body.input_file_id, identity, "input_file_id")
        if file.purpose != "batch":
            raise invalid(
                "input_file_id", "The file has the purpose `batch_output`: upload one with the purpose `batch`."
            )
        raw, most = encode_json(body), self.config.max_open
        new = NewBatch(
            id=new_id("batch_"),
            customer_id=identity.customer_id,
            api_key_id=identity.key_id,
            endpoint=body.endpoint,
            input_file_id=file.id,
            metadata=None if body.metadata is None else encode_json(body.metadata).decode(),
            output_kept_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
            pool=self._pool,
            idempotency=None if key is None else sha256(key.encode()).hexdigest(),
            fingerprint=None if key is None else sha256(raw).hexdigest(),
        )

        async def operation(connection: Connection) -> tuple[str, str | None] | None:
            found = await batches.insert_batch(connection, new, self.config.total_s, most)
            return found or (key and await batches.insert_batch(connection, new, self.config.total_s, most)) or None

        found = await self._run(self._calls, operation)
        if found is None:
            message = f"You have {most} open batches, which is the limit: wait until one has ended, or cancel one."
            raise RequestError(ErrorCode.RATE_LIMIT_EXCEEDED, message)
        batch_id, fingerprint = found
        if fingerprint != new.fingerprint:
            raise RequestError(ErrorCode.IDEMPOTENCY_KEY_REUSED, param=IDEMPOTENCY_KEY)
        return await self.find_batch(batch_id, identity), batch_id != new.id

    async def find_batch(self, batch_id: str, identity: Identity) -> BatchRow:
        """The customer's batch. Raises RequestError `not_found`."""
        row = await self._run(self._calls, lambda c: batches.find_batch(c, _text(batch_id), identity.customer_id))
        if row is None:
            raise RequestError(ErrorCode.NOT_FOUND, NO_BATCH)
        return row

    async def list_batches(self, identity: Identity, page: PageQuery) -> list[BatchRow]:
        """The customer's batches, one more than fit the page."""
        customer_id, limit = identity.customer_id, page.limit + 1
        return await self._run(
            self._calls, lambda c: batches.list_batches(c, customer_id, after=page.after, limit=limit)
        )

    async def cancel(self, batch_id: str, identity: Identity) -> BatchRow:
        """Start to cancel the customer's batch, and return it. Raises RequestError if there is none, or if it has ended."""
        row = await self.find_batch(batch_id, identity)
        cancelled = await self._run(self._calls, lambda c: batches.cancel_batch(c, row.id))
        row = await self.find_batch(batch_id, identity)
        if not cancelled and row.status not in ("cancelling", "cancelled"):
            raise invalid(None, f"The batch is {row.status}, so it cannot be cancelled.")
        return row

    async def close(self) -> None:
        """Close the connections."""
        for session in (self._calls, self._contents, self.lines):
            await session.close()

    async def _run(self, session: JobSession, operation: Callable[[Connection], Awaitable[T]]) -> T:
        if not self.served:
            raise RequestError(ErrorCode.NOT_FOUND, NOT_SERVED)
        try:
            return await session.run(operation)
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None


def _text(given: str) -> str:
    """An id from a client, as PostgreSQL accepts it."""
    return given if given.isascii() and given.isprintable() else ""
