"""Streams of a worker's batches: increments to the gateways, and cancellations to the model.

Increments that arrive while a message is being sent go with the next one. Neither the model nor the worker waits for
Redis, and the waiting text is bounded: adjacent or overlapping pieces of a request are joined, and what does not fit is
dropped. A gateway fills such gaps from the stored reply.
"""

import asyncio
from collections.abc import Callable, Sequence

from gpu_pool.model_process.messages import Piece
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.protocol.batches import ClaimedRequest
from scheduler.protocol.replies import LOST, Increment, IncrementChannel, IncrementTarget, read_address

MOST_CHARACTERS = 1 << 20


class Outgoing:
    """Increments of all streams of one worker."""

    def __init__(self, channel: IncrementChannel) -> None:
        self._channel = channel
        self._waiting: dict[str, dict[str, Increment]] = {}
        self._characters = 0
        self._wake = asyncio.Event()
        self.dropped = 0

    def add(self, address: IncrementTarget, increment: Increment) -> None:
        """Queue an increment for sending, or drop it."""
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
        """Send whatever was added; never ends by itself."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._send()
            except RedisUnavailable:
                self.dropped += 1  # Clients get the rest with the reply.
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


Drop = Callable[[Sequence[int]], None]


class BatchStreams:
    """The streams of one batch, from claim to end."""

    def __init__(self, requests: Sequence[ClaimedRequest], outgoing: Outgoing) -> None:
        self._attempts = {request.id: request.attempt for request in requests}
        self._outgoing = outgoing
        self._begun: dict[str, IncrementTarget] = {}
        self._ids: Sequence[str] = ()
        self._drop: Drop | None = None
        self._gone: set[str] = set()

    @property
    def members(self) -> set[str]:
        """Requests that are not cancelled as far as is known."""
        return self._attempts.keys() - self._gone

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
            address = read_address(piece.stream)
            if address is None or not 0 <= piece.place < len(self._ids):
                continue
            request_id = self._ids[piece.place]
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
        increment = Increment(request_id, address.nonce, self._attempts[request_id], offset, text)
        self._outgoing.add(address, increment)
