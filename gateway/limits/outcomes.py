"""Outcomes of each tier's requests at this gateway: counts of the last 10 s, 60 s, 5 min and 1 h.

The request path only adds integers. Each heartbeat adds them to slots, sums the windows and publishes the sums, so that
the figures of all gateways can be added. For each tier at most 60 slots of a second and 360 slots of ten seconds are kept.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection

from scheduler.errors import ErrorCode
from scheduler.protocol.pool_view import TierOutcomes

CAPACITY_REJECTIONS = frozenset(
    {
        ErrorCode.SHED_FOR_PRIORITY,
        ErrorCode.QUEUE_FULL,
        ErrorCode.REDUCED_CAPACITY,
        ErrorCode.NO_CAPACITY,
        ErrorCode.BACKPRESSURE,
        ErrorCode.DRAINING,
    }
)
"""Rejections before the request ran. They use the error budget, but health reports them by checks of their own."""

SHORT_S, LONG_S = 10, 60
TEN_S = 10
SHORT_BURN, LONG_BURN = 30, 360
"""Slots of ten seconds in 5 min and 1 h."""


class _Slot:
    """The outcomes of one interval; `number` is its start in multiples of its length."""

    __slots__ = ("codes", "completed", "number", "others", "rejected")

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.completed = 0
        self.rejected = 0  # For lack of capacity.
        self.codes: Counter[str] = Counter()  # Other failures by error code.
        self.others: Counter[str] = Counter()  # All other errors by code: rejections, and errors that clients cause.

    def add(self, other: "_Slot") -> None:
        self.completed += other.completed
        self.rejected += other.rejected
        self.codes.update(other.codes)
        self.others.update(other.others)

    @property
    def failed(self) -> int:
        return sum(self.codes.values())


class _TierWindows:
    """One tier: the outcomes since the last heartbeat, and the slots."""

    __slots__ = ("recent", "seconds", "tens")

    def __init__(self) -> None:
        self.recent = _Slot()
        self.seconds: deque[_Slot] = deque()
        self.tens: deque[_Slot] = deque()

    def close(self, now: float) -> TierOutcomes:
        """Close the heartbeat; returns the sums of the windows."""
        second, ten = int(now), int(now / TEN_S)
        recent, self.recent = self.recent, _Slot()
        for slots, number, most in ((self.seconds, second, LONG_S), (self.tens, ten, LONG_BURN)):
            if recent.completed or recent.codes or recent.others:
                if not slots or slots[-1].number != number:
                    slots.append(_Slot(number))
                slots[-1].add(recent)
            while slots and slots[0].number <= number - most:
                slots.popleft()
        last = [slot for slot in self.seconds if slot.number > second - SHORT_S]
        minute = _Slot()
        for slot in self.seconds:
            minute.add(slot)
        short = _budget([slot for slot in self.tens if slot.number > ten - SHORT_BURN])
        return TierOutcomes(
            completed_10s=sum(slot.completed for slot in last),
            failed_10s=sum(slot.failed for slot in last),
            completed_60s=minute.completed,
            codes_60s=dict(minute.codes),
            budget_5m=short,
            budget_1h=_budget(self.tens),
            others_60s=dict(minute.others),
        )


def _budget(slots: Collection[_Slot]) -> tuple[int, int]:
    """All requests, and those that count against the objective."""
    bad = sum(slot.failed + slot.rejected for slot in slots)
    return bad + sum(slot.completed for slot in slots), bad


class OutcomeMeter:
    """The outcomes of all tiers."""

    def __init__(self) -> None:
        self._tiers: defaultdict[str, _TierWindows] = defaultdict(_TierWindows)

    def completed(self, tier: str) -> None:
        """Count a request that was answered with the model's output."""
        self._tiers[tier].recent.completed += 1

    def failed(self, tier: str, code: ErrorCode) -> None:
        """Count a failure that the client did not cause."""
        recent = self._tiers[tier].recent
        if code in CAPACITY_REJECTIONS:
            recent.rejected += 1
            recent.others[code.value] += 1
        else:
            recent.codes[code.value] += 1

    def refused(self, tier: str, code: ErrorCode) -> None:
        """Count an error that the client caused."""
        self._tiers[tier].recent.others[code.value] += 1

    def heartbeat(self, tiers: Collection[str], now: float) -> dict[str, TierOutcomes]:
        """Close the heartbeat; `now` is monotonic seconds. Tiers that are not in `tiers` any more are removed."""
        self._tiers = defaultdict(_TierWindows, {name: self._tiers[name] for name in tiers})
        return {name: tier.close(now) for name, tier in self._tiers.items()}
