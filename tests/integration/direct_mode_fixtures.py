"""A gateway whose Redis stands still, with workers' doors to call; and the audit that it leaves."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from direct_parts import FakeEndpoint, endpoints
from eventually import eventually
from integration.gateway_fixtures import Stack, running_stack
from pool import Pool
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord
from tierlane.embedded.redis import EmbeddedRedis

LEAVE_AFTER_S = 0.5


class Outage:
    """Redis stopped as by SIGSTOP, and going on again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def begin(self) -> float:
        os.kill(self._pid, signal.SIGSTOP)
        return time.monotonic()

    def end(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@pytest.fixture
async def outage(redis_server: EmbeddedRedis, redis_url: str) -> AsyncIterator[Outage]:
    """Over after the test at the latest."""
    made = Outage(redis_server.pid)
    yield made
    made.end()


@asynccontextmanager
async def direct_stack(
    client: Redis, redis_url: str, home: Path, direct_workers: list[FakeEndpoint], **changes: Any
) -> AsyncIterator[Stack]:
    """A gateway that knows these doors, and comes back to Redis sooner than in production."""
    addresses = {door.worker_id: door.address for door in direct_workers}
    async with running_stack(
        client, redis_url, worker=False, direct_workers=addresses, data_dir=home, **changes
    ) as stack:
        stack.gateway.direct._policy._leave_after_s = LEAVE_AFTER_S
        await eventually(lambda: knows(stack, len(direct_workers)), "the gateway has seen the doors")
        yield stack


@asynccontextmanager
async def direct_already(
    client: Redis, redis_url: str, home: Path, outage: Outage, **changes: Any
) -> AsyncIterator[tuple[Stack, FakeEndpoint]]:
    """The same with one door, once Redis is away and a first request was served past it."""
    async with (
        endpoints("serve") as direct_workers,
        direct_stack(client, redis_url, home, direct_workers, **changes) as stack,
    ):
        outage.begin()
        await stack.infer(tier_name="enterprise")
        yield stack, direct_workers[0]


def knows(stack: Stack, direct_workers: int) -> bool:
    seen = stack.gateway.heartbeat.observation
    return seen is not None and sum(bool(worker.direct) for worker in seen.workers) == direct_workers


async def back(stack: Stack) -> None:
    """Wait until requests go through Redis again and everything is merged."""
    direct = stack.gateway.direct
    await eventually(lambda: not direct.view().active and not direct.view().spool_bytes, "Redis is trusted again")


async def audit_of(pool: Pool, request_id: str) -> tuple[list[AcceptedRecord], list[EndedRecord]]:
    accepted, ended = await pool.audit()
    return [each for each in accepted if each.id == request_id], [each for each in ended if each.id == request_id]


async def told_at_last(pool: Pool, stack: Stack, request_id: str) -> set[tuple[str, str, str, bool]]:
    """What the audit says of its ends once Redis is trusted again."""
    await back(stack)
    _, ended = await audit_of(pool, request_id)
    return told(ended)


def told(ended: list[EndedRecord]) -> set[tuple[str, str, str, bool]]:
    """Each pair may be there twice: Redis is told again what it may have lost."""
    return {(each.state, each.error_code, each.mode, each.delivered) for each in ended}


async def served(stack: Stack, asking: "asyncio.Task[Any]") -> bool:
    """Whether it is answered, after one more turn of the queue's worker."""
    await stack.worker.turn()
    return asking.done()
