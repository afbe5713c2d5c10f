"""The customers with the highest rates of requests at this gateway, over about five seconds.

Of each heartbeat's customers the first thousand are counted, so that memory is bounded, whatever the load.
"""

import heapq
import math

from gateway.limits.gpu_time import Customer
from scheduler.protocol.pool_view import CustomerRate

MOST_COUNTED = 1024
KEPT = 64
TOP_CUSTOMERS = 10
"""Published by each gateway; the dashboard shows fewer, of all gateways together."""

SPAN_S = 5.0
LEAST_RPS = 0.05


class TopCustomers:
    """Counts since the last heartbeat, and the rates until then."""

    __slots__ = ("_counts", "_rates")

    def __init__(self) -> None:
        self._counts: dict[Customer, int] = {}
        self._rates: dict[Customer, float] = {}

    def count(self, name: str, tier: str) -> None:
        """Count one valid request of a customer."""
        customer, counts = (name, tier), self._counts
        known = counts.get(customer)
        if known is not None:
            counts[customer] = known + 1
        elif len(counts) < MOST_COUNTED:
            counts[customer] = 1

    def heartbeat(self, elapsed_s: float) -> list[CustomerRate]:
        """The rates after `elapsed_s` since the last heartbeat, highest first."""
        old = math.exp(-elapsed_s / SPAN_S)
        gain = (1 - old) / elapsed_s if elapsed_s > 0 else 0.0
        rates = {customer: rate * old for customer, rate in self._rates.items()}
        for customer, count in self._counts.items():
            rates[customer] = rates.get(customer, 0.0) + count * gain
        self._counts = {}
        kept = heapq.nlargest(KEPT, ((rate, customer) for customer, rate in rates.items() if rate >= LEAST_RPS))
        self._rates = {customer: rate for rate, customer in kept}
        return [CustomerRate(name, tier, round(rate, 2)) for rate, (name, tier) in kept[:TOP_CUSTOMERS]]
