"""How often an address may fail to say who it is: counted by `limits`' sliding window, kept in a table of our own.

The memory storage of `limits` starts a thread for almost every count and never says how large it grows; this one is
a dictionary with a cap and an injected clock. Addresses that find it full share one bucket, so that somebody with very
many addresses neither fills the memory nor gets a budget for each.

Only failures come here: a good key passes whatever its address did, since behind a proxy everybody has the same one.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from limits import RateLimitItem, parse
from limits.storage.base import SlidingWindowCounterSupport, Storage
from limits.strategies import SlidingWindowCounterRateLimiter

from scheduler.errors import StartError

DEFAULT_LIMIT = "30/minute"
MAX_ADDRESSES = 10_000  # About 300 bytes each.
NO_ADDRESS = "none"
_OTHERS = "others"


class Count(NamedTuple):
    """Failures in one window and in the one before it."""

    window: int
    current: int
    previous: int


class FailureCounts(Storage, SlidingWindowCounterSupport):
    """A storage for `limits` that starts nothing and stays bounded. `clock` is seconds, of any origin.

    It knows sliding windows only: what other strategies would ask for raises NotImplementedError.
    """

    STORAGE_SCHEME = None

    def __init__(self, max_keys: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self._max_keys = max_keys
        self._clock = clock
        self._counts: OrderedDict[str, Count] = OrderedDict()  # The one that was counted longest ago comes first.

    def __len__(self) -> int:
        return len(self._counts)

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count `amount` where that stays within `limit` per `expiry` seconds; what is refused is not counted."""
        now = self._clock()
        key = self._slot(key, now, expiry)
        count = self._count(key, now, expiry)
        weighted = count.previous * (1 - now / expiry % 1) + count.current
        if math.floor(weighted) + amount > limit:
            return False
        self._counts[key] = count._replace(current=count.current + amount)
        self._counts.move_to_end(key)
        return True

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Count and seconds to live of the previous window, and of the current one."""
        now = self._clock()
        count = self._count(self._slot(key, now, expiry), now, expiry)
        left = (1 - now / expiry % 1) * expiry
        return count.previous, left if count.previous else 0.0, count.current, left + expiry

    def clear_sliding_window(self, key: str, expiry: int) -> None:  # noqa: ARG002  # the signature of `limits`
        """Forget one key."""
        self._counts.pop(key, None)

    def _slot(self, key: str, now: float, expiry: int) -> str:
        """The key itself where it is known or finds room, else the one that all others share."""
        if key in self._counts:
            return key
        last = int(now // expiry) - 1
        while self._counts and next(iter(self._counts.values())).window < last:
            self._counts.popitem(last=False)
        return key if len(self._counts) < self._max_keys else _OTHERS

    def _count(self, key: str, now: float, expiry: int) -> Count:
        window = int(now // expiry)
        count = self._counts.get(key)
        if count is None or count.window < window - 1:
            return Count(window, 0, 0)
        return count if count.window == window else Count(window, 0, count.current)

    @property
    def base_exceptions(self) -> type[Exception]:
        """Nothing fails here."""
        return ValueError

    def check(self) -> bool:
        """It is always there."""
        return True

    def reset(self) -> int:
        """Forget everything."""
        known = len(self._counts)
        self._counts.clear()
        return known

    def clear(self, key: str) -> None:
        """Forget one key."""
        self._counts.pop(key, None)

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Fixed windows are not kept."""
        raise NotImplementedError

    def get(self, key: str) -> int:
        """Fixed windows are not kept."""
        raise NotImplementedError

    def get_expiry(self, key: str) -> float:
        """Fixed windows are not kept."""
        raise NotImplementedError


class AuthThrottle:
    """Counts failures by address. `limit` is in the notation of `limits`; raises StartError where it is not.

    `refused` counts the failures that were told to wait.
    """

    def __init__(
        self,
        limit: str = DEFAULT_LIMIT,
        max_addresses: int = MAX_ADDRESSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._item = _parsed(limit)
        self._counts = FailureCounts(max_addresses, clock)
        self._window = SlidingWindowCounterRateLimiter(self._counts)
        self.refused = 0

    def __len__(self) -> int:
        """How many addresses are remembered."""
        return len(self._counts)

    def failed(self, address: str | None) -> int | None:
        """Note a failure; milliseconds to wait where the address had too many, else None."""
        bucket = bucket_of(address)
        if self._window.hit(self._item, bucket):
            return None
        self.refused += 1
        # One more: at the very moment the count is still the limit.
        return 1 + math.floor(1000 * max(0.0, self._wait_s(self._item.key_for(bucket))))

    def _wait_s(self, key: str) -> float:
        """Seconds until one more failure would be within the limit again."""
        window, limit = self._item.get_expiry(), self._item.amount
        previous, _, current, ends_in = self._counts.get_sliding_window(key, window)
        left = ends_in - window
        if current < limit:  # Old ones have to fade: previous * left' + current < limit.
            return left - window * (limit - current) / max(previous, 1)
        return left + window * (1 - limit / current)


def bucket_of(address: str | None) -> str:
    """What is counted together: one IPv4 address, the /64 of an IPv6 one (a customer has so many), all without one."""
    if not address:
        return NO_ADDRESS
    if ":" not in address:
        return address
    try:
        ip = ip_address(address)
    except ValueError:
        return NO_ADDRESS
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return ip.packed[:8].hex()


def _parsed(limit: str) -> RateLimitItem:
    try:
        return parse(limit)
    except ValueError as error:
        raise StartError(
            f"TIERLANE_AUTH_FAILURES is {limit!r}: write a number and a time, such as {DEFAULT_LIMIT}."
        ) from error
