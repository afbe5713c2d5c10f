"""The limits while Redis is away: this gateway's own share of each key's and each tier's limit. No I/O.

All buckets start anew each time that direct mode begins, and a quarter full: what the keys spent in Redis a moment ago
is not known here. The number of buckets is bounded.
"""

from typing import NamedTuple

FIRST_FILL = 0.25
MAX_KEYS = 10_000


class Share(NamedTuple):
    """A limit in force here: rate in requests/s, and bucket size."""

    rate: float
    burst: float

    def part(self, gateways: int) -> "Share":
        """What one of so many gateways may let through."""
        return Share(self.rate / gateways, max(1.0, self.burst / gateways))


class Bucket:
    """A token bucket; times are monotonic seconds."""

    __slots__ = ("at", "tokens")

    def __init__(self, burst: float, now: float) -> None:
        self.tokens = max(1.0, burst * FIRST_FILL)  # The first request of every key gets its chance.
        self.at = now

    def refill(self, share: Share, now: float) -> float:
        """Tokens now."""
        self.tokens = min(share.burst, self.tokens + max(0.0, now - self.at) * share.rate)
        self.at = now
        return self.tokens

    def ms_until(self, tokens: float, share: Share) -> int:
        """Milliseconds until there are so many, a minute at most."""
        missing = max(0.0, tokens - self.tokens)
        return min(60_000, int(missing / share.rate * 1000) + 1) if missing and share.rate > 0 else 0


class LocalLimits:
    """The buckets of keys and tiers."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: dict[str, Bucket] = {}
        self._tiers: dict[str, Bucket] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def clear(self) -> None:
        """Begin anew."""
        self._keys.clear()
        self._tiers.clear()

    def key(self, key_id: str, share: Share, now: float) -> Bucket:
        """The bucket of a key, refilled; the one that was added first goes when there are too many."""
        bucket = self._keys.get(key_id)
        if bucket is None:
            if len(self._keys) >= self._max_keys:
                del self._keys[next(iter(self._keys))]
            bucket = self._keys[key_id] = Bucket(share.burst, now)
        bucket.refill(share, now)
        return bucket

    def tier(self, name: str, share: Share, now: float) -> Bucket:
        """The bucket of a tier, refilled."""
        bucket = self._tiers.setdefault(name, Bucket(share.burst, now))
        bucket.refill(share, now)
        return bucket
