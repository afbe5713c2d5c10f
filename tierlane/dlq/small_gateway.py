"""A gateway without HTTP, for as long as a command runs: it lives in Redis, submits, and reads what became of it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from uuid_utils import uuid7

from scheduler.admission import Admissions, Submission, TierLimit
from scheduler.dead_list import DeadList
from scheduler.errors import RedisUnavailable
from scheduler.keys import Keys
from scheduler.observation import GatewayStats
from scheduler.presence import Presence
from scheduler.replies import Reply, Results
from scheduler.states import Admission
from tierlane.dlq.reach import DlqError

BEAT_S = 0.5
POLL_S = 0.05
SLACK_S = 1.0
"""A request that nobody runs is ended at its deadline, and that takes a moment to be seen."""

ENTERED = (Admission.ACCEPTED, Admission.DUPLICATE)


class SmallGateway:
    """One such gateway on one pool; `total_ms` is what its requests have. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, total_ms: int, gone_ms: int) -> None:
        self._keys = keys
        self._total_s = total_ms / 1000
        self._id = f"gw-{uuid7().hex}"
        self._presence = Presence(client, keys, gone_ms=gone_ms)
        self._admissions = Admissions(client, keys, self._id)
        self._results = Results(client, keys)
        self._dead = DeadList(client, keys)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Live until the end of the block. Raises DlqError where no worker is healthy."""
        if (await self._presence.observe([])).healthy_gpus == 0:
            raise DlqError(f"No worker of the pool {self._keys.pool} is healthy, so nothing was requeued.")
        await self._beat()
        beating = asyncio.create_task(self._keep_beating())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            with contextlib.suppress(RedisUnavailable):
                await self._presence.gateway_gone(self._id)

    async def submit(self, submissions: Sequence[Submission]) -> set[str]:
        """Queue them past all limits; the ids that are in."""
        limits = [TierLimit(tier, 1.0, 1.0, 1, [tier]) for tier in sorted({s.tier for s in submissions})]
        try:
            verdicts = await self._admissions.admit(limits, 0.0, submissions)
        except RedisUnavailable:  # Admission is idempotent by id.
            verdicts = await self._admissions.admit(limits, 0.0, submissions)
        pairs = zip(submissions, verdicts, strict=True)
        return {submission.id for submission, verdict in pairs if verdict.outcome in ENTERED}

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

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(RedisUnavailable):
                await self._beat()

    async def _beat(self) -> None:
        await self._presence.gateway_beat(GatewayStats(self._id, 0.0, {}))
