"""The requests that went past Redis and have no answer yet, by id and by customer. No I/O.

How many a customer has is how many of them are here: there is no counter that could be forgotten when one ends.
"""

from collections.abc import Iterator

from gateway.direct.queue import DirectEntry


class OpenRequests:
    """Put in once, taken out once, whatever its end was."""

    def __init__(self) -> None:
        self._entries: dict[str, DirectEntry] = {}
        self._of: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[DirectEntry]:
        """Over those that are here now, whichever leave meanwhile."""
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> DirectEntry | None:
        """The one with this id."""
        return self._entries.get(request_id)

    def of_customer(self, customer_id: str) -> int:
        """How many one customer has here."""
        return len(self._of.get(customer_id, ()))

    def put(self, entry: DirectEntry) -> None:
        """It is under way."""
        self._entries[entry.id] = entry
        self._of.setdefault(entry.waiter.submission.customer_id, set()).add(entry.id)

    def take(self, request_id: str) -> None:
        """It is not under way any more; nothing happens where it was not."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        customer_id = entry.waiter.submission.customer_id
        self._of[customer_id].discard(request_id)
        if not self._of[customer_id]:
            del self._of[customer_id]
