"""The catalog of one process: a snapshot that follows PostgreSQL and stays in use while PostgreSQL is not available.

One task owns one connection. It listens for notifications and also reads the version every second, because a notification
can be lost. After a change it reads the changed rows, or everything if that is not possible (a new connection may lead to
another server). The snapshot is replaced as a whole; it is kept if PostgreSQL is not available or a row is invalid. No
error of the task reaches a request.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf
from typing import Any

from ledger.catalog.api_key import KeyParts, parse, verify
from ledger.catalog.changes import load_changes
from ledger.catalog.loader import CHANNEL, PIECE, CatalogState, LoadedCatalog, load_whole, read_state
from ledger.catalog.quotas import BadCatalogRow
from ledger.catalog.snapshot import Identity, Snapshot
from ledger.postgres import AWAY, Connection, closing, connect, place_of, reason
from scheduler.errors import ErrorCode, RequestError
from scheduler.redis_client.backoff import Backoff

STATEMENT_TIMEOUT_MS = 5000
FRESH_POLLS = 3  # The number of poll intervals for which a snapshot is fresh after it was confirmed.
POLL_SLACK_S = 0.5  # How late a confirmation may be.
LONGEST_GAP_S = 0.25
LOAD_TIMEOUT_S = 30.0  # A hundred thousand keys take one second of CPU time, and the CPU may be busy.


class Catalog:
    """Follows the catalog at `database_url`.

    `poll_s`: seconds between version polls. `known_for_s`: how long known keys are accepted while PostgreSQL is not
    available. `timeout_s`: for connecting and for a poll. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        database_url: str,
        *,
        poll_s: float = 1.0,
        known_for_s: float = 900.0,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = database_url
        self._poll_s = poll_s
        self._known_for_s = known_for_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._loaded: LoadedCatalog | None = None
        self.snapshot: Snapshot | None = None
        """The last valid snapshot; None until PostgreSQL was reached once."""
        self._same_connection = False  # Whether the catalog was read over the present connection.
        self._whole_from = -inf  # When everything may be read again.
        self._garbage: list[object] = []
        self._problem: str | None = "The catalog has not been read yet."
        self._bad: CatalogState | None = None
        self._responded_at = -inf  # When PostgreSQL last responded.
        self._confirmed_at = -inf  # When the snapshot was last known to be the newest.
        self._wake = asyncio.Event()
        self._attempted = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """Why the snapshot may be old, as a sentence for health; None if it is not."""
        return self._problem

    @property
    def bad_row(self) -> bool:
        """Whether the newest catalog was rejected because of an invalid row."""
        return self._bad is not None

    def age_s(self, now: float | None = None) -> float:
        """Seconds since the snapshot was last known to be the newest; infinite without a snapshot."""
        return (self._clock() if now is None else now) - self._confirmed_at

    @property
    def fresh(self) -> bool:
        """Whether the snapshot was confirmed within the last few polls, for health: one missed poll is not a problem."""
        return self.age_s() <= FRESH_POLLS * self._poll_s

    def knows_all(self, now: float) -> bool:
        """Whether a key that is not in the snapshot is invalid, and not a new key.

        Stricter than `fresh`: this is False as soon as the connection is lost.
        """
        return self._problem is None and self.age_s(now) <= self._poll_s + POLL_SLACK_S

    @property
    def left_s(self) -> float:
        """For how long known keys and customers are still served if PostgreSQL does not respond; negative: they are not."""
        return self._responded_at + self._known_for_s - self._clock()

    @property
    def usable(self) -> bool:
        """Whether known keys and customers are served."""
        return self.snapshot is not None and self.left_s >= 0

    def identify(self, presented: str | KeyParts, wall_now: float) -> Identity:
        """The identity that belongs to a key, which may be parsed already. `wall_now` is seconds since the epoch.

        Raises RequestError as ledger.catalog.api_key.verify, and CATALOG_UNAVAILABLE while no key can be checked.
        """
        now, snapshot = self._clock(), self.snapshot
        parts = parse(presented) if isinstance(presented, str) else presented
        if parts is None:
            raise RequestError(ErrorCode.INVALID_API_KEY)
        if snapshot is None or now - self._responded_at > self._known_for_s:
            raise RequestError(ErrorCode.CATALOG_UNAVAILABLE)
        return verify(parts, snapshot, wall_now, fresh=parts.id in snapshot.keys or self.knows_all(now))

    async def start(self) -> None:
        """Start the task. Returns after the first attempt to read the catalog; see `problem`."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="catalog")
        await self._attempted.wait()

    async def stop(self) -> None:
        """Stop the task and close its connection. The snapshot is kept."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while not self._stopping:
            try:
                await self._follow(backoff)
            except AWAY as error:
                self._problem = f"PostgreSQL at {place_of(self._url)} is not responding: {reason(error)}."
            except Exception as error:  # noqa: BLE001 - no fault may end this loop
                self._problem = f"The catalog cannot be followed: {type(error).__name__}: {reason(error)}."
            self._attempted.set()
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, backoff: Backoff) -> None:
        connection = await connect(
            self._url,
            name="tierlane-catalog",
            connect_timeout_s=self._timeout_s,
            statement_timeout_ms=STATEMENT_TIMEOUT_MS,
        )
        async with closing(connection):
            self._same_connection = False
            connection.add_termination_listener(self._on_lost)
            await connection.add_listener(CHANNEL, lambda *_: self._wake.set())
            while not self._stopping and not connection.is_closed():
                self._wake.clear()  # Before the poll, so that a change during it starts another.
                gap_s = await self._poll(connection)
                backoff.reset()
                self._attempted.set()
                await asyncio.sleep(gap_s)
                while self._garbage and not self._wake.is_set():
                    await self._free_some()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s - gap_s):
                        await self._wake.wait()

    def _on_lost(self, *_: Any) -> None:
        """Called when the socket closes: from now on there are no notifications of new keys."""
        if self._problem is None and not self._stopping:
            self._problem = f"PostgreSQL at {place_of(self._url)} has closed the connection."
        self._wake.set()

    async def _poll(self, connection: Connection) -> float:
        """Compare versions and load if they differ. Returns the minimum pause before the next poll, in seconds.

        The pause leaves most of the CPU to requests while there are many changes, each of which costs a load.
        """
        async with asyncio.timeout(self._timeout_s):
            state = await read_state(connection)
        self._responded_at = began = self._clock()
        if self._bad is not None and state.same_as(self._bad):
            return 0.0
        if self._loaded is not None and state.same_as(self._loaded.state):
            # The same catalog in a newer snapshot of PostgreSQL, perhaps of another server. Changes are read from here on.
            self._loaded, self._same_connection = self._loaded._replace(state=state), True
            self._confirmed()
            return 0.0
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                is_new = await self._load(connection)
        except BadCatalogRow as error:
            self._bad = state
            version = "none" if self._loaded is None else self._loaded.snapshot.version
            self._problem = f"The catalog stays at version {version}, because a row is invalid: {error}"
        else:
            if is_new:
                self._confirmed()
        self._responded_at = self._clock()
        return self._gap_s(self._responded_at - began)

    async def _load(self, connection: Connection) -> bool:
        """Update the snapshot. Returns False if that has to wait for the next poll."""
        before = self._loaded
        if before is not None and self._same_connection:
            changed = await load_changes(connection, before)
            if changed is not None:
                self._keep(changed)
                return True
        if (began := self._clock()) < self._whole_from:
            self._wake.set()
            return False
        while self._garbage:
            await self._free_some()
        try:
            self._keep(await load_whole(connection, None if before is None else before.snapshot))
        finally:
            now = self._clock()
            self._whole_from = now + self._gap_s(now - began)
        self._same_connection = True
        if before is not None:
            self._garbage = [*before.snapshot.keys.values(), *before.snapshot.customers.values()]
        return True

    def _keep(self, loaded: LoadedCatalog) -> None:
        self._loaded, self.snapshot = loaded, loaded.snapshot

    async def _free_some(self) -> None:
        """Free a part of the old snapshot: freeing all of it at once would block requests."""
        del self._garbage[-PIECE:]
        await asyncio.sleep(0)

    def _gap_s(self, took_s: float) -> float:
        return min(LONGEST_GAP_S, self._poll_s / 2, 4 * took_s)

    def _confirmed(self) -> None:
        self._confirmed_at = self._clock()
        self._bad = None
        self._problem = None
