"""Memory for request bodies: bytes that are being read, bounded for each key, each customer and the process.

A body counts from the moment that its handler waits for it until it was read; bodies that arrived whole with their headers
are not counted.
"""

from gateway.http.errors import RejectionError
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError

OWN_BUDGET = (
    "Too many bytes of request bodies are being sent with this key or by this customer: send fewer requests at a time."
)
GATEWAY_BUDGET = "Too many bytes of request bodies are being sent to this gateway; try again."
RETRY_MS = 1000
"""Milliseconds after which a body sent at the usual speed has been read."""


class BodyBudget:
    """Bytes of bodies that are being read by one gateway. Limits are in bytes."""

    def __init__(self, in_all: int, of_customer: int, of_key: int) -> None:
        self.in_all = 0
        self._max_in_all = in_all
        self._max = {"customer": of_customer, "key": of_key}
        self._held: dict[tuple[str, str], int] = {}  # Without zeros.

    def share(self, identity: Identity) -> "BodyShare":
        """The share of one body of this customer and key."""
        return BodyShare(self, (("key", identity.key_id), ("customer", identity.customer_id)))

    def take(self, owners: tuple[tuple[str, str], ...], count: int) -> None:
        """Raises RequestError: 429 `rate_limit_exceeded` over an owner's limit, 503 `no_capacity` over the gateway's."""
        held = self._held
        for owner in owners:
            if held.get(owner, 0) + count > self._max[owner[0]]:
                raise RejectionError(ErrorCode.RATE_LIMIT_EXCEEDED, OWN_BUDGET, RETRY_MS)
        if self.in_all + count > self._max_in_all:
            raise RequestError(ErrorCode.NO_CAPACITY, GATEWAY_BUDGET)
        self.in_all += count
        for owner in owners:
            held[owner] = held.get(owner, 0) + count

    def give_back(self, owners: tuple[tuple[str, str], ...], count: int) -> None:
        """Undo `take`."""
        self.in_all -= count
        for owner in owners:
            self._held[owner] -= count
            if not self._held[owner]:
                del self._held[owner]


class BodyShare:
    """The share of one body in the budget."""

    __slots__ = ("_budget", "_count", "_owners")

    def __init__(self, budget: BodyBudget, owners: tuple[tuple[str, str], ...]) -> None:
        self._budget = budget
        self._owners = owners
        self._count = 0

    def take(self, count: int) -> None:
        """Count more bytes. Raises RequestError as `BodyBudget.take`."""
        self._budget.take(self._owners, count)
        self._count += count

    def give_back(self) -> None:
        """Return all bytes: the body was read, or will not be read."""
        if self._count:
            self._budget.give_back(self._owners, self._count)
            self._count = 0
