"""Workers with slots, for contract tests."""

from collections.abc import Sequence

from pool import Pool
from scheduler.errors import ErrorCode
from scheduler.protocol.audit_records import EndedRecord
from scheduler.protocol.batches import ClaimedBatch, FreeSlots, MemberEnd, Outcome, OwnedBatch, lost
from scheduler.protocol.pool_view import WorkerReport

LOST = lost(ErrorCode.WORKER_LOST)


async def announce(pool: Pool, worker: str = "w1", free: int = 4, total: int = 4, status: str = "ready") -> None:
    """A heartbeat with free slots; -1: not known, because a claim is in progress."""
    report = WorkerReport(worker, status, 0.5, 1, 100.0, 50.0, "tiny", "v1", slots=total, free_slots=free)
    await pool.presence.worker_beat(report)


async def in_slots(
    pool: Pool, count: int, tier: str = "free", *, worker: str = "w1", token: str = "token", slots: int = 4
) -> ClaimedBatch:
    """A claimed batch of `count` new requests of a worker that has nothing else to run."""
    await announce(pool, worker, slots, slots)
    await pool.queue(count, tier)
    await pool.form([(tier, count)])
    return await claim_next(pool, worker, token, slots, slots)


async def claim_next(
    pool: Pool, worker: str = "w1", token: str = "token", free: int = 4, total: int = 4
) -> ClaimedBatch:
    """Claim the next ready batch for a worker with these slots."""
    batch_id = await pool.pop()
    assert batch_id is not None
    claimed = await pool.batches.claim(batch_id, worker, token, FreeSlots(free, total))
    assert claimed is not None
    return claimed


def ids_of(batch: ClaimedBatch) -> list[str]:
    return [request.id for request in batch.requests]


def ended(batch: ClaimedBatch, at: int, code: str = "", *, tokens: int = 5, cost_ms: float = 0.0) -> MemberEnd:
    """The end of the `at`-th request of the batch."""
    output = "" if code else "olleh"
    outcome = Outcome(batch.requests[at].id, code, 50.0, tokens, "v1", output, cost_ms=cost_ms)
    return MemberEnd(OwnedBatch(batch.batch_id, batch.token), outcome)


async def finish(
    pool: Pool, ends: Sequence[MemberEnd], free: int | None = 4, *, worker: str = "w1", min_left_ms: int = 0
) -> int:
    """End these requests of a worker with four slots; the number of stale ones."""
    return await pool.batches.finish_part(worker, ends, FreeSlots(free, 4), min_left_ms)


async def stored_slots(pool: Pool) -> dict[str, tuple[int, ...]]:
    """Worker -> free slots, slots."""
    stored = await pool.client.hgetall(pool.keys.prefix + "slots")
    return {worker.decode(): tuple(map(int, text.split())) for worker, text in stored.items()}


async def stop_signals(pool: Pool, worker: str = "w1") -> int:
    """The number of signals for a worker."""
    return int(await pool.client.llen(pool.keys.stops(worker)))


async def ends(pool: Pool) -> dict[str, EndedRecord]:
    """The ended records by id; each request has at most one."""
    _, records = await pool.audit()
    assert len({each.id for each in records}) == len(records)
    return {each.id: each for each in records}
