"""Equal requests in a test's hands: asked, run as one batch, ended, and what is stored of them."""

from typing import Any

from pool import TIERS, Pool
from scheduler.protocol.admission import Submission, TierLimit
from scheduler.protocol.batches import ClaimedBatch, Outcome
from scheduler.protocol.replies import Reply
from scheduler.states import Admission

KEEP = {"same": "h", "keep_answer_ms": 60_000, "model_version": "v1"}
SHUT = [TierLimit("free", 0.0, 0.0, 0, ["free"], 0, 0)]


async def ask(pool: Pool, count: int = 1, tier: str = "free", **changes: Any) -> list[Submission]:
    """Equal requests that are accepted, oldest first."""
    asked = [pool.submission(tier, **KEEP | changes) for _ in range(count)]
    verdicts = await pool.admit(asked)
    assert {v.outcome for v in verdicts} == {Admission.ACCEPTED}
    return asked


def ids(submissions: list[Submission]) -> list[str]:
    return [s.id for s in submissions]


async def batch_of_all(pool: Pool, worker: str = "w1", token: str = "token") -> ClaimedBatch:
    """Whatever waits, claimed as one batch."""
    await pool.form([(tier, 32) for tier in TIERS])
    return await pool.claim_next(worker, token)


async def finish(pool: Pool, batch: ClaimedBatch, code: str = "", output: str = "text", version: str = "v1") -> None:
    outcomes = [Outcome(member.id, code, 50.0, 5, version, output) for member in batch.requests]
    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 0


async def served_from(pool: Pool) -> dict[str, str]:
    """Where the audit says that each ended one's answer came from."""
    _, ends = await pool.audit()
    return {end.id: end.served_from for end in ends}


async def stored(pool: Pool, asked: list[Submission]) -> list[Reply | None]:
    return await pool.results.fetch(ids(asked))


async def untold(pool: Pool, count: int = 200, **changes: Any) -> list[Submission]:
    """Equal requests whose run has ended, and whose worker died before it told more than the first 64."""
    asked = await ask(pool, count, **changes)
    batch = await batch_of_all(pool)
    worker = pool.batches._followers

    async def die() -> None:
        return

    worker.share_all = die  # type: ignore[method-assign]
    await finish(pool, batch)
    del worker.share_all
    return asked
