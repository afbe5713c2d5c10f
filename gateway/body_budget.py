"""How many bytes of request bodies may be on their way into memory at a time: of one key, of one customer, in all. Pure.

A body is counted from the moment that its handler waits for it until it was read: a client that announces 256 KiB and
sends them slowly would else hold them for the whole body deadline, on each of its connections. Bodies that came whole
with their headers are not counted: nothing is waited for.
"""

from gateway.catalog import IdentityView
from gateway.http.errors import Refusal
from scheduler.errors import ErrorCode, RequestError

OWN = (
    "Too many bytes of request bodies are being sent with this key or by this customer: send fewer requests at a time."
)
ALL = "Too many bytes of request bodies are being sent to this gateway; try again."
RETRY_MS = 1000
"""Milliseconds after which a body that is sent at the usual speed has made room."""


class BodyBudget:
    """The counts of one gateway. Limits are in bytes."""

    def __init__(self, in_all: int, of_customer: int, of_key: int) -> None:
        self.in_all = 0
        self._most_in_all = in_all
        self._most = {"customer": of_customer, "key": of_key}
        self._held: dict[tuple[str, str], int] = {}  # Only what is not zero.

    def share(self, identity: IdentityView) -> "BodyShare":
        """For one body of this customer and key."""
        return BodyShare(self, (("key", identity.key_id), ("customer", identity.customer_id)))

    def take(self, owners: tuple[tuple[str, str], ...], count: int) -> None:
        """Raises RequestError: 429 `rate_limit_exceeded` for the owners' own limits, 503 `no_capacity` for that of all."""
        held = self._held
        for owner in owners:
            if held.get(owner, 0) + count > self._most[owner[0]]:
                raise Refusal(ErrorCode.RATE_LIMIT_EXCEEDED, OWN, RETRY_MS)
        if self.in_all + count > self._most_in_all:
            raise RequestError(ErrorCode.NO_CAPACITY, ALL)
        self.in_all += count
        for owner in owners:
            held[owner] = held.get(owner, 0) + count

    def give_back(self, owners: tuple[tuple[str, str], ...], count: int) -> None:
        """What `take` counted."""
        self.in_all -= count
        for owner in owners:
            left = self._held[owner] - count
            if left:
                self._held[owner] = left
            else:
                del self._held[owner]


class BodyShare:
    """What one body takes of the budget."""

    __slots__ = ("_budget", "_count", "_owners")

    def __init__(self, budget: BodyBudget, owners: tuple[tuple[str, str], ...]) -> None:
        self._budget = budget
        self._owners = owners
        self._count = 0

    def take(self, count: int) -> None:
        """So many bytes more. Raises RequestError as `BodyBudget.take`."""
        self._budget.take(self._owners, count)
        self._count += count

    def give_back(self) -> None:
        """The body was read, or is not read any more."""
        if self._count:
            self._budget.give_back(self._owners, self._count)
            self._count = 0
