"""Moves of workers: the load of a cell from an observation, the published document, and the decision of a worker."""

from typing import Any

import msgspec
import pytest

from configs import GONE_MS
from ledger.catalog.snapshot import CellRow
from ratelimit.shares import TierShare
from scheduler.cells.moves import (
    BACKGROUND,
    PERIOD_S,
    REGISTER_S,
    CellPlace,
    CellState,
    MoveDecision,
    Moves,
    PoolPlan,
    Registrations,
    documents,
    loads_of,
    placement,
    places_of,
    until_next_s,
)
from scheduler.cells.placement import CellLoad
from scheduler.protocol.pool_view import GatewayStats, Observation, TierDepth, TierStats, WorkerView

TIERS = (TierShare("enterprise", 1, 0.05), TierShare("free", 3, 0.1))
PLAN = PoolPlan("default", TIERS, frozenset(), batch=10, request_ms=50.0, gone_ms=GONE_MS)
ROWS = [CellRow("west", "redis://west:1/0", "open", 1.0), CellRow("north", None, "open", 1.0)]
PLACES = places_of(ROWS, "redis://u:p@one:1/0?x=1")


def worker(
    name: str, *, in_flight: int = 0, run_ms: float = 100.0, healthy: bool = True, seen: float = 10
) -> WorkerView:
    """A batch of 10 takes 100 ms."""
    return WorkerView(
        name,
        "ready",
        0.0,
        in_flight,
        0.0,
        run_ms,
        "simulated",
        "v1",
        age_ms=0.0,
        healthy=healthy,
        item_ms=10.0,
        seen_batch=seen,
    )


def observation(workers: list[WorkerView] | None = None, **changes: Any) -> Observation:
    depths = {name: TierDepth(name, changes.pop(name, 0), 0.0) for name in ("enterprise", "free")}
    jobs = {"free": TierDepth("free", changes.pop("jobs", 0), 0.0)}
    rates = {tier: TierStats(0.0, 0.0, 0.0, recent_rps=rate) for tier, rate in changes.pop("rates", {}).items()}
    gateways = [GatewayStats(f"g{number}", 0.0, rates) for number in (1, 2)]
    fields = {"ready_batches": 0, "leased_batches": 0, "outbox": 0, "dlq": 0} | changes
    return Observation(0, depths, workers or [], gateways, background=jobs, **fields)


def load(seen: Observation, state: str = "open", plan: PoolPlan = PLAN) -> CellLoad:
    return loads_of(plan, {"west": CellState(state, seen)})[0]


@pytest.mark.parametrize(
    ("seen", "needed"),
    [
        (observation(), {"enterprise": 0.0, "free": 0.0, BACKGROUND: 0.0}),
        # 2 gateways x 20 requests/s x 10 ms, as measured
        (observation([worker("w1")], rates={"free": 20.0}), {"free": 0.4}),
        # 50 ms by the model's row while nothing is measured
        (observation(rates={"free": 20.0}), {"free": 2.0}),
        (observation([worker("w1", healthy=False)], rates={"free": 20.0}), {"free": 2.0}),
        (observation([worker("w1", seen=0)], rates={"free": 20.0}), {"free": 2.0}),
        # 50 waiting requests x 10 ms in half a second
        (observation([worker("w1")], enterprise=50), {"enterprise": 1.0}),
        # jobs, and batches that are ready but not claimed, attract workers that no other tier needs
        (observation([worker("w1")], jobs=100, ready_batches=5), {BACKGROUND: 3.0}),
    ],
)
def test_needed_workers_by_tier(seen: Observation, needed: dict[str, float]) -> None:
    """From the recent demand of all gateways, waiting requests, and the measured time of a request."""
    assert load(seen).needed == pytest.approx({"enterprise": 0.0, "free": 0.0, BACKGROUND: 0.0} | needed)


def test_service_times_are_those_of_all_cells() -> None:
    """A cell without workers has none of its own."""
    busy = observation(rates={"free": 20.0})
    loads = loads_of(PLAN, {"west": CellState("open", busy), "north": CellState("open", observation([worker("w1")]))})

    assert loads[0].needed["free"] == pytest.approx(0.4)


def test_an_engine_with_slots_counts_by_its_slots() -> None:
    """A request takes 1,600 ms in one of 64 slots, so 25 ms of the engine. One of them is free every 25 ms, when it can decide."""
    slotted = msgspec.structs.replace(
        worker("w1", in_flight=64, run_ms=1600.0), base_ms=1600.0, item_ms=0.0, seen_batch=64.0, width=64, slots=64
    )
    found = load(observation([slotted], rates={"enterprise": 10.0, "free": 20.0}, ready_batches=2))

    assert found.needed == pytest.approx({"enterprise": 0.5, "free": 1.0, BACKGROUND: 0.1})
    assert found.ready == pytest.approx(0.5 + 2 * 0.5**0.5)
    assert found.deciding == 1.0


def test_a_paused_tier_needs_no_workers() -> None:
    """Its requests wait until it is resumed."""
    plan = PLAN._replace(paused=frozenset({"free"}))

    assert load(observation(free=50, jobs=50, rates={"free": 20.0}), plan=plan).needs == 0


@pytest.mark.parametrize(
    ("state", "seen", "accepts"),
    [
        ("open", observation(), True),
        ("draining", observation(), False),
        ("draining", observation(free=1), True),
        ("draining", observation(jobs=1), True),
        ("draining", observation(leased_batches=1), True),
        ("closed", observation(free=1, leased_batches=1), False),
    ],
)
def test_cells_that_workers_leave(state: str, seen: Observation, accepts: bool) -> None:
    """A draining cell keeps workers until its requests have ended; a closed one has no schedulers."""
    assert load(seen, state).accepts == accepts


def test_workers_that_decide_within_a_period() -> None:
    """Idle ones, and those whose batch ends: of 500 ms in a quarter of all periods."""
    workers = [
        worker("w1"),
        worker("w2", in_flight=3, run_ms=500.0),
        worker("w3", in_flight=3),
        worker("w4", healthy=False),
    ]

    found = load(observation(workers))

    assert (found.workers, found.deciding) == (3, 2.25)


def decoded(packed: bytes) -> Moves:
    return msgspec.msgpack.decode(packed, type=Moves)


def test_the_document_of_each_cell() -> None:
    """It has the chances of the cell's own workers, and all cells; the default one needs no row."""
    cells = {
        "default": CellState("open", observation([worker("w1"), worker("w2")])),
        "west": CellState("open", observation([worker("w3")], free=500)),
    }

    found = {
        name: decoded(packed) for name, packed in documents(placement(PLAN, cells).chances, cells, PLACES, 7).items()
    }

    assert [
        CellPlace("default", "redis://one:1/0", "open"),
        CellPlace("west", "redis://west:1/0", "open"),
        CellPlace("north", None, "open"),
    ] == PLACES
    assert found == {"default": Moves(7, {"west": 1.0}, PLACES), "west": Moves(7, {}, PLACES)}


def test_a_draining_cell_keeps_the_workers_that_it_needs_until_it_is_empty() -> None:
    """A busy cell attracts the others; when nothing waits or runs there any more, all leave."""
    workers = [worker(f"w{number}") for number in range(4)]
    west = CellState("open", observation([worker("w4")], rates={"free": 1000.0}))

    def chances(draining: Observation) -> float:
        cells = {"default": CellState("draining", draining), "west": west}
        return sum(decoded(documents(placement(PLAN, cells).chances, cells, PLACES, 7)["default"]).chances.values())

    assert chances(observation(workers, free=5)) == pytest.approx(3 / 4)
    assert chances(observation(workers)) == 1.0


def packed(number: int, chances: dict[str, float]) -> bytes:
    places = [
        CellPlace("default", None, "open"),
        CellPlace("west", "redis://west:1/0", "open"),
        CellPlace("old", None, "closed"),
    ]
    return msgspec.msgpack.encode(Moves(number, chances, places))


WEST = "redis://:secret@west:1/0#west"


def test_a_worker_decides_once_by_a_document_and_once_in_a_period() -> None:
    """Two schedulers may publish. A heartbeat may be a little early; without a document the worker stays."""
    draws: list[float] = []
    decision = MoveDecision("redis://:secret@one:1/0", lambda: draws.append(0.5) or 0.5)  # type: ignore[func-returns-value]
    table: list[tuple[float, bytes | None, str | None, int]] = [
        (0.0, None, None, 0),
        (0.0, packed(1, {"west": 0.4}), None, 1),
        (1.0, packed(1, {"west": 0.4}), None, 1),  # the same document
        (1.0, packed(2, {"west": 0.6}), WEST, 2),
        (1.0 + PERIOD_S / 2, packed(3, {"west": 0.6}), None, 2),  # of another scheduler
        (1.0 + PERIOD_S * 0.9, packed(3, {"west": 0.6}), WEST, 3),
        (2.0, packed(4, {"gone": 1.0}), None, 4),
        (3.0, packed(5, {"old": 1.0}), None, 5),
        (4.0, b"damaged", None, 5),
        (5.0, None, None, 5),
        (6.0, packed(6, {"default": 1.0}), "redis://:secret@one:1/0", 6),
    ]

    for at, document, url, count in table:
        decision.receive(document)
        drawn = len(draws)
        assert decision.would_draw(at) == (count > drawn)
        assert (decision.destination(at), len(draws)) == (url, count), at


def test_a_worker_that_has_started_in_another_cell_finds_the_default_one() -> None:
    """Its own URL is that of the other cell; the document has the server of the default one, without credentials."""
    places = [CellPlace("default", "redis://one:1/0", "open"), CellPlace("west", "redis://west:1/0", "open")]
    decision = MoveDecision("redis://:secret@west:1/0#west", lambda: 0.5)

    decision.receive(msgspec.msgpack.encode(Moves(1, {"default": 1.0}, places)))

    assert decision.destination(0.0) == "redis://:secret@one:1/0"
    assert decision.refuge("west") == "redis://:secret@one:1/0"


def test_the_refuge_from_a_lost_cell() -> None:
    """Any open cell that the last document named, even if no scheduler has published since; none without a document."""
    decision = MoveDecision("redis://:secret@one:1/0", lambda: 0.999)
    assert decision.refuge("default") is None

    decision.receive(packed(1, {}))
    decision.receive(None)

    assert (decision.refuge("default"), decision.refuge("west")) == (WEST, "redis://:secret@one:1/0")


@pytest.mark.parametrize(("moving", "expected_s"), [(False, 0.25), (True, 0.125)])
def test_documents_follow_sooner_while_workers_move(moving: bool, expected_s: float) -> None:
    """The needs of cells change quickly then."""
    assert until_next_s(moving=moving) == expected_s


@pytest.mark.parametrize(
    "steps",
    [
        # epoch, healthy workers, time, lacking
        [(0, 0, 0.0, False), (1, 0, 0.25, False), (1, 3, 0.5, False), (1, 0, 0.75, False)],
        [(1, 3, 0.0, False), (2, 0, 0.25, True), (2, 2, 0.5, True), (2, 3, 0.75, False), (2, 0, 1.0, False)],
        # Emptied again before all have registered; a worker that does not return.
        [(1, 3, 0.0, False), (2, 1, 0.5, True), (3, 0, 1.0, True), (3, 2, REGISTER_S + 1.0, False)],
        [(1, 3, 0.0, False), (2, 2, 0.5, True), (2, 2, REGISTER_S + 0.4, True), (2, 2, REGISTER_S + 0.5, False)],
        # A replica that takes over has the workers.
        [(1, 3, 0.0, False), (2, 3, 0.25, False), (2, 1, 0.5, False)],
    ],
)
def test_workers_that_an_emptied_redis_does_not_know_yet(steps: list[tuple[int, int, float, bool]]) -> None:
    """For a second they are lacking, until as many are healthy as before; without a loss of data none is."""
    registrations = Registrations()
    found = [
        registrations.lacking(observation([worker(f"w{n}") for n in range(healthy)], epoch_us=epoch_us), now)
        for epoch_us, healthy, now, _ in steps
    ]
    assert found == [lacking for *_, lacking in steps]
