"""Cells: the home of a customer, and whether a worker stays in its cell or moves to another. Pure.

Customers are pinned to cells; workers move. The home is the cell with the best score in a weighted rendezvous hash (Thaler
and Ravishankar 1998; weights by the logarithmic method of Schindelhauer and Schomaker 2005): a cell that is added takes its
part of the customers of every other cell, and a cell that is closed gives its customers to all others; all others stay.

Workers go where they are needed. Each cell publishes how many workers each of its tiers needs (`workers_needed`). All workers
together are shared among the tiers as a single queue would share them (`ratelimit/shares.py`: guaranteed shares, then strict
priority), and the part of a tier is divided among the cells in proportion to their needs. The others are spread so that all
cells are equally busy. That gives each cell a number of workers. A cell gets whole workers for its highest tier: with one for a
need of 1.2, ever more requests would wait until a second worker comes.

In a single queue, requests of a tier above the lowest one run on the next of all workers; in a cell with as few workers as they
keep busy, they would wait for one of these. So such a cell also gets workers that are ready (`ready_workers`), from those
that are idle or, if requests are refused in any case, serve the lowest tier in other cells.

Three rules keep workers in place otherwise. A worker moves only to a cell that is busy (`BUSY`) or lacks ready workers, and only
if that cell lacks more than a tenth of its workers (`SLACK`) and more than half a worker, because each move costs a
reconnection. A worker decides at the end of a batch, or while idle when new digests arrive, by a random draw: the chances are
such that, over all workers that decide before the next digests, as many move as the cell has too many and others lack. So a herd
cannot move. A cell without any worker attracts `FIRST` workers instead of one, because with one the draw would often move none.

A cell that needs a worker for its highest tier therefore waits for at most one batch (until a worker elsewhere decides), one
period of digests and one move longer than it would in a single queue.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from ratelimit.shares import TierShare, allocate, share_in_part

HORIZON_S = 0.5
"""The time in which the queues of a cell should be served: it turns a backlog into a number of workers."""

BUSY = 0.8
"""A cell attracts workers of other cells if it needs more than this part of those that it has."""

SLACK, LEAST_LACK = 0.1, 0.5
"""A cell that lacks at most this part of its workers, or so many, attracts none: only a whole one can come."""

READY = 5.0
"""Workers that a cell has at least for many requests above the lowest tier: one becomes free within a fifth of a run."""

OVERLOAD = 0.25
"""If this part more workers are needed than there are, the lowest tier keeps none that another cell could have as ready ones."""

LEAST = 0.001
"""A cell that needs less has no requests: means of past arrivals never become 0."""

FIRST = 3.0
"""Workers that a cell with requests and without workers attracts: at least one of them moves with a probability of 95 %."""


class Cell(NamedTuple):
    """A cell: `weight` is its part of the customers, in proportion; no customer has its home in a cell that is not open."""

    name: str
    weight: float = 1.0
    is_open: bool = True


def homes(customer_id: str, cells: Iterable[Cell], count: int = 1) -> list[str]:
    """The `count` cells of a customer, the best first. Raises ValueError if no cell is open."""
    scores = [(_score(cell, customer_id), cell.name) for cell in cells if cell.is_open and cell.weight > 0]
    if not scores:
        raise ValueError("No cell is open: open one with a weight above 0.")
    return [name for _, name in sorted(scores)[:count]]


def home(customer_id: str, cells: Iterable[Cell]) -> str:
    """The cell of a customer. Raises ValueError if no cell is open."""
    return homes(customer_id, cells)[0]


def _score(cell: Cell, customer_id: str) -> float:
    """Exponentially distributed with the cell's weight, so that the least score has a cell with a probability by weight."""
    digest = blake2b(f"{cell.name}\0{customer_id}".encode(), digest_size=8).digest()
    part = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
    return -math.log(part) / cell.weight


def workers_needed(demand_rps: float, waiting: float, request_ms: float) -> float:
    """Workers that a tier of a cell needs, for requests of `request_ms` GPU time: for its arrivals, and for `waiting` requests."""
    return (demand_rps + waiting / HORIZON_S) * request_ms / 1000


def ready_workers(tiers: Sequence[TierShare], demand_rps: Mapping[str, float], run_ms: float) -> float:
    """Workers with which requests of tiers above the lowest one rarely wait: square-root staffing, for runs of one request."""
    lowest = _lowest(tiers)
    at_once = sum(rps for name, rps in demand_rps.items() if name != lowest) * run_ms / 1000
    return min(READY, at_once + 2 * math.sqrt(at_once))


def needed_above(tiers: Sequence[TierShare], needed: Mapping[str, float]) -> float:
    """The need of all tiers above the lowest one; that of background counts as lower."""
    lowest = _lowest(tiers)
    return sum(needed.get(tier.name, 0.0) for tier in tiers if tier.name != lowest)


def _highest(tiers: Sequence[TierShare]) -> str:
    return min(tiers, key=lambda tier: tier.priority).name


def _lowest(tiers: Sequence[TierShare]) -> str:
    return max(tiers, key=lambda tier: tier.priority).name


class CellLoad(NamedTuple):
    """The digest of a cell. `workers`: those that serve it or move to it; `needed`: by tier (`workers_needed`).

    `deciding`: how many of its workers are expected to decide before the next digests: idle ones, and those whose batch ends.
    `accepts`: False for a draining, closed or lost cell, which workers leave. `ready`: see `ready_workers`; `above`: the
    need of all tiers above the lowest one.
    """

    name: str
    workers: int
    needed: Mapping[str, float]
    deciding: float
    accepts: bool = True
    ready: float = 0.0
    above: float = 0.0

    @property
    def needs(self) -> float:
        """Workers that all its tiers need."""
        return sum(self.needed.values())


class Placement(NamedTuple):
    """What follows from the loads of all cells.

    `chances`: for the workers of each cell, the cells to which one that decides now moves, each with its probability; else it
    stays. `shares`: by cell, the guaranteed share of each tier of its batches.
    """

    chances: dict[str, dict[str, float]]
    shares: dict[str, dict[str, float]]


def placed(loads: Sequence[CellLoad], tiers: Sequence[TierShare]) -> Placement:
    """Where workers should move, and how those of each cell are shared among tiers."""
    return Placement(move_chances(loads, tiers), shares_in_cells(loads, tiers))


def fair_workers(loads: Sequence[CellLoad], tiers: Sequence[TierShare]) -> dict[str, float]:
    """How many workers each cell should have: the sum is the number of all workers."""
    fair = _shared(loads, tiers, {load.name: load.needed for load in loads})
    highest, needs = _highest(tiers), {}
    for load in loads:
        more = max(0.0, _whole(load, tiers) - max(fair[load.name], load.above))
        needs[load.name] = {**load.needed, highest: load.needed.get(highest, 0.0) + more}
    return _shared(loads, tiers, needs)


def shares_in_cells(loads: Sequence[CellLoad], tiers: Sequence[TierShare]) -> dict[str, dict[str, float]]:
    """By cell, the guaranteed share of each tier of its batches, such that the tier has its share of all workers.

    More than that only as far as the cell needs it; a tier that has no requests in a cell keeps its share there.
    """
    total, fair = max(1, sum(load.workers for load in loads)), fair_workers(loads, tiers)
    demand = {tier.name: sum(load.needed.get(tier.name, 0.0) for load in loads) for tier in tiers}
    shares: dict[str, dict[str, float]] = {}
    for load in loads:
        # Where most workers have yet to come, the first ones are not given to the guaranteed tiers alone.
        workers, of_cell = max(fair[load.name] / 2, load.workers, LEAST), shares.setdefault(load.name, {})
        for tier in tiers:
            needed = load.needed.get(tier.name, 0.0)
            if needed > LEAST:
                share = share_in_part(tier.guaranteed_share, needed / demand[tier.name], workers / total)
                of_cell[tier.name] = min(share, max(tier.guaranteed_share, needed / workers))
    return shares


def _shared(
    loads: Sequence[CellLoad], tiers: Sequence[TierShare], needs: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """The workers of each cell for these needs by cell and tier."""
    total = sum(load.workers for load in loads)
    demand = {tier.name: sum(each.get(tier.name, 0.0) for each in needs.values()) for tier in tiers}
    granted = allocate(total, tiers, demand)
    parts = {name: granted[name] / needed for name, needed in demand.items() if needed > 0}
    wanted = {cell: sum(each.get(name, 0.0) * part for name, part in parts.items()) for cell, each in needs.items()}
    needed = sum(wanted.values())
    if needed <= 0:
        return {load.name: float(load.workers) for load in loads}
    return {name: workers * total / needed for name, workers in wanted.items()}


def _whole(load: CellLoad, tiers: Sequence[TierShare]) -> int:
    """The whole workers that the highest tier of a cell keeps busy, at most by BUSY if they are few. 0 if it is the lowest too."""
    if load.above <= LEAST:
        return 0
    needed = load.needed.get(_highest(tiers), 0.0)
    return math.ceil(min(needed / BUSY, needed + 0.5) - LEAST)


def move_chances(loads: Sequence[CellLoad], tiers: Sequence[TierShare]) -> dict[str, dict[str, float]]:
    """For the workers of each cell: the cells to which one that decides now moves, each with its probability; else it stays."""
    by_need = fair_workers(loads, tiers)
    fair = _with_least(loads, tiers, _with_ready(loads, by_need))
    some_idle = any(load.workers and load.needs <= LEAST for load in loads)
    lacks = {
        load.name: _lacks(load, fair[load.name], some_idle or fair[load.name] > by_need[load.name]) for load in loads
    }
    lacking = {name: workers for name, workers in lacks.items() if workers > 0}
    surplus = {
        load.name: max(0.0, load.workers - fair[load.name]) if load.accepts else float(load.workers)
        for load in loads
        if load.name not in lacking
    }
    missing, spare = sum(lacking.values()), sum(surplus.values())
    if missing <= 0 or spare <= 0:  # Only workers of cells that accept none leave, to all others.
        others = {load.name: max(fair[load.name], 1e-9) for load in loads if load.accepts}
        to = {name: part / sum(others.values()) for name, part in others.items()}
        return {load.name: to for load in loads if not load.accepts and load.workers and to}
    moving = min(1.0, missing / spare)
    chances: dict[str, dict[str, float]] = {}
    for load in loads:
        if surplus.get(load.name, 0.0) > 0:
            moves = 1.0 if not load.accepts else min(1.0, moving * surplus[load.name] / max(1e-9, load.deciding))
            chances[load.name] = {name: moves * lacks / missing for name, lacks in lacking.items()}
    return chances


def _with_ready(loads: Sequence[CellLoad], fair: Mapping[str, float]) -> dict[str, float]:
    """Each cell that accepts workers should have those that are ready, as far as others serve only lower tiers.

    None gives its last worker, nor, while there are enough for all requests, one that it needs.
    """
    lacking = {load.name: max(0.0, load.ready - fair[load.name]) for load in loads if load.accepts}
    # Of all workers, by all cells; above 1 some requests are refused, and the lowest tier keeps this part of its need.
    needed = sum(load.needs for load in loads) / max(1.0, sum(fair.values()))
    kept = min(1.0, max(0.0, 1.0 - (needed - 1.0) / OVERLOAD))
    giving = {
        load.name: max(0.0, fair[load.name] - max(load.ready, load.above, kept * load.needs, 1.0))
        for load in loads
        if load.needs > load.above
    }
    return _moved(fair, lacking, giving)


def _moved(fair: Mapping[str, float], lacking: Mapping[str, float], giving: Mapping[str, float]) -> dict[str, float]:
    """The workers of each cell after as many as possible of those that some lack were taken from what others can give."""
    moved = min(sum(lacking.values()), sum(giving.values()))
    if moved <= 0:
        return dict(fair)
    more, less = moved / sum(lacking.values()), moved / sum(giving.values())
    return {
        name: workers + more * lacking.get(name, 0.0) - less * giving.get(name, 0.0) for name, workers in fair.items()
    }


def _with_least(loads: Sequence[CellLoad], tiers: Sequence[TierShare], fair: Mapping[str, float]) -> dict[str, float]:
    """Each cell that has requests should have a worker, one without workers FIRST; with fewer workers than cells, an even part.

    They are taken from what others have beyond the need of their tiers above the lowest one.
    """
    needing = [load for load in loads if load.accepts and load.needs > LEAST]
    even = sum(fair.values()) / max(1, len(needing))
    raised = {load.name: min(even, 1.0 if load.workers else FIRST) for load in needing}
    lacking = {name: least - fair[name] for name, least in raised.items() if fair[name] < least}
    giving = {
        load.name: max(0.0, fair[load.name] - max(load.above, _whole(load, tiers)))
        for load in loads
        if load.name not in lacking
    }
    return _moved(fair, lacking, giving)


def _lacks(load: CellLoad, fair: float, wants_ready: bool) -> float:  # noqa: FBT001 - one of two kinds of need
    """The workers that a cell attracts. `wants_ready`: those that should be ready, even if it is not busy."""
    if not load.accepts or load.needs <= LEAST:
        return 0.0
    if load.needs <= BUSY * load.workers:
        fair = min(fair, load.ready) if wants_ready else 0.0
    lacks = max(0.0, fair - load.workers)
    return lacks if not load.workers or lacks > max(SLACK * load.workers, LEAST_LACK) else 0.0


def destination(chances: Mapping[str, float], draw: float) -> str | None:
    """The cell to which a worker moves, by its draw (0..1, evenly distributed), or None: it stays."""
    for name, chance in chances.items():
        if draw < chance:
            return name
        draw -= chance
    return None
