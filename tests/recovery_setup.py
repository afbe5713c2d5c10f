"""Recovery after a loss of Redis, over a fake Redis and a virtual clock."""

from collections.abc import Sequence
from typing import Any

from customer_limits import in_force
from gateway.inference.admission import AdmissionLimits
from gateway.inference.deadlines import Cancellations
from gateway.inference.pending import PendingRequest, PendingRequests
from gateway.inference.recovery.loss_recovery import LossRecovery
from gateway.inference.recovery.recent_outcomes import RecentOutcomes
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.admission import Submission, SubmissionGroup, TierLimit, Verdict
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.protocol.replies import Reply
from scheduler.request_id import new_request_id
from scheduler.states import Admission

TIERS = [
    TierLimit("free", 1.0, 1.0, 1, ["enterprise", "paid", "free"]),
    TierLimit("enterprise", 1.0, 1.0, 1, ["enterprise"]),
    TierLimit("paid", 1.0, 1.0, 1, ["enterprise", "paid"]),
]
Pair = tuple[AcceptedRecord, EndedRecord]


def pending(started: float = 0.0, tier: str = "free", **state: bool) -> PendingRequest:
    """A pending request that Redis has accepted, unless `state` says otherwise."""
    submission = Submission(
        id=new_request_id(),
        group=SubmissionGroup(tier, "c", "k", "m", in_force(1.0, 1.0), endpoint="/v1/messages"),
        nonce="n",
        input_bytes=7,
        total_ms=4000,
        queue_ms=2000,
        trace_id="t",
        idempotency="c:key",
        fingerprint="body",
        body=b"x" * 1000,
    )
    made = PendingRequest(submission, started)
    made.sent = made.accepted = True
    for name, value in state.items():
        setattr(made, name, value)
    return made


def reply(to: PendingRequest, output: str = "out") -> Reply:
    return Reply(to.id, "c", "n", "completed", "", 2, 12.5, "b1", 8, "w1", 50.0, 3, "v1", output)


class FakeRedis:
    """Records its calls; the next `failures` calls fail."""

    def __init__(self) -> None:
        self.failures = 0
        self.outcome = Admission.ACCEPTED
        self.submitted: list[list[Submission]] = []
        self.adopted: list[list[Pair]] = []
        self.during: Any = lambda: None

    async def admit(
        self, tiers: Sequence[TierLimit], capacity_rps: float, submissions: Sequence[Submission], *_: int
    ) -> list[Verdict]:
        self._respond()
        self.submitted.append(list(submissions))
        self.during()
        return [Verdict(self.outcome) for _ in submissions]

    async def adopt(self, pairs: Sequence[Pair]) -> int:
        self._respond()
        self.adopted.append(list(pairs))
        return 0

    async def cancel(self, requests: Sequence[tuple[str, ErrorCode]]) -> list[Reply | None]:
        return []

    def _respond(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RedisUnavailable("away")

    @property
    def ids(self) -> list[str]:
        return [submission.id for call in self.submitted for submission in call]


class Setup:
    """Recovery over a fake Redis and a virtual clock."""

    def __init__(self, p95_ms: float = 100.0, max_pairs: int = 1000) -> None:
        self.now = 0.0
        self.redis = FakeRedis()
        self.cancellations = Cancellations(self.redis)
        self.pending_requests = PendingRequests(self._ended)
        self.ends = RecentOutcomes("g1", lambda: self.now, max_pairs)
        self.recovery = LossRecovery(
            pending_requests=self.pending_requests,
            ends=self.ends,
            admissions=self.redis,
            adoption=self.redis,
            limits=lambda: AdmissionLimits(TIERS, 10.0),
            cancellations=self.cancellations,
            p95_ms=lambda: p95_ms,
            clock=lambda: self.now,
        )

    def _ended(self, waiting: PendingRequest) -> None:
        self.recovery.ended(waiting)

    def add(self, *waiting: PendingRequest) -> None:
        for each in waiting:
            self.pending_requests.add(each)

    def end(self, *waiting: PendingRequest, outcome: Any = None) -> None:
        for each in waiting:
            each.finish(reply(each) if outcome is None else outcome)
            self.pending_requests.remove(each)
