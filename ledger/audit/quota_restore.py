"""The quota keeper: when Redis came back empty, it is told from the audit what was spent of each quota.

Redis counts quotas, the audit remembers them. Until it is told, a moment after its first use, a new Redis counts from
nothing; told twice or by several schedulers, nothing changes. Not told is what the audit has not got yet: requests of
the last two seconds, and refused ones, which are none of its business.
"""

import asyncio
from collections.abc import Callable

import structlog

from ledger.audit.queries import SPENT_TIMEOUT_MS, quota_spent
from ledger.catalog.snapshot import Snapshot
from ledger.postgres import AWAY, closing, connect, reason
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.protocol.limits import QuotaRestore, QuotaSpent

log = structlog.get_logger("scheduler")

CONNECT_TIMEOUT_S = 5.0


class QuotaKeeper:
    """Looks every `look_s` whether Redis has to be told. `snapshot` gives the catalog, None while it is not known."""

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
        """Look for ever."""
        while True:
            try:
                await self.look()
            except RedisUnavailable:
                pass  # It is looked at again soon.
            except AWAY as error:
                log.warning("quotas_not_restored", error=reason(error))
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                log_fault("restoring quotas failed", error)
            await asyncio.sleep(self._look_s)

    async def look(self) -> None:
        """One look. Raises RedisUnavailable, and what asyncpg raises."""
        snapshot = self._snapshot()
        if snapshot is None or not await self._restore.wanted():
            return
        raised = await self._restore.tell(await self._spent(snapshot) if snapshot.quotas else [])
        if raised:
            log.info("quotas_restored", raised=raised)

    async def _spent(self, snapshot: Snapshot) -> list[QuotaSpent]:
        connection = await connect(
            self._url,
            name="tierlane-quotas",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            statement_timeout_ms=SPENT_TIMEOUT_MS,
        )
        async with closing(connection):
            counted = await quota_spent(connection, snapshot)
        return [
            QuotaSpent(s.customer_id, s.period, int(s.window_start.timestamp() * 1000), s.requests) for s in counted
        ]
