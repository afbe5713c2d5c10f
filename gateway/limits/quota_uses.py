"""What admission reported last of the quotas of each customer, for alerts. No I/O."""

from typing import NamedTuple

from ratelimit.limits import EffectiveLimits, RemainingLimits
from scheduler.bounded_dict import BoundedDict
from scheduler.protocol.admission import SubmissionGroup, Verdict
from scheduler.states import Admission

MAX_CUSTOMERS = 10_000
_NONE: frozenset[str] = frozenset()


class QuotaUse(NamedTuple):
    """The quotas of a customer after its last request. `spent`: names of those that rejected one while none was in progress."""

    limits: EffectiveLimits
    left: RemainingLimits
    spent: frozenset[str] = _NONE


class QuotaUses:
    """Customers with quotas whose requests were admitted or rejected since the last `take`."""

    def __init__(self) -> None:
        self._seen: BoundedDict[str, QuotaUse] = BoundedDict(MAX_CUSTOMERS)

    def note(self, group: SubmissionGroup, verdict: Verdict) -> None:
        """Remember a verdict of Redis on a request of a customer with quotas."""
        left, known = verdict.left, self._seen.get(group.customer_id)
        is_spent = verdict.outcome is Admission.QUOTA and not left.in_use
        if not left.quotas or (known is not None and known.left is left and not is_spent):
            return  # Verdicts of one call share what is left.
        spent = _NONE if known is None else known.spent
        if is_spent:
            spent |= frozenset(verdict.quotas)
        self._seen[group.customer_id] = QuotaUse(group.limits, left, spent)

    def take(self) -> dict[str, QuotaUse]:
        """All of them by customer, which are forgotten here."""
        found = dict(self._seen)
        self._seen.clear()
        return found
