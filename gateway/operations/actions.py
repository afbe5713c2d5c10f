"""The actions of the dashboard: cordon and uncordon workers, purge and requeue dead letters.

Each action checks authentication, then the origin of the request, then its exact content, and makes no change that
PostgreSQL does not record. Schedulers apply a cordon within a second.
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
    uncached,
)
from gateway.operations.requeue import DeadLetterRequeue, changed_meanwhile
from gateway.operations.session import SessionAuth
from gateway.pools import Pools
from ledger.admin.transaction import cordon_worker, uncordon_worker
from ledger.dead_letters import CountDiffers, letter_groups, purge_seen
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.protocol.pool_view import Observation

_cordon = msgspec.json.Decoder(CordonBody)
_uncordon = msgspec.json.Decoder(UncordonBody)


class CordonActions:
    """The handlers for workers."""

    def __init__(self, guard: ActionGuard, transaction: AuditedTransaction, pools: Pools) -> None:
        self._guard = guard
        self._transaction = transaction
        self._pools = pools

    async def cordon(self, call: RoutedRequest) -> HttpResponse:
        """Cordon a worker if its pool keeps as many healthy workers as the operator confirmed."""
        body = await self._guard.read(call, _cordon)
        check_healthy_left(body, list(self._observations()))
        return uncached(call, await self._guard.carry_out(self._cordoned(body, actor(call))))

    async def uncordon(self, call: RoutedRequest) -> HttpResponse:
        """Let a worker claim batches again."""
        body = await self._guard.read(call, _uncordon)
        return uncached(call, await self._guard.carry_out(self._uncordoned(body, actor(call))))

    async def _cordoned(self, body: CordonBody, by: str) -> Cordoned:
        async with self._transaction.change(by) as connection:
            changed = await cordon_worker(connection, body.worker, body.reason)
        return Cordoned(body.worker, cordoned=True, changed=changed)

    async def _uncordoned(self, body: UncordonBody, by: str) -> Cordoned:
        async with self._transaction.change(by) as connection:
            changed = await uncordon_worker(connection, body.worker)
        if not changed:
            _pool_of(body.worker, list(self._observations()))
        return Cordoned(body.worker, cordoned=False, changed=changed)

    def _observations(self) -> Iterator[Observation]:
        for parts in self._pools.all:
            if parts.heartbeat.observation is not None:
                yield parts.heartbeat.observation


def check_healthy_left(body: CordonBody, pools: list[Observation]) -> None:
    """Raises RequestError if the worker is unknown, or its pool would keep fewer healthy workers than confirmed."""
    pool = _pool_of(body.worker, pools)
    left = sum(other.healthy for other in pool.workers if other.id != body.worker)
    if left < body.healthy_left:
        message = (
            f"{body.healthy_left} healthy workers were confirmed to remain in the pool, but {left} would; nothing was changed. "
            "Reload and try again."
        )
        raise RequestError(ErrorCode.CHANGED_MEANWHILE, message, "healthy_left")


def _pool_of(worker: str, pools: list[Observation]) -> Observation:
    for pool in pools:
        if any(view.id == worker for view in pool.workers):
            return pool
    raise RequestError(ErrorCode.NOT_FOUND, "No worker with this id was seen in the last five minutes.", "worker")


_purge = msgspec.json.Decoder(PurgeBody)
_requeue = msgspec.json.Decoder(RequeueBody)
STILL_COUNTED = "Redis is not responding, so health still counts them."


class DeadLetterActions:
    """The handlers for dead letters."""

    def __init__(self, guard: ActionGuard, transaction: AuditedTransaction, pools: Pools) -> None:
        self._guard = guard
        self._transaction = transaction
        self._pools = pools
        self._requeue = DeadLetterRequeue(transaction, pools)

    async def groups(self, call: RoutedRequest) -> HttpResponse:
        """The number of dead letters by tier, model and error code."""
        self._guard.check(call)
        async with self._transaction.read() as connection:
            found = await letter_groups(connection, [parts.config.pool for parts in self._pools.all])
        return uncached(call, found)

    async def purge(self, call: RoutedRequest) -> HttpResponse:
        """Delete the confirmed dead letters with their inputs."""
        body = await self._guard.read(call, _purge)
        return uncached(call, await self._guard.carry_out(self._purged(body, actor(call))))

    async def requeue(self, call: RoutedRequest) -> HttpResponse:
        """Run the oldest 32 of the confirmed dead letters again, and return the result of each."""
        body = await self._guard.read(call, _requeue)
        return uncached(call, await self._guard.carry_out(self._requeue.run(body, actor(call))))

    async def _purged(self, body: PurgeBody, by: str) -> Purged:
        async with self._transaction.change(by) as connection:
            try:
                ids = await purge_seen(connection, body.selection(), body.count)
            except CountDiffers as error:
                raise changed_meanwhile(body.count, error.found, "deleted") from error
        return Purged(len(ids), await self._remove_from_redis(ids))

    async def _remove_from_redis(self, ids: Sequence[str]) -> str:
        """Remove ids from the lists that health counts. Returns a warning if Redis is unavailable, else ""."""
        try:
            for parts in self._pools.all:
                await parts.reruns.forget_dead(ids)
        except RedisUnavailable:
            return STILL_COUNTED
        return ""


class Actions:
    """All actions of one gateway; rejected without `connect`."""

    def __init__(self, session_auth: SessionAuth, connect: Connect | None, pools: Pools) -> None:
        self._guard = ActionGuard(session_auth)
        transaction = AuditedTransaction(connect)
        self.cordons = CordonActions(self._guard, transaction, pools)
        self.dead_letters = DeadLetterActions(self._guard, transaction, pools)

    async def close(self) -> None:
        """Wait briefly for running actions, then cancel them."""
        await self._guard.close()
