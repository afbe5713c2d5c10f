"""The catalog of one process: a Snapshot that follows PostgreSQL and outlives it.

One task owns one connection. It LISTENs, and because NOTIFY can be lost it also asks for the version each second. Of a
changed version it reads what changed, or everything where that cannot be told (a new connection may lead to another
server); the snapshot is replaced whole, or kept whole when PostgreSQL is away or a row is bad. Nothing here ever
raises into the request path.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf
from typing import Any

from ledger.catalog.api_key import parse, verify
from ledger.catalog.changes import load_changes
from ledger.catalog.loader import CHANNEL, PIECE, BadCatalogRow, CatalogState, LoadedCatalog, load_whole, read_state
from ledger.catalog.snapshot import Identity, Snapshot
from ledger.postgres import AWAY, Connection, closing, connect, place_of, reason
from scheduler.errors import ErrorCode, RequestError
from scheduler.redis_client.pipeline import Backoff

STATEMENT_TIMEOUT_MS = 5000
FRESH_POLLS = 3  # A snapshot is fresh while it was confirmed within so many poll intervals.
POLL_SLACK_S = 0.5  # A confirmation may be so much later than a poll interval after the one before.
LONGEST_GAP_S = 0.25
LOAD_TIMEOUT_S = 30.0  # A hundred thousand keys take a second of a CPU that has other things to do.


class Catalog:
    """Follows the catalog at `database_url`.

    `poll_s`: seconds between version polls; `known_for_s`: how long known keys stay good while PostgreSQL is away;
    `timeout_s`: for connecting and for a poll; `clock`: monotonic seconds.
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
        self._picture: LoadedCatalog | None = None
        self._read_here = False  # Whether the picture was read over the present connection.
        self._whole_from = -inf  # When everything may be read again.
        self._remains: list[object] = []
        self._problem: str | None = "The catalog has not been read yet."
        self._bad: CatalogState | None = None
        self._answered_at = -inf  # When PostgreSQL last answered.
        self._confirmed_at = -inf  # When it last said that our snapshot is the newest.
        self._wake = asyncio.Event()
        self._tried = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """The last good picture; None until PostgreSQL was reached once."""
        return None if self._picture is None else self._picture.snapshot

    @property
    def problem(self) -> str | None:
        """Why the snapshot may be old, in one sentence for health; None while all is well."""
        return self._problem

    def age_s(self, now: float | None = None) -> float:
        """Seconds since the snapshot was last known to be the newest; infinite without one."""
        return (self._clock() if now is None else now) - self._confirmed_at

    @property
    def fresh(self) -> bool:
        """Whether the snapshot was confirmed within the last few polls, for health: one missed poll is no fault."""
        return self.age_s() <= FRESH_POLLS * self._poll_s

    def knows_all(self, now: float) -> bool:
        """Whether a key that the snapshot lacks is a wrong key, and not one that was issued since.

        Stricter than `fresh`: no sooner is PostgreSQL lost than nothing can be said of an unknown key.
        """
        return self._problem is None and self.age_s(now) <= self._poll_s + POLL_SLACK_S

    @property
    def usable(self) -> bool:
        """Whether known keys and customers may be served: PostgreSQL answered within `known_for_s`."""
        return self.snapshot is not None and self._clock() - self._answered_at <= self._known_for_s

    def identify(self, presented: str, wall_now: float) -> Identity:
        """Who presents this key; `wall_now` is seconds since the epoch.

        Raises RequestError as ledger.catalog.api_key.verify, and CATALOG_UNAVAILABLE while nothing can be known of any key.
        """
        now = self._clock()
        if self._picture is None or now - self._answered_at > self._known_for_s:
            nonsense = parse(presented) is None
            raise RequestError(ErrorCode.INVALID_API_KEY if nonsense else ErrorCode.CATALOG_UNAVAILABLE)
        return verify(presented, self._picture.snapshot, wall_now, fresh=self.knows_all(now))

    async def start(self) -> None:
        """Begin to follow; returns after the first attempt, good or not (see `problem`)."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="catalog")
        await self._tried.wait()

    async def stop(self) -> None:
        """End the task and its connection; the snapshot stays."""
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
                self._problem = f"PostgreSQL at {place_of(self._url)} does not answer for the catalog: {reason(error)}."
            except Exception as error:  # noqa: BLE001 - the loop must outlive what nobody thought of.
                self._problem = f"The catalog cannot be followed: {type(error).__name__}: {reason(error)}."
            self._tried.set()
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, backoff: Backoff) -> None:
        connection = await connect(
            self._url,
            name="tierlane-catalog",
            connect_timeout_s=self._timeout_s,
            statement_timeout_ms=STATEMENT_TIMEOUT_MS,
        )
        async with closing(connection):
            self._read_here = False
            connection.add_termination_listener(self._on_lost)
            await connection.add_listener(CHANNEL, self._on_event)
            while not self._stopping and not connection.is_closed():
                self._wake.clear()  # Before the look, so that a change during it wakes us again.
                gap_s = await self._look(connection)
                backoff.reset()
                self._tried.set()
                await asyncio.sleep(gap_s)
                while self._remains and not self._wake.is_set():
                    await self._let_go_of_some()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s - gap_s):
                        await self._wake.wait()

    def _on_event(self, *_: Any) -> None:
        self._wake.set()

    def _on_lost(self, *_: Any) -> None:
        """Told as soon as the socket closes: from now on nobody tells us of new keys."""
        if self._problem is None and not self._stopping:
            self._problem = f"PostgreSQL at {place_of(self._url)} has closed the catalog's connection."
        self._wake.set()

    async def _look(self, connection: Connection) -> float:
        """Compare versions and load if they differ. Returns the seconds that the next look should keep off.

        Many changes at once cost one load each; the gap leaves most of the CPU to the requests.
        """
        async with asyncio.timeout(self._timeout_s):
            state = await read_state(connection)
        self._answered_at = began = self._clock()
        if self._bad is not None and state.same_as(self._bad):
            return 0.0
        if self._picture is not None and state.same_as(self._picture.state):
            # The same picture seen in a newer snapshot of PostgreSQL, perhaps of another server: changes count from here.
            self._picture, self._read_here = self._picture._replace(state=state), True
            self._confirmed()
            return 0.0
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                is_new = await self._load(connection)
        except BadCatalogRow as error:
            self._bad = state
            self._problem = f"A bad row keeps the catalog at version {self._version()}: {error}"
        else:
            if is_new:
                self._confirmed()
        self._answered_at = self._clock()
        return self._gap_s(self._answered_at - began)

    async def _load(self, connection: Connection) -> bool:
        """Bring the picture up to date. False where that has to wait, for the next look."""
        before = self._picture
        if before is not None and self._read_here:
            changed = await load_changes(connection, before)
            if changed is not None:
                self._picture = changed
                return True
        if (began := self._clock()) < self._whole_from:
            self._wake.set()
            return False
        while self._remains:
            await self._let_go_of_some()
        try:
            self._picture = await load_whole(connection, None if before is None else before.snapshot)
        finally:
            now = self._clock()
            self._whole_from = now + self._gap_s(now - began)
        self._read_here = True
        if before is not None:
            self._remains = [*before.snapshot.keys.values(), *before.snapshot.customers.values()]
        return True

    async def _let_go_of_some(self) -> None:
        """Free a part of what only the old picture held: all at one go it would hold up the requests."""
        del self._remains[-PIECE:]
        await asyncio.sleep(0)

    def _gap_s(self, took_s: float) -> float:
        return min(LONGEST_GAP_S, self._poll_s / 2, 4 * took_s)

    def _confirmed(self) -> None:
        self._confirmed_at = self._clock()
        self._bad = None
        self._problem = None

    def _version(self) -> str:
        return "none" if self._picture is None else str(self._picture.snapshot.version)
