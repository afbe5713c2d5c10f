"""Batch fill and GPU use of a run, from its audit rows."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from ledger.postgres import AWAY
from tierlane_tools.bench.verification.audit_connection import audit_connection

# The members of a batch share its size, its run time and its worker. A batch that lost members to an earlier end, a
# cancel for instance, still has them in batch_size.
_BATCHES = """
SELECT max(batch_size), max(gpu_ms), max(worker_id), count(*)
FROM requests
WHERE created_at BETWEEN $1 AND $2 AND api_key_id = ANY($3) AND completed_at >= $4 AND completed_at < $5
  AND batch_id IS NOT NULL AND gpu_ms IS NOT NULL
GROUP BY batch_id
"""
_LARGEST = "SELECT max(max_batch_size) FROM models WHERE enabled AND ($1 = '' OR name = $1)"


@dataclass(frozen=True)
class Ran:
    """One batch that ran to its end."""

    size: int
    gpu_ms: float
    worker_id: str
    members: int


@dataclass(frozen=True)
class BatchUse:
    """The batches that ended in the window. Shares of 0..1; None where what they are a share of is not known."""

    batches: int
    requests: int
    mean_size: float | None
    max_batch_size: int | None
    fill: float | None
    """Mean size over the largest that the model may have."""
    mean_gpu_ms: float | None
    workers: int
    gpu_busy: float | None
    """GPU time over workers times window."""
    sizes: dict[int, int]


@dataclass(frozen=True)
class MeasuredRows:
    """Which rows: made in the run by these keys, ended in the window that is measured."""

    made_from: datetime
    made_to: datetime
    api_key_ids: tuple[str, ...]
    ended_from: datetime
    ended_to: datetime


async def read_batches(database_url: str, span: MeasuredRows, model: str, workers: int) -> BatchUse | None:
    """Read the rows; None when the database is away. `workers`: how many there are, 0 for those that were seen."""
    try:
        async with audit_connection(database_url) as connection:
            keys = list(span.api_key_ids)
            rows = await connection.fetch(_BATCHES, span.made_from, span.made_to, keys, span.ended_from, span.ended_to)
            largest = await connection.fetchval(_LARGEST, model)
    except (*AWAY, ValueError):
        return None
    ran = [Ran(row[0] or row[3], row[1], row[2] or "", row[3]) for row in rows]
    return batch_use(ran, largest, workers, (span.ended_to - span.ended_from).total_seconds())


def batch_use(ran: list[Ran], largest: int | None, workers: int, window_s: float) -> BatchUse:
    """Sum up batches; what ran in part outside of the window counts whole at one end and not at all at the other."""
    workers = workers or len({batch.worker_id for batch in ran})
    gpu_ms = sum(batch.gpu_ms for batch in ran)
    mean_size = sum(batch.size for batch in ran) / len(ran) if ran else None
    return BatchUse(
        batches=len(ran),
        requests=sum(batch.members for batch in ran),
        mean_size=mean_size,
        max_batch_size=largest,
        fill=mean_size / largest if mean_size and largest else None,
        mean_gpu_ms=gpu_ms / len(ran) if ran else None,
        workers=workers,
        gpu_busy=gpu_ms / 1000 / (workers * window_s) if workers and window_s else None,
        sizes=dict(sorted(Counter(batch.size for batch in ran).items())),
    )
