"""Reruns of dead letters: new requests that bypass the limits of a pool, and their results.

The dashboard and `tierlane dlq requeue` take the same steps: choose candidates, mark them and commit, queue them, unmark
those for which Redis had no memory, wait. The marks are committed first, so that of two operators only one requeues a
dead letter. Customers are not charged and get no response: the requests are admitted as ones that were accepted before.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from ledger.dead_letters import (
    DeadLetterRow,
    RequeueTerms,
    find_letter,
    mark_requeued,
    note,
    read_body,
    requeue_terms,
    unmark_requeued,
)
from ledger.postgres import Connection
from ratelimit.limits import NO_LIMITS
from ratelimit.request_limits import LANGUAGE_MODEL, RequestLimits, limits_of_workers
from scheduler.body_store import is_reference
from scheduler.errors import RedisUnavailable, TierlaneError
from scheduler.payload import Task, decode_payload
from scheduler.protocol.admission import Admissions, Submission, SubmissionGroup, TierLimit, calls_of
from scheduler.protocol.cancellation import DeadLetterList
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import Reply, Results
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id
from scheduler.states import Admission

MAX_RERUNS = 32
"""Reruns at a time: thousands at once would delay the requests of customers."""

POLL_S = 0.05
SLACK_S = 1.0
"""Time after the deadline in which the end of a request is noticed."""

RERUN_ENDPOINT = "dlq"
"""The endpoint of a rerun in the audit: it came through none of the gateway's."""

ENTERED = (Admission.ACCEPTED, Admission.DUPLICATE)


class NotRerun(TierlaneError):
    """A dead letter cannot be requeued; the message is one sentence."""


class NoSuchLetter(NotRerun):
    """There is no dead letter with this id."""


class Candidate(NamedTuple):
    """A dead letter that can be requeued, and its new submission."""

    letter: DeadLetterRow
    submission: Submission


def new_ids(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Maps the id of each dead letter to that of its new request, for the change record."""
    return {each.letter.request_id: each.submission.id for each in candidates}


async def candidate(
    connection: Connection, request_id: str, pool: str, within: RequestLimits, *, again: bool = False
) -> Candidate:
    """The dead letter and its new submission in a pool. Raises NotRerun and the errors of asyncpg."""
    letter = await find_letter(connection, request_id)
    if letter is None:
        raise NoSuchLetter(request_id)
    body = await read_body(connection, request_id)
    terms = await requeue_terms(connection, request_id, pool)
    return Candidate(letter, submission_for(letter, body, terms, within, again=again))


def submission_for(
    letter: DeadLetterRow, body: bytes | None, terms: RequeueTerms | None, within: RequestLimits, *, again: bool
) -> Submission:
    """The new submission of a dead letter. Raises NotRerun if it cannot be requeued."""
    if letter.requeued_as is not None and not again:
        raise NotRerun(f"It was already requeued, as {letter.requeued_as}; use --again to requeue it once more.")
    if body is None:
        raise NotRerun("Its input was not stored.")
    if terms is None:
        raise NotRerun("Its customer was deleted.")
    if not terms.active:
        raise NotRerun("Its customer is suspended.")
    if not terms.model_served:
        raise NotRerun(f"This pool has no enabled model {letter.model!r}; use --pool for another pool.")
    try:
        payload = decode_payload(body)
    except ValueError:
        raise NotRerun("Its input cannot be read.") from None
    if payload.task is Task.CHAT_DOCUMENT and is_reference(payload.input):
        raise NotRerun("Its input was a file, which was removed with the request.")
    return Submission(
        id=new_request_id(),
        group=SubmissionGroup(
            terms.tier, letter.customer_id or "", "", payload.model, NO_LIMITS, endpoint=RERUN_ENDPOINT
        ),
        nonce=secrets.token_hex(8),
        input_bytes=len(payload.input.encode()),
        total_ms=within.total_ms,
        queue_ms=min(terms.queue_ms or within.queue_ms, within.total_ms),
        again=True,  # Its first request was accepted and charged.
        body=body,
    )


async def mark(connection: Connection, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Mark candidates as requeued, in a transaction. Returns those that no one else had marked since they were read."""
    # The same order for all operators prevents deadlocks.
    ordered = sorted(candidates, key=lambda each: each.letter.request_id)
    return [each for each in ordered if await mark_requeued(connection, each.letter, each.submission.id)]


async def unmark(
    connection: Connection, rejected: Sequence[Candidate], which: str, before: Mapping[str, str | None] | None
) -> None:
    """Undo `mark`, in a transaction. `which`, `before`: the row key and the former marks in the change record."""
    for each in rejected:
        await unmark_requeued(connection, each.letter, each.submission.id)
    await note(connection, which, {"requeued_as": new_ids(rejected)}, {"requeued_as": before})


class DeadLetterReruns:
    """Reruns in one pool, as requests of a running gateway. All methods raise RedisUnavailable.

    `chosen`: the limits of a request with the settings, from those of the pool's backend.
    """

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        presence: Presence,
        admissions: Admissions,
        chosen: Callable[[RequestLimits], RequestLimits],
    ) -> None:
        self._chosen = chosen
        self.limits = chosen(LANGUAGE_MODEL)  # Of each request; by the workers once `check_workers` was called.
        self._pool = keys.pool
        self._presence = presence
        self._admissions = admissions
        self._results = Results(client, keys)
        self._dead = DeadLetterList(client, keys)

    async def check_workers(self) -> None:
        """Raises NotRerun if no worker is healthy: the requests would only time out in the queue."""
        seen = await self._presence.observe([])
        self.limits = self._chosen(limits_of_workers(seen.workers))
        if seen.healthy_gpus == 0:
            raise NotRerun(f"No worker of pool {self._pool} is healthy, so nothing was requeued.")

    async def queue(self, marked: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Queue requests without limits. Returns the queued ones, and those for which Redis had no memory."""
        submissions = [each.submission for each in marked]
        limits = [TierLimit(tier, 1.0, 1.0, 1, [tier]) for tier in sorted({s.tier for s in submissions})]
        entered: set[str] = set()
        for group in calls_of(submissions):
            try:
                verdicts = await self._admissions.admit(limits, 0.0, group)
            except RedisUnavailable:  # Admission is idempotent by id.
                verdicts = await self._admissions.admit(limits, 0.0, group)
            entered |= {each.id for each, verdict in zip(group, verdicts, strict=True) if verdict.outcome in ENTERED}
        return (
            [each for each in marked if each.submission.id in entered],
            [each for each in marked if each.submission.id not in entered],
        )

    async def forget_dead(self, ids: Sequence[str]) -> None:
        """Remove ids from the list of dead letters in Redis."""
        await self._dead.remove(ids)

    async def replies(self, running: Sequence[Candidate]) -> AsyncIterator[tuple[str, str, Reply | None]]:
        """The ids of each dead letter and of its request, with the reply, in the order of their ends; None without a reply in time."""
        waiting = {each.submission.id: each.letter.request_id for each in running}
        until = time.monotonic() + self.limits.total_ms / 1000 + SLACK_S
        while waiting and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
            found: Sequence[Reply | None] = ()
            with contextlib.suppress(RedisUnavailable):  # It may return.
                found = await self._results.fetch(list(waiting))
            for reply in found:
                if reply is not None:
                    yield waiting.pop(reply.id), reply.id, reply
        for new_id, old_id in waiting.items():
            yield old_id, new_id, None
