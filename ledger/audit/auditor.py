"""The auditor: writes the outbox in Redis to PostgreSQL, exactly one row for each request.

It takes entries, folds them, writes and commits the rows, and then drops the entries. Records that cannot be written are
set aside, and requests without an end are held for it (ledger/audit/window.py). After a crash the entries are taken and
written again, which changes nothing. For each pool one auditor is active: the one whose session holds an advisory lock.
It writes on that session, so an auditor that has lost the lock cannot write. The lock needs a direct connection or a
session pool. What Redis has lost is written by others: ended jobs by ledger/sql/jobs.sql, lines of batches by
ledger/sql/batches.sql, on the same key.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

import msgspec

from ledger.audit import writer
from ledger.audit.maintenance import Maintenance, MaintenancePolicy
from ledger.audit.window import HoldPolicy, OutboxWindow
from ledger.audit.writer import make_batch
from ledger.postgres import (
    AUDITOR_LOCK,
    AWAY,
    LEADER_CONNECT_TIMEOUT_S,
    LEADER_SETTINGS,
    Connection,
    closing,
    connect,
    place_of,
    reason,
    wait_for_lock,
)
from scheduler.errors import TierlaneError
from scheduler.failpoints import failpoint
from scheduler.protocol.audit_outbox import Outbox
from scheduler.redis_client.backoff import Backoff


class AuditPolicy(msgspec.Struct, frozen=True):
    """`interval_s`: pause when all entries are written. `hold`: how long a request without an end is held for its end, so
    that both are written as one row. `standby_s`: pause between attempts to get the lock.
    """

    take_limit: int = 500
    interval_s: float = 0.5
    hold: HoldPolicy = HoldPolicy()
    standby_s: float = 1.0
    pool: str = "default"
    statement_timeout_ms: int = 5000
    maintenance: MaintenancePolicy = MaintenancePolicy()


class Auditor:
    """An auditor of one pool. `clock` is monotonic seconds.

    `active`: it holds the lock. `set_aside` counts outbox entries, and `last_rejection` is why the last of them was set aside.
    `last_error` is the present problem.
    """

    def __init__(
        self,
        database_url: str,
        outbox: Outbox,
        policy: AuditPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = database_url
        self._outbox = outbox
        self._policy = policy or AuditPolicy()
        self._clock = clock
        self._window = OutboxWindow(self._policy.hold, clock)
        self.maintenance = Maintenance(self._policy.maintenance, clock, self._policy.pool)
        self._backoff = Backoff(0.05, 2.0)
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopped.set()
        self._stop_by = 0.0
        self._drained = False  # Whether this auditor has reached the end of the outbox since it became active.
        self._drained_at = clock()
        self._error: str | None = None
        self.active = False
        self.rows_written = 0
        self.set_aside = 0
        self.last_rejection: str | None = None

    @property
    def last_error(self) -> str | None:
        return self._error or self.maintenance.problem

    def lag(self) -> float:
        """Seconds since all entries were written, except those held for their ends; 0 on standby."""
        return max(0.0, self._clock() - self._drained_at)

    async def run(self) -> None:
        """Audit until `stop`. While PostgreSQL or Redis is not available, entries stay in Redis."""
        self._stopped.clear()
        try:
            while not self._stopping.is_set():
                try:
                    await self._session()
                except AWAY as error:
                    self._error = f"PostgreSQL at {place_of(self._url)} cannot be written: {reason(error)}."
                except Exception as error:  # noqa: BLE001 - no fault may end this loop
                    self._error = f"The auditor failed: {type(error).__name__}: {reason(error)}."
                self.active = False
                await self._pause(self._backoff.next_s())
        finally:
            self.active = False
            self._stopped.set()

    async def stop(self, grace_s: float = 2.0) -> None:
        """Write entries for at most `grace_s` seconds and end `run`. The next auditor writes the rest."""
        self._stop_by = self._clock() + grace_s
        self._stopping.set()
        await self._stopped.wait()

    async def _session(self) -> None:
        connection = await connect(
            self._url,
            name="tierlane-auditor",
            connect_timeout_s=LEADER_CONNECT_TIMEOUT_S,
            statement_timeout_ms=self._policy.statement_timeout_ms,
            settings=LEADER_SETTINGS | writer.STAGING_SETTINGS,
        )
        async with closing(connection):
            if not await wait_for_lock(connection, AUDITOR_LOCK, self._policy.pool, self._stand_by):
                return
            self.active, self._drained = True, False
            self._window.forget()  # Another auditor may have written some of it.
            await writer.prepare(connection)
            while True:
                last = self._stopping.is_set()  # A step that began before the stop may have missed later entries.
                try:
                    more = await self._step(connection)
                    self._error = None
                    self._backoff.reset()
                    wait_s = 0.0 if more else self._policy.interval_s
                except TierlaneError as error:  # Redis is not available: the session and the lock are kept.
                    self._error = str(error)
                    more, wait_s = True, self._backoff.next_s()
                await self.maintenance.run_due(connection, self.lag() if self._drained else math.inf)
                if not self._stopping.is_set():
                    if wait_s:
                        await self._pause(wait_s)
                elif self._clock() >= self._stop_by or (last and not (more or len(self._window))):
                    await self.maintenance.write_uses(connection)
                    return
                elif self._error:  # One call that timed out in Redis does not end the grace period.
                    await asyncio.sleep(min(wait_s, self._stop_by - self._clock()))

    async def _stand_by(self) -> bool:
        """Another auditor is active. Returns False after `stop`."""
        self._backoff.reset()
        self._error = None
        self._drained_at = self._clock()  # The lag is that of the active auditor.
        await self._pause(self._policy.standby_s)
        return not self._stopping.is_set()

    async def _step(self, connection: Connection) -> bool:
        """Take entries, write and commit their rows, drop the oldest ones that are written. Returns whether there are probably more."""
        began = self._clock()
        taken = await self._outbox.take(self._policy.take_limit, *self._window.held())
        try:
            folded = await self._window.read(taken, hold=not self._stopping.is_set())
            if folded:
                failpoint("audit_taken")
                batch = await make_batch(folded)
                timeout_s = 2 * self._policy.statement_timeout_ms / 1000
                batch.refuse(await writer.write_rows(connection, batch.new, timeout_s, new=True))
                batch.refuse(await writer.write_rows(connection, batch.known, timeout_s))
                batch.refuse(await writer.write_rows(connection, batch.later, timeout_s))
                self._window.set_aside(batch.bad)
                self.last_rejection = batch.rejection or self.last_rejection
                self.rows_written += batch.requests()
                self.maintenance.note_use(batch.key_uses())
            written = self._window.written()
            if written.entries:
                failpoint("audit_undropped")
                await self._outbox.drop(*written)
                self._window.dropped(written.entries)
                self.set_aside += len(written.bad)
        except BaseException:
            self._window.forget()
            raise
        if not taken.more:
            self._drained_at, self._drained = began, True
        return taken.more

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until `stop`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
