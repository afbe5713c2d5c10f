"""Keeps a queue at a given depth: a gateway without HTTP that replaces requests that workers have claimed.

One machine cannot hold 100,000 connections to itself. The requests are admitted by the script of the gateways, with a
lease and an audit record each.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ratelimit.limits import BUCKETS, Bucket, EffectiveLimits
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import (
    MAX_SUBMISSIONS,
    Admissions,
    ReplayLimits,
    Submission,
    SubmissionGroup,
    TierLimit,
)
from scheduler.protocol.pool_view import GatewayStats
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.request_id import new_request_id
from scheduler.states import Admission

GATEWAY = "gw-feeder"
TIER = "free"
BEAT_S = 0.25
POLL_S = 0.01
GONE_MS, PASS_MS = 1000, 100  # As the stack has them.
NO_REPLAYS = ReplayLimits(0, 0, 0)  # No request has an Idempotency-Key.
WAIT_MS = 1_800_000
LIMIT = TierLimit(TIER, 1e6, 1e6, 10_000_000, [TIER])
CUSTOMER = "00000000-0000-0000-0000-00000000feed"

LIMITS = EffectiveLimits(tuple(Bucket(kind, 1e12, 1e12) for kind in BUCKETS), max_concurrency=10_000_000)


class Feeder:
    """Submits requests: `open` it, `reach` a depth, then `hold` it."""

    def __init__(self, redis_url: str, model: str, text: str = "the quick brown fox jumps") -> None:
        self._client = command_client(redis_url)
        self._keys = Keys()
        self._admissions = Admissions(self._client, self._keys, GATEWAY, replays=NO_REPLAYS, pass_ms=PASS_MS)
        self._presence = Presence(self._client, self._keys, gone_ms=GONE_MS)
        self._model = model
        self.body = encode_payload(Payload(model, text, {}))
        self.submitted = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Send heartbeats until the end of the block."""
        await self._presence.gateway_beat(GatewayStats(GATEWAY, 0.0, {}))
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await self._client.aclose()

    async def depth(self) -> int:
        """The number of queued requests."""
        return int(await self._client.llen(self._keys.queue(TIER)))

    async def memory(self) -> int:
        """The memory of Redis in bytes."""
        return int((await self._client.info("memory"))["used_memory"])

    async def reach(self, depth: int) -> None:
        """Submit until the queue has this depth."""
        while (missing := depth - await self.depth()) > 0:
            for _ in range(-(-missing // MAX_SUBMISSIONS)):
                await self.submit(min(MAX_SUBMISSIONS, missing))
                missing -= MAX_SUBMISSIONS

    async def hold(self, depth: int, seconds: float) -> None:
        """Keep the queue at this depth for a number of seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self.reach(depth)
            await asyncio.sleep(POLL_S)

    async def submit(self, count: int) -> None:
        """Submit requests in one call. Raises RuntimeError where one is rejected."""
        verdicts = await self._admissions.admit([LIMIT], 0.0, [self._submission() for _ in range(count)])
        if any(verdict.outcome is not Admission.ACCEPTED for verdict in verdicts):
            raise RuntimeError(f"rejected: {verdicts[0].outcome}")
        self.submitted += count

    def _submission(self) -> Submission:
        return Submission(
            id=new_request_id(),
            group=SubmissionGroup(TIER, CUSTOMER, "feeder", self._model, LIMITS),
            nonce="0123456789abcdef",
            input_bytes=len(self.body),
            total_ms=WAIT_MS,
            queue_ms=WAIT_MS,
            tokens=32,
            body=self.body,
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._presence.gateway_beat(GatewayStats(GATEWAY, 0.0, {}))
