"""`POST /v1/files`: a multipart body that is stored while it arrives, a chunk at a time.

Each chunk is committed before the next one is read, so that memory is bounded and a slow PostgreSQL slows the client down. The
file exists for its customer once it is complete. The fields may come in any order.
"""

from collections.abc import Callable
from contextlib import suppress

from aiohttp import BodyPartReader, MultipartReader
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

from gateway.batch_api.documents import read_expiry
from gateway.batch_api.store import PIECE_BYTES, FileStore
from gateway.http.body.budget import BodyBudget
from gateway.http.body.content_coding import EncodingError, coding_of
from gateway.http.body.reading import awaited_body, check_media
from gateway.http.parsed_request import ParsedRequest
from gateway.http.router import RoutedRequest
from gateway.http.validation import invalid
from ledger.catalog.snapshot import Identity
from ledger.files import FileRow
from scheduler.errors import ErrorCode, RequestError

FORM = "multipart/form-data"
NOT_FORM = "Send the file as multipart/form-data, with the fields `purpose` and `file`."
NOT_ENCODED = "Files are stored as they arrive: send the file without Content-Encoding."
ONLY_PURPOSE = "`purpose` must be `batch`: other purposes are not supported here."
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_FIELD = 256
MAX_FILENAME = 255
OVERHEAD = 65_536
"""Bytes of a body beside its file."""

READ_BYTES = 65_536


class Upload:
    """One upload of a customer. `fields` has the values of the fields beside the file."""

    def __init__(self, store: FileStore, budget: BodyBudget, identity: Identity) -> None:
        self._store = store
        self._budget = budget
        self._identity = identity
        self._file_id = ""
        self._filename = ""
        self.fields: dict[str, str] = {}

    async def receive(self, request: RoutedRequest) -> FileRow:
        """Store the file of a request. Raises RequestError."""
        config = self._store.config
        check_media(request.headers, request.request.content_length or 0, config.max_file_bytes + OVERHEAD, (FORM,))
        if coding_of(request.headers):
            raise EncodingError(NOT_ENCODED, "identity")
        share, complete = self._budget.share(self._identity), False
        try:
            share.take(2 * PIECE_BYTES)
            await self._read(request.request)
            purpose = self.fields.get("purpose")
            kept_s = read_expiry(*(self.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")))
            if purpose != "batch":
                raise invalid("purpose", ONLY_PURPOSE if purpose else NOT_FORM)
            if not self._file_id:
                raise invalid("file", NOT_FORM)
            row = await self._store.complete_file(
                self._file_id, self._filename, config.kept_s if kept_s is None else kept_s
            )
            complete = True
            return row
        except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
            if isinstance(error, RequestPayloadError):
                raise
            raise invalid(None, f"The body is not valid: {NOT_FORM}") from None
        finally:
            share.give_back()
            if self._file_id and not complete:
                with suppress(RequestError):  # It expires within an hour.
                    await self._store.drop_file(self._file_id)

    async def _read(self, request: ParsedRequest) -> None:
        if not request.headers.get("Content-Type", "").lower().startswith(FORM):
            raise RequestError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, NOT_FORM, "Content-Type")
        async with awaited_body(request) as restart:
            reader = MultipartReader(request.headers, request.content)
            while (part := await reader.next()) is not None:
                restart()
                if not isinstance(part, BodyPartReader):
                    raise invalid(None, NOT_FORM)
                name = part.name or ""
                if name == "file":
                    await self._store_file(part, restart)
                    continue
                if name not in FIELDS:
                    message = f"The field is not known here. The fields are: file, {', '.join(FIELDS)}."
                    raise invalid(name[:MAX_FIELD] or None, message)
                value = b""
                while piece := await part.read_chunk(READ_BYTES):
                    value += piece
                    if len(value) > MAX_FIELD:
                        raise invalid(name, f"`{name}` is too long.")
                self.fields[name] = value.decode(errors="replace").strip()

    async def _store_file(self, part: BodyPartReader, restart: Callable[[], None]) -> None:
        store, most = self._store, self._store.config.max_file_bytes
        if self._file_id:
            raise invalid("file", "Send one file.")
        # The last part of the client's name, without control characters.
        filename = "".join(each for each in part.filename or "file.jsonl" if each.isprintable())
        filename = filename.replace("\\", "/").rpartition("/")[2]
        self._filename = filename[:MAX_FILENAME] or "file.jsonl"
        self._file_id = await store.begin_file(self._identity.customer_id)
        chunk, number, size = bytearray(), 0, 0
        while piece := await part.read_chunk(READ_BYTES):
            size += len(piece)
            if size > most:
                message = f"A file must not be larger than {most} bytes: split it into several batches."
                raise RequestError(ErrorCode.REQUEST_TOO_LARGE, message, "file")
            chunk += piece
            if len(chunk) >= PIECE_BYTES:
                await store.add_chunk(self._file_id, number, bytes(chunk))
                chunk.clear()
                number += 1
                restart()
        if chunk:
            await store.add_chunk(self._file_id, number, bytes(chunk))
        if not size:
            raise invalid("file", "The file is empty.")
