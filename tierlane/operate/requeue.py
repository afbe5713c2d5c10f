"""`tierlane dlq requeue`: dead letters run again under new ids.

The command registers as a gateway without HTTP while it runs. Customers are not charged and get no response: the requests
are submitted as accepted before. The dead letter is marked first, so that of two operators only one requeues it; the mark
is removed if Redis did not queue the request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import typer
from redis.asyncio import Redis
from uuid_utils import uuid7

from gateway.jobs.dead_letter_rerun import (
    MAX_RERUNS,
    Candidate,
    DeadLetterReruns,
    NoSuchLetter,
    NotRerun,
    candidate,
    new_ids,
)
from ledger.admin.transaction import as_actor
from ledger.dead_letters import mark_requeued, note, unmark_requeued
from ledger.postgres import Connection
from ratelimit.request_limits import RequestLimits
from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import GatewayStats
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import Reply
from scheduler.redis_client.connections import command_client, server_url, tag_at
from scheduler.redis_client.keys import Keys
from scheduler.states import State
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.runner import actor_of
from tierlane.connect import VerbError, database
from tierlane.operate.cells import urls_of_cells
from tierlane.operate.dead_letters import APPLICATION, forget_dead, no_such
from tierlane.output import counted

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


BEAT_S = 0.5

BY_ID = "by id"


class RequeueGateway(DeadLetterReruns):
    """A gateway without HTTP in one pool. Methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, settings: "Settings") -> None:
        self._id = f"dlq-requeue-{uuid7().hex}"
        self._life = Presence(client, keys, gone_ms=settings.gone_ms)
        super().__init__(client, keys, self._id, settings.gone_ms, settings.request_limits)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Be registered until the end of the block."""
        await self._beat()
        beating = asyncio.create_task(self._keep_beating())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            with contextlib.suppress(RedisUnavailable):
                await self._life.gateway_gone(self._id)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(RedisUnavailable):
                await self._beat()

    async def _beat(self) -> None:
        await self._life.gateway_beat(GatewayStats(self._id, 0.0, {}))


def requeue(request_ids: Sequence[str], cell: str | None, *, again: bool) -> Work:
    """Requeue dead letters in a cell, or in the first one with a healthy worker; the exit code is 0 if all completed.

    The work raises UsageError and VerbError.
    """

    async def work(call: VerbCall) -> int:
        if not call.settings.redis_url:
            raise VerbError("TIERLANE_REDIS_URL is not set, so nothing can be queued.")
        ids = list(dict.fromkeys(request_ids))
        return await _requeue(call.settings, ids, actor_of(call), cell, again=again)

    return work


async def _requeue(settings: "Settings", ids: Sequence[str], by: str, cell: str | None, *, again: bool) -> int:
    try:
        async with database(settings, APPLICATION) as connection:
            urls, chosen = [await urls_of_cells(connection, settings, only) for only in (None, cell)]
            forget, completed = partial(forget_dead, settings, urls), 0
            async with _gateway(settings, chosen) as gateway:
                for at in range(0, len(ids), MAX_RERUNS):
                    batch = [
                        await _candidate(connection, settings.pool, request_id, gateway.limits, again=again)
                        for request_id in ids[at : at + MAX_RERUNS]
                    ]
                    known = [each for each in batch if each is not None]
                    completed += await _run_batch(connection, gateway, known, by, forget)
    except RedisUnavailable as error:
        raise VerbError(f"Nothing more was requeued: {error}.") from error
    return 0 if completed == len(ids) else 1


@asynccontextmanager
async def _gateway(settings: "Settings", urls: Mapping[str, str]) -> AsyncIterator[RequeueGateway]:
    """The gateway in the first of these cells that has a healthy worker. Raises VerbError if none has one."""
    fault = ""
    for url in urls.values():
        client = command_client(await server_url(url))
        try:
            keys = Keys(settings.pool, tag_at(client))
            gateway = RequeueGateway(client, keys, settings)
            try:
                await gateway.check_workers()
            except (NotRerun, RedisUnavailable) as error:
                fault = fault or str(error)
                continue
            async with gateway.open():
                yield gateway
                return
        finally:
            await client.aclose()
    raise VerbError(fault)


async def _candidate(
    connection: Connection, pool: str, request_id: str, within: RequestLimits, *, again: bool
) -> Candidate | None:
    """The request to run; None if there is none, after printing the reason."""
    try:
        return await candidate(connection, request_id, pool, within, again=again)
    except NoSuchLetter:
        typer.echo(no_such(request_id), err=True)
    except NotRerun as error:
        typer.echo(f"{request_id}: {error}", err=True)
    return None


async def _run_batch(
    connection: Connection,
    gateway: RequeueGateway,
    batch: Sequence[Candidate],
    by: str,
    forget: Callable[[Sequence[str]], Awaitable[None]],
) -> int:
    """Queue the batch and wait; returns how many completed. `forget`: removes ids from the lists that health counts."""
    marked = await _mark(connection, batch, by)
    if not marked:
        return 0
    try:
        entered = await gateway.submit([c.submission for c in marked])
    except RedisUnavailable as error:
        ids = ", ".join(c.submission.id for c in marked)
        raise VerbError(f"It is not known whether these run: {ids} ({error}).") from error
    await _take_back(connection, [c for c in marked if c.submission.id not in entered], by)
    running = [c for c in marked if c.submission.id in entered]
    await forget([c.letter.request_id for c in running])
    completed = 0
    began = time.monotonic()
    async for request_id, reply in gateway.replies([c.submission.id for c in running]):
        old = next(c.letter.request_id for c in running if c.submission.id == request_id)
        typer.echo(f"{old} -> {request_id}: {ending(reply, time.monotonic() - began)}")
        completed += reply is not None and reply.state == State.COMPLETED
    return completed


async def _mark(connection: Connection, batch: Sequence[Candidate], by: str) -> list[Candidate]:
    """Mark the batch as requeued, in the dead letters and in config_changes; returns those that no one else had marked."""
    async with as_actor(connection, by):
        # The same order for all operators prevents deadlocks.
        ordered = sorted(batch, key=lambda c: c.letter.request_id)
        marked = [c for c in ordered if await mark_requeued(connection, c.letter, c.submission.id)]
        if marked:
            before = {c.letter.request_id: c.letter.requeued_as for c in marked}
            await note(connection, BY_ID, {"requeued_as": before}, {"requeued_as": new_ids(marked)})
    for each in batch:
        if each not in marked:
            typer.echo(
                f"{each.letter.request_id}: It was requeued or deleted by another operator at the same time.", err=True
            )
    return marked


async def _take_back(connection: Connection, refused: Sequence[Candidate], by: str) -> None:
    if not refused:
        return
    async with as_actor(connection, by):
        for each in refused:
            await unmark_requeued(connection, each.letter, each.submission.id)
        before = {each.letter.request_id: each.letter.requeued_as for each in refused}
        await note(connection, BY_ID, {"requeued_as": new_ids(refused)}, {"requeued_as": before})
    for each in refused:
        typer.echo(f"{each.letter.request_id}: Redis is out of memory, so it was not queued.", err=True)


def ending(reply: Reply | None, waited_s: float) -> str:
    """The result of a request as text."""
    if reply is None:
        return f"no result within {waited_s:.0f} s; see the audit."
    result = "completed" if reply.state == State.COMPLETED else f"failed, {reply.error_code}"
    return f"{result} after {waited_s * 1000:.0f} ms and {counted(reply.attempts, 'run')}."
