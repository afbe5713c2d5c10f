"""Reads all open responses of an endpoint at short intervals.

A task that waits for each part of its response costs a wake-up for each token of each stream: more than everything else that
is done for it. An engine sends the tokens of all its sequences at the same moment, so one sweep finds many.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from gpu_pool.backends.openai_endpoint.client import CallTimeout, ResponseAborted

SWEEP_S = 0.003
"""Time between two sweeps while responses are open: a token waits for half of it on average."""


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
        self._timer: asyncio.TimerHandle | None = None

    async def read(
        self, content: aiohttp.StreamReader, take: Callable[[bytes], bool], first_at: float, until: float
    ) -> bool:
        """Read until `take` returns True, or to the end of the body: then False. The first part must come by `first_at`.

        Raises ResponseAborted, CallTimeout, and what `take` raises.
        """
        loop = asyncio.get_running_loop()
        response = _OpenResponse(content, take, first_at, until, loop.create_future())
        self._open.add(response)
        if self._timer is None:
            self._timer = loop.call_later(0, self._sweep)
        try:
            return await response.complete
        finally:
            self._open.discard(response)

    def _sweep(self) -> None:
        now, has_new = self._clock(), False
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
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep) if self._open else None
