"""Dead letters on the page for on-call: how many there are, and purge and requeue of exactly those that were seen."""

from collections.abc import Sequence

import msgspec

from gateway.action_door import ActionDoor, actor, said
from gateway.desk import Desk
from gateway.http.response import Answer
from gateway.http.router import Call
from gateway.operations.action_requests import PurgeBody, Purged, RequeueBody
from gateway.operations.requeue import Requeuing, differs
from gateway.pools import Pools
from ledger.letter_groups import CountDiffers, letter_groups, purge_seen
from scheduler.errors import RedisUnavailable

_purge = msgspec.json.Decoder(PurgeBody)
_requeue = msgspec.json.Decoder(RequeueBody)
STILL_COUNTED = "Redis does not answer, so health still counts them."


class LetterActions:
    """The handlers."""

    def __init__(self, door: ActionDoor, desk: Desk, pools: Pools) -> None:
        self._door = door
        self._desk = desk
        self._pools = pools
        self._requeuing = Requeuing(desk, pools)

    async def groups(self, call: Call) -> Answer:
        """How many there are, by tier, model and cause."""
        self._door.check(call)
        async with self._desk.looking() as connection:
            found = await letter_groups(connection, [parts.config.pool for parts in self._pools.all])
        return said(call, found)

    async def purge(self, call: Call) -> Answer:
        """Delete them for good, inputs included."""
        body = await self._door.read(call, _purge)
        return said(call, await self._door.carry_out(self._purged(body, actor(call))))

    async def requeue(self, call: Call) -> Answer:
        """Run the oldest 32 of them again now, and tell how each ended."""
        body = await self._door.read(call, _requeue)
        return said(call, await self._door.carry_out(self._requeuing.requeue(body, actor(call))))

    async def _purged(self, body: PurgeBody, by: str) -> Purged:
        async with self._desk.acting(by) as connection:
            try:
                ids = await purge_seen(connection, body.seen(), body.count)
            except CountDiffers as error:
                raise differs(body.count, error.found, "deleted") from error
        return Purged(len(ids), await self._forget(ids))

    async def _forget(self, ids: Sequence[str]) -> str:
        """Take them off the lists in Redis, where health counts them; what is to be said where that cannot be done."""
        try:
            for parts in self._pools.all:
                await parts.reruns.forget_dead(ids)
        except RedisUnavailable:
            return STILL_COUNTED
        return ""
