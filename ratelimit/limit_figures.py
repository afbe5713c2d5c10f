"""Each limit of a customer as figures: agreed, in force, and left. Pure; `tierlane explain` and the dashboard show them."""

from typing import NamedTuple

from ratelimit.limits import BUCKETS, MAX_CONCURRENCY, EffectiveLimits, LimitColumn, RemainingLimits
from ratelimit.quotas import quota_title, shown_amount


class LimitFigures(NamedTuple):
    """One limit, in the unit for users. None: there is none, or it is not known. `column`: None for a quota."""

    name: str
    column: LimitColumn | None
    base: float | None
    effective: float | None
    left: float | None = None
    reset_ms: int | None = None  # Of a quota: until its window ends.


def limit_figures(
    base: EffectiveLimits, now: EffectiveLimits | None, left: RemainingLimits | None
) -> list[LimitFigures]:
    """All limits over all keys. `now`: None if the factor is not known; concurrency and quotas are never reduced."""
    agreed = {bucket.kind: bucket for bucket in base.buckets}
    in_force = {bucket.kind: bucket for bucket in now.buckets} if now else {}
    levels = (
        {bucket.kind: level.left for bucket, level in zip(base.buckets, left.buckets, strict=False)} if left else {}
    )
    found: list[LimitFigures] = []
    for kind in BUCKETS:
        whole, part, rest = agreed.get(kind), in_force.get(kind), levels.get(kind)
        rate, size = kind.rate, kind.size
        found.append(LimitFigures(rate.name, rate, whole and whole.rate, part and part.rate, None if size else rest))
        if size:
            found.append(LimitFigures(size.name, size, whole and whole.size, part and part.size, rest))
    most = base.max_concurrency
    free = max(0, most - left.in_use) if left else None
    found.append(LimitFigures(MAX_CONCURRENCY.name, MAX_CONCURRENCY, most, most, free))
    known = left.quotas if left and len(left.quotas) == len(base.quotas) else [(None, None)] * len(base.quotas)
    for (name, amount), (rest, reset_ms) in zip(base.quotas, known, strict=True):
        shown, spare = shown_amount(name, amount), None if rest is None else shown_amount(name, rest)
        found.append(LimitFigures(quota_title(name), None, shown, shown, spare, reset_ms))
    return found
