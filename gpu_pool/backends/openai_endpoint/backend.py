"""An endpoint as the model of one worker: what it is, whether it wants batches, and what it makes of one."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.availability import Look, look
from gpu_pool.backends.openai_endpoint.client import Transport
from gpu_pool.backends.openai_endpoint.errors import Broken, Busy, End
from gpu_pool.backends.openai_endpoint.requests import BROKE_OFF, TOO_SLOW, Line
from gpu_pool.backends.openai_endpoint.settings import Address
from gpu_pool.endpoint.access import Access
from gpu_pool.endpoint.batch import EndpointBatch, HandBack, reason_of, settled, wait_asked_s
from gpu_pool.endpoint.door import Door
from gpu_pool.endpoint.habits import Habits
from gpu_pool.endpoint.pauses import Pauses
from gpu_pool.endpoint.priority import ORDERS, takes_priority
from scheduler.errors import ErrorCode, StartError, TierlaneError

TICK_S = 0.05  # How soon a reader who left is noticed.
MARGIN_S = 0.1  # Of a batch's time, for the way back.
LONGEST_S = 600.0  # For whoever sets no limit at all.
LOAD_S = 60.0
_NO_ANSWERS = (TOO_SLOW, BROKE_OFF)


class EndpointAway(TierlaneError):
    """The endpoint did not answer while the model was to be loaded; it may do later."""


class Endpoint:
    """Used in one event loop. `door` says whether batches are wanted."""

    def __init__(self, address: Address, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises StartError for certificates that cannot be used."""
        self._address = address
        self._clock = clock
        self._transport = Transport(address, access)
        self._seen = Look()
        turns = asyncio.Semaphore(access.max_calls)
        self._line = Line(self._transport, turns, Habits(), lambda: self._seen.model, clock)
        self.door = Door(self.look_again)
        self.replaced: Callable[[], Any] = lambda: None
        """Called when a look finds another model than was loaded."""

    @property
    def model(self) -> str:
        """What the endpoint calls its model; "" before `load`."""
        return self._seen.model

    async def load(self, within_s: float = LOAD_S) -> None:
        """Wait until it is there. Raises StartError where another setting is needed, EndpointAway when it does not come."""
        await self._transport.open()
        pauses, until = Pauses(), self._clock() + within_s
        while (seen := await look(self._transport, self._address)).fault:
            if seen.ours:
                raise StartError(f"{seen.fault} ({self._address.base})")
            if self._clock() >= until:
                raise EndpointAway(seen.fault)
            await asyncio.sleep(pauses.look_s())
        self._seen = seen
        if seen.owner == ORDERS:
            self._line.habits.takes_priority = await takes_priority(self._transport, seen.model, seen.tasks)

    async def answer(self, items: Sequence[Item], step: Callable[[], None]) -> list[ItemResult] | HandBack:
        """Run one batch, at the latest until its items' time is over. `step` is called at every step, and now and then."""
        if self.door.shut:
            return HandBack(self.door.shut, counted=False)
        now = self._clock()
        timed = [replace(item, until=_in_time(item.until, now)) for item in items]
        batch = EndpointBatch(self._line, self._seen.tasks, timed, step)
        ticks = asyncio.create_task(_tick(batch, step))
        try:
            ends = await self._without_false_alarms(await batch.run(), batch.until)
        finally:
            ticks.cancel()
        self._judge(batch.asked(ends))
        return settled(ends, said=batch.calls.said)

    async def close(self) -> None:
        """Hang up."""
        await self.door.close()
        await self._transport.close()

    async def _without_false_alarms(self, ends: list[End], until: float) -> list[End]:
        """A proxy may forbid one text with the status of a wrong key: where a look finds all well, it was that.

        The look has the batch's time and no more: past it the watchdog would end the process, with all other batches.
        """
        if not any(isinstance(end, Broken) for end in ends) or await self._ill(until):
            return ends
        forbidden = ItemResult("The model does not accept this request.", 0, ErrorCode.INVALID_REQUEST)
        return [forbidden if isinstance(end, Broken) and not end.key else end for end in ends]

    async def _ill(self, until: float) -> bool:
        try:
            async with asyncio.timeout(until - self._clock()):
                return bool(await self.look_again())
        except TimeoutError:
            return True

    def _judge(self, ends: Sequence[End]) -> None:
        """What the items that the endpoint was asked for say of it."""
        broken = next((end for end in ends if isinstance(end, Broken)), None)
        if broken is not None:
            self.door.broken(broken.reason)
        elif any(isinstance(end, Busy) for end in ends):
            self.door.busy(wait_asked_s(ends))
        elif any(isinstance(end, ItemResult) and end not in _NO_ANSWERS for end in ends):
            self.door.worked()
        elif ends:
            said = next((end.output for end in ends if isinstance(end, ItemResult)), "")
            self.door.failed(reason_of(ends) or said)

    async def look_again(self) -> str:
        """Why the endpoint cannot be used; "" where it can."""
        seen = await look(self._transport, self._address, self._seen.model)
        if seen.fault:
            return seen.fault
        if not self._seen.tasks <= seen.tasks:  # A proxy before servers that restart; callers must not be told of it.
            return "The endpoint lacks a route that it had."
        before, self._seen = self._seen, seen
        if seen.model != before.model:
            self.replaced()
        return ""


def _in_time(until: float, now: float) -> float:
    """When an item's calls must be over, so that its end arrives while it is of use."""
    left_s = min(until - now, LONGEST_S)
    return now + left_s - min(MARGIN_S, 0.1 * left_s)


async def _tick(batch: EndpointBatch, step: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        batch.calls.let_go()
        step()
