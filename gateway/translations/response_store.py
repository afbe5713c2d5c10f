"""The store of responses: inserts and lookups in coalesced calls on two connections, and stored responses as documents.

Conversations are read one at a time for each customer, so that customers take turns; a bounded number of reads waits.

A response is committed before the end of its own response is sent. All methods raise RequestError `catalog_unavailable`
while PostgreSQL is not available, before a request runs if that is known then.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from asyncpg import PostgresError

from gateway.api.format import TokenUsage
from gateway.config import ResponseStoreConfig
from gateway.http.errors import RejectionError
from gateway.http.validation import invalid
from gateway.jobs.store import MAX_INSERTS, CallBatcher
from gateway.translations.response_body import Item
from gateway.translations.response_document import ResponseDocument
from gateway.translations.response_id import request_id_of
from gateway.translations.response_output import RESPONSES, Output, failed, whole
from ledger.jobs import JobSession, StoreUnavailable
from ledger.postgres import Connection
from ledger.responses import (
    Conversation,
    NewResponse,
    ResponseRow,
    StoreLimits,
    delete_response,
    find_conversation,
    find_responses,
    insert_responses,
    running_responses,
)
from scheduler.errors import ErrorCode, RequestError
from scheduler.fault_log import log_fault

NOT_NOW = (
    "Responses cannot be stored or read right now: try again soon, or send `store: false`, without an earlier response."
)
UNKNOWN = "There is no such response, or it is not stored any more."
LONG = 16
"""A conversation, with the fields of its requests, may have so many times the bytes of an input, which are checked again."""

MOST_READS = 32
"""Conversations of one customer that are being read, or wait for that; each takes milliseconds."""

BUSY = "Too many conversations of this account are being read: try again, or send the items as `input`."
BUSY_RETRY_MS = 250

T = TypeVar("T")
_document = msgspec.json.Decoder(ResponseDocument)
_items = msgspec.json.Decoder(list[Item])


class _Turn:
    """The reads of one customer."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.count = 0


class CustomerTurns:
    """One operation of each customer at a time; at most `most` of one customer run or wait."""

    def __init__(self, most: int = MOST_READS) -> None:
        self._most = most
        self._turns: dict[str, _Turn] = {}

    @asynccontextmanager
    async def turn(self, customer_id: str) -> AsyncIterator[None]:
        """The customer's turn. Raises RequestError `rate_limit_exceeded` if too many wait."""
        turn = self._turns.get(customer_id) or _Turn()
        if turn.count >= self._most:
            raise RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, BUSY, BUSY_RETRY_MS)
        self._turns[customer_id] = turn
        turn.count += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.count -= 1
            if not turn.count:
                del self._turns[customer_id]


class ResponseStore:
    """The stored responses of all customers. Without a database nothing is stored."""

    def __init__(self, config: ResponseStoreConfig) -> None:
        self._configured = bool(config.database_url)
        self._limits = StoreLimits(config.count, config.bytes, config.kept_s)
        self._writing = JobSession(config.database_url, "tierlane-responses-in")
        self._reading = JobSession(config.database_url, "tierlane-responses-read")
        self._inserts: CallBatcher[NewResponse, None] = CallBatcher(self._insert, MAX_INSERTS)
        self._reads: CallBatcher[str, ResponseRow | None] = CallBatcher(self._find)
        self._turns = CustomerTurns()
        self._others: CallBatcher[Callable[[Connection], Awaitable[Any]], Any] = CallBatcher(self._one, 1)

    def check(self) -> None:
        """Raises RequestError if PostgreSQL was not available a moment ago, so that no request runs in vain."""
        if not (self._configured and self._writing.available):
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW)

    async def insert(self, response: NewResponse) -> None:
        """Insert and commit a response."""
        try:
            await self._available(self._inserts.run(response))
        except PostgresError as error:  # Its customer was deleted.
            log_fault("a response cannot be stored", error, request_id=response.request_id)
            raise RequestError(ErrorCode.INTERNAL_ERROR) from None

    async def find(self, response_id: str, customer_id: str) -> ResponseRow:
        """The customer's response. Raises RequestError `not_found`."""
        row = await self.known(response_id, customer_id)
        if row is None or not row.document:
            raise RequestError(ErrorCode.NOT_FOUND, UNKNOWN)
        return row

    async def known(self, response_id: str, customer_id: str) -> ResponseRow | None:
        """The customer's response, whose document is empty if it was deleted; None if there is none."""
        if not self._configured or request_id_of(response_id) is None:
            return None
        row = await self._available(self._reads.run(response_id))
        return row if row is not None and row.customer_id == customer_id else None

    async def running(self, ids: Sequence[str]) -> set[str]:
        """Those of the responses whose jobs have not ended."""
        found: set[str] = await self._available(self._others.run(lambda connection: running_responses(connection, ids)))
        return found

    async def history(self, response_id: str, customer_id: str, max_input_bytes: int) -> list[Item]:
        """The items of a customer's response and of all before it. Raises RequestError that names the field."""

        async def operation(connection: Connection) -> Conversation | None:
            return await find_conversation(connection, response_id, customer_id, LONG * max_input_bytes)

        field = "previous_response_id"
        async with self._turns.turn(customer_id):
            found: Conversation | None = await self._available(self._others.run(operation))
        if found is None:
            raise RequestError(ErrorCode.NOT_FOUND, UNKNOWN, field)
        if found.too_long:
            raise RequestError(ErrorCode.REQUEST_TOO_LARGE, "The conversation is too long: begin another one.", field)
        if not found.whole:
            message = "An earlier response of this conversation is not stored any more: send its items as `input`."
            raise RequestError(ErrorCode.NOT_FOUND, message, field)
        items: list[Item] = []
        for row in found.rows:
            document = document_of(row)
            if document.status not in ("completed", "incomplete"):
                raise invalid(field, f"The response `{row.id}` is {document.status}, so it cannot be continued.")
            items += [*items_of(row), *document.output]
        return items

    async def delete(self, response_id: str, customer_id: str) -> None:
        """Delete the customer's response, if it exists."""
        await self._available(
            self._others.run(lambda connection: delete_response(connection, response_id, customer_id))
        )

    async def close(self) -> None:
        """Close the connections."""
        for calls in (self._inserts, self._reads, self._others):
            await calls.close()
        await self._writing.close()
        await self._reading.close()

    async def _available(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except StoreUnavailable:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW) from None

    async def _insert(self, responses: Sequence[NewResponse]) -> Sequence[Exception | None]:
        try:
            await self._writing.run(lambda connection: insert_responses(connection, responses, self._limits))
        except PostgresError as error:  # One that cannot be stored must not fail the others.
            if len(responses) == 1:
                return [error]
            return [each for response in responses for each in await self._insert([response])]
        return [None] * len(responses)

    async def _find(self, ids: Sequence[str]) -> Sequence[ResponseRow | None]:
        found = await self._reading.run(lambda connection: find_responses(connection, ids))
        return [found.get(response_id) for response_id in ids]

    async def _one(self, operations: Sequence[Callable[[Connection], Awaitable[Any]]]) -> Sequence[Any]:
        return [await self._reading.run(operation) for operation in operations]


def document_of(row: ResponseRow) -> ResponseDocument:
    """The response of a row, with the output or the error of its job."""
    document = first_document(row)
    if row.open:
        return failed(document, RequestError(ErrorCode.GATEWAY_LOST)) if row.lost else document
    if row.error_code is not None:
        try:
            code = ErrorCode(row.error_code)
        except ValueError:  # Written by a newer version.
            code = ErrorCode.INTERNAL_ERROR
        text = (row.output or b"").decode(errors="replace")
        if code is ErrorCode.INVALID_REQUEST and text:
            return failed(document, RESPONSES.bad_parameters(text))
        return failed(document, RequestError(code))
    output = output_of_job(row)
    return document if output is None else whole(document, output)


def output_of_job(row: ResponseRow) -> Output | None:
    """The output of the job of a response, if it completed."""
    if row.output is None or row.error_code is not None:
        return None
    total, written = row.tokens_used or 0, row.output_tokens or 0
    tokens = TokenUsage(max(0, total - written), written, total)
    return Output(row.output.decode(errors="replace"), row.finish_reason or "stop", tokens)


def first_document(row: ResponseRow) -> ResponseDocument:
    """The response of a row as it was stored: of a job without its output."""
    return _document.decode(row.document)


def items_of(row: ResponseRow) -> list[Item]:
    """The items of the input."""
    return _items.decode(row.input_items)
