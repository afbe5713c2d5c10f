"""The way into every action of the page for on-call: who, from where, what, and few at a time.

Once begun, an action goes on to its end though its client leaves: half of one would be done, and nobody told.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from gateway.body import check_media, read_body
from gateway.endless import end_all
from gateway.http.request import check_duplicates, decode
from gateway.http.response import Answer
from gateway.http.router import Call
from gateway.logged_in import LoggedIn
from gateway.same_site import check_same_site
from scheduler.errors import ErrorCode, RequestError

T = TypeVar("T")
MAX_BODY_BYTES = 4096
AT_ONCE = 4
LAST_S = 2.0
"""A gateway that stops gives so long to what is under way."""


class ActionDoor:
    """One for all actions of a gateway."""

    def __init__(self, logged_in: LoggedIn) -> None:
        self._logged_in = logged_in
        self._under_way: set[asyncio.Task[Any]] = set()

    def check(self, call: Call) -> None:
        """Raises RequestError for who is not logged in."""
        self._logged_in.check(call)

    async def read(self, call: Call, decoder: "msgspec.json.Decoder[T]") -> T:
        """What is to be done. Raises RequestError for who may not, and for what cannot be meant so."""
        self._logged_in.check(call)
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


def said(call: Call, document: object) -> Answer:
    """An answer that nobody keeps."""
    return Answer.of(200, document, [("x-request-id", call.request_id), ("Cache-Control", "no-store")])


def actor(call: Call) -> str:
    """Whom `config_changes` names. Everybody has the same token, so the address is all that is known of them."""
    return f"dashboard ({call.remote})" if call.remote else "dashboard"
