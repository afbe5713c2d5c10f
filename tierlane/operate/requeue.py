"""`tierlane dlq requeue`: dead letters run again under new ids, with the steps of `gateway.jobs.dead_letter_rerun`.

No gateway has to run: the command registers as one without HTTP while it waits. Each dead letter is requeued or rejected
by itself.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import typer
from uuid_utils import uuid7

from gateway.jobs.dead_letter_rerun import (
    MAX_RERUNS,
    Candidate,
    DeadLetterReruns,
    NoSuchLetter,
    NotRerun,
    candidate,
    mark,
    new_ids,
    unmark,
)
from ledger.admin.transaction import as_actor
from ledger.dead_letters import note
from ledger.postgres import Connection
from scheduler.errors import RedisUnavailable
from scheduler.protocol.admission import Admissions, ReplayLimits
from scheduler.protocol.pool_view import GatewayStats
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import Reply
from scheduler.redis_client.connections import command_client, server_url, tag_at
from scheduler.redis_client.keys import Keys
from scheduler.states import State
from tierlane.admin.options import VerbCall
from tierlane.admin.runner import actor_of
from tierlane.connect import VerbError, database
from tierlane.operate.cells import urls_of_cells
from tierlane.operate.dead_letters import APPLICATION, forget_dead, no_such
from tierlane.output import counted
from tierlane.settings.model import Settings

BEAT_S = 0.5

BY_ID = "by id"


async def requeue(call: VerbCall, request_ids: Sequence[str], cell: str | None, *, again: bool) -> int:
    """Requeue dead letters in a cell, or in the first one with a healthy worker; the exit code is 0 if all completed.

    Raises UsageError and VerbError.
    """
    settings = call.settings
    if not settings.redis_url:
        raise VerbError("TIERLANE_REDIS_URL is not set, so nothing can be queued.")
    ids, by, completed = list(dict.fromkeys(request_ids)), actor_of(call), 0
    try:
        async with database(settings, APPLICATION) as connection:
            urls, chosen = [await urls_of_cells(connection, settings, only) for only in (None, cell)]
            forget = partial(forget_dead, settings, urls)
            async with _reruns(settings, chosen) as reruns:
                for at in range(0, len(ids), MAX_RERUNS):
                    batch = []
                    for request_id in ids[at : at + MAX_RERUNS]:
                        try:
                            within, pool = reruns.limits, settings.pool
                            batch.append(await candidate(connection, request_id, pool, within, again=again))
                        except NoSuchLetter:
                            typer.echo(no_such(request_id), err=True)
                        except NotRerun as error:
                            typer.echo(f"{request_id}: {error}", err=True)
                    completed += await _run_batch(connection, reruns, batch, by, forget)
    except RedisUnavailable as error:
        raise VerbError(f"Nothing more was requeued: {error}.") from error
    return 0 if completed == len(ids) else 1


@asynccontextmanager
async def _reruns(settings: Settings, urls: Mapping[str, str]) -> AsyncIterator[DeadLetterReruns]:
    """Reruns in the first of these cells that has a healthy worker. Raises VerbError if none has one."""
    gateway_id, fault = f"dlq-requeue-{uuid7().hex}", ""
    for url in urls.values():
        client = command_client(await server_url(url))
        try:
            keys = Keys(settings.pool, tag_at(client))
            presence = Presence(client, keys, gone_ms=settings.gone_ms)
            replays = settings.config_of(ReplayLimits, "idempotency_")
            admissions = Admissions(client, keys, gateway_id, replays=replays, pass_ms=settings.reap_ms)
            reruns = DeadLetterReruns(client, keys, presence, admissions, settings.request_limits)
            try:
                await reruns.check_workers()
            except (NotRerun, RedisUnavailable) as error:
                fault = fault or str(error)
                continue
            async with _registered(presence, gateway_id):
                yield reruns
                return
        finally:
            await client.aclose()
    raise VerbError(fault)


@asynccontextmanager
async def _registered(presence: Presence, gateway_id: str) -> AsyncIterator[None]:
    """Registered as a gateway during the block: the reaper ends requests of gateways without a heartbeat."""
    stats = GatewayStats(gateway_id, 0.0, {})

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(RedisUnavailable):
                await presence.gateway_beat(stats)

    await presence.gateway_beat(stats)
    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        with contextlib.suppress(RedisUnavailable):
            await presence.gateway_gone(gateway_id)


async def _run_batch(
    connection: Connection,
    reruns: DeadLetterReruns,
    batch: Sequence[Candidate],
    by: str,
    forget: Callable[[Sequence[str]], Awaitable[None]],
) -> int:
    """Queue the batch and wait; returns how many completed. `forget`: removes ids from the lists that health counts."""
    async with as_actor(connection, by):
        marked = await mark(connection, batch)
        if marked:
            await note(connection, BY_ID, {"requeued_as": _former_ids(marked)}, {"requeued_as": new_ids(marked)})
    for each in batch:
        if each not in marked:
            fault = "It was requeued or deleted by another operator at the same time."
            typer.echo(f"{each.letter.request_id}: {fault}", err=True)
    if not marked:
        return 0
    try:
        running, rejected = await reruns.queue(marked)
    except RedisUnavailable as error:
        ids = ", ".join(c.submission.id for c in marked)
        raise VerbError(f"It is not known whether these run: {ids} ({error}).") from error
    if rejected:
        async with as_actor(connection, by):
            await unmark(connection, rejected, BY_ID, _former_ids(rejected))
        for each in rejected:
            typer.echo(f"{each.letter.request_id}: Redis is out of memory, so it was not queued.", err=True)
    await forget([c.letter.request_id for c in running])
    completed = 0
    began = time.monotonic()
    async for old_id, new_id, reply in reruns.replies(running):
        typer.echo(f"{old_id} -> {new_id}: {ending(reply, time.monotonic() - began)}")
        completed += reply is not None and reply.state == State.COMPLETED
    return completed


def _former_ids(candidates: Sequence[Candidate]) -> dict[str, str | None]:
    return {each.letter.request_id: each.letter.requeued_as for each in candidates}


def ending(reply: Reply | None, waited_s: float) -> str:
    """The result of a request as text."""
    if reply is None:
        return f"no result within {waited_s:.0f} s; see the audit."
    result = "completed" if reply.state == State.COMPLETED else f"failed, {reply.error_code}"
    return f"{result} after {waited_s * 1000:.0f} ms and {counted(reply.attempts, 'run')}."
