"""Customers whose requests the model refuses, answers, or fails on, in the last five to ten seconds.

A refusal is the client's error, and counts in no ratio of failures. Refusals of all requests of several customers are not: a
model's server may have been started with a wrong template. Failures are the service's, unless they are all of one customer while
others are answered. Customers are numbers here, so that the sets of all gateways can be united without names, which only those
with failures have.
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
LEAST_FAILED, MOST_OF_ONE = 5, 0.9
"""Failures of a customer, and their part of all, from which on its inputs may be the cause."""
LEAST_PART = 0.5
"""The part of the customers that must be refused: a few with broken clients are always there."""


class _Customers:
    __slots__ = ("failed", "refused", "served")

    def __init__(self) -> None:
        self.served: set[str] = set()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[tuple[str, int]] = Counter()


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

    def failed(self, customer_id: str, name: str) -> None:
        """Count a request whose run failed."""
        failed, customer = self._slot.failed, (name, _number(customer_id))
        if len(failed) < MOST_COUNTED or customer in failed:
            failed[customer] += 1

    def heartbeat(self, now: float) -> tuple[list[int], list[int], list[tuple[str, int, int]]]:
        """The numbers of customers that were only refused, and of those that were served; (name, number, failures) of each.

        `now`: monotonic seconds.
        """
        number = int(now / SLOT_S)
        if number != self._number:
            self._before = self._slot if number == self._number + 1 else _Customers()
            self._slot, self._number = _Customers(), number
            self._in_a_row = Counter({each: self._in_a_row[each] for each in self._before.refused})
        refused = self._slot.refused + self._before.refused
        now_refused = {customer for customer, count in self._in_a_row.items() if count >= LEAST_IN_A_ROW}
        served = (self._slot.served | self._before.served) - now_refused
        only = (customer for customer, count in refused.items() if count >= LEAST_REFUSED and customer not in served)
        failed = self._slot.failed + self._before.failed
        most = [(name, number, count) for (name, number), count in failed.most_common(MOST_PUBLISHED)]
        return _numbers(only), _numbers(served), most


def _numbers(customers: Iterable[str]) -> list[int]:
    return sorted(map(_number, customers))[:MOST_PUBLISHED]


def _number(customer_id: str) -> int:
    return crc32(customer_id.encode())


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


def failing_customer(gateways: Iterable[GatewayStats]) -> str:
    """The name of the customer of nearly all failed requests, while another one is answered; "" if there is none."""
    failed: Counter[tuple[str, int]] = Counter()
    served: set[int] = set()
    for gateway in gateways:
        failed.update({(name, number): count for name, number, count in gateway.failed})
        served.update(gateway.served)
    (((name, number), count),) = failed.most_common(1) or [(("", 0), 0)]
    return name if count >= max(LEAST_FAILED, MOST_OF_ONE * failed.total()) and served - {number} else ""
