"""The auditor: the outbox in Redis becomes rows in PostgreSQL, each request exactly one.

take -> fold -> write (commit) -> drop, with the bad ones set aside, and requests that have only begun held for their
ends (ledger/audit/window.py). Killed anywhere, the taken entries are taken again and written again, which changes
nothing. One auditor of a pool is active at a time: the one whose own session holds an advisory lock. It writes on that same
session, so whoever has lost the lock can no longer write. (The lock needs a direct connection or a session pool.)
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

import msgspec

from ledger.audit import writer
from ledger.audit.maintenance import Maintenance, MaintenancePolicy
from ledger.audit.rows import Folded
from ledger.audit.window import HoldPolicy, OutboxWindow
from ledger.audit.writer import make_batch
from ledger.postgres import AWAY, Connection, closing, connect, place_of, reason
from scheduler.errors import TierlaneError
from scheduler.failpoints import failpoint
from scheduler.protocol.audit_outbox import Outbox
from scheduler.redis_client.pipeline import Backoff

AUDITOR_LOCK = 7_436_002
LOCK = "SELECT pg_try_advisory_lock($1, hashtext($2))"
CONNECT_TIMEOUT_S = 3.0

# A process that was stopped for longer loses its session and with it the lock, so that another can go on.
HUNG_SESSION = {"idle_session_timeout": "15s", "idle_in_transaction_session_timeout": "10s"}


class AuditPolicy(msgspec.Struct, frozen=True):
    """How the auditor works.

    `interval_s`: pause once all is written. `hold`: how long a request that has only begun waits for its end, so that
    both are written as one row.
    """

    take_limit: int = 500
    interval_s: float = 0.5
    hold: HoldPolicy = HoldPolicy()
    standby_s: float = 1.0
    pool: str = "default"
    statement_timeout_ms: int = 5000
    chores: MaintenancePolicy = MaintenancePolicy()


class AuditorStats(msgspec.Struct, frozen=True):
    """How the audit stands, for health and metrics."""

    active: bool  # This auditor holds the lock.
    pending: int  # Outbox entries that wait.
    lag_s: float  # Since all was last written but what waits for its end; 0 while another auditor is the active one.
    rows_written: int
    last_write_ms: float
    closed: int  # Rows closed as abandoned.
    set_aside: int
    last_refusal: str | None  # Why something was last set aside.
    last_error: str | None  # What is wrong now.


class Auditor:
    """One auditor of one pool. `run` until `stop`; `clock` gives monotonic seconds."""

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
        self._chores = Maintenance(self._policy.chores, clock, self._policy.pool)
        self._backoff = Backoff(0.05, 2.0)
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._stop_by = 0.0
        self._active = False
        self._drained = False  # Whether this auditor, since it is active, has seen the end of the outbox.
        self._pending = 0
        self._drained_at = clock()
        self._rows_written = 0
        self._last_write_ms = 0.0
        self._set_aside = 0
        self._last_refusal: str | None = None
        self._last_error: str | None = None

    def lag(self, now: float | None = None) -> float:
        """Seconds since every entry was last seen written, but for beginnings that wait for their end."""
        return max(0.0, (self._clock() if now is None else now) - self._drained_at)

    def stats(self) -> AuditorStats:
        """How it stands now."""
        return AuditorStats(
            active=self._active,
            pending=self._pending,
            lag_s=self.lag(),
            rows_written=self._rows_written,
            last_write_ms=self._last_write_ms,
            closed=self._chores.closed,
            set_aside=self._set_aside,
            last_refusal=self._last_refusal,
            last_error=self._last_error or self._chores.problem,
        )

    async def run(self) -> None:
        """Audit until `stop`. PostgreSQL or Redis being away is waited out; entries stay where they are meanwhile."""
        self._ended.clear()
        try:
            while not self._stopping.is_set():
                try:
                    await self._session()
                except AWAY as error:
                    self._last_error = f"PostgreSQL at {place_of(self._url)} cannot be written: {reason(error)}."
                except Exception as error:  # noqa: BLE001 - the loop must outlive what nobody thought of.
                    self._last_error = f"The auditor stumbled: {type(error).__name__}: {reason(error)}."
                self._active = False
                await self._count_pending()
                await self._pause(self._backoff.next_s())
        finally:
            self._active = False
            self._ended.set()

    async def stop(self, grace_s: float = 2.0) -> None:
        """Write what waits, for `grace_s` seconds at most, and end `run`; what remains waits for the next auditor."""
        self._stop_by = self._clock() + grace_s
        self._stopping.set()
        await self._ended.wait()

    async def _session(self) -> None:
        connection = await connect(
            self._url,
            name="tierlane-auditor",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            statement_timeout_ms=self._policy.statement_timeout_ms,
            settings=HUNG_SESSION | writer.STAGING_ROOM,
        )
        async with closing(connection):
            if await self._lock(connection):
                self._active, self._drained = True, False
                self._window.forget()  # Another auditor may have been at it.
                await writer.prepare(connection)
                await self._serve(connection)

    async def _lock(self, connection: Connection) -> bool:
        """Wait until this session is the auditor's. False: told to stop meanwhile."""
        while not self._stopping.is_set():
            if await connection.fetchval(LOCK, AUDITOR_LOCK, self._policy.pool):
                return True
            self._backoff.reset()
            self._last_error = None
            self._drained_at = self._clock()  # Whoever holds the lock answers for what waits.
            await self._pause(self._policy.standby_s)
        return False

    async def _serve(self, connection: Connection) -> None:
        while True:
            last = self._stopping.is_set()  # A step that began before the stop may have missed what came since.
            try:
                more = await self._step(connection)
                self._last_error = None
                self._backoff.reset()
                wait_s = 0.0 if more else self._policy.interval_s
            except TierlaneError as error:  # Redis is away: PostgreSQL's session and lock are kept.
                self._last_error = str(error)
                more, wait_s = True, self._backoff.next_s()
            await self._chores.run_due(connection, self.lag() if self._drained else math.inf)
            if not self._stopping.is_set():
                if wait_s:
                    await self._pause(wait_s)
            elif self._clock() >= self._stop_by or (last and not (more or len(self._window))):
                return
            elif self._last_error:  # One call that Redis did not answer in time does not end the grace period.
                await asyncio.sleep(min(wait_s, self._stop_by - self._clock()))

    async def _step(self, connection: Connection) -> bool:
        """Take, write, drop. Returns whether more is likely to wait."""
        began = self._clock()
        taken = await self._outbox.take(self._policy.take_limit, *self._window.held())
        try:
            folded = await self._window.read(taken, hold=not self._stopping.is_set())
            if folded:
                failpoint("audit_taken")
                await self._write(connection, folded)
                self._last_write_ms = (self._clock() - began) * 1000
            await self._drop()
        except BaseException:
            self._window.forget()
            raise
        if not taken.more:
            self._drained_at, self._drained = began, True
        self._pending = await self._outbox.depth()
        return taken.more

    async def _write(self, connection: Connection, folded: Folded) -> None:
        """Commit what can be, and set aside what never can."""
        batch = await make_batch(folded)
        timeout_s = 2 * self._policy.statement_timeout_ms / 1000
        batch.refuse(await writer.write_rows(connection, batch.new, timeout_s, new=True))
        batch.refuse(await writer.write_rows(connection, batch.known, timeout_s))
        batch.refuse(await writer.write_rows(connection, batch.later, timeout_s))
        self._window.set_aside(batch.bad)
        self._last_refusal = batch.refusal or self._last_refusal
        self._rows_written += batch.requests()
        self._chores.note_use(batch.key_uses())

    async def _drop(self) -> None:
        """Have the entries forgotten of which all is written."""
        written = self._window.written()
        if written.entries:
            failpoint("audit_undropped")
            await self._outbox.drop(*written)
            self._window.dropped(written.entries)
            self._set_aside += len(written.bad)

    async def _count_pending(self) -> None:
        """While nothing can be written, the backlog is what health wants to know."""
        with contextlib.suppress(TierlaneError):
            self._pending = await self._outbox.depth()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
