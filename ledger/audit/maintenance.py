"""What the active auditor does beside writing: partitions made ahead, abandoned rows closed, last use of keys noted,
old dead letters deleted.
"""

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

import asyncpg
import msgspec

from ledger.postgres import Connection, reason, statement
from scheduler.errors import ErrorCode, http_status
from scheduler.redis_client.keys import JOBS_GATEWAY

MOST_KEYS_NOTED = 100_000
RETRY_S = 30.0


class MaintenancePolicy(msgspec.Struct, frozen=True):
    """When chores are due, in seconds. A row is abandoned when it is open `deadline_s + grace_s` after its creation, that of
    a job `job_deadline_s + grace_s` after it.
    """

    deadline_s: float = 4.0
    job_deadline_s: float = 600.0
    grace_s: float = 10.0
    close_every_s: float = 5.0
    close_limit: int = 1000
    partitions_every_s: float = 3600.0
    partitions_ahead_days: int = 7
    last_used_every_s: float = 60.0
    letters_every_s: float = 600.0
    letters_kept_days: int = 30  # Their bodies are customer data.
    letters_limit: int = 1000


class Maintenance:
    """Runs what is due on the connection of a pool's auditor. `clock`: monotonic seconds."""

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
        self.closed = 0
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str | None:
        """What could not be done when it was last due; one chore's success does not hide another's failure."""
        return next(iter(self._problems.values()), None)

    def note_use(self, uses: Iterable[tuple[str, datetime]]) -> None:
        """Remember when keys were used: pairs of key id and time, of requests that are committed."""
        for key_id, at in uses:
            if len(self._last_used) < MOST_KEYS_NOTED:
                self._last_used[key_id] = max(at, self._last_used.get(key_id, at))

    async def run_due(self, connection: Connection, lag_s: float) -> None:
        """Do what is due. `lag_s`: seconds since all audit entries were last written; beyond the grace no row is
        closed, for its end may be among those that wait.

        A chore that fails is tried again when it is due next, and `problem` says why. Raises what asyncpg raises only
        where the connection is lost.
        """
        now = self._clock()
        if now >= self._partitions_due:
            done = await self._tried(connection, "make partitions", self._make_partitions)
            self._partitions_due = now + (self._policy.partitions_every_s if done else RETRY_S)
        if now >= self._close_due and lag_s < self._policy.grace_s:
            self._close_due = now + self._policy.close_every_s
            await self._tried(connection, "close abandoned requests", self._close_abandoned)
        if now >= self._letters_due:
            self._letters_due = now + self._policy.letters_every_s
            await self._tried(connection, "delete old dead letters", self._purge_letters)
        if now >= self._last_used_due:
            self._last_used_due = now + self._policy.last_used_every_s
            await self._tried(connection, "note the last use of keys", self._touch_keys)

    async def _tried(self, connection: Connection, what: str, chore: Callable[[Connection], Awaitable[None]]) -> bool:
        try:
            await chore(connection)
        except asyncpg.PostgresError as error:
            if connection.is_closed():
                raise
            self._problems[what] = f"The auditor cannot {what}: {reason(error)}."
            return False
        self._problems.pop(what, None)
        return True

    async def _make_partitions(self, connection: Connection) -> None:
        await connection.execute(statement("ensure_partitions"), self._policy.partitions_ahead_days)

    async def _close_abandoned(self, connection: Connection) -> None:
        """A row that nobody will end: gateway and Redis were lost together."""
        policy, code = self._policy, ErrorCode.ABANDONED
        status = await connection.execute(
            statement("close_abandoned"),
            policy.deadline_s + policy.grace_s,
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

    async def _purge_letters(self, connection: Connection) -> None:
        policy = self._policy
        status = await connection.execute(
            statement("delete_old_dead_letters"), policy.letters_kept_days, policy.letters_limit
        )
        if status == f"DELETE {policy.letters_limit}":
            self._letters_due = self._clock()

    async def _touch_keys(self, connection: Connection) -> None:
        noted, self._last_used = self._last_used, {}
        if noted:
            # In one order everywhere, so that two writers of the same rows never wait for each other in a circle.
            ids = sorted(noted)
            await connection.execute(statement("touch_keys"), ids, [noted[key_id] for key_id in ids])
