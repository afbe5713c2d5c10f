"""Alerts at shares of quotas: which quotas have them, and which shares were reached. Pure."""

import hashlib
from collections.abc import Iterable, Sequence

from ratelimit.quotas import PERIOD_S, period_of, period_parts

USUAL_SHARES = (0.8, 1.0)
"""Shares of a quota without a list of its own."""

LEAST_PERIOD_S = 3600
"""Quotas with shorter periods raise no alerts."""


_BINARY = 1e-12
"""More than the error of a product of decimal fractions in binary."""


def has_alerts(name: str) -> bool:
    """Whether the periods of a quota are long enough for alerts. An unknown unit is that of a newer version."""
    every, unit = period_parts(period_of(name))
    return every * PERIOD_S.get(unit, 0) >= LEAST_PERIOD_S


def reached(shares: Iterable[float], amount: int, used: float) -> Sequence[float]:
    """The shares that `used` of `amount` has reached, the smallest first."""
    return [share for share in sorted(shares) if used >= share * amount * (1 - _BINARY)]


def event_id(customer_id: str, name: str, period: int, share: float) -> str:
    """The id of the event that a customer reached this share of a quota in a period: the same on every gateway."""
    key = f"{customer_id} {name} {period} {share:.17g}"
    return f"alert_{hashlib.sha256(key.encode()).hexdigest()[:32]}"
