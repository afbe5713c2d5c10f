"""Restores the quotas in an empty Redis from the audit.

Redis counts quotas, and the audit has the requests. A new Redis counts from zero until the counts are restored, shortly
after its first use. They are restored again when a cell is drained or closed, since a lost one does not return what its customers
have spent. A restore only raises counts, so several schedulers may repeat it. Requests that the audit does not
have yet (of the last two seconds) and rejected ones are missing, and of GPU time, tokens and money what requests reserved
that have not ended.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime

import structlog
from msgspec.structs import replace

from ledger.audit.queries import with_statement_timeout
from ledger.catalog.snapshot import Snapshot
from ledger.postgres import AWAY, Connection, closing, connect, reason, statement
from ratelimit.periods import window_number, window_start
from ratelimit.quotas import key_of, of_key, unit_of, without_key
from scheduler.errors import CHARGED_FAILURES, ErrorCode, RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.protocol.limits import QuotaRestore, QuotaSpent

log = structlog.get_logger("scheduler")

CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_MS = 60_000
CUSTOMERS_PER_STATEMENT = 2000
"""Few enough not to block the event loop for long."""

CHARGED_CODES = (*sorted(CHARGED_FAILURES), ErrorCode.CANCELLED)
"""Failures caused by the client. All others are refunded: see scheduler/lua/includes/refund.lua."""


async def quota_spent(
    connection: Connection,
    snapshot: Snapshot,
    *,
    now: datetime | None = None,
    timeout_ms: int = STATEMENT_TIMEOUT_MS,
) -> list[QuotaSpent]:
    """What customers and keys have spent of their quotas in all pools, without zeros, each in the smallest parts of its unit.

    `now` selects the windows (None: PostgreSQL's time). A request counts in the window in which its id was created.
    `timeout_ms` applies to each statement. Raises what asyncpg raises.
    """
    # By name, zone and whether it is of keys: the customers, each with the key or "".
    owners: dict[tuple[str, str, bool], list[tuple[str, str]]] = defaultdict(list)
    of_keys = snapshot.quotas_of_keys()
    for customer in snapshot.customers.values():
        for name in (*dict(customer.quotas), *of_keys.get(customer.id, ())):
            key_id = key_of(name)
            owners[without_key(name), customer.zone, bool(key_id)].append((customer.id, key_id))
    spent: list[QuotaSpent] = []
    queries = {
        "": statement("quota_spent"),
        "gpu": statement("quota_spent_gpu"),
        "tokens": statement("quota_spent_tokens"),
        "usd": statement("quota_spent_usd"),
    }
    async with with_statement_timeout(connection, timeout_ms):
        moment: datetime = await connection.fetchval(statement("clock_timestamp")) if now is None else now
        for (name, zone, is_of_keys), ids in owners.items():
            number = window_number(name, moment, zone)
            start, end = window_start(name, number, zone), window_start(name, number + 1, zone)
            query = queries[unit_of(name).mark]
            window = number, int(start.timestamp() * 1000), int(end.timestamp() * 1000)
            for first in range(0, len(ids), CUSTOMERS_PER_STATEMENT):
                some = ids[first : first + CUSTOMERS_PER_STATEMENT]
                customers = list({customer_id for customer_id, _ in some})
                keys = [key_id for _, key_id in some] if is_of_keys else None
                rows = await connection.fetch(query, start, end, customers, list(CHARGED_CODES), keys)
                spent += [
                    QuotaSpent(customer_id, of_key(name, key_id) if key_id else name, *window, units)
                    for customer_id, key_id, units in rows
                    if units
                ]
    return spent


class QuotaKeeper:
    """Checks every `look_s` whether Redis needs a restore. `snapshot` returns the catalog, None until it was read."""

    def __init__(
        self,
        database_url: str,
        restore: QuotaRestore,
        snapshot: Callable[[], Snapshot | None],
        look_s: float = 1.0,
    ) -> None:
        self._url = database_url
        self._restore = restore
        self._snapshot = snapshot
        self._look_s = look_s

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except RedisUnavailable:
                pass  # The next check is soon.
            except AWAY as error:
                log.warning("quotas_not_restored", error=reason(error))
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("restoring quotas failed", error)
            await asyncio.sleep(self._look_s)

    async def look(self) -> None:
        """Check once, and restore if needed. Raises RedisUnavailable, and what asyncpg raises."""
        snapshot = self._snapshot()
        if snapshot is None:
            return
        left = " ".join(row.name for row in snapshot.cells if row.state != "open")
        if not await self._restore.wanted(left):
            return
        spent: list[QuotaSpent] = []
        if snapshot.quotas or snapshot.has_key_quotas:
            # Without customers of several cells: the audit has the sum of all cells, with which the allotter compares.
            single = {name: each for name, each in snapshot.customers.items() if each.spread == 1}
            connection = await connect(
                self._url,
                name="tierlane-quotas",
                connect_timeout_s=CONNECT_TIMEOUT_S,
                statement_timeout_ms=STATEMENT_TIMEOUT_MS,
            )
            async with closing(connection):
                spent = await quota_spent(connection, replace(snapshot, customers=single))
        raised = await self._restore.apply(spent, left)
        if raised:
            log.info("quotas_restored", raised=raised)
