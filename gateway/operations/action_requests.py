"""Requests for dashboard actions: their bodies, the guard that each action passes, and the audited transaction.

Each body contains the state that the operator confirmed; an action is rejected if the state has changed. Few actions run
at a time. An action that has started is completed even if its client leaves. The change and its record are one PostgreSQL
transaction on a connection of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, TypeVar

import msgspec
from asyncpg import DataError, IntegrityConstraintViolationError
from msgspec import Meta

from gateway.http.body.reading import check_media, read_body
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.errors import RejectionError
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.operations.session import SessionAuth, check_same_site
from ledger.admin.transaction import as_actor
from ledger.dead_letters import LetterSelection
from ledger.postgres import AWAY, Connection, reason
from scheduler.errors import ErrorCode, RequestError
from scheduler.tasks import end_all

MAX_DEAD_LETTERS = 10_000
"""Of one action."""

MAX_NUMBER = 2**63 - 1
MAX_WORKER_CHARACTERS = 200
MAX_REASON_CHARACTERS = 500

PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*(?![\s\S])"
"""Text without control characters: PostgreSQL does not store NUL, and constraints of the tables reject the others. `$`
would accept a line feed at the end.
"""

Worker = Annotated[str, Meta(min_length=1, max_length=MAX_WORKER_CHARACTERS, pattern=PLAIN)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS, pattern=PLAIN)]
Healthy = Annotated[int, Meta(ge=0, le=1_000_000)]
Count = Annotated[int, Meta(ge=1, le=MAX_DEAD_LETTERS)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Name = Annotated[str, Meta(max_length=200, pattern=PLAIN)]


class CordonBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`healthy_left`: the number of healthy workers that remain in the pool, as the operator confirmed."""

    worker: Worker
    healthy_left: Healthy
    reason: Reason = ""


class UncordonBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The worker that may claim batches again."""

    worker: Worker


class Cordoned(msgspec.Struct, frozen=True):
    """The new state. `changed` is false if it was the same before."""

    worker: str
    cordoned: bool
    changed: bool


class PurgeBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`count` dead letters up to number `up_to`; only those of a tier, model or error code, if given."""

    count: Count
    up_to: Number
    tier: Name | None = None
    model: Name | None = None
    error_code: Name | None = None

    def selection(self) -> LetterSelection:
        """The selected dead letters."""
        return LetterSelection(self.tier, self.model, self.error_code, self.up_to)


class RequeueBody(PurgeBody, forbid_unknown_fields=True, frozen=True):
    """`count` dead letters that can be requeued, with a number above `after`."""

    after: Number = 0


class Purged(msgspec.Struct, frozen=True):
    """The number of deleted dead letters. `warning`: a step that failed, or ""."""

    purged: int
    warning: str


class Rerun(msgspec.Struct, frozen=True):
    """A dead letter, its new request, and the result: `completed`, an error code, or null if there was none in time."""

    request_id: str
    requeued_as: str
    ended: str | None


class Requeued(msgspec.Struct, frozen=True):
    """At most 32 reruns with their results. `left` more remain: send another request with this `count` and `after`."""

    reruns: list[Rerun]
    left: int
    after: int
    warning: str


T = TypeVar("T")
MAX_BODY_BYTES = 4096
MAX_RUNNING = 4
STOP_TIMEOUT_S = 2.0
"""Time that running actions have when the gateway stops."""


class ActionGuard:
    """Authenticates and reads the requests of all actions of a gateway, and limits how many run."""

    def __init__(self, session_auth: SessionAuth) -> None:
        self._session_auth = session_auth
        self._running: set[asyncio.Task[Any]] = set()

    def check(self, call: RoutedRequest) -> None:
        """Raises RequestError if the caller is not authenticated."""
        self._session_auth.check(call)

    async def read(self, call: RoutedRequest, decoder: "msgspec.json.Decoder[T]") -> T:
        """The body of an action. Raises RequestError if the caller is not allowed, or if the body is not valid."""
        self._session_auth.check(call)
        check_same_site(call.headers)
        if "Content-Type" not in call.headers:  # A form of another page could be sent without one, and no preflight.
            raise RequestError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, param="Content-Type")
        check_media(call.headers, int(call.headers.get("Content-Length", "0")), MAX_BODY_BYTES)
        raw = await read_body(call.request, MAX_BODY_BYTES)
        body = decode(decoder, raw)
        check_duplicates(raw)
        return body

    async def carry_out(self, work: Coroutine[Any, Any, T]) -> T:
        """Complete an action even if its caller leaves. Raises its errors, and RequestError if too many are running."""
        if len(self._running) >= MAX_RUNNING:
            work.close()
            raise RequestError(ErrorCode.NO_CAPACITY, "Too many actions are running at this gateway; try again.")
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait([task])
        return task.result()

    async def close(self) -> None:
        """Wait for running actions for STOP_TIMEOUT_S, then cancel them."""
        if self._running:
            await asyncio.wait(self._running, timeout=STOP_TIMEOUT_S)
        await end_all(self._running)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # Marks it as retrieved: the caller may have left.


def uncached(call: RoutedRequest, document: object) -> HttpResponse:
    """A 200 response that must not be cached."""
    return HttpResponse.of(200, document, [("x-request-id", call.request_id), ("Cache-Control", "no-store")])


def actor(call: RoutedRequest) -> str:
    """The actor in `config_changes`. All callers have the same token, so they differ only in their addresses."""
    return f"dashboard ({call.remote})" if call.remote else "dashboard"


Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""One connection to PostgreSQL. Raises the exceptions of `ledger.postgres.AWAY`."""

NOTHING = "so nothing was changed"
_BAD_VALUE = (DataError, IntegrityConstraintViolationError)
"""Errors that the values of the request caused."""

UNKNOWN = "and it is not known whether anything was changed: reload to check"


class AuditedTransaction:
    """Transactions in PostgreSQL, with the actor of the change. `connect`: None if the gateway has no PostgreSQL."""

    def __init__(self, connect: Connect | None) -> None:
        self._connect = connect

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Connection]:
        """A connection for reading. Raises RequestError `catalog_unavailable`, or `invalid_request` for a rejected value."""
        try:
            async with self._connection() as connection:
                yield connection
        except _BAD_VALUE as error:
            raise _bad_value(error) from error
        except AWAY as error:
            raise _unavailable(error, "so this cannot be read") from error

    @asynccontextmanager
    async def change(self, actor: str) -> AsyncIterator[Connection]:
        """A transaction by `actor`, committed at the end of the block. Raises RequestError as `read` does."""
        outcome = NOTHING
        try:
            async with self._connection() as connection, as_actor(connection, actor):
                yield connection
                outcome = UNKNOWN  # The commit follows.
        except _BAD_VALUE as error:
            raise _bad_value(error) from error
        except AWAY as error:
            raise _unavailable(error, outcome) from error

    def _connection(self) -> AbstractAsyncContextManager[Connection]:
        if self._connect is None:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, f"This gateway does not use PostgreSQL, {NOTHING}.")
        return self._connect()


def _bad_value(error: BaseException) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"PostgreSQL rejected a value ({reason(error)}), {NOTHING}.")


def _unavailable(error: BaseException, outcome: str) -> RejectionError:
    return RejectionError(ErrorCode.CATALOG_UNAVAILABLE, f"PostgreSQL is not available ({reason(error)}), {outcome}.")
