"""Jobs that Redis has lost are queued again, under their ids: no limit is asked, since they were admitted before."""

from collections.abc import Callable, Sequence

from gateway.inference.admission import ENTERED, AdmitCall, Limits
from ledger.jobs import NewJob
from scheduler.payload import decode_payload
from scheduler.protocol.admission import Submission, calls_of


class Requeue:
    """Queues again by `admissions`; `limits` says which tiers there are."""

    def __init__(self, admissions: AdmitCall, limits: Callable[[], Limits]) -> None:
        self._admissions = admissions
        self._limits = limits

    async def queue(self, jobs: Sequence[NewJob]) -> list[str]:
        """The ids that Redis has now. Raises RedisUnavailable.

        Left out is whose tier is gone from the catalog (it ends at its deadline), and whom Redis has no memory for.
        """
        limits = self._limits()
        names = {tier.name for tier in limits.tiers}
        chosen = [again(job) for job in jobs if job.tier in names]
        queued: list[str] = []
        for group in calls_of(chosen):
            verdicts = await self._admissions.admit(limits.tiers, limits.capacity_rps, group)
            queued += [s.id for s, verdict in zip(group, verdicts, strict=True) if verdict.outcome in ENTERED]
        return queued


def again(job: NewJob) -> Submission:
    """The submission of a job that was admitted before. Its limits play no part any more."""
    left_ms = max(1, int(job.left_s * 1000))
    return Submission(
        id=job.id,
        tier=job.tier,
        customer_id=job.customer_id,
        api_key_id=job.api_key_id,
        nonce="",  # Nobody waits at a connection.
        model=job.model,
        input_bytes=_input_bytes(job.body),
        total_ms=left_ms,
        queue_ms=left_ms,
        rate=1.0,
        burst=1.0,
        trace_id=job.trace_id,
        idempotency=job.idempotency,
        fingerprint=job.fingerprint,
        again=True,
        body=job.body,
    )


def _input_bytes(body: bytes) -> int:
    try:
        return len(decode_payload(body).input.encode())
    except ValueError:  # The worker will say so.
        return 0
