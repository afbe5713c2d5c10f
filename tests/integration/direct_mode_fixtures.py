"""Gateways whose Redis is stopped, with workers' direct endpoints, and the audit records that they write."""

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from direct_parts import FakeEndpoint, endpoints
from eventually import eventually
from integration.gateway_fixtures import Stack, running_stack
from pool import Pool
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from tierlane_local.embedded.redis import EmbeddedRedis

Ends = set[tuple[str, str, str, bool]]


class Direct:
    """Starts gateways that call workers directly while Redis is stopped."""

    def __init__(self, pool: Pool, redis: EmbeddedRedis, home: Path) -> None:
        self.pool = pool
        self.home = home
        self.spool = home / "spool"
        self._redis = redis

    def stop_redis(self) -> float:
        """Send SIGSTOP; return the time."""
        os.kill(self._redis.pid, signal.SIGSTOP)
        return time.monotonic()

    def resume_redis(self) -> None:
        os.kill(self._redis.pid, signal.SIGCONT)

    @asynccontextmanager
    async def stack(
        self, *behaviours: str, active: bool = False, **changes: Any
    ) -> AsyncIterator[tuple[Stack, list[FakeEndpoint]]]:
        """A gateway with one worker per behaviour, which leaves direct mode sooner than in production.

        With `active` Redis is stopped and a first request was served directly.
        """
        async with endpoints(*behaviours) as workers:
            addresses = {worker.worker_id: worker.address for worker in workers}
            async with self.gateway(direct_workers=addresses, **changes) as stack:
                stack.gateway.direct._policy._leave_after_s = 0.5
                await eventually(lambda: _known(stack) == len(workers), "the gateway knows the endpoints")
                if active:
                    self.stop_redis()
                    assert (await stack.infer(tier_name="enterprise"))[0] == 200
                yield stack, workers

    @asynccontextmanager
    async def gateway(self, **changes: Any) -> AsyncIterator[Stack]:
        """A gateway with this data directory."""
        async with running_stack(
            self.pool.client, self._redis.url, worker=False, data_dir=self.home, **changes
        ) as stack:
            yield stack

    async def records(self, request_id: str) -> tuple[list[AcceptedRecord], list[EndedRecord]]:
        accepted, ended = await self.pool.audit()
        return [each for each in accepted if each.id == request_id], [each for each in ended if each.id == request_id]

    async def ends(self, request_id: str, stack: Stack | None = None) -> Ends:
        """Return how the audit says that the request ended, once `stack` uses Redis again. A record may be there twice."""
        if stack is not None:
            await redis_used(stack)
        _, ended = await self.records(request_id)
        return {(each.state, each.error_code, each.mode, each.delivered) for each in ended}


@pytest.fixture
async def direct(pool: Pool, redis_server: EmbeddedRedis, redis_url: str, tmp_path: Path) -> AsyncIterator[Direct]:
    """Redis is resumed after the test at the latest."""
    made = Direct(pool, redis_server, tmp_path)
    yield made
    made.resume_redis()


def _known(stack: Stack) -> int:
    observation = stack.gateway.heartbeat.observation
    return -1 if observation is None else sum(bool(worker.direct) for worker in observation.workers)


async def redis_used(stack: Stack) -> None:
    """Wait until requests go through Redis again and the spool is merged."""
    direct = stack.gateway.direct
    await eventually(lambda: not direct.view().active and not direct.view().spool_bytes, "Redis is used again")
