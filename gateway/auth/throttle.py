"""The limit on failed authentications of one address: a sliding window counter, bounded in memory.

The memory storage of the `limits` package starts a thread for almost every count and is not bounded, so only its notation
is used. Addresses over the cap share one count: a sender with many addresses neither fills the memory nor gets one
budget per address. Valid keys are never throttled, since all clients of a proxy have the same address.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import NamedTuple

from limits import parse

from gateway.auth.client_address import ip_of
from scheduler.errors import StartError

DEFAULT_LIMIT = "30/minute"
MAX_ADDRESSES = 10_000  # About 300 bytes each.
NO_ADDRESS = "none"
_OTHERS = "others"


class FailureCount(NamedTuple):
    """Failures in one window and in the window before it."""

    window: int
    current: int
    previous: int


class AuthThrottle:
    """Counts failures by address. `limit` has the notation of `limits`, such as 30/minute; raises StartError otherwise.

    `rejected` is the number of failures over the limit. `clock` is seconds, of any origin.
    """

    def __init__(
        self,
        limit: str = DEFAULT_LIMIT,
        max_addresses: int = MAX_ADDRESSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            item = parse(limit)
        except ValueError as error:
            raise StartError(
                f"TIERLANE_AUTH_FAILURES is {limit!r}: write a number and a time, such as {DEFAULT_LIMIT}."
            ) from error
        self._limit, self._window_s = item.amount, item.get_expiry()
        self._max_addresses = max_addresses
        self._clock = clock
        self._counts: OrderedDict[str, FailureCount] = OrderedDict()  # Least recently counted first.
        self.rejected = 0

    def __len__(self) -> int:
        return len(self._counts)

    def failed(self, address: str | None) -> int | None:
        """Count a failure. Returns milliseconds to wait if the address is over the limit, which is not counted; else None."""
        window, elapsed = divmod(self._clock() / self._window_s, 1)
        left = 1 - elapsed  # Share of the current window; failures of the previous one weigh as much.
        key = bucket_of(address)
        if key not in self._counts:
            while self._counts and next(iter(self._counts.values())).window < window - 1:
                self._counts.popitem(last=False)
            if len(self._counts) >= self._max_addresses:
                key = _OTHERS
        count = self._counts.get(key, FailureCount(int(window), 0, 0))
        if count.window != window:
            count = FailureCount(int(window), 0, count.current if count.window == window - 1 else 0)
        if math.floor(count.previous * left + count.current) < self._limit:
            self._counts[key] = count._replace(current=count.current + 1)
            self._counts.move_to_end(key)
            return None
        self.rejected += 1
        if count.current < self._limit:  # Wait until previous * left + current < limit.
            wait = left - (self._limit - count.current) / max(count.previous, 1)
        else:
            wait = left + 1 - self._limit / count.current
        # One millisecond more, since at that moment the sum is still the limit.
        return 1 + math.floor(1000 * self._window_s * max(0.0, wait))


def bucket_of(address: str | None) -> str:
    """The key of an address: an IPv4 address, the /64 of an IPv6 address (one customer has all of it), or NO_ADDRESS."""
    if not address:
        return NO_ADDRESS
    if ":" not in address:
        return address
    ip = ip_of(address)
    if ip is None:
        return NO_ADDRESS
    return ip.packed[:8].hex() if isinstance(ip, IPv6Address) else str(ip)
