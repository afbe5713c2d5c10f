"""The allotter of a scheduler, or of a gateway in its place: it follows the customers of several cells in the catalog."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace
from uuid_utils import uuid7

from ledger.audit.quota_restore import quota_spent
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import CellRow, Customer, Snapshot
from ledger.postgres import AWAY, LEADER_CONNECT_TIMEOUT_S, closing, connect
from ratelimit.limits import MAX_CONCURRENCY, base_buckets, value_of
from scheduler.cells.allotter import Allotter
from scheduler.cells.division import SharedCustomer
from scheduler.cells.places import cell_urls, cells_of
from scheduler.tasks import TaskRegistry
from tierlane.settings.model import Settings

LEASE_SLACK_S = 0.5
"""How long a request counts as open after its deadline, as in ratelimit/lua/charge.lua."""

AUDIT_LOOK_S = 1.0
STATEMENT_TIMEOUT_MS = 60_000


def shared_customer(
    customer: Customer, cells: Sequence[CellRow], of_keys: Mapping[str, Mapping[str, int]]
) -> SharedCustomer:
    """A customer, with its base limits, its quotas and those of its keys, and its cells. `of_keys`: by customer."""
    return SharedCustomer(
        customer.id,
        cells_of(customer.id, cells, customer.cell, customer.spread),
        base_buckets(customer.limits, 1.0, customer.spread),
        int(value_of(customer.limits, MAX_CONCURRENCY) or 0),
        (*customer.quotas, *of_keys.get(customer.id, {}).items()),
        customer.spread > 1,
        customer.zone,
    )


class SharedCustomers:
    """The customers of several cells. They are looked for once in each snapshot."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._snapshot: Snapshot | None = None
        self._of_keys: Mapping[str, Mapping[str, int]] = {}
        self._found: Mapping[str, SharedCustomer] = {}

    def all(self) -> Mapping[str, SharedCustomer]:
        """By id; the same object until one of them changes."""
        snapshot = self._catalog.snapshot
        if snapshot is not None and snapshot is not self._snapshot:
            self._snapshot, self._of_keys = snapshot, snapshot.quotas_of_keys()
            shared = [customer for customer in snapshot.customers.values() if customer.spread > 1]
            found = {customer.id: shared_customer(customer, snapshot.cells, self._of_keys) for customer in shared}
            if found != self._found:
                self._found = found
        return self._found

    def find(self, customer_id: str) -> SharedCustomer | None:
        """Any customer of the catalog."""
        self.all()
        snapshot = self._catalog.snapshot
        customer = snapshot.customers.get(customer_id) if snapshot is not None else None
        return (
            None if snapshot is None or customer is None else shared_customer(customer, snapshot.cells, self._of_keys)
        )


class QuotaAudit:
    """Compares the quotas of customers of several cells with the audit: when an allotter begins, and after a loss of data."""

    def __init__(self, database_url: str, catalog: Catalog, allotter: Allotter) -> None:
        self._url = database_url
        self._catalog = catalog
        self._allotter = allotter

    async def run(self) -> None:
        """Compare for ever. While PostgreSQL is not available, what the cells know counts."""
        while True:
            with suppress(*AWAY):
                await self._look()
            await asyncio.sleep(AUDIT_LOOK_S)

    async def _look(self) -> None:
        snapshot, ids = self._catalog.snapshot, self._allotter.unaudited()
        if snapshot is None or not ids:
            return
        customers = {i: snapshot.customers[i] for i in ids if i in snapshot.customers}
        connection = await connect(
            self._url,
            name="tierlane-allotter",
            connect_timeout_s=LEADER_CONNECT_TIMEOUT_S,
            statement_timeout_ms=STATEMENT_TIMEOUT_MS,
        )
        async with closing(connection):
            rows = await quota_spent(connection, replace(snapshot, customers=customers))
        found: dict[str, dict[str, tuple[int, int]]] = {customer_id: {} for customer_id in ids}
        for row in rows:
            found[row.customer_id][row.period] = row.window, row.spent
        for customer_id, spent in found.items():
            self._allotter.audited(customer_id, spent)


async def run_allotter(settings: Settings, catalog: Catalog) -> None:
    """Run for ever, once there is a catalog."""

    def urls() -> Mapping[str, str]:
        snapshot = catalog.snapshot
        return cell_urls(settings.redis_url, snapshot.cells if snapshot is not None else ())

    customers = SharedCustomers(catalog)
    life_s = settings.longest.total_ms / 1000 + LEASE_SLACK_S
    allotter = Allotter(uuid7().hex, urls, customers.all, customers.find, life_s=life_s)
    while catalog.snapshot is None:  # noqa: ASYNC110 - the catalog has no event
        await asyncio.sleep(0.1)
    tasks, audit = TaskRegistry(), QuotaAudit(settings.statement_url, catalog, allotter)
    async with asyncio.TaskGroup() as group:
        group.create_task(tasks.run_forever("allotter", allotter.run))
        group.create_task(tasks.run_forever("audit of shared quotas", audit.run))
