"""Reads all open responses of an endpoint together, soon after one of them has received something.

A task that waits for each part of its response costs a wake-up for each token of each stream: more than everything else that
is done for it. An engine sends the tokens of all its sequences at the same moment, so one sweep finds many. All responses
wait with the same future, which the first that receives data completes.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiohttp

from gpu_pool.backends.openai_endpoint.client import CallTimeout, ResponseAborted

COLLECT_S = 0.001
"""From the first data to the sweep, if several responses are open: the others receive theirs meanwhile."""
SPACING_S = 0.003
"""The least time between two sweeps of several responses."""
CHECK_S = 0.05
"""The longest time between two sweeps, which also find responses that are silent for too long."""


@dataclass(eq=False, slots=True)
class _OpenResponse:
    """`take` receives each part, and returns whether the response is complete. Times are seconds of the clock."""

    content: aiohttp.StreamReader
    take: Callable[[bytes], bool]
    silent_at: float
    until: float
    complete: "asyncio.Future[bool]"
    seen: int = 0


class StreamSweep:
    """`swept` is called after each sweep that found something. `silence_s`: the longest time between two parts."""

    def __init__(
        self, swept: Callable[[], None], silence_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._swept = swept
        self._silence_s = silence_s
        self._clock = clock
        self._open: set[_OpenResponse] = set()
        self._timer: asyncio.Handle | None = None
        self._due_s = math.inf  # In the time of the loop. A handle of uvloop does not always know it.
        self._news: asyncio.Future[None] | None = None
        self._swept_at = -math.inf

    async def read(
        self, content: aiohttp.StreamReader, take: Callable[[bytes], bool], first_at: float, until: float
    ) -> bool:
        """Read until `take` returns True, or to the end of the body: then False. The first part must come by `first_at`.

        Raises ResponseAborted, CallTimeout, and what `take` raises.
        """
        loop = asyncio.get_running_loop()
        response = _OpenResponse(content, take, first_at, until, loop.create_future())
        self._open.add(response)
        self._wait_for_data([response])
        if self._timer is None or content.total_bytes or content.is_eof() or content.exception() is not None:
            self._plan(0)
        try:
            return await response.complete
        finally:
            self._open.discard(response)

    def _wait_for_data(self, responses: Iterable[_OpenResponse]) -> None:
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
            self._news.add_done_callback(self._arrived)
        for response in responses:
            response.content._waiter = self._news  # noqa: SLF001 - the public methods wait in a task for each response

    def _arrived(self, news: "asyncio.Future[None]") -> None:
        if not news.cancelled():
            news.exception()  # Of a connection that was lost; its response has it, too.
        if len(self._open) > 1:
            self._plan(max(COLLECT_S, self._swept_at + SPACING_S - self._clock()))
        else:
            self._plan(0)

    def _plan(self, after_s: float) -> None:
        """Sweep after this time, or when it is planned if that is earlier."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + after_s
        if self._timer is not None:
            if self._due_s <= due_s:
                return
            self._timer.cancel()
        self._timer, self._due_s = loop.call_later(after_s, self._sweep), due_s

    def _sweep(self) -> None:
        now, has_new = self._clock(), False
        self._timer, self._swept_at = None, now
        for response in list(self._open):
            content = response.content
            if response.complete.done():
                continue
            if content.total_bytes != response.seen:
                has_new = True
                response.seen, response.silent_at = content.total_bytes, now + self._silence_s
                try:
                    # Data received before the connection was lost may complete the output; the public methods raise instead.
                    if response.take(content._read_nowait(-1)):  # noqa: SLF001
                        response.complete.set_result(True)
                except Exception as error:  # noqa: BLE001 - it is of this response
                    response.complete.set_exception(error)
            elif (fault := content.exception()) is not None:
                lost = ResponseAborted(f"The endpoint's response broke off: {type(fault).__name__}.")
                response.complete.set_exception(lost)
            elif content.is_eof():
                response.complete.set_result(False)
            elif now >= min(response.silent_at, response.until):
                response.complete.set_exception(CallTimeout("The endpoint did not continue its response in time."))
        if has_new:
            self._swept()
        if self._open:
            self._wait_for_data(self._open)
            self._plan(CHECK_S)
