"""The actions of the dashboard: cordon and uncordon workers, purge and requeue dead letters.

Each action checks authentication, then the origin of the request, then its exact content, and makes no change that
PostgreSQL does not record. Schedulers apply a cordon within a second.

Dead letters are requeued at most 32 at a time, all of them or none: no request runs without a record.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gateway.http.errors import RejectionError
from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.jobs.dead_letter_rerun import (
    MAX_RERUNS,
    Candidate,
    DeadLetterReruns,
    NotRerun,
    candidate,
    mark,
    new_ids,
    unmark,
)
from gateway.operations.action_bodies import (
    CordonBody,
    Cordoned,
    PurgeBody,
    Purged,
    RequeueBody,
    Requeued,
    Rerun,
    UncordonBody,
)
from gateway.operations.action_guard import ActionGuard, actor
from gateway.operations.audited_transaction import AuditedTransaction, Connect
from gateway.operations.session import SessionAuth
from gateway.operations.uncached import uncached
from gateway.pool import PoolParts
from gateway.pools import Pools
from ledger.admin.transaction import cordon_worker, uncordon_worker
from ledger.dead_letters import (
    CountDiffers,
    LetterSelection,
    letter_groups,
    note,
    purge_seen,
    seen_to_requeue,
)
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.protocol.pool_view import Observation
from scheduler.states import State

_cordon = msgspec.json.Decoder(CordonBody)
_uncordon = msgspec.json.Decoder(UncordonBody)

_purge = msgspec.json.Decoder(PurgeBody)
_requeue = msgspec.json.Decoder(RequeueBody)
STILL_COUNTED = "Redis is not responding, so health still counts them."


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


class RequeueStarted(NamedTuple):
    """The marked dead letters by pool, how many remain for the next request, and the number of the last one."""

    by_pool: Mapping[str, Sequence[Candidate]]
    left: int
    after: int


class DeadLetterActions:
    """The handlers for dead letters of all pools."""

    def __init__(self, guard: ActionGuard, transaction: AuditedTransaction, pools: Pools) -> None:
        self._guard = guard
        self._transaction = transaction
        self._pools = pools

    async def groups(self, call: RoutedRequest) -> HttpResponse:
        """The number of dead letters by tier, model and error code."""
        self._guard.check(call)
        async with self._transaction.read() as connection:
            found = await letter_groups(connection, sorted({parts.config.pool for parts in self._pools.all}))
        return uncached(call, found)

    async def purge(self, call: RoutedRequest) -> HttpResponse:
        """Delete the confirmed dead letters with their inputs."""
        body = await self._guard.read(call, _purge)
        return uncached(call, await self._guard.carry_out(self._purged(body, actor(call))))

    async def requeue(self, call: RoutedRequest) -> HttpResponse:
        """Run the oldest 32 of the confirmed dead letters again, and return the result of each."""
        body = await self._guard.read(call, _requeue)
        return uncached(call, await self._guard.carry_out(self._requeued(body, actor(call))))

    async def _purged(self, body: PurgeBody, by: str) -> Purged:
        async with self._transaction.change(by) as connection:
            try:
                ids = await purge_seen(connection, body.selection(), body.count)
            except CountDiffers as error:
                raise changed_meanwhile(body.count, error.found, "deleted") from error
        return Purged(len(ids), await forget_dead(self._pools, ids))

    async def _requeued(self, body: RequeueBody, by: str) -> Requeued:
        """Requeue the oldest of the confirmed dead letters, and wait for their results. Raises RequestError only."""
        chosen = most_healthy(self._pools.all)
        reruns = {pool: parts.reruns for pool, parts in chosen.items()}
        async with self._transaction.change(by) as connection:
            started = await _mark(connection, body, reruns)
        queued = {
            pool: await self._queue(reruns[pool], each, body.selection(), by) for pool, each in started.by_pool.items()
        }
        warning = " ".join(warning for _, warning in queued.values() if warning)
        if not any(running for running, _ in queued.values()):
            raise RejectionError(ErrorCode.NO_CAPACITY, warning)
        results = await asyncio.gather(*(_results(reruns[pool], running) for pool, (running, _) in queued.items()))
        return Requeued([rerun for several in results for rerun in several], started.left, started.after, warning)

    async def _queue(
        self, reruns: DeadLetterReruns, candidates: Sequence[Candidate], selection: LetterSelection, by: str
    ) -> tuple[Sequence[Candidate], str]:
        """The queued requests of one pool, and a warning about the others."""
        try:
            running, rejected = await reruns.queue(candidates)
        except RedisUnavailable as error:
            return [], f"{_unavailable(error)}: these are marked as requeued, but may not run: {_ids(candidates)}."
        warnings = []
        if rejected:
            outcome = "; these were not changed."
            try:
                async with self._transaction.change(by) as connection:
                    await unmark(connection, rejected, selection.words(), None)
            except RequestError:
                still = _ids(rejected)
                outcome = f", and PostgreSQL is not available: they are marked as requeued, but do not run: {still}."
            warnings.append(f"Redis has no memory left for {len(rejected)} of them{outcome}")
        warnings.append(await forget_dead(self._pools, [each.letter.request_id for each in running]))
        return running, " ".join(filter(None, warnings))


def most_healthy(places: Sequence[PoolParts]) -> dict[str, PoolParts]:
    """For each pool its parts in the cell with the most healthy workers, the default one first."""

    def healthy(parts: PoolParts) -> int:
        seen = parts.heartbeat.observation
        return seen.healthy_gpus if seen is not None and parts.heartbeat.redis_problem is None else -1

    found: dict[str, PoolParts] = {}
    for parts in places:
        pool = parts.config.pool
        if pool not in found or healthy(parts) > healthy(found[pool]):
            found[pool] = parts
    return found


async def forget_dead(pools: Pools, ids: Sequence[str]) -> str:
    """Remove ids from the lists that health counts, in all cells. Returns a warning if a Redis is unavailable, else ""."""
    warning = ""
    for parts in pools.all:
        try:
            await parts.reruns.forget_dead(ids)
        except RedisUnavailable:
            warning = STILL_COUNTED
    return warning


def changed_meanwhile(count: int, found: int, done: str) -> RequestError:
    """The error if the number of dead letters is not the confirmed one. `done`: `deleted` or `requeued`."""
    now = f"there are {found} now" if found <= count else "there are more now"
    message = f"{count} dead letters were confirmed, but {now}; none was {done}. Reload and try again."
    return RequestError(ErrorCode.CHANGED_MEANWHILE, message, "count")


async def _mark(connection: Connection, body: RequeueBody, reruns: Mapping[str, DeadLetterReruns]) -> RequeueStarted:
    """Choose and mark dead letters. Raises RequestError; then the transaction must be rolled back."""
    try:
        rows = await seen_to_requeue(connection, body.selection(), body.count, list(reruns), body.after)
    except CountDiffers as error:
        raise changed_meanwhile(body.count, error.found, "requeued") from error
    picked = rows[:MAX_RERUNS]
    try:
        await asyncio.gather(*(reruns[pool].check_workers() for pool in sorted({row.pool for row in picked})))
    except NotRerun as error:
        raise RejectionError(ErrorCode.NO_CAPACITY, str(error)) from error
    except RedisUnavailable as error:
        raise RejectionError(ErrorCode.NO_CAPACITY, f"{_unavailable(error)}, so nothing was requeued.") from error
    candidates: list[Candidate] = []
    for row in picked:
        try:
            candidates.append(await candidate(connection, row.request_id, row.pool, reruns[row.pool].limits))
        except NotRerun as error:
            message = f"{row.request_id} cannot be requeued now; none was requeued. {error}"
            raise RequestError(ErrorCode.CHANGED_MEANWHILE, message) from error
    marked = await mark(connection, candidates)
    if missed := {each.letter.request_id for each in candidates} - {each.letter.request_id for each in marked}:
        message = f"{min(missed)} was requeued or deleted meanwhile; none was requeued. Reload and try again."
        raise RequestError(ErrorCode.CHANGED_MEANWHILE, message)
    pools, by_pool = {row.request_id: row.pool for row in picked}, dict[str, list[Candidate]]()
    for each in marked:
        by_pool.setdefault(pools[each.letter.request_id], []).append(each)
    after = {"count": len(marked), "requeued_as": new_ids(marked)}
    await note(connection, body.selection().words(), {"count": len(marked), "requeued_as": None}, after)
    return RequeueStarted(by_pool, len(rows) - len(picked), picked[-1].number)


async def _results(reruns: DeadLetterReruns, running: Sequence[Candidate]) -> list[Rerun]:
    results = []
    async for old_id, new_id, reply in reruns.replies(running):
        ended = None if reply is None else "completed" if reply.state == State.COMPLETED else reply.error_code
        results.append(Rerun(old_id, new_id, ended))
    return results


def _ids(candidates: Sequence[Candidate]) -> str:
    return ", ".join(each.letter.request_id for each in candidates)


def _unavailable(error: RedisUnavailable) -> str:
    return f"Redis is not responding ({str(error).rstrip('.')})"


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
