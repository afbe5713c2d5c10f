"""The last quarter of an hour: a moment every two seconds, here in memory and, where Redis answers, in its list too.

A gateway that starts reads what others kept, so every page shows the same; without Redis each goes on with its own.
"""

from collections import deque

import msgspec

from gateway.operations.state import Event, State
from scheduler.errors import RedisUnavailable
from scheduler.protocol.history import MOMENTS, STEP_MS, History


class TierMoment(msgspec.Struct, frozen=True, array_like=True):
    """One tier: as `TierState`."""

    name: str
    depth: int
    oldest_ms: float
    in_rps: float
    out_rps: float
    shed_rps: float
    limit_ratio: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    failed_rps: float = 0.0  # Older gateways keep none.


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """What the charts draw, and what happened since the moment before."""

    at_ms: int
    status: str
    demand_rps: float
    capacity_rps: float
    tiers: list[TierMoment]
    events: list[Event]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Moment).decode


def moment(state: State, events: list[Event]) -> Moment:
    """What is kept of a document of state."""
    tiers = [
        TierMoment(
            tier.name,
            tier.depth,
            tier.oldest_ms,
            tier.in_rps,
            tier.out_rps,
            tier.shed_rps,
            tier.limit_ratio,
            tier.p50_ms,
            tier.p95_ms,
            tier.p99_ms,
            tier.failed_rps,
        )
        for tier in state.tiers
    ]
    return Moment(state.at_ms, state.status, state.demand_rps, state.capacity_rps, tiers, events)


class Moments:
    """The ring. `note` is called with every new document."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._ring: deque[Moment] = deque(maxlen=MOMENTS)
        self._since: list[Event] = []
        self._known = False  # What others kept was read.

    @property
    def all(self) -> list[Moment]:
        """All of them, the oldest first."""
        return list(self._ring)

    async def note(self, state: State) -> None:
        """Keep a moment where the last one is two seconds old. Never raises for a Redis that is away."""
        self._since += state.events
        if self._has(state):
            return
        try:
            await self._begin()
        except RedisUnavailable:
            self._take(state)
            return
        if not self._has(state):  # As others may have told just now.
            await self._write(self._take(state))

    def _has(self, state: State) -> bool:
        return bool(self._ring) and state.at_ms // STEP_MS <= self._ring[-1].at_ms // STEP_MS

    def _take(self, state: State) -> Moment:
        taken, self._since = moment(state, self._since), []
        self._ring.append(taken)
        return taken

    async def _begin(self) -> None:
        """Once: put what others kept before what this gateway has seen itself."""
        if self._known:
            return
        kept = [each for each in map(_read, await self._history.read()) if each is not None]
        first_ms = self._ring[0].at_ms if self._ring else None
        before = [each for each in kept if first_ms is None or each.at_ms < first_ms]
        self._ring = deque([*before, *self._ring], maxlen=MOMENTS)
        self._known = True

    async def _write(self, newest: Moment) -> None:
        try:
            if not await self._history.has_turn():
                return
            kept = await self._history.add(_encode(newest))
            if kept == 1 and len(self._ring) > 1:
                await self._history.add_older([_encode(each) for each in reversed(list(self._ring)[:-1])])
        except RedisUnavailable:
            return  # It stays in memory, and the list has a gap.

    async def close(self) -> None:
        """Let another gateway write."""
        try:
            await self._history.give_up()
        except RedisUnavailable:
            return  # The turn runs out by itself.


def _read(packed: bytes) -> Moment | None:
    """None for what another version wrote in another form."""
    try:
        return _decode(packed)
    except msgspec.MsgspecError:
        return None
