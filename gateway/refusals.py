"""What this gateway refused since its last beat, in a bounded buffer that prefers variety to completeness.

A flood must cost neither memory nor the sight of what others were refused for. So the first few of each customer and
reason are kept whole and the rest counted; in a full buffer a customer or reason of which nothing is kept takes the place
of the newest of one that has several.
"""

import msgspec

from gateway.catalog import IdentityView
from gateway.http.errors import Refusal as Told
from ratelimit.effective import effective
from scheduler.errors import RequestError
from scheduler.protocol.admission import Verdict
from scheduler.protocol.limits import MAX_A_BEAT, Refusal
from scheduler.states import Admission

SAME_A_BEAT = 8
"""So many of one customer and reason are kept from one beat."""

_Group = tuple[str, str, str]  # Customer, code and outcome.


class Refusals:
    """The buffer. Each call is O(1), as it happens while requests are refused by the thousand."""

    def __init__(self, most: int = MAX_A_BEAT, same: int = SAME_A_BEAT) -> None:
        self._most = most
        self._same = same
        self._kept: dict[_Group, list[Refusal]] = {}
        self._more: dict[_Group, int] = {}
        self._several: dict[_Group, None] = {}  # Groups of which one can be given up; a dict, since sets have no order.
        self._size = 0
        self.left_out = 0  # Since the start, and not even counted with one that was kept.

    def note(
        self, request_id: str, identity: IdentityView, error: RequestError, verdict: Verdict | None, factor: float
    ) -> None:
        """Keep or count one refusal. `factor` is that of its tier now; no verdict means that admission was not asked."""
        group = (identity.customer_id, error.code.value, verdict.outcome.value if verdict else "")
        kept = self._kept.get(group)
        if kept is None:
            if self._size >= self._most and not self._give_one_up():
                self.left_out += 1
                return
            self._kept[group] = [_refusal(request_id, identity, error, verdict, factor)]
        elif len(kept) < self._same and self._size < self._most:
            kept.append(_refusal(request_id, identity, error, verdict, factor))
            self._several[group] = None
        else:
            self._more[group] = self._more.get(group, 0) + 1
            return
        self._size += 1

    def drain(self) -> list[Refusal]:
        """Everything kept since the last call, oldest first; the last of a group tells how many more there were."""
        for group, count in self._more.items():
            kept = self._kept[group]
            kept[-1] = msgspec.structs.replace(kept[-1], more=count)
        drained = [refusal for kept in self._kept.values() for refusal in kept]
        self._kept, self._more, self._several, self._size = {}, {}, {}, 0
        return sorted(drained, key=lambda refusal: refusal.id)

    def _give_one_up(self) -> bool:
        """Make room where a group has several; False where each has but one."""
        if not self._several:
            return False
        group = next(iter(self._several))  # In turns: who gave one up goes to the end.
        del self._several[group]
        kept = self._kept[group]
        kept.pop()
        self._more[group] = self._more.get(group, 0) + 1
        self._size -= 1
        if len(kept) > 1:
            self._several[group] = None
        return True


def _refusal(
    request_id: str, identity: IdentityView, error: RequestError, verdict: Verdict | None, factor: float
) -> Refusal:
    """The limits that were in force, and the state that admission answered with."""
    now = effective(identity, factor)
    limits = Refusal(
        id=request_id,
        customer_id=identity.customer_id,
        key_id=identity.key_id,
        tier=identity.tier,
        code=error.code.value,
        factor=round(factor, 4),
        rate=round(now.rate, 4),
        burst=round(now.burst, 4),
        tokens_per_minute=round(now.tokens_per_minute, 4),
        max_concurrency=now.max_concurrency,
        key_rate=round(now.key_rate, 4),
        key_burst=round(now.key_burst, 4),
        retry_after_ms=(error.retry_after_ms or 0) if isinstance(error, Told) else 0,
    )
    return limits if verdict is None else _with(limits, identity, verdict)


def _with(limits: Refusal, identity: IdentityView, verdict: Verdict) -> Refusal:
    period, amount = _used_up(identity, verdict)
    return msgspec.structs.replace(
        limits,
        outcome=verdict.outcome.value,
        quota=period,
        quota_amount=amount,
        remaining=round(verdict.remaining, 3),
        tokens_left=round(verdict.tokens_left, 3),
        in_use=verdict.in_use,
        depth=verdict.depth,
        retry_after_ms=limits.retry_after_ms or verdict.retry_after_ms,
    )


def _used_up(identity: IdentityView, verdict: Verdict) -> tuple[str, int]:
    """Period and amount of the quota that refused: the first with nothing left, as admission judges them."""
    if verdict.outcome is not Admission.QUOTA:
        return "", 0
    pairs = zip(identity.quotas, verdict.quotas, strict=False)
    return next((quota for quota, (left, _) in pairs if left <= 0), ("", 0))
