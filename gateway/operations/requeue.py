"""Requeue of dead letters by a gateway for an operator, at most 32 at a time: mark, queue, wait.

The marks in the dead letters and the change record are committed first: of two operators only one succeeds, and no request
runs without a record. A mark is removed if Redis had no memory for the new request.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.dead_letter_rerun import MAX_RERUNS, Candidate, DeadLetterReruns, NotRerun, candidate, new_ids
from gateway.http.errors import RejectionError
from gateway.operations.action_requests import AuditedTransaction, RequeueBody, Requeued, Rerun
from gateway.pools import Pools
from ledger.dead_letters import (
    CountDiffers,
    LetterSelection,
    Requeueable,
    mark_requeued,
    note,
    seen_to_requeue,
    unmark_requeued,
)
from ledger.postgres import Connection
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.states import State


class RequeueStarted(NamedTuple):
    """The marked dead letters by pool, how many remain for the next request, and the number of the last one."""

    by_pool: Mapping[str, Sequence[Candidate]]
    left: int
    after: int


class Queued(NamedTuple):
    """The queued requests of one pool, and a warning about the others."""

    running: Sequence[Candidate]
    warning: str


class DeadLetterRequeue:
    """Requeues the dead letters of all pools. Raises RequestError only."""

    def __init__(self, transaction: AuditedTransaction, pools: Pools) -> None:
        self._transaction = transaction
        self._pools = pools

    async def run(self, body: RequeueBody, by: str) -> Requeued:
        """Requeue the oldest of the confirmed dead letters, and wait for their results."""
        reruns = {parts.config.pool: parts.reruns for parts in self._pools.all}
        totals = {parts.config.pool: parts.config.total_ms for parts in self._pools.all}
        async with self._transaction.change(by) as connection:
            started = await _mark(connection, body, totals, reruns)
        queued = {
            pool: await self._queue(reruns[pool], each, body.selection(), by) for pool, each in started.by_pool.items()
        }
        warning = " ".join(each.warning for each in queued.values() if each.warning)
        if not any(each.running for each in queued.values()):
            raise RejectionError(ErrorCode.NO_CAPACITY, warning)
        results = await asyncio.gather(*(_results(reruns[pool], each.running) for pool, each in queued.items()))
        return Requeued([rerun for several in results for rerun in several], started.left, started.after, warning)

    async def _queue(
        self, reruns: DeadLetterReruns, candidates: Sequence[Candidate], selection: LetterSelection, by: str
    ) -> Queued:
        try:
            entered = await reruns.submit([each.submission for each in candidates])
        except RedisUnavailable as error:
            return Queued(
                [], f"{_unavailable(error)}: these are marked as requeued, but may not run: {_ids(candidates)}."
            )
        running = [each for each in candidates if each.submission.id in entered]
        rejected = [each for each in candidates if each.submission.id not in entered]
        warning = await self._unmark(rejected, selection, by) if rejected else ""
        try:
            await reruns.forget_dead([each.letter.request_id for each in running])
        except RedisUnavailable as error:  # They run nevertheless.
            warning = f"{warning} {_unavailable(error)}, so health still counts them.".lstrip()
        return Queued(running, warning)

    async def _unmark(self, rejected: Sequence[Candidate], selection: LetterSelection, by: str) -> str:
        """Remove the marks of dead letters for which Redis had no memory. Returns a warning."""
        full = f"Redis has no memory left for {len(rejected)} of them"
        try:
            async with self._transaction.change(by) as connection:
                for each in rejected:
                    await unmark_requeued(connection, each.letter, each.submission.id)
                await note(connection, selection.words(), {"requeued_as": new_ids(rejected)}, {"requeued_as": None})
        except RequestError:
            return f"{full}, and PostgreSQL is not available: they are marked as requeued, but do not run: {_ids(rejected)}."
        return f"{full}; these were not changed."


def changed_meanwhile(count: int, found: int, done: str) -> RequestError:
    """The error if the number of dead letters is not the confirmed one. `done`: `deleted` or `requeued`."""
    now = f"there are {found} now" if found <= count else "there are more now"
    message = f"{count} dead letters were confirmed, but {now}; none was {done}. Reload and try again."
    return RequestError(ErrorCode.CHANGED_MEANWHILE, message, "count")


async def _mark(
    connection: Connection, body: RequeueBody, totals: Mapping[str, int], reruns: Mapping[str, DeadLetterReruns]
) -> RequeueStarted:
    """Choose and mark dead letters. Raises RequestError; then the transaction must be rolled back."""
    try:
        rows = await seen_to_requeue(connection, body.selection(), body.count, list(totals), body.after)
    except CountDiffers as error:
        raise changed_meanwhile(body.count, error.found, "requeued") from error
    picked = rows[:MAX_RERUNS]
    await _check_workers([reruns[pool] for pool in sorted({row.pool for row in picked})])
    by_pool: dict[str, list[Candidate]] = {}
    for row in sorted(picked, key=lambda row: row.request_id):  # The same order everywhere, to avoid deadlocks.
        by_pool.setdefault(row.pool, []).append(await _marked(connection, row, totals[row.pool]))
    chosen = [each for several in by_pool.values() for each in several]
    after = {"count": len(chosen), "requeued_as": new_ids(chosen)}
    await note(connection, body.selection().words(), {"count": len(chosen), "requeued_as": None}, after)
    return RequeueStarted(by_pool, len(rows) - len(picked), picked[-1].number)


async def _marked(connection: Connection, row: Requeueable, total_ms: int) -> Candidate:
    try:
        found = await candidate(connection, row.request_id, row.pool, total_ms)
    except NotRerun as error:
        message = f"{row.request_id} cannot be requeued now; none was requeued. {error}"
        raise RequestError(ErrorCode.CHANGED_MEANWHILE, message) from error
    if not await mark_requeued(connection, found.letter, found.submission.id):
        message = f"{row.request_id} was requeued or deleted meanwhile; none was requeued. Reload and try again."
        raise RequestError(ErrorCode.CHANGED_MEANWHILE, message)
    return found


async def _check_workers(several: Sequence[DeadLetterReruns]) -> None:
    try:
        await asyncio.gather(*(reruns.check_workers() for reruns in several))
    except NotRerun as error:
        raise RejectionError(ErrorCode.NO_CAPACITY, str(error)) from error
    except RedisUnavailable as error:
        raise RejectionError(ErrorCode.NO_CAPACITY, f"{_unavailable(error)}, so nothing was requeued.") from error


async def _results(reruns: DeadLetterReruns, running: Sequence[Candidate]) -> list[Rerun]:
    old = {each.submission.id: each.letter.request_id for each in running}
    results = []
    async for new_id, reply in reruns.replies(list(old)):
        ended = None if reply is None else "completed" if reply.state == State.COMPLETED else reply.error_code
        results.append(Rerun(old[new_id], new_id, ended))
    return results


def _ids(candidates: Sequence[Candidate]) -> str:
    return ", ".join(each.letter.request_id for each in candidates)


def _unavailable(error: RedisUnavailable) -> str:
    return f"Redis is not responding ({str(error).rstrip('.')})"
