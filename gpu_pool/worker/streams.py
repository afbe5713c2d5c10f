"""What a worker's streams add, on its way to the gateways: what gathers while one message is under way goes with the next.

So neither the model nor the supervisor ever waits for Redis, and what waits is bounded: pieces of one request that
follow each other, or overlap, are one, and what finds no room is dropped. A gateway fills such gaps from the stored reply.
"""

import asyncio

from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.increments import LOST, Address, Increment, IncrementChannel

MOST_CHARACTERS = 1 << 20


class Outgoing:
    """All streams' of one worker."""

    def __init__(self, channel: IncrementChannel) -> None:
        self._channel = channel
        self._waiting: dict[str, dict[str, Increment]] = {}
        self._characters = 0
        self._wake = asyncio.Event()
        self.dropped = 0

    def add(self, address: Address, increment: Increment) -> None:
        """Send this soon, or never."""
        if self._characters + len(increment.text) > MOST_CHARACTERS:
            self.dropped += 1
            return
        waiting = self._waiting.setdefault(address.gateway_id, {})
        whole = joined(waiting.get(increment.id), increment)
        if whole is None:
            self.dropped += 1
            return
        waiting[increment.id] = whole
        self._characters += len(increment.text)
        self._wake.set()

    async def run(self) -> None:
        """Send whenever something was added; never ends by itself."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._send()
            except RedisUnavailable:
                self.dropped += 1  # Whoever reads along gets the rest with the end.
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("increments not sent", error)

    async def _send(self) -> None:
        waiting, self._waiting, self._characters = self._waiting, {}, 0
        publish = self._channel.publish
        calls = (publish(gateway_id, list(increments.values())) for gateway_id, increments in waiting.items())
        for fault in await asyncio.gather(*calls, return_exceptions=True):
            if fault is not None:
                raise fault


def joined(before: Increment | None, more: Increment) -> Increment | None:
    """Both as one; the later one where the request is run again; None where a piece between them is missing."""
    if before is None or more.attempt != before.attempt or more.offset == LOST:
        return more
    end = before.offset + len(before.text)
    if before.offset == LOST or more.offset > end:
        return None
    if more.offset < before.offset:
        return more
    kept = before.text[: more.offset - before.offset]
    return Increment(more.id, more.nonce, more.attempt, before.offset, kept + more.text)
