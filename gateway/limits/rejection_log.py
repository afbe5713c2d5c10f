"""The log of rejections since the last heartbeat, for `explain`: a bounded buffer.

The first few of each customer and reason are kept whole and the rest counted; in a full buffer a new customer or reason
replaces the newest entry of one that has several.
"""

import msgspec

from gateway.http.errors import RejectionError
from gateway.limits.rejections import spent_quotas
from ledger.catalog.snapshot import Identity
from ratelimit.limits import NO_BUCKET, effective
from scheduler.errors import RequestError
from scheduler.protocol.admission import Submission, Verdict
from scheduler.protocol.limits import MAX_PER_HEARTBEAT, RejectionRecord
from scheduler.states import Admission

MAX_PER_GROUP = 8
"""Rejections of one customer and reason that are kept from one heartbeat."""

_Group = tuple[str, str, str]  # Customer, code and outcome.


class RejectionLog:
    """The buffer. Each call is O(1): it happens while requests are rejected by the thousand."""

    def __init__(self, most: int = MAX_PER_HEARTBEAT, same: int = MAX_PER_GROUP) -> None:
        self._most = most
        self._same = same
        self._kept: dict[_Group, list[RejectionRecord]] = {}
        self._more: dict[_Group, int] = {}
        self._several: dict[_Group, None] = {}  # Groups with an entry to spare; a dict, since sets have no order.
        self._size = 0
        self.left_out = 0  # Since the start: neither kept nor counted with a kept one.

    def note(
        self,
        submission: Submission,
        identity: Identity,
        error: RequestError,
        verdict: Verdict | None,
        factor: float,
    ) -> None:
        """Keep or count one rejection. `factor` is that of its tier now; without a verdict there was no call of admission."""
        group = (identity.customer_id, error.code.value, verdict.outcome.value if verdict else "")
        kept = self._kept.get(group)
        if kept is None:
            if self._size >= self._most and not self._drop_one():
                self.left_out += 1
                return
            self._kept[group] = [_record(submission, identity, error, verdict, factor)]
        elif len(kept) < self._same and self._size < self._most:
            kept.append(_record(submission, identity, error, verdict, factor))
            self._several[group] = None
        else:
            self._more[group] = self._more.get(group, 0) + 1
            return
        self._size += 1

    def drain(self) -> list[RejectionRecord]:
        """Everything kept since the last call, oldest first; the last of a group has the number of further ones."""
        for group, count in self._more.items():
            kept = self._kept[group]
            kept[-1] = msgspec.structs.replace(kept[-1], more=count)
        drained = [rejection for kept in self._kept.values() for rejection in kept]
        self._kept, self._more, self._several, self._size = {}, {}, {}, 0
        return sorted(drained, key=lambda rejection: rejection.id)

    def _drop_one(self) -> bool:
        """Drop an entry of a group that has several; False where each has but one."""
        if not self._several:
            return False
        group = next(iter(self._several))  # In turns: the group goes to the end.
        del self._several[group]
        kept = self._kept[group]
        kept.pop()
        self._more[group] = self._more.get(group, 0) + 1
        self._size -= 1
        if len(kept) > 1:
            self._several[group] = None
        return True


def _record(
    submission: Submission, identity: Identity, error: RequestError, verdict: Verdict | None, factor: float
) -> RejectionRecord:
    """The limits that were in force, and the state that admission reported."""
    now = effective(identity, factor)
    requests, tokens = now.buckets[0], now.bucket_of(Admission.TOKEN_LIMIT)
    own = now.key or NO_BUCKET
    record = RejectionRecord(
        id=submission.id,
        customer_id=identity.customer_id,
        key_id=identity.key_id,
        tier=identity.tier,
        code=error.code.value,
        factor=round(factor, 4),
        rate=round(requests.rate, 4),
        burst=round(requests.size, 4),
        tokens_per_minute=round(tokens.rate, 4) if tokens else 0.0,
        max_concurrency=now.max_concurrency,
        key_rate=round(own.rate, 4),
        key_burst=round(own.size, 4),
        retry_after_ms=(error.retry_after_ms or 0) if isinstance(error, RejectionError) else 0,
        endpoint=submission.endpoint,
    )
    if verdict is None:
        return record
    quotas = spent_quotas(verdict, now) if verdict.outcome is Admission.QUOTA else []
    quota, amount = quotas[0] if quotas else ("", 0)  # The first without room, in the order of admission.
    levels = {b.kind.outcome: level.left for b, level in zip(now.buckets, verdict.left.buckets, strict=False)}
    rejecting = now.bucket_of(verdict.outcome)
    remaining = levels.get(Admission.CUSTOMER_LIMIT, 0.0)
    return msgspec.structs.replace(
        record,
        outcome=verdict.outcome.value,
        quota=quota,
        quota_amount=amount,
        remaining=round(remaining, 3),
        tokens_left=round(levels.get(Admission.TOKEN_LIMIT, 0.0), 3),
        in_use=verdict.left.in_use,
        depth=verdict.depth,
        retry_after_ms=record.retry_after_ms or verdict.retry_after_ms,
        limit=rejecting.words if rejecting else "",
        left=round(levels.get(verdict.outcome, remaining), 3) if rejecting else 0.0,
    )
