"""A token bucket that is counted in this process, and the level of one that is counted elsewhere. Pure.

Times are seconds of any one clock. Scripts have their own (ratelimit/lua/bucket.lua), as `StoredBucket`.
"""

from ratelimit.limits import Bucket, Level

DAY_MS = 86_400_000  # The time until full of a bucket that is not refilled, as Redis reports it.


class LocalBucket:
    """A bucket that is full at first."""

    __slots__ = ("at", "level")

    def __init__(self, size: float, now: float) -> None:
        self.level = size
        self.at = now

    def set(self, level: float, now: float) -> None:
        """Take a level that is known."""
        self.level = level
        self.at = now

    def has(self, cost: float, bucket: Bucket, now: float) -> bool:
        """Whether so much is there now; a cost above the size needs a full bucket."""
        self.level = level_after(self.level, bucket, now - self.at)
        self.at = now
        return self.level >= min(cost, bucket.size)


class StoredBucket(LocalBucket):
    """A bucket as scripts store it: with the rate `per_s` at the time `at` of its `level`."""

    __slots__ = ("per_s",)

    def __init__(self, level: float, per_s: float, now: float = 0.0) -> None:
        super().__init__(level, now)
        self.per_s = per_s

    def level_at(self, now: float, per_s: float, size: float) -> float:
        """The level: since it was stored, the lower of the two rates counts, so that a changed rate adds nothing for the past."""
        return min(size, self.level + (now - self.at) * min(self.per_s, per_s))

    def store(self, level: float, now: float, per_s: float) -> None:
        """Store a level and the rate."""
        self.set(level, now)
        self.per_s = per_s

    def rate_changed(self, per_s: float) -> bool:
        """Whether the rate differs by more than 1 % from the stored one."""
        return abs(self.per_s - per_s) > per_s / 100


def ms_until(level: float, wanted: float, per_s: float) -> float:
    """Milliseconds until `wanted` units are there, at most a day."""
    return min(DAY_MS, max(0.0, wanted - level) / per_s * 1000) if per_s > 0 else DAY_MS


def level_after(level: float, bucket: Bucket, elapsed_s: float) -> float:
    """The level after so long without a charge."""
    return min(bucket.size, level + max(0.0, elapsed_s) * bucket.per_s)


def refilled(level: Level, bucket: Bucket, elapsed_s: float) -> Level:
    """The level, and when the bucket is full, after so long without a charge."""
    left, size, rate = level_after(level.left, bucket, elapsed_s), bucket.size, bucket.per_s
    if left >= size:
        return Level(left, 0)
    return Level(left, int(min(DAY_MS, (size - left) / rate * 1000)) if rate > 0 else DAY_MS)
