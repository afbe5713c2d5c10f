"""Cordon and uncordon on the page for on-call: the rows that `tierlane gpu` writes, which schedulers obey within a second."""

from collections.abc import Iterator

import msgspec

from gateway.action_door import ActionDoor, actor, said
from gateway.desk import Desk
from gateway.http.response import Answer
from gateway.http.router import Call
from gateway.operations.action_requests import CordonBody, Cordoned, UncordonBody
from gateway.pools import Pools
from ledger.operating import cordon_worker, uncordon_worker
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.pool_view import Observation

_cordon = msgspec.json.Decoder(CordonBody)
_uncordon = msgspec.json.Decoder(UncordonBody)


class CordonActions:
    """The handlers."""

    def __init__(self, door: ActionDoor, desk: Desk, pools: Pools) -> None:
        self._door = door
        self._desk = desk
        self._pools = pools

    async def cordon(self, call: Call) -> Answer:
        """No new work for a worker, as long as its pool is left with as many healthy ones as was confirmed."""
        body = await self._door.read(call, _cordon)
        check_left(body, list(self._looks()))
        return said(call, await self._door.carry_out(self._cordoned(body, actor(call))))

    async def uncordon(self, call: Call) -> Answer:
        """It may claim again."""
        body = await self._door.read(call, _uncordon)
        return said(call, await self._door.carry_out(self._uncordoned(body, actor(call))))

    async def _cordoned(self, body: CordonBody, by: str) -> Cordoned:
        async with self._desk.acting(by) as connection:
            changed = await cordon_worker(connection, body.worker, body.reason)
        return Cordoned(body.worker, cordoned=True, changed=changed)

    async def _uncordoned(self, body: UncordonBody, by: str) -> Cordoned:
        async with self._desk.acting(by) as connection:
            changed = await uncordon_worker(connection, body.worker)
        if not changed:
            _pool_of(body.worker, list(self._looks()))
        return Cordoned(body.worker, cordoned=False, changed=changed)

    def _looks(self) -> Iterator[Observation]:
        for parts in self._pools.all:
            if parts.beat.observation is not None:
                yield parts.beat.observation


def check_left(body: CordonBody, looks: list[Observation]) -> None:
    """Raises RequestError for a worker that nobody knows, and where its pool would be left with fewer than was confirmed."""
    look = _pool_of(body.worker, looks)
    left = sum(other.healthy for other in look.workers if other.id != body.worker)
    if left < body.healthy_left:
        message = (
            f"Its pool was to be left with {body.healthy_left} healthy, but would be with {left} now; nothing was changed. "
            "Look again."
        )
        raise RequestError(ErrorCode.CHANGED_MEANWHILE, message, "healthy_left")


def _pool_of(worker: str, looks: list[Observation]) -> Observation:
    for look in looks:
        if any(view.id == worker for view in look.workers):
            return look
    raise RequestError(ErrorCode.NOT_FOUND, "No worker of this id was seen in the last five minutes.", "worker")
