"""Which customers ask most at this gateway: rates over about five seconds, of few names, whatever the number of customers.

On the way of a request it is one addition. Of a quarter of a second's customers the first thousand are counted: whoever asks
much is among them in most of them.
"""

import heapq
import math

from scheduler.protocol.pool_view import CustomerRate

MOST_COUNTED = 1024
KEPT = 64
TOLD = 10
"""So many of each gateway are published; a page shows fewer, of all gateways together."""

SPAN_S = 5.0
LEAST_RPS = 0.05

Customer = tuple[str, str]
"""Name and tier."""


class Busiest:
    """Counts since the last beat, and the rates until then."""

    __slots__ = ("_counts", "_rates")

    def __init__(self) -> None:
        self._counts: dict[Customer, int] = {}
        self._rates: dict[Customer, float] = {}

    def asked(self, name: str, tier: str) -> None:
        """A valid request of this customer came in."""
        customer, counts = (name, tier), self._counts
        known = counts.get(customer)
        if known is not None:
            counts[customer] = known + 1
        elif len(counts) < MOST_COUNTED:
            counts[customer] = 1

    def beat(self, elapsed_s: float) -> list[CustomerRate]:
        """Close the beat, so many seconds after the last one; the busiest, the busiest first."""
        old = math.exp(-elapsed_s / SPAN_S)
        gain = (1 - old) / elapsed_s if elapsed_s > 0 else 0.0
        rates = {customer: rate * old for customer, rate in self._rates.items()}
        for customer, count in self._counts.items():
            rates[customer] = rates.get(customer, 0.0) + count * gain
        self._counts = {}
        kept = heapq.nlargest(KEPT, ((rate, customer) for customer, rate in rates.items() if rate >= LEAST_RPS))
        self._rates = {customer: rate for rate, customer in kept}
        return [CustomerRate(name, tier, round(rate, 2)) for rate, (name, tier) in kept[:TOLD]]
