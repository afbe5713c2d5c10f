"""A Snapshot in the making: rows go in by the piece, a picture comes out whole. Pure; bad rows end it.

By the piece, because a hundred thousand keys built at one go would hold up the requests of the same process.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from ledger.catalog.loader import BadCatalogRow, Row, customers_from, keys_from
from ledger.catalog.quotas import QuotaBook
from ledger.catalog.snapshot import Customer, Key, Model, Quota, Snapshot, Tier

T = TypeVar("T")


@contextmanager
def readable() -> Iterator[None]:
    """A value of an impossible type is a bad row too. Raises BadCatalogRow."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        raise BadCatalogRow(f"The catalog cannot be read: {error}") from error


class SnapshotBuild:
    """Feed it quotas, then customers, then keys: each stands on those before it. All raise BadCatalogRow.

    What is equal in `known`, the picture before, is taken from there: a new picture of a large catalog costs hardly
    any memory, and nothing has to be freed when the old one goes.
    """

    def __init__(self, tiers: tuple[Tier, ...], known: Snapshot | None = None) -> None:
        self._tiers = tiers
        self._by_name = {tier.name: tier for tier in tiers}
        self._known_customers = {} if known is None else known.customers
        self._known_keys = {} if known is None else known.keys
        self._book = QuotaBook()
        self._fed_customers: dict[str, Customer] = {}
        self._fed_keys: dict[str, Key] = {}
        self._customers: Mapping[str, Customer] = self._fed_customers
        self._keys: Mapping[str, Key] = self._fed_keys

    @property
    def quotas(self) -> list[Quota]:
        """All that were fed."""
        return self._book.quotas

    def add_quotas(self, rows: Iterable[Row]) -> None:
        with readable():
            for row in rows:
                self._book.add(*row)

    def add_customers(self, rows: Iterable[Row]) -> None:
        with readable():
            for customer_id, customer in customers_from(rows, self._by_name, self._book.held):
                known = self._known_customers.get(customer_id)
                self._fed_customers[customer_id] = known if known == customer else customer

    def add_keys(self, rows: Iterable[Row]) -> None:
        with readable():
            for key_id, key in keys_from(rows, self._customers):
                known = self._known_keys.get(key_id)
                self._fed_keys[key_id] = known if known == key else key

    def merge_customers(self, changed: Collection[str]) -> None:
        """What was fed becomes all that there is: with what `known` has, but without those of `changed` not fed."""
        self._customers = _merged(self._known_customers, changed, self._fed_customers)

    def merge_keys(self, changed: Collection[str]) -> None:
        """As `merge_customers`."""
        self._keys = _merged(self._known_keys, changed, self._fed_keys)

    def picture(
        self,
        version: int,
        models: Mapping[str, Model],
        quotas: tuple[Quota, ...] | None = None,
        cordoned: frozenset[str] = frozenset(),
    ) -> Snapshot:
        """The finished picture; it may not be fed any more. `quotas`: where they are not just those that were fed."""
        fed = tuple(self._book.quotas) if quotas is None else quotas
        return Snapshot(version, self._tiers, self._customers, self._keys, models, fed, cordoned)


def _merged(known: Mapping[str, T], changed: Collection[str], fed: Mapping[str, T]) -> Mapping[str, T]:
    if not changed and not fed:
        return known
    all_ = dict(known)
    for id_ in changed:
        if id_ not in fed:
            all_.pop(id_, None)
    all_.update(fed)  # Last, and over what is there: a dict that shrank and grew again is slow to copy.
    return all_
