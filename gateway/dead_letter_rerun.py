"""Dead letters run again: as which requests, how they enter one pool past all limits, and how it is seen what became of them.

Their customers are neither charged nor answered: the requests enter as ones that were accepted before.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from ledger.dead_letters import DeadLetterRow, RequeueTerms, find_letter, read_body, requeue_terms
from ledger.postgres import Connection
from ratelimit.limits import NO_LIMITS
from scheduler.errors import RedisUnavailable, TierlaneError
from scheduler.payload import decode_payload
from scheduler.protocol.admission import Admissions, Submission, TierLimit, calls_of
from scheduler.protocol.cancellation import DeadLetterList
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import Reply, Results
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id
from scheduler.states import Admission

AT_ONCE = 32
"""So many run together: an operator's thousand letters must not stand before customers as one block."""

POLL_S = 0.05
SLACK_S = 1.0
"""A request that nobody runs is ended at its deadline, and that takes a moment to be seen."""

ENTERED = (Admission.ACCEPTED, Admission.DUPLICATE)


class NotRerun(TierlaneError):
    """It cannot be run again; the message is one sentence."""


class NoSuchLetter(NotRerun):
    """There is no dead letter of this id."""


class Candidate(NamedTuple):
    """A dead letter that may run again, and what it would run as."""

    letter: DeadLetterRow
    submission: Submission


def named(candidates: Sequence[Candidate]) -> dict[str, str]:
    """From each dead letter's id to that of the new request, for the record."""
    return {each.letter.request_id: each.submission.id for each in candidates}


async def candidate(
    connection: Connection, request_id: str, pool: str, total_ms: int, *, again: bool = False
) -> Candidate:
    """What a dead letter would run as in a pool. Raises NotRerun, and what asyncpg raises."""
    letter = await find_letter(connection, request_id)
    if letter is None:
        raise NoSuchLetter(request_id)
    body = await read_body(connection, request_id)
    terms = await requeue_terms(connection, request_id, pool)
    return Candidate(letter, submission_for(letter, body, terms, total_ms, again=again))


def submission_for(
    letter: DeadLetterRow, body: bytes | None, terms: RequeueTerms | None, total_ms: int, *, again: bool
) -> Submission:
    """What a dead letter runs as. Raises NotRerun where it cannot."""
    if letter.requeued_as is not None and not again:
        raise NotRerun(f"It was requeued already, as {letter.requeued_as}; --again does so once more.")
    if body is None:
        raise NotRerun("Its input was not kept.")
    if terms is None:
        raise NotRerun("Its customer is gone.")
    if not terms.active:
        raise NotRerun("Its customer is suspended.")
    if not terms.model_served:
        raise NotRerun(f"No enabled model of this pool is called {letter.model!r}; --pool names another one.")
    return _submission(letter, body, terms, total_ms)


def _submission(letter: DeadLetterRow, body: bytes, terms: RequeueTerms, total_ms: int) -> Submission:
    try:
        payload = decode_payload(body)
    except ValueError:
        raise NotRerun("Its input cannot be read.") from None
    return Submission(
        id=new_request_id(),
        tier=terms.tier,
        customer_id=letter.customer_id or "",
        api_key_id="",  # None was used.
        nonce=secrets.token_hex(8),
        model=payload.model,
        input_bytes=len(payload.input.encode()),
        total_ms=total_ms,
        queue_ms=min(terms.queue_ms, total_ms),
        limits=NO_LIMITS,
        again=True,  # It was accepted and paid for when it came first.
        body=body,
    )


class DeadLetterReruns:
    """Runs in one pool, in the name of a gateway that lives. `total_ms` is what each has. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, gateway_id: str, total_ms: int, gone_ms: int) -> None:
        self._pool = keys.pool
        self._total_s = total_ms / 1000
        self._presence = Presence(client, keys, gone_ms=gone_ms)
        self._admissions = Admissions(client, keys, gateway_id)
        self._results = Results(client, keys)
        self._dead = DeadLetterList(client, keys)

    async def check_workers(self) -> None:
        """Raises NotRerun where no worker is healthy: what is queued would only die again, of waiting."""
        if (await self._presence.observe([])).healthy_gpus == 0:
            raise NotRerun(f"No worker of the pool {self._pool} is healthy, so nothing was requeued.")

    async def submit(self, submissions: Sequence[Submission]) -> set[str]:
        """Queue them past all limits; the ids that are in."""
        limits = [TierLimit(tier, 1.0, 1.0, 1, [tier]) for tier in sorted({s.tier for s in submissions})]
        entered: set[str] = set()
        for group in calls_of(submissions):
            try:
                verdicts = await self._admissions.admit(limits, 0.0, group)
            except RedisUnavailable:  # Admission is idempotent by id.
                verdicts = await self._admissions.admit(limits, 0.0, group)
            entered |= {asked.id for asked, told in zip(group, verdicts, strict=True) if told.outcome in ENTERED}
        return entered

    async def forget_dead(self, ids: Sequence[str]) -> None:
        """Take ids out of the list of dead letters."""
        await self._dead.remove(ids)

    async def replies(self, ids: Sequence[str]) -> AsyncIterator[tuple[str, Reply | None]]:
        """Each id with its reply, as they come; with None where there is none in time."""
        waiting = list(ids)
        until = time.monotonic() + self._total_s + SLACK_S
        while waiting and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
            for reply in await self._ended(waiting):
                waiting.remove(reply.id)
                yield reply.id, reply
        for request_id in waiting:
            yield request_id, None

    async def _ended(self, ids: Sequence[str]) -> list[Reply]:
        """The replies that are stored; none while Redis is away, for it may come back."""
        try:
            return [reply for reply in await self._results.fetch(ids) if reply is not None]
        except RedisUnavailable:
            return []
