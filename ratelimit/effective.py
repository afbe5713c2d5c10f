"""The limits in force for one identity, its base limits times its tier's factor, and what is left of each of them.

Rates are lowered with the capacity; how many requests may be under way and the quotas are not: the one falls by itself
when less is let in, and the others are what was sold. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

# A rate of 0 would mean "no limit" further on, where the factor only took all of it away for now.
_LEAST_TOKENS_PER_MINUTE = 1.0
_LEAST_KEY_RATE = 1e-6


class EffectiveLimits(NamedTuple):
    """Limits as they are now: requests/s and bucket sizes; 0 where there is no such limit. Hashable, to be cached by."""

    rate: float  # Of the customer, over all of its keys.
    burst: float
    tokens_per_minute: float
    max_concurrency: int
    quotas: tuple[tuple[str, int], ...]
    key_rate: float
    key_burst: float

    @property
    def told_rate(self) -> float:
        """What one key can have of requests/s: the smaller of the customer's limit and of the key's own."""
        return min(self.rate, self.key_rate) if self.key_rate > 0 else self.rate

    @property
    def told_burst(self) -> float:
        """The same for the bucket size."""
        return min(self.burst, self.key_burst) if self.key_rate > 0 else self.burst


class BaseLimits(Protocol):
    """The base limits of one identity, as they are read here."""

    @property
    def requests_per_second(self) -> float: ...
    @property
    def burst(self) -> float: ...
    @property
    def tokens_per_minute(self) -> int | None: ...
    @property
    def max_concurrency(self) -> int: ...
    @property
    def quotas(self) -> Sequence[tuple[str, int]]: ...
    @property
    def key_rate(self) -> float: ...
    @property
    def key_burst(self) -> float: ...


class LimitReading(Protocol):
    """What Redis says of a customer's limits: a `Verdict`, or a look that spends nothing."""

    @property
    def remaining(self) -> float: ...
    @property
    def reset_ms(self) -> int: ...
    @property
    def tokens_left(self) -> float: ...
    @property
    def tokens_reset_ms(self) -> int: ...
    @property
    def in_use(self) -> int: ...
    @property
    def quotas(self) -> Sequence[tuple[int, int]]: ...


class RemainingLimits(NamedTuple):
    """What is left, and in how many ms it is whole again. `quotas` is empty where it is not known."""

    remaining: float
    reset_ms: int
    tokens: float = 0.0
    tokens_reset_ms: int = 0
    in_use: int = 0
    quotas: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, look: LimitReading) -> "RemainingLimits":
        """As Redis said it."""
        quotas = tuple(look.quotas) if look.quotas else ()
        return cls(look.remaining, look.reset_ms, look.tokens_left, look.tokens_reset_ms, look.in_use, quotas)


def effective(identity: BaseLimits, factor: float = 1.0) -> EffectiveLimits:
    """The identity's limits at `factor` (0..1) of its base; 1 gives the base limits themselves."""
    tokens, own = identity.tokens_per_minute or 0, identity.key_rate > 0
    return EffectiveLimits(
        rate=identity.requests_per_second * factor,
        burst=max(1.0, identity.burst * factor),
        tokens_per_minute=max(_LEAST_TOKENS_PER_MINUTE, tokens * factor) if tokens else 0.0,
        max_concurrency=identity.max_concurrency,
        quotas=tuple(identity.quotas),
        key_rate=max(_LEAST_KEY_RATE, identity.key_rate * factor) if own else 0.0,
        key_burst=max(1.0, identity.key_burst * factor) if own else 0.0,
    )
