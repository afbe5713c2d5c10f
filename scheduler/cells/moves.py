"""Moves of workers between cells: the document that schedulers publish, and the decision of a worker.

The same loads give the guaranteed share of each tier in each cell, which the dispatchers of the process use.

Four times a second, and eight times while workers should move, each scheduler observes a pool in all cells, computes the
chances of a move (`placement.py`) and writes them into each cell, in the key `moves`. The reply to a worker's heartbeat
contains this document, so that it costs no call of its own. But a busy worker whose last document lets it move reads the
present one before it decides: others may have moved by the same document meanwhile, and too many would leave. Several
schedulers may publish: a worker decides at most once by a document and once in a period of its own clock.

A cell whose Redis does not respond for a second has no part in this, and its workers leave it without a draw; nor has one
whose Redis has lost its data, until its workers have registered again: others would go to them. A draining cell keeps workers
as long as requests wait or run in it.

Bound: enterprise work in a cell without a free worker waits, compared with a single queue, at most for one observation
(0.25 s), for the heartbeat that brings the document (0.25 s), for the batch that runs on the worker then, and for its
connection to the cell. The draw may select no worker: with the chances for three, in one of twenty periods. An idle worker
that was not drawn reads the next document after a period.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from statistics import mean
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from ratelimit.capacity import GpuRate
from ratelimit.shares import TierShare
from scheduler.cells.placement import (
    CellLoad,
    Placement,
    destination,
    needed_above,
    placed,
    ready_workers,
    workers_needed,
)
from scheduler.cells.places import CellServer, cell_urls, with_credentials, without_credentials
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import log_fault
from scheduler.protocol.pool_view import Observation
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import close_client, command_client, server_url
from scheduler.redis_client.keys import DEFAULT_CELL, Keys, cell_of
from scheduler.tasks import end_all

PERIOD_S = 0.125
"""Time between two documents while workers should move, and the least time between two decisions of a worker, but for late
heartbeats. Needs change quickly then, and a worker that stays idle in the wrong cell serves nothing."""

CALM_S = 0.25
"""Time between two documents while no worker should move."""

EARLIEST = 0.8
"""A worker decides again after this part of a period: heartbeats are aligned to tenths of a period, and may be early."""

LOST_S = 1.0
"""A cell whose Redis does not respond for this time is lost."""

REGISTER_S = 1.0
"""The time in which the workers of a cell register again after its Redis has lost its data."""

WAIT_S = 0.1
"""How long a round waits for the slowest cell; its reply counts in the next round."""

BACKGROUND = "background"
"""The background queues of all tiers, as one tier of the lowest priority."""


_encode = msgspec.msgpack.Encoder().encode


class CellPlace(msgspec.Struct, array_like=True, frozen=True):
    """A cell: `redis_url` has no credentials; None: the server of the default cell."""

    name: str
    redis_url: str | None
    state: str


class Moves(msgspec.Struct, array_like=True, frozen=True):
    """What workers of one cell read. `number` differs between documents; `chances`: by destination; `cells`: all cells."""

    number: int
    chances: dict[str, float]
    cells: list[CellPlace]


_moves = msgspec.msgpack.Decoder(Moves)


class PoolPlan(NamedTuple):
    """A pool: its tiers, the paused ones, requests in a full batch, and the GPU time of a request while none is measured.

    `gone_ms`: the age of the last heartbeat from which a worker counts as lost.
    """

    pool: str
    tiers: Sequence[TierShare]
    paused: frozenset[str]
    batch: int
    request_ms: float
    gone_ms: int


class CellState(NamedTuple):
    """A cell that responds: its state in the table, and the last observation of a pool in it."""

    state: str
    seen: Observation


def places_of(rows: Sequence[CellServer], base_url: str) -> list[CellPlace]:
    """All cells: the default one needs no row. `base_url`: its URL, for workers that have started in another cell."""
    state = next((row.state for row in rows if row.name == DEFAULT_CELL), "open")
    others = [CellPlace(row.name, row.redis_url, row.state) for row in rows if row.name != DEFAULT_CELL]
    return [CellPlace(DEFAULT_CELL, without_credentials(base_url), state), *others]


def loads_of(plan: PoolPlan, cells: Mapping[str, CellState]) -> list[CellLoad]:
    """The load of each cell. Service times are those of all cells: one without workers has none of its own."""
    if any(worker.slots for each in cells.values() for worker in each.seen.workers):
        plan = plan._replace(batch=1)
    request_ms = measured_request_ms([each.seen for each in cells.values()], plan.batch) or plan.request_ms
    served = [tier.name for tier in plan.tiers if tier.name not in plan.paused]
    loads: list[CellLoad] = []
    for name, cell in cells.items():
        seen = cell.seen
        workers = [worker for worker in seen.workers if worker.healthy]
        waiting = {tier: queue.depth for tier, queue in seen.tiers.items() if tier not in plan.paused}
        background = sum(queue.depth for tier, queue in seen.background.items() if tier not in plan.paused)
        # Ready batches are of any tier. As part of the lowest one they take no workers from others, but attract the first ones.
        background += seen.ready_batches * plan.batch
        # The demand of the last half second at all gateways. The mean of two seconds would follow a jump too late.
        demand = {tier: sum(g.tiers[tier].recent_rps for g in seen.gateways if tier in g.tiers) for tier in served}
        needed = {tier: workers_needed(rps, waiting.get(tier, 0), request_ms) for tier, rps in demand.items()}
        needed[BACKGROUND] = workers_needed(0.0, background, request_ms)
        has_work = any(waiting.values()) or background > 0 or seen.leased_batches > 0
        accepts = cell.state == "open" or (cell.state == "draining" and has_work)
        above = needed_above(plan.tiers, needed)
        ready = ready_workers(plan.tiers, demand, request_ms * plan.batch)
        # A worker decides within a period if it is idle, its batch ends, or a slot becomes free.
        runs_ms = [each.service_p95_ms / max(1, each.slots) if each.in_flight else 0.0 for each in workers]
        deciding = sum(1.0 if run_ms <= 0 else min(1.0, 1000 * PERIOD_S / run_ms) for run_ms in runs_ms)
        loads.append(CellLoad(name, len(workers), needed, deciding, accepts, ready, above))
    return loads


def measured_request_ms(seen: Sequence[Observation], batch: int) -> float:
    """GPU time of a request in a full batch, the mean of all healthy workers; 0: nothing was measured."""
    rates: list[float] = []
    for worker in (worker for each in seen for worker in each.workers if worker.healthy):
        width = max(1, worker.width)
        rate = GpuRate(worker.base_ms, worker.item_ms, worker.seen_batch, width, slots=worker.slots).full_rps(batch)
        if rate > 0:
            rates.append(rate)
    return 1000 / mean(rates) if rates else 0.0


def placement(plan: PoolPlan, cells: Mapping[str, CellState]) -> Placement:
    """Where the workers of a pool should move, and how those of each cell are shared among tiers."""
    lowest = max((tier.priority for tier in plan.tiers), default=0)
    return placed(loads_of(plan, cells), [*plan.tiers, TierShare(BACKGROUND, lowest + 1, 0.0)])


def documents(
    chances: Mapping[str, Mapping[str, float]], cells: Collection[str], places: list[CellPlace], number: int
) -> dict[str, bytes]:
    """The packed document of each cell that responds."""
    return {name: _encode(Moves(number, dict(chances.get(name, {})), places)) for name in cells}


def until_next_s(*, moving: bool, calm_s: float = CALM_S) -> float:
    """Seconds from one document to the next. `moving`: any worker should move."""
    return calm_s * PERIOD_S / CALM_S if moving else calm_s


class Registrations:
    """Whether workers that a Redis knew before it lost its data have yet to register again. Pure; times are monotonic seconds."""

    def __init__(self) -> None:
        self._epoch_us: int | None = None
        self._healthy = 0
        self._until = -math.inf

    def lacking(self, seen: Observation, now: float) -> bool:
        """Whether workers are lacking in this observation, at most for REGISTER_S."""
        if self._epoch_us not in (None, seen.epoch_us):
            self._until = now + REGISTER_S
        self._epoch_us = seen.epoch_us
        if now < self._until and seen.healthy_gpus < self._healthy:
            return True
        self._healthy, self._until = seen.healthy_gpus, -math.inf
        return False


class _ObservedCell:
    """One pool in one cell, as a publisher sees it. At most one call runs at a time."""

    def __init__(self, url: str, plan: PoolPlan, clock: Callable[[], float]) -> None:
        self.cell = cell_of(url)
        self.plan = plan
        self._url = url
        self._clock = clock
        self._client: Redis | None = None
        self._presence: Presence | None = None
        self._seen: Observation | None = None
        self._seen_at = 0.0
        self._registrations = Registrations()
        self._call: asyncio.Task[None] | None = None

    @property
    def seen(self) -> Observation | None:
        """The last observation; None if the cell is lost, or its workers have yet to register again."""
        return self._seen if self._clock() - self._seen_at < LOST_S else None

    def observe(self) -> "asyncio.Task[None]":
        """Observe the pool, unless a call has not ended."""
        return self._start(self._observe)

    def publish(self, document: bytes) -> "asyncio.Task[None]":
        """Write the document, unless a call has not ended."""
        return self._start(lambda: self._publish(document))

    async def close(self) -> None:
        """End the call, and close the connection."""
        if self._call is not None:
            await end_all([self._call])
        await self._disconnect()

    def _start(self, call: Callable[[], Awaitable[None]]) -> "asyncio.Task[None]":
        if self._call is None or self._call.done():
            self._call = asyncio.create_task(self._tried(call), name=f"moves {self.plan.pool}@{self.cell}")
        return self._call

    async def _tried(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except RedisUnavailable:
            if self.seen is None:  # The next call looks again whether the server is a cluster.
                await self._disconnect()
        except Exception as error:  # noqa: BLE001 - the other cells are served
            log_fault(f"moves of workers: cell {self.cell} cannot be observed", error)
            await self._disconnect()

    async def _observe(self) -> None:
        if self._presence is None:
            url = await server_url(self._url)
            self._client = command_client(url)
            self._presence = Presence(self._client, Keys.at(url, self.plan.pool), gone_ms=self.plan.gone_ms)
        seen = await self._presence.observe([tier.name for tier in self.plan.tiers])
        now = self._clock()
        self._seen, self._seen_at = None if self._registrations.lacking(seen, now) else seen, now

    async def _publish(self, document: bytes) -> None:
        if self._presence is not None:
            await self._presence.publish_moves(document)

    async def _disconnect(self) -> None:
        client, self._client, self._presence = self._client, None, None
        if client is not None:
            await close_client(client)


class MovesPublisher:
    """Publishes the documents of several pools in all cells, while the table `cells` has rows.

    `plans`: the pools; `rows`: the table; `base_url`: TIERLANE_REDIS_URL.
    """

    def __init__(
        self,
        base_url: str,
        plans: Callable[[], Sequence[PoolPlan]],
        rows: Callable[[], Sequence[CellServer]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base_url = base_url
        self._plans = plans
        self._rows = rows
        self._clock = clock
        self._cells: dict[tuple[str, str], _ObservedCell] = {}  # By pool and URL.
        self._shares: Mapping[tuple[str, str], Mapping[str, float]] = {}  # By pool and cell.

    async def run(self) -> None:
        """Publish; never returns."""
        try:
            while True:
                began = self._clock()
                moving = await self.turn()
                await asyncio.sleep(max(PERIOD_S / 2.5, until_next_s(moving=moving) - (self._clock() - began)))
        finally:
            await asyncio.gather(*(each.close() for each in self._cells.values()))
            self._cells, self._shares = {}, {}

    async def turn(self) -> bool:
        """Observe all cells, and publish one document in each that responds. Returns whether any worker should move."""
        rows = self._rows()
        plans = {plan.pool: plan for plan in self._plans()} if rows else {}
        # One connection for each pool in each cell.
        urls = cell_urls(self._base_url, rows, closed=True).values() if plans else ()
        wanted = {(pool, url) for pool in plans for url in urls}
        for left in self._cells.keys() - wanted:
            await self._cells.pop(left).close()
        for pool, url in wanted:
            if (pool, url) not in self._cells:
                self._cells[pool, url] = _ObservedCell(url, plans[pool], self._clock)
            self._cells[pool, url].plan = plans[pool]
        await _within([call for each in self._cells.values() if (call := each.observe()) and each.seen is not None])
        places = places_of(rows, self._base_url)
        states = {place.name: place.state for place in places}
        writes, moving, shares = [], False, dict[tuple[str, str], Mapping[str, float]]()
        for plan in plans.values():
            cells = {each.cell: each for (pool, _), each in self._cells.items() if pool == plan.pool}
            seen = {name: CellState(states[name], each.seen) for name, each in cells.items() if each.seen is not None}
            found = placement(plan, seen)
            shares |= {(plan.pool, name): of_tiers for name, of_tiers in found.shares.items()}
            moving = moving or any(found.chances.values())
            packed = documents(found.chances, seen, places, random.getrandbits(62))
            writes += [cells[name].publish(document) for name, document in packed.items()]
        self._shares = shares
        await _within(writes)
        return moving

    def shares(self, pool: str, cell: str) -> Mapping[str, float]:
        """The guaranteed share of each tier in a cell, as of the last turn; empty: that of its row."""
        return self._shares.get((pool, cell), {})


async def _within(calls: Collection["asyncio.Task[None]"]) -> None:
    """Wait for calls, but not for those of a cell that does not respond."""
    if calls:
        await asyncio.wait(calls, timeout=WAIT_S)


class MoveDecision:
    """Whether a worker moves, by the documents that it received. Pure; times are monotonic seconds.

    `base_url`: the worker's own TIERLANE_REDIS_URL; `draw`: 0 to 1, evenly distributed.
    """

    def __init__(self, base_url: str, draw: Callable[[], float] = random.random) -> None:
        self._base_url = base_url
        self._draw = draw
        self._packed: bytes | None = None
        self._moves: Moves | None = None
        self._cells: Sequence[CellServer] = ()
        self._decided = 0
        self._decided_at = -PERIOD_S

    def receive(self, packed: bytes | None) -> None:
        """The document in the reply to a heartbeat; None: there is none. The cells that it named stay known."""
        if packed == self._packed:
            return
        self._packed, self._moves = packed, None
        if packed is not None:
            with suppress(msgspec.MsgspecError):
                self._moves = _moves.decode(packed)
                self._cells = self._moves.cells

    def destination(self, now: float) -> str | None:
        """The URL of the cell to which the worker moves; None: it stays. At most one draw for each document and period."""
        moves = self._moves
        if moves is None or not self._is_due(moves, now):
            return None
        self._decided, self._decided_at = moves.number, now
        cell = destination(moves.chances, self._draw())
        return None if cell is None else self._urls().get(cell)

    def would_draw(self, now: float) -> bool:
        """Whether `destination` would draw: then the document should be the present one, since others have moved by it."""
        moves = self._moves
        return moves is not None and bool(moves.chances) and self._is_due(moves, now)

    def _is_due(self, moves: Moves, now: float) -> bool:
        return moves.number != self._decided and now - self._decided_at >= EARLIEST * PERIOD_S

    @property
    def is_moving(self) -> bool:
        """Whether workers of this cell should move now, so that the next document is soon worth reading."""
        return self._moves is not None and bool(self._moves.chances)

    def refuge(self, lost_cell: str) -> str | None:
        """The URL of a drawn open cell, for a worker whose cell is lost; None if it knows none."""
        open_cells = {each.name for each in self._cells if each.state == "open"}
        others = [url for cell, url in self._urls().items() if cell in open_cells - {lost_cell}]
        return others[int(self._draw() * len(others)) % len(others)] if others else None

    def _urls(self) -> dict[str, str]:
        """The URLs of all cells. A worker that has started in another cell has no URL of the default one of its own."""
        base = self._base_url
        if cell_of(base) != DEFAULT_CELL:
            found = next((each.redis_url for each in self._cells if each.name == DEFAULT_CELL), None)
            base = base if found is None else with_credentials(found, base.partition("#")[0])
        return cell_urls(base, self._cells)
