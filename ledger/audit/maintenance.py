"""Periodic work of the active auditor: create partitions, close abandoned rows, delete old dead letters, and write when
keys were last used.
"""

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

import asyncpg
import msgspec

from ledger.postgres import Connection, reason, statement
from scheduler.errors import ErrorCode, http_status
from scheduler.redis_client.keys import JOBS_GATEWAY

MAX_KEYS = 100_000
RETRY_S = 30.0


class MaintenancePolicy(msgspec.Struct, frozen=True):
    """Periods in seconds. A row is abandoned if it is still open `deadline_s() + grace_s` after its creation; the row of a job
    `job_deadline_s + grace_s` after it.
    """

    deadline_s: Callable[[], float] = lambda: 4.0
    job_deadline_s: float = 600.0
    grace_s: float = 10.0
    close_every_s: float = 5.0
    close_limit: int = 1000
    partitions_every_s: float = 3600.0
    partitions_ahead_days: int = 7
    last_used_every_s: float = 2.0  # An operator who looks at a key after a request sees that request.
    letters_every_s: float = 600.0
    letters_kept_days: int = 30  # Their bodies are customer data.
    letters_limit: int = 1000
    alerts_kept_days: int = 30  # After the period of the quota: within it, its alerts must not be raised again.


class Maintenance:
    """Runs the tasks that are due, on the connection of a pool's auditor. `clock` is monotonic seconds."""

    def __init__(self, policy: MaintenancePolicy, clock: Callable[[], float], pool: str = "default") -> None:
        self._policy = policy
        self._pool = pool
        self._clock = clock
        now = clock()
        self._partitions_due = now
        self._letters_due = now
        self._close_due = now
        self._last_used_due = now + policy.last_used_every_s
        self._last_used: dict[str, datetime] = {}
        self.closed = 0  # Rows closed as abandoned.
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str | None:
        """A task that failed when it was last due. The success of one task does not hide the failure of another."""
        return next(iter(self._problems.values()), None)

    def note_use(self, uses: Iterable[tuple[str, datetime]]) -> None:
        """Record the last use of keys, as pairs of key id and time, from requests that are committed."""
        for key_id, at in uses:
            if len(self._last_used) < MAX_KEYS:
                self._last_used[key_id] = max(at, self._last_used.get(key_id, at))

    async def run_due(self, connection: Connection, lag_s: float) -> None:
        """Run the tasks that are due. A failed task is retried when it is due next.

        `lag_s` is the lag of the audit. If it exceeds the grace, no row is closed, since its end may be in the outbox. Raises
        what asyncpg raises only if the connection is lost.
        """
        now = self._clock()
        if now >= self._partitions_due:
            done = await self._run(connection, "make partitions", self._make_partitions)
            self._partitions_due = now + (self._policy.partitions_every_s if done else RETRY_S)
        if now >= self._close_due and lag_s < self._policy.grace_s:
            self._close_due = now + self._policy.close_every_s
            await self._run(connection, "close abandoned requests", self._close_abandoned)
        if now >= self._letters_due:
            self._letters_due = now + self._policy.letters_every_s
            await self._run(connection, "delete old dead letters", self._delete_dead_letters)
            await self._run(connection, "delete old alerts", self._delete_alerts)
        if now >= self._last_used_due:
            self._last_used_due = now + self._policy.last_used_every_s
            await self.write_uses(connection)

    async def write_uses(self, connection: Connection) -> None:
        """Write the last use of keys now: the auditor stops, and the next one does not have these uses."""
        await self._run(connection, "write the last use of keys", self._touch_keys)

    async def _run(self, connection: Connection, name: str, task: Callable[[Connection], Awaitable[None]]) -> bool:
        try:
            await task(connection)
        except asyncpg.PostgresError as error:
            if connection.is_closed():
                raise
            self._problems[name] = f"The auditor cannot {name}: {reason(error)}."
            return False
        self._problems.pop(name, None)
        return True

    async def _make_partitions(self, connection: Connection) -> None:
        await connection.execute(statement("ensure_partitions"), self._policy.partitions_ahead_days)

    async def _close_abandoned(self, connection: Connection) -> None:
        """Close rows of requests that no process will end: the gateway and Redis were lost together."""
        policy, code = self._policy, ErrorCode.ABANDONED
        status = await connection.execute(
            statement("close_abandoned"),
            policy.deadline_s() + policy.grace_s,
            policy.close_limit,
            code.value,
            http_status(code),
            policy.job_deadline_s + policy.grace_s,
            JOBS_GATEWAY,
            self._pool,
        )
        closed = int(status.rpartition(" ")[2])  # "UPDATE 3"
        self.closed += closed
        if closed == policy.close_limit:
            self._close_due = self._clock()

    async def _delete_dead_letters(self, connection: Connection) -> None:
        policy = self._policy
        status = await connection.execute(
            statement("delete_old_dead_letters"), policy.letters_kept_days, policy.letters_limit
        )
        if status == f"DELETE {policy.letters_limit}":
            self._letters_due = self._clock()

    async def _delete_alerts(self, connection: Connection) -> None:
        policy = self._policy
        await connection.execute(statement("delete_old_alerts"), policy.alerts_kept_days, policy.letters_limit)

    async def _touch_keys(self, connection: Connection) -> None:
        # In one order everywhere, so that two writers of the same rows cannot deadlock.
        if ids := sorted(self._last_used):
            await connection.execute(statement("touch_keys"), ids, [self._last_used[key_id] for key_id in ids])
            self._last_used.clear()  # Only now: a failed write is repeated.
