"""A load that saturates one tier: a few of its customers keep a number of requests open each (closed loop).

Each customer always has waiting requests, more than its share of the GPUs can serve, and one has several times as many as the
others. All runs are slow, so that the GPUs are the limit, not the CPU of this machine. The requests of the flooding customer
cost about twice as much.
"""

import asyncio
import time
from collections.abc import Iterator

from tierlane_tools.chaos.history import History, LoadCustomer, Target
from tierlane_tools.chaos.load.requests import ChaosLoad, LoadRequest

SECONDS = 15.0
RAMP_S = 0.5
AFTER_REJECTION_S = 0.5
SLOW_DIGIT = "0"  # The model is slow for a nonce that ends so.
FLOOD_PADDING = "x" * 60


def saturating_customers(target: Target) -> tuple[LoadCustomer, ...]:
    """The customers of this load; none if they cannot be compared."""
    found = tuple(customer for customer in target.customers if customer.in_flight)
    return found if len(found) > 1 else ()


class SaturatingLoad(ChaosLoad):
    """The load of the customers with `in_flight`."""

    def __init__(self, target: Target, seed: int, history: History, seconds: float = SECONDS) -> None:
        """`seconds`: for which requests are sent."""
        customers = saturating_customers(target)
        self._first = [customer for customer in customers for _ in range(customer.in_flight)]
        self._flooding = max(customers, key=lambda customer: customer.in_flight)
        self._seconds = seconds
        self._until = 0.0
        super().__init__(target, len(self._first) / RAMP_S, seconds, seed, history)
        self._random.shuffle(self._first)

    async def run(self) -> None:
        """Send requests for the given time; returns when each has its outcome."""
        self._until = time.monotonic() + self._seconds
        await super().run()

    def _arrivals(self, rate: float, duration_s: float) -> Iterator[float]:  # noqa: ARG002 - a closed loop
        return (number / rate for number in range(len(self._first)))

    def _drawn(self) -> LoadRequest:
        return self._request_of(self._first.pop())

    def _request_of(self, customer: LoadCustomer) -> LoadRequest:
        padding = FLOOD_PADDING if customer is self._flooding else ""
        request = LoadRequest(customer, self._random.randrange(len(self._pools)), "", padding)
        request.nonce = request.nonce[: -len(SLOW_DIGIT)] + SLOW_DIGIT
        return request

    def _end(self, request: LoadRequest, *, served: bool) -> None:
        """Send the next request of this customer, after a while if this one was rejected."""
        wait_s = 0.0 if served else AFTER_REJECTION_S
        if self._done.is_set() or time.monotonic() + wait_s >= self._until:
            super()._end(request, served=served)
        else:
            asyncio.get_running_loop().call_later(wait_s, self._replace, request)

    def _replace(self, ended: LoadRequest) -> None:
        self._open -= 1
        if not self._done.is_set():
            self._begin(self._request_of(ended.customer))
