"""Customers whose requests the model refuses, and those whose requests it answers, in the last five to ten seconds.

A refusal is the client's error, and counts in no ratio of failures. Refusals of all requests of several customers are not: a
model's server may have been started with a wrong template. Customers are numbers here, so that the sets of all gateways can be
united without names.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

from scheduler.protocol.pool_view import GatewayStats

SLOT_S = 5.0
MOST_COUNTED = 1024
"""Customers of a slot; others are not counted."""
MOST_PUBLISHED = 64
LEAST_REFUSED = 3
"""Refusals of a customer without an answer; fewer are no evidence."""
LEAST_IN_A_ROW = 5
"""Refusals of a customer since its last answer, from which on that answer does not count."""
LEAST_CUSTOMERS = 2
LEAST_PART = 0.5
"""The part of the customers that must be refused: a few with broken clients are always there."""


class _Customers:
    __slots__ = ("refused", "served")

    def __init__(self) -> None:
        self.served: set[str] = set()
        self.refused: Counter[str] = Counter()


class RefusalMeter:
    """The customers of one gateway."""

    def __init__(self) -> None:
        self._slot, self._before, self._number = _Customers(), _Customers(), 0
        self._in_a_row: Counter[str] = Counter()  # Refusals since the last answer.

    def served(self, customer_id: str) -> None:
        """Count an answer of the model."""
        served = self._slot.served
        if len(served) < MOST_COUNTED:
            served.add(customer_id)
        self._in_a_row.pop(customer_id, None)

    def refused(self, customer_id: str) -> None:
        """Count a refusal by the model."""
        refused = self._slot.refused
        if len(refused) < MOST_COUNTED or customer_id in refused:
            refused[customer_id] += 1
            self._in_a_row[customer_id] += 1

    def heartbeat(self, now: float) -> tuple[list[int], list[int]]:
        """The numbers of customers that were only refused, and of those that were served. `now`: monotonic seconds."""
        number = int(now / SLOT_S)
        if number != self._number:
            self._before = self._slot if number == self._number + 1 else _Customers()
            self._slot, self._number = _Customers(), number
            self._in_a_row = Counter({each: self._in_a_row[each] for each in self._before.refused})
        refused = self._slot.refused + self._before.refused
        now_refused = {customer for customer, count in self._in_a_row.items() if count >= LEAST_IN_A_ROW}
        served = (self._slot.served | self._before.served) - now_refused
        only = (customer for customer, count in refused.items() if count >= LEAST_REFUSED and customer not in served)
        return _numbers(only), _numbers(served)


def _numbers(customers: Iterable[str]) -> list[int]:
    return sorted(crc32(customer.encode()) for customer in customers)[:MOST_PUBLISHED]


class Refusals(NamedTuple):
    """How many customers are refused with all their requests, and how many are not."""

    refused: int
    served: int

    @property
    def by_model(self) -> bool:
        """Whether so many customers are refused that the model may be the cause."""
        return self.refused >= LEAST_CUSTOMERS and self.refused >= LEAST_PART * (self.refused + self.served)


def refusals_of(gateways: Iterable[GatewayStats]) -> Refusals:
    """Over all gateways: a customer that one of them served is not refused."""
    refused: set[int] = set()
    served: set[int] = set()
    for gateway in gateways:
        refused.update(gateway.refused)
        served.update(gateway.served)
    return Refusals(len(refused - served), len(served))
