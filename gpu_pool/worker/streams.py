"""Streams of a worker's batches: increments to the gateways, and cancellations to the model.

A message to a gateway costs all processes as much CPU as ten events, so the increments of all its streams go together: those
that arrive while a message is being sent, and for a few milliseconds after it. After a pause, and with the first text of a
stream, a message is sent at once. Neither the model nor the worker waits for Redis, and the waiting text is bounded: adjacent or overlapping pieces of a request are
joined, and what does not fit is dropped. Text that no gateway received goes again with the next text of a stream, while
its gateway may be subscribing again. A gateway fills all other gaps from the stored reply.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence

from gpu_pool.model_process.messages import Piece
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.batches import ClaimedRequest
from scheduler.protocol.increments import LOST, Increment, IncrementChannel, IncrementTarget, read_address

MOST_CHARACTERS = 1 << 20
SEND_EVERY_S = 0.008
"""The time between two messages. Of 64 streams with 50 tokens a second, each has 25 events."""
ABSENT_S = 0.5
"""How long the text of a gateway without a subscription is kept; a lost subscription is restored in less."""
FORGET_S = 60.0

Drop = Callable[[Sequence[int]], None]


class Outgoing:
    """Increments of all streams of one worker. `clock` is monotonic seconds."""

    def __init__(self, channel: IncrementChannel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._waiting: dict[str, dict[str, Increment]] = {}
        self._characters = 0
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = -math.inf
        self._absent_since: dict[str, float] = {}
        self.dropped = 0

    def add(self, address: IncrementTarget, increment: Increment) -> None:
        """Queue an increment for sending, or drop it."""
        self._queue(address.gateway_id, increment)
        early_s = self._sent_at + SEND_EVERY_S - self._clock()
        if early_s <= 0 or increment.offset <= 0:  # The first text, or the loss of the run.
            self._wake.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(early_s, self._wake.set)

    async def run(self) -> None:
        """Send whatever was added; never ends by itself."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._sent_at = self._clock()
            waiting, self._waiting, self._characters = self._waiting, {}, 0
            with LoggedFaults("increments not sent"):
                if len(waiting) == 1:  # Without a task.
                    (gateway_id,) = waiting
                    await self._publish(gateway_id, waiting[gateway_id])
                    continue
                calls = (self._publish(gateway_id, increments) for gateway_id, increments in waiting.items())
                for fault in await asyncio.gather(*calls, return_exceptions=True):
                    if fault is not None:
                        raise fault

    def _queue(self, gateway_id: str, increment: Increment) -> None:
        if self._characters + len(increment.text) > MOST_CHARACTERS:
            self.dropped += 1
            return
        waiting = self._waiting.setdefault(gateway_id, {})
        whole = joined(waiting.get(increment.id), increment)
        if whole is None:
            self.dropped += 1
            return
        waiting[increment.id] = whole
        self._characters += len(increment.text)

    async def _publish(self, gateway_id: str, increments: Mapping[str, Increment]) -> None:
        try:
            received = await self._channel.publish(gateway_id, list(increments.values()))
        except RedisUnavailable:
            received = False
        if received:
            if self._absent_since:
                self._absent_since.pop(gateway_id, None)
            return

        # Queue them again, before those that were added since, unless the gateway has been absent for long. They are sent with
        # the next one, since the gateway gets the whole output at the end.
        now = self._clock()
        self._absent_since = {each: since for each, since in self._absent_since.items() if now - since < FORGET_S}
        if now - self._absent_since.setdefault(gateway_id, now) >= ABSENT_S:
            self.dropped += 1
            return
        added = self._waiting.pop(gateway_id, {}).values()
        self._characters -= sum(len(increment.text) for increment in added)
        for increment in (*increments.values(), *added):
            self._queue(gateway_id, increment)


def joined(before: Increment | None, more: Increment) -> Increment | None:
    """Both as one increment; the later one if the request is run again; None if a piece between them is missing."""
    if before is None or more.attempt != before.attempt or more.offset == LOST:
        return more
    end = before.offset + len(before.text)
    if before.offset == LOST or more.offset > end:
        return None
    if more.offset < before.offset:
        return more
    kept = before.text[: more.offset - before.offset]
    return Increment(more.id, more.nonce, more.attempt, before.offset, kept + more.text)


class BatchStreams:
    """The streams of one batch, from claim to end."""

    def __init__(self, requests: Sequence[ClaimedRequest], outgoing: Outgoing) -> None:
        self._requests = requests
        self._outgoing = outgoing
        self._attempts: dict[str, int] = {}
        self._begun: dict[str, IncrementTarget] = {}
        self._ids: Sequence[str] = ()
        self._drop: Drop | None = None
        self._gone: set[str] = set()

    @property
    def members(self) -> set[str]:
        """Requests that are not cancelled as far as is known."""
        return {request.id for request in self._requests} - self._gone

    def waiting(self, requests: Sequence[ClaimedRequest]) -> Sequence[ClaimedRequest]:
        """The requests that still have to be run."""
        return [request for request in requests if request.id not in self._gone] if self._gone else requests

    def begin(self, ids: Sequence[str], drop: Drop) -> None:
        """The model runs these, in this order; `drop` cancels positions of the batch."""
        self._ids, self._drop = ids, drop

    def end(self) -> None:
        """The run has ended."""
        self._drop = None

    def on_pieces(self, pieces: Sequence[Piece]) -> None:
        """The model added these pieces."""
        for piece in pieces:
            if not 0 <= piece.place < len(self._ids):
                continue
            request_id = self._ids[piece.place]
            address = self._begun.get(request_id) or read_address(piece.stream)
            if address is None:
                continue
            self._begun[request_id] = address
            self._send_piece(request_id, address, piece.offset, piece.text)

    def keep_only(self, left: frozenset[str]) -> None:
        """All requests except `left` are cancelled."""
        gone = self.members - left
        self._gone |= gone
        if self._drop is not None and (places := [i for i, each in enumerate(self._ids) if each in gone]):
            self._drop(places)

    def lost(self) -> None:
        """The run is lost; streams that had begun will not be continued."""
        for request_id, address in self._begun.items():
            self._send_piece(request_id, address, LOST, "")
        self._begun = {}

    def _send_piece(self, request_id: str, address: IncrementTarget, offset: int, text: str) -> None:
        if not self._attempts:  # Most batches have no stream.
            self._attempts = {request.id: request.attempt for request in self._requests}
        increment = Increment(request_id, address.nonce, self._attempts[request_id], offset, text)
        self._outgoing.add(address, increment)
