"""The actions of the dashboard: cordon and uncordon workers, purge and requeue the dead letters that the operator saw.

They are few and rare, and built for safety rather than speed: authorisation first, then the origin of the request, then
its exact content, and nothing is done that PostgreSQL does not record. Schedulers obey a cordon within a second.
"""

from collections.abc import Iterator, Sequence

import msgspec

from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.operations.action_requests import (
    ActionGuard,
    AuditedTransaction,
    Connect,
    CordonBody,
    Cordoned,
    PurgeBody,
    Purged,
    RequeueBody,
    UncordonBody,
    actor,
    said,
)
from gateway.operations.requeue import DeadLetterRequeue, differs
from gateway.operations.session import SessionAuth
from gateway.pools import Pools
from ledger.admin.transaction import cordon_worker, uncordon_worker
from ledger.dead_letters import CountDiffers, letter_groups, purge_seen
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.protocol.pool_view import Observation

_cordon = msgspec.json.Decoder(CordonBody)
_uncordon = msgspec.json.Decoder(UncordonBody)


class CordonActions:
    """The handlers."""

    def __init__(self, door: ActionGuard, transaction: AuditedTransaction, pools: Pools) -> None:
        self._door = door
        self._transaction = transaction
        self._pools = pools

    async def cordon(self, call: RoutedRequest) -> HttpResponse:
        """No new work for a worker, as long as its pool is left with as many healthy ones as was confirmed."""
        body = await self._door.read(call, _cordon)
        check_left(body, list(self._looks()))
        return said(call, await self._door.carry_out(self._cordoned(body, actor(call))))

    async def uncordon(self, call: RoutedRequest) -> HttpResponse:
        """It may claim again."""
        body = await self._door.read(call, _uncordon)
        return said(call, await self._door.carry_out(self._uncordoned(body, actor(call))))

    async def _cordoned(self, body: CordonBody, by: str) -> Cordoned:
        async with self._transaction.acting(by) as connection:
            changed = await cordon_worker(connection, body.worker, body.reason)
        return Cordoned(body.worker, cordoned=True, changed=changed)

    async def _uncordoned(self, body: UncordonBody, by: str) -> Cordoned:
        async with self._transaction.acting(by) as connection:
            changed = await uncordon_worker(connection, body.worker)
        if not changed:
            _pool_of(body.worker, list(self._looks()))
        return Cordoned(body.worker, cordoned=False, changed=changed)

    def _looks(self) -> Iterator[Observation]:
        for parts in self._pools.all:
            if parts.heartbeat.observation is not None:
                yield parts.heartbeat.observation


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


_purge = msgspec.json.Decoder(PurgeBody)
_requeue = msgspec.json.Decoder(RequeueBody)
STILL_COUNTED = "Redis does not answer, so health still counts them."


class DeadLetterActions:
    """The handlers."""

    def __init__(self, door: ActionGuard, transaction: AuditedTransaction, pools: Pools) -> None:
        self._door = door
        self._transaction = transaction
        self._pools = pools
        self._requeuing = DeadLetterRequeue(transaction, pools)

    async def groups(self, call: RoutedRequest) -> HttpResponse:
        """How many there are, by tier, model and cause."""
        self._door.check(call)
        async with self._transaction.looking() as connection:
            found = await letter_groups(connection, [parts.config.pool for parts in self._pools.all])
        return said(call, found)

    async def purge(self, call: RoutedRequest) -> HttpResponse:
        """Delete them for good, inputs included."""
        body = await self._door.read(call, _purge)
        return said(call, await self._door.carry_out(self._purged(body, actor(call))))

    async def requeue(self, call: RoutedRequest) -> HttpResponse:
        """Run the oldest 32 of them again now, and tell how each ended."""
        body = await self._door.read(call, _requeue)
        return said(call, await self._door.carry_out(self._requeuing.requeue(body, actor(call))))

    async def _purged(self, body: PurgeBody, by: str) -> Purged:
        async with self._transaction.acting(by) as connection:
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


class Actions:
    """Those of one gateway; without `connect` all are refused."""

    def __init__(self, session_auth: SessionAuth, connect: Connect | None, pools: Pools) -> None:
        self._door = ActionGuard(session_auth)
        transaction = AuditedTransaction(connect)
        self.cordons = CordonActions(self._door, transaction, pools)
        self.letters = DeadLetterActions(self._door, transaction, pools)

    async def close(self) -> None:
        """Let what is under way end, but not for long."""
        await self._door.close()
