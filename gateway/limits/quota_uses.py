"""What admission reported last of the quotas of each customer and of each key with quotas, for alerts. No I/O."""

from typing import NamedTuple

from ratelimit.limits import EffectiveLimits, RemainingLimits
from ratelimit.quotas import key_of
from scheduler.bounded_dict import BoundedDict
from scheduler.protocol.admission import SubmissionGroup, Verdict
from scheduler.states import Admission

MAX_CUSTOMERS = 10_000
_NONE: frozenset[str] = frozenset()


class QuotaUse(NamedTuple):
    """The quotas of a customer, and those of the key, after a request. `spent`: names of those that rejected one while none was
    in progress.
    """

    customer_id: str
    limits: EffectiveLimits
    left: RemainingLimits
    spent: frozenset[str] = _NONE


class QuotaUses:
    """Customers and keys with quotas whose requests were admitted or rejected since the last `take`."""

    def __init__(self) -> None:
        self._seen: BoundedDict[tuple[str, str], QuotaUse] = BoundedDict(MAX_CUSTOMERS)

    def note(self, group: SubmissionGroup, verdict: Verdict) -> None:
        """Remember a verdict of Redis on a request of a customer with quotas."""
        left, quotas = verdict.left, group.limits.quotas
        owner = group.customer_id, key_of(quotas[-1][0])  # Those of a key are the last ones.
        known = self._seen.get(owner)
        is_spent = verdict.outcome is Admission.QUOTA and not left.in_use
        if not left.quotas or (known is not None and known.left is left and not is_spent):
            return  # Verdicts of one call share what is left.
        spent = _NONE if known is None else known.spent
        if is_spent:
            spent |= frozenset(verdict.quotas)
        self._seen[owner] = QuotaUse(group.customer_id, group.limits, left, spent)

    def take(self) -> list[QuotaUse]:
        """All of them, which are forgotten here."""
        found = list(self._seen.values())
        self._seen.clear()
        return found
