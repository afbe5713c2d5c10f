"""Workers between two cells on servers of their own: they follow the load, leave draining and lost cells, and lose nothing."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from configs import BACKGROUND_SHARE, GONE_MS, PASS_MS
from eventually import eventually
from gpu_pool.worker import prefetch
from gpu_pool.worker.cell_link import CellLink
from gpu_pool.worker.worker import Worker
from held_pops import pops_held
from integration.gpu_pool_direct import StartHere, start_here
from ledger.catalog.snapshot import CellRow, Snapshot, Tier
from pool import TIERS, Pool
from ratelimit.shares import TierShare
from scheduler.batching.dispatcher import Dispatcher, ServiceWatch, Waker
from scheduler.batching.reaper import Reaper
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.cells.moves import CellPlace, Moves, MovesPublisher, PoolPlan
from scheduler.errors import RedisUnavailable
from scheduler.protocol.pool_view import GatewayStats, TierStats
from scheduler.protocol.replies import Reply
from scheduler.redis_client.connections import blocking_client, command_client
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all
from tierlane.roles.scheduler import serve_cells
from tierlane.roles.stand_in import StandIn
from tierlane.settings.model import Settings
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["start_here"]

POLICY = BatchPolicy(
    4, 20, 4, 1000, tuple(TierPolicy(name, n, 0.1) for n, name in enumerate(TIERS, 1)), BACKGROUND_SHARE
)
PLAN = PoolPlan("default", [TierShare(name, n, 0.1) for n, name in enumerate(TIERS, 1)], frozenset(), 4, 20.0, GONE_MS)
STEP_S = 0.05
PATIENCE_S = 10.0
MOST_FETCHED = 200
BUSY_MODEL = "simulated:80"
"""With batches of 4, the rates of the tests keep all workers busy: a cell that is not busy attracts no more of them."""


class TestCell:
    """A cell with its dispatcher, its reaper, and a gateway that sends `rate` requests a second."""

    __test__ = False

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.client, self._blocking = command_client(url, PATIENCE_S), blocking_client(url)
        self.pool = Pool(self.client, Keys.at(url))
        self.rate = 0.0
        self.sent: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        pool = self.pool
        service = ServiceWatch(pool.presence, lambda: TIERS)
        waker = Waker(self._blocking, pool.keys)
        dispatcher = Dispatcher(pool.batches, waker, lambda: POLICY, time.monotonic, lambda: service.service)
        reaper = Reaper(pool.terminations, pool.presence, lambda: TIERS, lambda: 50, PASS_MS)
        loops = (waker.run, dispatcher.run, service.run, reaper.run, self._beat, self._send)
        self._tasks = [asyncio.create_task(loop()) for loop in loops]

    async def stop(self) -> None:
        await end_all(self._tasks)
        await self.client.aclose()
        await self._blocking.aclose()

    async def _beat(self) -> None:
        while True:
            stats = TierStats(self.rate, 0.0, 0.0, recent_rps=self.rate)
            with suppress(RedisUnavailable):
                await self.pool.presence.gateway_beat(GatewayStats("g1", self.rate, {"free": stats}))
            await asyncio.sleep(STEP_S)

    async def _send(self) -> None:
        owed = 0.0
        while True:
            owed += self.rate * STEP_S
            if owed >= 1:
                count, owed = int(owed), owed % 1
                await self.send(count)
            await asyncio.sleep(STEP_S)

    async def send(self, count: int) -> list[str]:
        """Admit requests; their ids."""
        ids = await self.pool.queue(count, total_ms=60_000, queue_ms=60_000)
        self.sent += ids
        return ids

    async def workers(self) -> set[str]:
        """All that are registered here, healthy or not."""
        return {worker.id for worker in (await self.pool.presence.observe(TIERS)).workers}

    async def answered(self) -> list[Reply]:
        """The replies to all requests, once all are there."""
        found: dict[str, Reply] = {}

        async def all_there() -> list[Reply] | None:
            missing = [each for each in self.sent if each not in found][:MOST_FETCHED]
            with suppress(RedisUnavailable):  # On a busy machine.
                replies = await self.pool.results.fetch(missing)
                found.update((reply.id, reply) for reply in replies if reply is not None)
            return list(found.values()) if len(found) == len(self.sent) else None

        return await eventually(all_there, f"all requests of {self.name} have a reply", 30.0)


class TestCells:
    """The default cell and `west`, and the rows of the table."""

    __test__ = False

    def __init__(self, one: EmbeddedRedis, two: EmbeddedRedis) -> None:
        self.servers = (one, two)
        self.default, self.west = TestCell("default", one.url), TestCell("west", f"{two.url}#west")
        self.rows: Sequence[CellRow] = [CellRow("west", two.url, "open", 1.0)]
        self.publisher = MovesPublisher(one.url, lambda: [PLAN], lambda: self.rows)
        self._publishing: asyncio.Task[None] | None = None

    def publish(self) -> None:
        """Begin to publish moves."""
        self._publishing = asyncio.create_task(self.publisher.run())

    async def order(self, destination: str, *others: CellPlace) -> None:
        """Let all workers of the default cell move to `destination`, without a publisher."""
        await self.publish_once(1, {destination: 1.0}, *others)

    async def publish_once(self, number: int, chances: dict[str, float], *others: CellPlace) -> None:
        """Publish one document in the default cell."""
        places = [CellPlace("default", None, "open"), CellPlace("west", self.servers[1].url, "open"), *others]
        await self.default.pool.presence.publish_moves(msgspec.msgpack.encode(Moves(number, chances, places)))

    async def stop(self) -> None:
        if self._publishing is not None:
            await end_all([self._publishing])
        await self.default.stop()
        await self.west.stop()


@pytest.fixture
async def cells(tmp_path: Path) -> AsyncIterator[TestCells]:
    """Two servers that a test may kill."""
    servers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        servers.append(EmbeddedRedis(tmp_path / name, tmp_path / name, ephemeral=True))
        await servers[-1].start()
    both = TestCells(servers[0], servers[1])
    both.default.start()
    both.west.start()
    yield both
    await both.stop()
    for server in servers:
        await server.stop()


async def started(
    start_here: StartHere, cells: TestCells, count: int, backend: str = "simulated:20", **changes: Any
) -> list[Worker]:
    """Workers in the default cell, after their first heartbeats."""
    fields = {"redis_url": cells.default.url, "max_batch_size": 4} | changes
    workers = [await start_here(backend, worker_id=f"w{n}", **fields) for n in range(count)]

    async def registered() -> bool:
        return len(await cells.default.workers()) == count

    await eventually(registered, "all workers are registered")
    return workers


async def serve(cell: TestCell, other: TestCell, count: int) -> None:
    """Wait until all workers serve one cell, and are not registered in the other."""

    async def moved() -> bool:
        return (len(await cell.workers()), len(await other.workers())) == (count, 0)

    await eventually(moved, f"all workers serve {cell.name}", 20.0)


async def gone(cells: TestCells) -> None:
    """Wait until no worker is registered in any cell."""

    async def nowhere() -> bool:
        return not await cells.default.workers() and not await cells.west.workers()

    await eventually(nowhere, "no worker is registered any more")


async def test_workers_follow_the_load(cells: TestCells, start_here: StartHere) -> None:
    """To the other cell and back, with the same model processes. Each request runs once."""
    workers = await started(start_here, cells, 3, BUSY_MODEL)
    models = [worker._supervisor.pid for worker in workers]
    cells.publish()

    cells.west.rate = 125.0
    await serve(cells.west, cells.default, 3)
    cells.west.rate, cells.default.rate = 0.0, 125.0
    await serve(cells.default, cells.west, 3)
    cells.default.rate = 0.0

    replies = [*await cells.default.answered(), *await cells.west.answered()]
    assert {(reply.output, reply.attempts) for reply in replies} == {("olleh", 1)}
    assert [worker._supervisor.pid for worker in workers] == models
    assert all(worker._execution.service.seen_batch for worker in workers)


async def test_a_draining_cell_keeps_workers_until_it_is_empty(cells: TestCells, start_here: StartHere) -> None:
    """Requests that wait there end there; then all workers leave, although no other cell needs them."""
    await started(start_here, cells, 2, "simulated:100")
    await cells.default.send(40)
    cells.rows = [*cells.rows, CellRow("default", None, "draining", 1.0)]

    cells.publish()

    assert {reply.attempts for reply in await cells.default.answered()} == {1}
    await serve(cells.west, cells.default, 2)


async def test_workers_leave_a_lost_cell_and_return_to_it(cells: TestCells, start_here: StartHere) -> None:
    """Without a scheduler's help they serve another one, and follow the load when the server is back."""
    await started(start_here, cells, 2, BUSY_MODEL)
    cells.publish()
    cells.west.rate = 80.0
    await serve(cells.west, cells.default, 2)
    cells.west.rate = 0.0
    await cells.west.answered()

    os.kill(cells.servers[1].pid, signal.SIGKILL)
    await cells.default.send(8)
    replies = await cells.default.answered()
    await cells.servers[1].start()
    cells.west.sent = []
    cells.west.rate = 80.0

    await serve(cells.west, cells.default, 2)
    cells.west.rate = 0.0
    replies += await cells.west.answered()
    assert {(reply.output, reply.attempts) for reply in replies} == {("olleh", 1)}


async def test_a_worker_stays_if_the_other_cell_does_not_respond(
    cells: TestCells, start_here: StartHere, tmp_path: Path
) -> None:
    """It goes on in its cell."""
    (worker,) = await started(start_here, cells, 1)
    moves: list[str] = []
    move = worker._move

    async def counted(url: str) -> None:
        moves.append(url)
        await move(url)

    worker._move = counted  # type: ignore[method-assign]
    await cells.order("gone", CellPlace("gone", f"unix://{tmp_path}/nobody", "open"))
    await eventually(lambda: moves, "it attempts to move")

    await cells.default.send(4)

    assert {reply.worker_id for reply in await cells.default.answered()} == {"w0"}
    assert moves == [f"unix://{tmp_path}/nobody#gone"]


async def test_a_busy_worker_decides_by_the_present_document(cells: TestCells, start_here: StartHere) -> None:
    """Not by that of its last heartbeat, by which others may have moved."""
    (worker,) = await started(start_here, cells, 1, "simulated:500", heartbeat_ms=10_000)
    await cells.default.send(1)
    await eventually(lambda: worker._execution.running, "a batch runs")
    await cells.order("west")
    worker._link.heartbeat.now()
    await eventually(lambda: worker._decision.is_moving, "a heartbeat has brought the document")

    await cells.publish_once(2, {})

    await cells.default.answered()
    await eventually(lambda: worker._popping, "it waits for a batch")
    assert (worker._link.cell, worker._decision.is_moving) == ("default", False)


async def test_a_batch_popped_by_a_moving_worker_is_pushed_back(cells: TestCells, start_here: StartHere) -> None:
    """Here its pop cannot be ended. Another worker runs the batch, as its first attempt."""
    (worker,) = await started(start_here, cells, 1)
    async with pops_held(cells.default.client):
        await cells.order("west")
        await eventually(lambda: worker._destination, "it has decided to move")
        await cells.default.client.delete(cells.default.pool.keys.moves)
        await cells.default.send(1)
        await serve(cells.west, cells.default, 1)

    other = await start_here(redis_url=cells.default.url, worker_id="other", max_batch_size=4)

    (reply,) = await cells.default.answered()
    assert (reply.worker_id, reply.attempts, other._link.cell) == ("other", 1, "default")


async def test_a_running_batch_ends_in_the_cell_that_its_worker_has_left(
    cells: TestCells, start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the worker claims in the other cell, and reports in the first one that it is draining."""
    monkeypatch.setattr(prefetch, "AHEAD_MS", 1000.0)
    (worker,) = await started(start_here, cells, 1, "simulated:2000")
    await cells.default.send(1)
    await cells.default.answered()  # The time of a run is measured.
    await cells.default.send(1)
    await eventually(lambda: worker._execution.running, "a batch runs")

    await cells.order("west")
    await eventually(lambda: worker._link.cell == "west", "the worker moves")

    assert worker._execution.running == 1
    await cells.west.send(1)
    await eventually(lambda: worker._link.pipeline.in_flight, "it has claimed the other batch")
    (left,) = (await cells.default.pool.presence.observe(TIERS)).workers
    assert (left.status, left.healthy, left.in_flight) == ("draining", False, 1)
    replies = [*await cells.default.answered(), *await cells.west.answered()]
    assert [(reply.worker_id, reply.attempts) for reply in replies] == [("w0", 1)] * 3
    await serve(cells.west, cells.default, 1)


async def test_sigterm_while_a_batch_runs_in_the_cell_that_was_left(
    cells: TestCells, start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch outlasts the drain: it is handed back there, uncounted, and the worker is registered in neither cell."""
    monkeypatch.setattr(prefetch, "AHEAD_MS", 1000.0)
    (worker,) = await started(start_here, cells, 1, "simulated:2000", drain_ms=100)
    await cells.default.send(1)
    await cells.default.answered()  # The time of a run is measured.
    (waiting,) = await cells.default.send(1)
    await eventually(lambda: worker._execution.running, "a batch runs")
    await cells.order("west")
    await eventually(lambda: worker._link.cell == "west", "the worker moves")

    worker.drain()

    async def handed_back() -> bool:
        return await cells.default.pool.attempts(waiting) == 0

    await eventually(handed_back, "the attempt does not count")
    await gone(cells)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_sigterm_during_a_move(
    cells: TestCells, start_here: StartHere, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before and after its registration in the other cell: the worker drains, and is registered in neither."""
    (worker,) = await started(start_here, cells, 1)
    register = CellLink.register

    async def draining(link: CellLink) -> None:
        if moment == "before":
            worker.drain()
        await register(link)
        worker.drain()

    monkeypatch.setattr(CellLink, "register", draining)
    await cells.order("west")

    await eventually(worker._draining.is_set, "it drains")
    await gone(cells)


@pytest.mark.parametrize("role", ["scheduler", "gateway"])
async def test_schedulers_and_gateways_in_their_place_publish_moves(cells: TestCells, role: str) -> None:
    """In every cell, once the catalog has rows."""
    tiers = tuple(Tier(name, n, 0.1, (10.0, 10.0, 5, None), 100, 2000, None, None) for n, name in enumerate(TIERS, 1))
    catalog: Any = SimpleNamespace(snapshot=Snapshot(1, tiers, {}, {}, {}, ()), fresh=True)
    settings, stop = (
        Settings(redis_url=cells.default.url, database_url="postgresql+asyncpg://nobody@127.0.0.1:1/none"),
        asyncio.Event(),
    )
    if role == "scheduler":
        running = asyncio.create_task(serve_cells(settings, stop, catalog))
    else:
        running = asyncio.create_task(StandIn(settings, catalog).run(settings.redis_url, "default", stop))
    cluster = [cells.default, cells.west]

    async def published() -> int:
        return sum([bool(await cell.client.exists(cell.pool.keys.moves)) for cell in cluster])

    async def passed() -> bool:
        return (await cells.default.pool.presence.observe(TIERS)).pass_age_ms is not None

    await eventually(passed, "it works without other cells")
    assert await published() == 0

    catalog.snapshot = msgspec.structs.replace(catalog.snapshot, cells=tuple(cells.rows))

    async def everywhere() -> bool:
        return await published() == 2

    await eventually(everywhere, "both cells have a document")
    stop.set()
    await running


async def test_a_lost_cell_does_not_delay_the_documents_of_others(cells: TestCells) -> None:
    """While the other server hangs, documents for the default cell name it, and are replaced as often as before."""
    cells.publish()
    numbers: set[int] = set()

    async def published(count: int) -> bool:
        packed = await cells.default.client.get(cells.default.pool.keys.moves)
        if packed:
            moves = msgspec.msgpack.decode(packed, type=Moves)
            assert [place.name for place in moves.cells] == ["default", "west"]
            numbers.add(moves.number)
        return len(numbers) >= count

    await eventually(lambda: published(2), "two documents")
    os.kill(cells.servers[1].pid, signal.SIGSTOP)
    try:
        await eventually(lambda: published(12), "ten more documents")
    finally:
        os.kill(cells.servers[1].pid, signal.SIGCONT)
    cells.rows = []
    await eventually(lambda: cells.publisher._cells == {}, "with one cell nothing is published")


async def test_the_guaranteed_shares_of_each_cell_follow_its_requests(cells: TestCells) -> None:
    """Those of a tier that waits in one cell; with one cell, the rows of the tiers hold."""
    cells.publish()
    await cells.west.send(100)

    await eventually(lambda: cells.publisher.shares("default", "west").get("free", 0.0) > 0.1, "free has more in west")
    assert cells.publisher.shares("default", "default") == {}
    cells.rows = []
    await eventually(lambda: cells.publisher.shares("default", "west") == {}, "the rows of the tiers hold again")
