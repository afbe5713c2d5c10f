"""Requests for dashboard actions: bodies, the guard in front of every action, and the audited transaction.

Each body carries what the operator saw, so that what is done is what was confirmed. Few actions run at a time. Once
begun, an action is completed though its client leaves. The change and its record are one transaction in PostgreSQL, on
one short connection.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, TypeVar

import msgspec
from asyncpg import DataError, IntegrityConstraintViolationError
from msgspec import Meta

from gateway.http.errors import RejectionError
from gateway.http.request import check_duplicates, check_media, decode, read_body
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.operations.session import SessionAuth, check_same_site
from ledger.admin.transaction import as_actor
from ledger.dead_letters import LetterSelection
from ledger.postgres import AWAY, Connection, reason
from scheduler.errors import ErrorCode, RequestError
from scheduler.tasks import end_all

MOST_LETTERS = 10_000
"""That one action may be about."""

MOST_NUMBER = 2**63 - 1
MAX_WORKER_CHARACTERS = 200
MAX_REASON_CHARACTERS = 500

PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*(?![\s\S])"
"""Without control characters: PostgreSQL keeps no NUL, and its tables refuse the others. (`$` would let
a line feed at the end pass.)
"""

Worker = Annotated[str, Meta(min_length=1, max_length=MAX_WORKER_CHARACTERS, pattern=PLAIN)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS, pattern=PLAIN)]
Healthy = Annotated[int, Meta(ge=0, le=1_000_000)]
Count = Annotated[int, Meta(ge=1, le=MOST_LETTERS)]
Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
Name = Annotated[str, Meta(max_length=200, pattern=PLAIN)]


class CordonBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`healthy_left`: how many healthy workers the pool was said to be left with."""

    worker: Worker
    healthy_left: Healthy
    reason: Reason = ""


class UncordonBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Which worker may claim again."""

    worker: Worker


class Cordoned(msgspec.Struct, frozen=True):
    """How it is now; `changed` is false where it was so before."""

    worker: str
    cordoned: bool
    changed: bool


class PurgeBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`count` letters up to number `up_to`, of one tier, model and cause each, or of any where it is left out."""

    count: Count
    up_to: Number
    tier: Name | None = None
    model: Name | None = None
    error_code: Name | None = None

    def seen(self) -> LetterSelection:
        """Which letters these are."""
        return LetterSelection(self.tier, self.model, self.error_code, self.up_to)


class RequeueBody(PurgeBody, forbid_unknown_fields=True, frozen=True):
    """`count` letters that can be run again, with a number above `after`."""

    after: Number = 0


class Purged(msgspec.Struct, frozen=True):
    """How many were deleted. `warning`: what could not be done besides, "" where all was."""

    purged: int
    warning: str


class Rerun(msgspec.Struct, frozen=True):
    """A letter, the new request made of it, and its end: `completed`, an error code, or null where none was seen in time."""

    request_id: str
    requeued_as: str
    ended: str | None


class Requeued(msgspec.Struct, frozen=True):
    """At most 32 were begun, and are ended. `left` more are to come: ask again with this `count` and `after`."""

    reruns: list[Rerun]
    left: int
    after: int
    warning: str


T = TypeVar("T")
MAX_BODY_BYTES = 4096
AT_ONCE = 4
LAST_S = 2.0
"""A gateway that stops gives so long to what is under way."""


class ActionGuard:
    """One for all actions of a gateway."""

    def __init__(self, session_auth: SessionAuth) -> None:
        self._session_auth = session_auth
        self._under_way: set[asyncio.Task[Any]] = set()

    def check(self, call: RoutedRequest) -> None:
        """Raises RequestError for who is not logged in."""
        self._session_auth.check(call)

    async def read(self, call: RoutedRequest, decoder: "msgspec.json.Decoder[T]") -> T:
        """What is to be done. Raises RequestError for who may not, and for what cannot be meant so."""
        self._session_auth.check(call)
        check_same_site(call.headers)
        if "Content-Type" not in call.headers:  # A form of another page could come without one, and without asking.
            message = "Content-Type must be application/json."
            raise RequestError(ErrorCode.UNSUPPORTED_ENCODING, message, "Content-Type")
        check_media(call.headers, int(call.headers.get("Content-Length", "0")), MAX_BODY_BYTES)
        raw = await read_body(call.request, MAX_BODY_BYTES)
        body = decode(decoder, raw)
        check_duplicates(raw)
        return body

    async def carry_out(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to its end, whatever becomes of the caller. Raises what it raises, and RequestError where too many are at it."""
        if len(self._under_way) >= AT_ONCE:
            work.close()
            raise RequestError(ErrorCode.NO_CAPACITY, "Too many actions are under way at this gateway; try again.")
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait([task])
        return task.result()

    async def close(self) -> None:
        """Let what is under way end, but not for long."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=LAST_S)
        await end_all(self._under_way)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # Nobody may be there any more to be told.


def said(call: RoutedRequest, document: object) -> HttpResponse:
    """An answer that nobody keeps."""
    return HttpResponse.of(200, document, [("x-request-id", call.request_id), ("Cache-Control", "no-store")])


def actor(call: RoutedRequest) -> str:
    """Whom `config_changes` names. Everybody has the same token, so the address is all that is known of them."""
    return f"dashboard ({call.remote})" if call.remote else "dashboard"


Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""One connection to PostgreSQL. Raises what is in `ledger.postgres.AWAY`."""

NOTHING = "so nothing was changed"
_BAD_VALUE = (DataError, IntegrityConstraintViolationError)
"""What is the fault of what was sent, and says nothing against PostgreSQL."""

UNKNOWN = "and whether anything was changed is not known: look again"


class AuditedTransaction:
    """Without `connect` there is no PostgreSQL here, and nothing can be done."""

    def __init__(self, connect: Connect | None) -> None:
        self._connect = connect

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[Connection]:
        """For a look. Raises RequestError `catalog_unavailable`, and `invalid_request` for what PostgreSQL does not take."""
        try:
            async with self._connection() as connection:
                yield connection
        except _BAD_VALUE as error:
            raise _bad_value(error) from error
        except AWAY as error:
            raise _away(error, "so this is not known") from error

    @asynccontextmanager
    async def acting(self, actor: str) -> AsyncIterator[Connection]:
        """For a change by `actor`, committed at the end of the block. Raises RequestError as `looking` does."""
        outcome = NOTHING
        try:
            async with self._connection() as connection, as_actor(connection, actor):
                yield connection
                outcome = UNKNOWN  # From here on it is being committed.
        except _BAD_VALUE as error:
            raise _bad_value(error) from error
        except AWAY as error:
            raise _away(error, outcome) from error

    def _connection(self) -> AbstractAsyncContextManager[Connection]:
        if self._connect is None:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE, f"This gateway has no PostgreSQL, {NOTHING}.")
        return self._connect()


def _bad_value(error: BaseException) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"PostgreSQL does not take this ({reason(error)}), {NOTHING}.")


def _away(error: BaseException, outcome: str) -> RejectionError:
    return RejectionError(ErrorCode.CATALOG_UNAVAILABLE, f"PostgreSQL cannot be used ({reason(error)}), {outcome}.")
