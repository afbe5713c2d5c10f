"""Helpers for requests that are equal: submit, run as one batch, finish."""

from typing import Any

from pool import TIERS, Pool
from scheduler.protocol.admission import Submission, TierLimit
from scheduler.protocol.batches import ClaimedBatch, Outcome
from scheduler.protocol.replies import Reply
from scheduler.states import Admission

KEEP = {"same": "h", "keep_answer_ms": 60_000, "model_version": "v1"}
CLOSED = [TierLimit("free", 0.0, 0.0, 0, ["free"], 0, 0)]
"""Tier limits that reject every request that needs a GPU."""


async def submit(pool: Pool, count: int = 1, tier: str = "free", **changes: Any) -> list[Submission]:
    """Equal requests that are accepted, oldest first."""
    submissions = [pool.submission(tier, **KEEP | changes) for _ in range(count)]
    assert {v.outcome for v in await pool.admit(submissions)} == {Admission.ACCEPTED}
    return submissions


def ids(submissions: list[Submission]) -> list[str]:
    return [s.id for s in submissions]


async def claim_all(pool: Pool, worker: str = "w1", token: str = "token") -> ClaimedBatch:
    """All queued requests, claimed as one batch."""
    await pool.form([(tier, 32) for tier in TIERS])
    return await pool.claim_next(worker, token)


async def finish(pool: Pool, batch: ClaimedBatch, code: str = "", output: str = "text", version: str = "v1") -> None:
    """Finish all members of a batch with the same outcome."""
    outcomes = [Outcome(member.id, code, 50.0, 5, version, output) for member in batch.requests]
    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 0


async def served_from(pool: Pool) -> dict[str, str]:
    """The source of each reply, by the audit records."""
    return {end.id: end.served_from for end in (await pool.audit())[1]}


async def replies(pool: Pool, submissions: list[Submission]) -> list[Reply | None]:
    return await pool.results.fetch(ids(submissions))


async def finished_with_followers_left(pool: Pool, **changes: Any) -> list[Submission]:
    """200 equal requests whose run has ended, but whose worker was lost after it ended the first 64 followers. `changes` are
    those of the followers.
    """
    submissions = await submit(pool) + await submit(pool, 199, **changes)
    batch = await claim_all(pool)
    followers = pool.batches._followers

    async def lost() -> None:
        return

    followers.share_all = lost
    await finish(pool, batch)
    del followers.share_all
    return submissions
