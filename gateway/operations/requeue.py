"""Dead letters that a gateway runs again for an operator, at most 32 at a time: noted, queued, waited for.

The note in the letters and the record are committed first, so that of two operators one is told, and nothing runs that is not
on record; the note is taken back where Redis had no memory for the new request.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.dead_letter_rerun import AT_ONCE, Candidate, DeadLetterReruns, NotRerun, candidate, named
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
    """What was noted: the candidates by pool, how many are left for the next time, and the number of the last one."""

    by_pool: Mapping[str, Sequence[Candidate]]
    left: int
    after: int


class Queued(NamedTuple):
    """What runs of one pool, and what is to be said of the rest."""

    running: Sequence[Candidate]
    warning: str


class DeadLetterRequeue:
    """One for a gateway. All that is raised is RequestError."""

    def __init__(self, transaction: AuditedTransaction, pools: Pools) -> None:
        self._transaction = transaction
        self._pools = pools

    async def requeue(self, body: RequeueBody, by: str) -> Requeued:
        """The oldest of those that are meant, to their end."""
        reruns = {parts.config.pool: parts.reruns for parts in self._pools.all}
        totals = {parts.config.pool: parts.config.total_ms for parts in self._pools.all}
        async with self._transaction.acting(by) as connection:
            begun = await _begin(connection, body, totals, reruns)
        queued = {pool: await self._queue(reruns[pool], each, body.seen(), by) for pool, each in begun.by_pool.items()}
        warning = " ".join(each.warning for each in queued.values() if each.warning)
        if not any(each.running for each in queued.values()):
            raise RejectionError(ErrorCode.NO_CAPACITY, warning)
        ends = await asyncio.gather(*(_ends(reruns[pool], each.running) for pool, each in queued.items()))
        return Requeued([rerun for several in ends for rerun in several], begun.left, begun.after, warning)

    async def _queue(
        self, reruns: DeadLetterReruns, candidates: Sequence[Candidate], seen: LetterSelection, by: str
    ) -> Queued:
        try:
            entered = await reruns.submit([each.submission for each in candidates])
        except RedisUnavailable as error:
            return Queued(
                [], f"{_away(error)}: whether these run is not known, but they are noted: {_ids(candidates)}."
            )
        running = [each for each in candidates if each.submission.id in entered]
        refused = [each for each in candidates if each.submission.id not in entered]
        warning = await self._take_back(refused, seen, by) if refused else ""
        try:
            await reruns.forget_dead([each.letter.request_id for each in running])
        except RedisUnavailable as error:  # They run all the same, and are waited for.
            warning = f"{warning} {_away(error)}, so health still counts them.".lstrip()
        return Queued(running, warning)

    async def _take_back(self, refused: Sequence[Candidate], seen: LetterSelection, by: str) -> str:
        """The note in letters for which Redis had no room; what is to be said of it."""
        full = f"Redis has no memory left for {len(refused)} of them"
        try:
            async with self._transaction.acting(by) as connection:
                for each in refused:
                    await unmark_requeued(connection, each.letter, each.submission.id)
                await note(connection, seen.words(), {"requeued_as": named(refused)}, {"requeued_as": None})
        except RequestError:
            return f"{full}, and PostgreSQL is away: they are noted as requeued, but do not run: {_ids(refused)}."
        return f"{full}; these stay as they were."


def differs(count: int, found: int, done: str) -> RequestError:
    """The refusal of what is not any more as it was confirmed."""
    there = f"there are {found} now" if found <= count else "there are more now"
    message = f"{count} dead letters were confirmed, but {there}; none was {done}. Look again."
    return RequestError(ErrorCode.CHANGED_MEANWHILE, message, "count")


async def _begin(
    connection: Connection, body: RequeueBody, totals: Mapping[str, int], reruns: Mapping[str, DeadLetterReruns]
) -> RequeueStarted:
    """Choose and note them. Raises RequestError, which has to undo the transaction."""
    try:
        rows = await seen_to_requeue(connection, body.seen(), body.count, list(totals), body.after)
    except CountDiffers as error:
        raise differs(body.count, error.found, "requeued") from error
    picked = rows[:AT_ONCE]
    await _check_workers([reruns[pool] for pool in sorted({row.pool for row in picked})])
    by_pool: dict[str, list[Candidate]] = {}
    for row in sorted(picked, key=lambda row: row.request_id):  # One order for all, or two could wait for each other.
        by_pool.setdefault(row.pool, []).append(await _noted(connection, row, totals[row.pool]))
    chosen = [each for several in by_pool.values() for each in several]
    told = {"count": len(chosen), "requeued_as": named(chosen)}
    await note(connection, body.seen().words(), {"count": len(chosen), "requeued_as": None}, told)
    return RequeueStarted(by_pool, len(rows) - len(picked), picked[-1].number)


async def _noted(connection: Connection, row: Requeueable, total_ms: int) -> Candidate:
    try:
        found = await candidate(connection, row.request_id, row.pool, total_ms)
    except NotRerun as error:
        message = f"{row.request_id} cannot be run again now; none was requeued. {error}"
        raise RequestError(ErrorCode.CHANGED_MEANWHILE, message) from error
    if not await mark_requeued(connection, found.letter, found.submission.id):
        message = f"Somebody else has just requeued or deleted {row.request_id}; none was requeued. Look again."
        raise RequestError(ErrorCode.CHANGED_MEANWHILE, message)
    return found


async def _check_workers(several: Sequence[DeadLetterReruns]) -> None:
    try:
        await asyncio.gather(*(reruns.check_workers() for reruns in several))
    except NotRerun as error:
        raise RejectionError(ErrorCode.NO_CAPACITY, str(error)) from error
    except RedisUnavailable as error:
        raise RejectionError(ErrorCode.NO_CAPACITY, f"{_away(error)}, so nothing was requeued.") from error


async def _ends(reruns: DeadLetterReruns, running: Sequence[Candidate]) -> list[Rerun]:
    old = {each.submission.id: each.letter.request_id for each in running}
    ends = []
    async for new_id, reply in reruns.replies(list(old)):
        ended = None if reply is None else "completed" if reply.state == State.COMPLETED else reply.error_code
        ends.append(Rerun(old[new_id], new_id, ended))
    return ends


def _ids(candidates: Sequence[Candidate]) -> str:
    return ", ".join(each.letter.request_id for each in candidates)


def _away(error: RedisUnavailable) -> str:
    return f"Redis does not answer ({str(error).rstrip('.')})"
