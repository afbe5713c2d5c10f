"""The guard that each dashboard action passes: authentication, origin, media type and size, and a limit on running actions.

An action that has started is completed even if its client leaves.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from gateway.http.body.reading import check_media, read_body
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.router import RoutedRequest
from gateway.operations.session import SessionAuth, check_same_site
from scheduler.errors import ErrorCode, RequestError
from scheduler.tasks import end_all

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


def actor(call: RoutedRequest) -> str:
    """The actor in `config_changes`. All callers have the same token, so they differ only in their addresses."""
    return f"dashboard ({call.remote})" if call.remote else "dashboard"
