"""The aggregated mode: time steps, and numbers of requests of each class and cell instead of single requests.

For systems that are too large to be simulated request by request. The limits (`ratelimit/shares.py`, `capacity.py`), the members of
batches (`choose`), their size (`target_size`, `distance_ms`), shedding, homes and moves (`scheduler/cells/placement.py`) are the same functions;
customers of a class share one level of their buckets, and a tier's classes share its service by water filling, which is what fair
queueing gives them. A response time is the wait in the tier queue, which follows from the steps, plus even parts for what happens within a
step (a batch that gathers, or the next even distance), plus the run. Capacity counts as measured. `tests/unit/test_simulate_flows.py` compares
the figures with those of the other mode.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from ledger.catalog.snapshot import Tier
from ratelimit.capacity import relax
from ratelimit.limits import CONCURRENCY, LIMIT_COLUMNS, MAX_CONCURRENCY, REQUEST_BUCKET, Values, value_of
from ratelimit.request_limits import FUNCTION
from ratelimit.shares import TierShare, ceilings, factor, part_of_capacity, remembered
from scheduler.batching.policy import BatchPolicy, TierPolicy, TierQueue, choose
from scheduler.batching.timing import Service, distance_ms, target_size, window_ms
from scheduler.cells.moves import PERIOD_S, until_next_s
from scheduler.cells.placement import Cell, CellLoad, home, needed_above, placed, ready_workers, workers_needed
from scheduler.errors import ErrorCode
from scheduler.states import Admission
from tierlane_tools.simulate.admission import shed_chance
from tierlane_tools.simulate.events import poisson_count
from tierlane_tools.simulate.fair_queue import water_fill, whole_parts
from tierlane_tools.simulate.results import (
    CellStep,
    ClassFigures,
    CustomerFairness,
    Figures,
    FlowRecorder,
    SimulatedTimeline,
)
from tierlane_tools.simulate.scenario import CustomerClass, ScenarioChange, ScenarioError, SimulationScenario
from tierlane_tools.simulate.worker import BEAT_S

DEMAND_S = 2.0
"""The time over which gateways average demand."""
RECENT_S = 0.36
"""The time over which digests average it: half of it in a quarter of a second."""
MOST_HASHES = 500_000
"""Customers of a class times cells for which homes are computed; beyond, numbers are drawn."""
PARTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The points of an even distribution at which response times are counted."""

_CAPACITY = (ErrorCode.REDUCED_CAPACITY, ErrorCode.SHED_FOR_PRIORITY, ErrorCode.QUEUE_FULL)


class ClassFlow:
    """One class in one cell. `parcels`: [when they arrived, how many], the oldest first. Levels are those of one customer."""

    def __init__(self, each: CustomerClass, name: str, limits: Values) -> None:
        self.name = name
        self.section = each
        self.customers = 0
        self.rate = value_of(limits, REQUEST_BUCKET.rate) or math.inf
        self.burst = value_of(limits, REQUEST_BUCKET.size or REQUEST_BUCKET.rate) or self.rate
        self.concurrency = value_of(limits, MAX_CONCURRENCY) or math.inf
        self.level = self.base_level = self.burst
        self.parcels: deque[list[float]] = deque()
        self.waiting = 0
        self.running = 0.0

    def push(self, now: float, count: int) -> None:
        """Requests are queued."""
        if count:
            self.parcels.append([now, count])
            self.waiting += count

    def pop(self, count: int) -> list[tuple[float, int]]:
        """The oldest `count` requests, as (when they arrived, how many)."""
        taken: list[tuple[float, int]] = []
        self.waiting -= count
        while count > 0:
            parcel = self.parcels[0]
            part = min(count, int(parcel[1]))
            taken.append((parcel[0], part))
            parcel[1], count = parcel[1] - part, count - part
            if not parcel[1]:
                self.parcels.popleft()
        return taken

    def expired(self, before: float) -> int:
        """Drop the requests that arrived before a time; returns how many."""
        count = 0
        while self.parcels and self.parcels[0][0] < before:
            count += int(self.parcels.popleft()[1])
        self.waiting -= count
        return count


class TierFlow:
    """One tier in one cell: its classes, its bucket, and its limits."""

    def __init__(self, tier: Tier, classes: Sequence[ClassFlow]) -> None:
        self.tier = tier
        self.classes = classes
        self.demand = self.before = self.recent = 0.0
        self.factor, self.level = 1.0, 0.0
        self.ceiling = self.rate = math.inf
        self.share = self.wait_share = tier.guaranteed_share  # In this cell: of batches, and for predicted waits.

    @property
    def waiting(self) -> int:
        """Requests in its queue."""
        return sum(each.waiting for each in self.classes)

    @property
    def need(self) -> float:
        """The requests/s that it needs, for its arrivals and for what waits."""
        return workers_needed(self.demand, self.waiting, 1000.0)


class Departure(NamedTuple):
    """The batches that leave in a step: the longest wait for the next one, the time of a run, and the requests in one."""

    step_s: float
    gathering_ms: float
    run_ms: float
    size: float


class FlowCell:
    """One cell, in steps."""

    def __init__(
        self, name: str, scenario: SimulationScenario, tiers: Sequence[TierFlow], recorder: FlowRecorder, random: Random
    ) -> None:
        self.name = name
        self.tiers = tiers
        self.workers = 0
        self.coming: deque[float] = deque()
        self.is_open, self.isolated, self.stopped_until = True, False, 0.0
        self._scenario = scenario
        self._recorder = recorder
        self._random = random
        self._credit: Mapping[str, float] = {}
        self._places = self._rate = self._running = 0.0
        self._words = 10.0
        self.capacity = 0.0  # Of all cells, the part for predicted waits in this one.
        self._started: deque[tuple[float, float]] = deque()  # Batches by the step in which they began, for one run.
        self._shares = [TierShare(t.tier.name, t.tier.priority, t.tier.guaranteed_share) for t in tiers]

    @property
    def depth(self) -> int:
        """Requests in all queues."""
        return sum(tier.waiting for tier in self.tiers)

    @property
    def _batch(self) -> int:
        return self._scenario.model.max_batch_size

    def full_ms(self) -> float:
        """The time of a full batch."""
        return max(0.001, self._scenario.costs.run_ms(self._batch, self._batch * self._words))

    def _service(self) -> Service:
        """As workers fit it."""
        costs = self._scenario.costs
        item_ms = (self.full_ms() - costs.run_ms(1, self._words)) / max(1, self._batch - 1)
        return Service(max(0.0, self.full_ms() - self._batch * item_ms), max(0.0, item_ms), self._batch, steady=True)

    def limit(self, capacity: float, needs: Mapping[str, float], demand: Mapping[str, float], least: float) -> None:
        """Compute the limits again, as `LiveLimits` does with each heartbeat, from those of all cells."""
        own = {each.tier.name: each.demand for each in self.tiers}
        own_needs = {each.tier.name: each.need for each in self.tiers}
        here = part_of_capacity(capacity, self._shares, needs, own_needs, own, least=least)
        self.capacity, found = capacity * here.part, ceilings(capacity, self._shares, demand)
        for each, share in zip(self.tiers, here.shares, strict=True):
            each.ceiling, wanted = found[each.tier.name], demand[each.tier.name]
            each.rate, each.wait_share = here.ceiling(each.tier.name, each.ceiling), share.guaranteed_share
            each.before = remembered(each.before, wanted, each.factor, BEAT_S)
            target = 1.0 if each.tier.shadow else factor(each.ceiling, min(wanted, each.before))
            each.factor = relax(each.factor, target, BEAT_S)

    def step(self, now: float, step_s: float) -> None:
        """Arrivals, admission, batches."""
        ahead, arrived, words = 0, 0, 0.0
        for tier in self.tiers:
            part = step_s / min(DEMAND_S, now + step_s)  # At first, the mean since the start.
            tier.demand *= 1 - part
            tier.recent *= 1 - min(1.0, step_s / RECENT_S)
            wanted = [self._arrive(tier, each, now, step_s, part) for each in tier.classes]
            admitted = self._admit(tier, wanted, ahead, step_s)
            for each, count in zip(tier.classes, admitted, strict=True):
                each.push(now, count)
                arrived += count
                words += count * each.section.words
            ahead += tier.waiting
        self._rate += (arrived / step_s - self._rate) * min(1.0, step_s / 0.25)
        self._words += (words / arrived - self._words) * min(1.0, step_s) if arrived else 0.0
        self._expire(now)
        if now >= self.stopped_until:
            self._serve(now, step_s)

    def _arrive(self, tier: TierFlow, each: ClassFlow, now: float, step_s: float, part: float) -> int:
        """The requests of a class that its customers' limits accept. `part`: of this step in the demand."""
        if not each.customers:
            return 0
        count = poisson_count(each.customers * each.section.rate_at(now) * step_s, self._random)
        self._recorder.arrived(tier.tier.name, each.name, self.name, count)
        customers = max(1, each.customers)
        base = min(each.burst, each.base_level + each.rate * step_s) if each.rate < math.inf else math.inf
        allowed_by_base = min(count, int(base * customers + self._random.random())) if base < math.inf else count
        each.base_level = base - allowed_by_base / customers
        tier.demand += allowed_by_base / step_s * part
        tier.recent += allowed_by_base / step_s * min(1.0, step_s / RECENT_S)
        size = max(1.0, each.burst * tier.factor)
        level = min(size, each.level + each.rate * tier.factor * step_s) if each.rate < math.inf else math.inf
        allowed = min(count, max(0, int(level * customers + self._random.random()))) if level < math.inf else count
        each.level = level - allowed / customers
        room = each.concurrency * customers - each.waiting - each.running
        held = max(0, allowed - int(room)) if room < allowed else 0
        outcome = REQUEST_BUCKET.outcome
        refuse, name = self._recorder.refused, tier.tier.name
        refuse(name, each.name, ErrorCode.RATE_LIMIT_EXCEEDED, outcome, min(count - allowed, count - allowed_by_base))
        refuse(name, each.name, ErrorCode.REDUCED_CAPACITY, outcome, max(0, allowed_by_base - allowed))
        refuse(name, each.name, ErrorCode.RATE_LIMIT_EXCEEDED, CONCURRENCY, held)
        return allowed - held

    def _admit(self, tier: TierFlow, wanted: Sequence[int], ahead: int, step_s: float) -> list[int]:
        """The requests of each class that the tier accepts: its bucket, shedding, its depth."""
        if not tier.ceiling < math.inf:
            return list(wanted)
        tier.level = min(max(1.0, tier.ceiling), tier.level + tier.rate * step_s)
        parts = water_fill(
            wanted, [each.customers * each.section.weight for each in tier.classes], max(0.0, tier.level)
        )
        admitted: list[int] = []
        for each, count, part in zip(tier.classes, wanted, parts, strict=True):
            refused = 0 if tier.tier.shadow else max(0, count - int(part + self._random.random()))
            self._recorder.refused(tier.tier.name, each.name, ErrorCode.REDUCED_CAPACITY, Admission.TIER_LIMIT, refused)
            kept = count - refused
            tier.level -= kept
            shed, late = self._shed(tier, each, kept, ahead)
            self._recorder.refused(tier.tier.name, each.name, ErrorCode.SHED_FOR_PRIORITY, Admission.SHED, shed)
            self._recorder.refused(tier.tier.name, each.name, ErrorCode.QUEUE_FULL, Admission.WAIT, late)
            room = max(0, tier.tier.max_queue_depth - tier.waiting - sum(admitted))
            full = max(0, kept - shed - late - room)
            self._recorder.refused(tier.tier.name, each.name, ErrorCode.QUEUE_FULL, Admission.QUEUE_FULL, full)
            admitted.append(kept - shed - late - full)
        return admitted

    def _shed(self, tier: TierFlow, each: ClassFlow, count: int, ahead: int) -> tuple[int, int]:
        """How many of these requests are shed, and how many would wait too long."""
        if not count or self.capacity <= 0:
            return 0, 0
        row, own, capacity = tier.tier, self._own_depth(tier, each), self.capacity
        in_share = own / tier.wait_share if tier.wait_share else math.inf
        rate = max(min(tier.rate, capacity), tier.wait_share * capacity, 0.001)
        wait_ms = 1000 * min(ahead / capacity + own / rate, in_share / capacity)
        chance = max(
            shed_chance(min(ahead + own, in_share), -1 if row.shed_depth is None else row.shed_depth),
            shed_chance(wait_ms, -1 if row.shed_wait_ms is None else row.shed_wait_ms),
        )
        shed = min(count, int(chance * count + self._random.random()))
        longest_ms = min(row.max_queue_ms or FUNCTION.queue_ms, self._scenario.model.total_ms - self.full_ms())
        return shed, count - shed if wait_ms >= longest_ms else 0

    def _own_depth(self, tier: TierFlow, each: ClassFlow) -> float:
        """Requests of the tier that leave before the next one of a customer of this class."""
        waiting = tier.waiting
        if waiting <= self._batch:
            return waiting
        weights = sum(other.customers * other.section.weight for other in tier.classes if other.waiting)
        own = each.waiting / max(1, each.customers) * max(weights, each.section.weight) / each.section.weight
        return min(waiting, self._batch + own)

    def _expire(self, now: float) -> None:
        for tier in self.tiers:
            for each in tier.classes:
                count = each.expired(now - (tier.tier.max_queue_ms or FUNCTION.queue_ms) / 1000)
                self._recorder.failed(each.name, ErrorCode.QUEUE_TIMEOUT, count)

    # Batches.

    def _serve(self, now: float, step_s: float) -> None:
        service, waiting = self._service(), self.depth
        settings, full_ms = self._scenario.scheduler, self.full_ms()
        most = self.workers * step_s * 1000 / full_ms * self._batch
        apart_ms = distance_ms(self.workers, service, self._batch, settings.batch_headroom)
        if apart_ms and waiting > most:
            most = min(most, step_s * 1000 / apart_ms * self._batch)
        self._places = min(self._places + most, max(most, float(self._batch))) if waiting else 0.0
        places = min(waiting, int(self._places))
        self._places -= places
        is_saturated, rate = waiting > places, max(waiting / step_s, self._rate)
        size = float(self._batch if is_saturated else target_size(rate, max(1, self.workers), service, self._batch))
        run_ms = self._scenario.costs.run_ms(size, size * self._words)
        busy_s = min(self.workers * step_s, places / max(1.0, size) * run_ms / 1000)
        self._recorder.figures.timeline.busy(self.name, now, busy_s)
        self._started.append((now, busy_s / max(step_s, run_ms / 1000)))
        self._running += self._started[-1][1]
        while self._started[0][0] <= now - run_ms / 1000 and len(self._started) > 1:
            self._running -= self._started.popleft()[1]
        if now >= self._recorder.warmup_s and places:
            self._recorder.figures.batches += places / size
            self._recorder.figures.batched += places
        if not places:
            return
        tiers = {t.tier.name: TierQueue(t.waiting, self._oldest_ms(t, now)) for t in self.tiers if t.waiting}
        order = [TierPolicy(each.tier.name, each.tier.priority, each.share) for each in self.tiers]
        policy = BatchPolicy(places, 0.0, 1, settings.ageing_ms, order)
        picks, self._credit = choose(tiers, policy, self._credit)
        gathering_ms = self._wait_ms(size, apart_ms, waiting / step_s, is_saturated=is_saturated)
        for tier in self.tiers:
            self._leave(tier, dict(picks).get(tier.tier.name, 0), now, Departure(step_s, gathering_ms, run_ms, size))

    def _wait_ms(self, size: float, apart_ms: float, rate: float, *, is_saturated: bool) -> float:
        """The longest wait within a step: until the next batch leaves."""
        if is_saturated:
            return apart_ms or self.full_ms() / max(1, self.workers)
        window = window_ms(int(size), max(rate, self._rate), self._scenario.model.max_wait_ms)
        return min(window, 1000 * size / max(rate, 1.0)) if size > 1 else 0.0

    def _oldest_ms(self, tier: TierFlow, now: float) -> float:
        return max(((now - each.parcels[0][0]) * 1000 for each in tier.classes if each.parcels), default=0.0)

    def _leave(self, tier: TierFlow, count: int, now: float, departure: Departure) -> None:
        """Requests of a tier leave its queue, the classes by fair shares; count their response times."""
        step_s, gathering_ms, run_ms, size = departure
        waits = [each.waiting for each in tier.classes]
        parts = whole_parts(
            water_fill(waits, [e.customers * e.section.weight / e.section.words for e in tier.classes], count)
        )
        costs, backlog = self._scenario.costs, sum(waits) > count
        after_ms = costs.dispatch_ms + run_ms + costs.call_ms
        for each, part in zip(tier.classes, parts, strict=True):
            each.running = part / step_s * run_ms / 1000
            gpu_ms = run_ms * each.section.words / (size * self._words)
            names = (tier.tier.name, each.name, self.name)
            for arrived_s, number in each.pop(part):
                age_ms = (now - arrived_s) * 1000
                spread_ms = max(gathering_ms, step_s * 1000 if backlog or age_ms > 0 else 0.0)
                for point in PARTS:
                    wait_ms = max(0.0, age_ms + (point - 0.5) * spread_ms) if age_ms > 0 else point * spread_ms
                    self._recorder.completed(
                        *names, ms=wait_ms + after_ms, queue_ms=wait_ms, gpu_ms=gpu_ms, count=number / len(PARTS)
                    )

    def load(self, deciding_s: float) -> CellLoad:
        """Its digest."""
        request_ms = self.full_ms() / self._batch
        needed = {t.tier.name: workers_needed(t.recent, t.waiting, request_ms) for t in self.tiers}
        idle = max(0.0, self.workers - self._running)
        deciding = idle + (self.workers - idle) * min(1.0, deciding_s * 1000 / self.full_ms())
        serves, workers = self.is_open or self.depth > 0, self.workers + len(self.coming)
        ready = ready_workers(self._shares, {t.tier.name: t.recent for t in self.tiers}, self.full_ms())
        return CellLoad(self.name, workers, needed, deciding, serves, ready, needed_above(self._shares, needed))


class FlowSimulation:
    """One run in steps."""

    def __init__(self, scenario: SimulationScenario) -> None:
        self._scenario = scenario
        self._random = Random(f"{scenario.seed}/flows")
        tiers = scenario.tier_rows()
        self._shares = [TierShare(tier.name, tier.priority, tier.guaranteed_share) for tier in tiers]
        names = scenario.cells.names
        classes = [ClassFigures(each.tier, name, each.count) for name, each in scenario.customers.items()]
        self.figures = Figures(classes, SimulatedTimeline([tier.name for tier in tiers], names, scenario.ends_s))
        self._recorder = FlowRecorder(self.figures, scenario.warmup_s)
        self._cells = [
            FlowCell(name, scenario, [self._tier_flow(tier) for tier in tiers], self._recorder, self._random)
            for name in names
        ]
        self._assign()
        self._resize(scenario.gpus)

    def _tier_flow(self, tier: Tier) -> TierFlow:
        flows = []
        for name, each in self._scenario.customers.items():
            if each.tier == tier.name:
                own = [each.limits.get(c.name, v) for c, v in zip(LIMIT_COLUMNS, tier.limits, strict=True)]
                flows.append(ClassFlow(each, name, tuple(own)))
        return TierFlow(tier, flows)

    def run(self) -> Figures:
        """Run to the end."""
        scenario, step_s = self._scenario, self._scenario.step_s
        changes = deque(sorted(scenario.changes, key=lambda each: each.at_s))
        per_beat = max(1, round(BEAT_S / step_s))
        sampled, digest_due, timeline = 0, 0, self.figures.timeline
        for number in range(math.ceil(scenario.ends_s / step_s)):
            now = self._recorder.now = number * step_s
            while changes and changes[0].at_s <= now:
                self._change(changes.popleft(), now)
            if len(self._cells) > 1 and number >= digest_due:
                digest_due = number + self._move(now)
            for cell in self._cells:
                while cell.coming and cell.coming[0] <= now:
                    cell.coming.popleft()
                    cell.workers += 1
            if number % per_beat == 0:
                lost = [[cell] for cell in self._cells if cell.isolated]
                for cells in ([cell for cell in self._cells if not cell.isolated], *lost):
                    self._limit(cells)
            for cell in self._cells:
                cell.step(now, step_s)
            while (sampled + 1) * timeline.step_s <= now + step_s and sampled < timeline.count:
                self._sample()
                sampled += 1
        self._close()
        return self.figures

    def _limit(self, cells: Sequence[FlowCell]) -> None:
        """These cells share their workers."""
        model, workers = self._scenario.model, sum(cell.workers for cell in cells)
        full_rps = sum(cell.workers * 1000 * model.max_batch_size / cell.full_ms() for cell in cells)
        tiers = list(zip(*(cell.tiers for cell in cells), strict=True))
        demand = {each[0].tier.name: sum(tier.demand for tier in each) for each in tiers}
        needs = {each[0].tier.name: sum(tier.need for tier in each) for each in tiers}
        for cell in cells if full_rps > 0 else ():
            cell.limit(full_rps * model.target_utilization, needs, demand, max(1, cell.workers) / workers)

    def _sample(self) -> None:
        for cell in self._cells:
            self.figures.timeline.cells[cell.name].append(CellStep(float(cell.workers), float(cell.depth)))

    def _assign(self) -> None:
        """Customers of each class in each cell."""
        cells = [
            Cell(cell.name, self._scenario.cells.weights.get(cell.name, 1.0), cell.is_open) for cell in self._cells
        ]
        if not any(cell.is_open for cell in cells):
            raise ScenarioError("changes: no cell is open; leave at least one open.")
        for name, each in self._scenario.customers.items():
            named = [cell for cell in cells if cell.name in each.cells] if each.cells else cells
            counts = self._homes(name, each, named if any(cell.is_open for cell in named) else cells)
            for cell in self._cells:
                for tier in cell.tiers:
                    for flow in tier.classes:
                        if flow.name == name:
                            flow.customers = counts.get(cell.name, 0)

    def _homes(self, name: str, each: CustomerClass, cells: Sequence[Cell]) -> dict[str, int]:
        counts = {cell.name: 0 for cell in cells}
        if each.count * len(cells) <= MOST_HASHES:
            for number in range(each.count):
                counts[home(f"{name}-{number + 1}" if each.count > 1 else name, cells)] += 1
            return counts
        left, weights = each.count, sum(cell.weight for cell in cells if cell.is_open)
        for cell in cells:
            if cell.is_open and weights > 0:
                part = min(1.0, cell.weight / weights)
                drawn = round(self._random.gauss(left * part, math.sqrt(left * part * (1 - part))))
                counts[cell.name] = min(left, max(0, drawn))
                left, weights = left - counts[cell.name], weights - cell.weight
        return counts

    def _resize(self, gpus: int) -> None:
        """Add workers to the cells with the fewest, or lose drawn ones."""
        total = sum(cell.workers + len(cell.coming) for cell in self._cells)
        cells = [cell for cell in self._cells if cell.is_open and not cell.isolated] or self._cells
        for number in range(max(0, gpus - total)):
            cells[number % len(cells)].workers += 1
        for _ in range(max(0, total - gpus)):
            draw = self._random.randrange(max(1, sum(cell.workers for cell in self._cells)))
            for cell in self._cells:
                if draw < cell.workers:
                    cell.workers -= 1
                    break
                draw -= cell.workers

    def _move(self, now: float) -> int:
        """Workers that decide now move. Returns the number of steps until the next digests."""
        cells = {cell.name: cell for cell in self._cells if not cell.isolated}
        loads = {name: cell.load(max(self._scenario.step_s, PERIOD_S)) for name, cell in cells.items()}
        (found, shares), calm_s = placed(list(loads.values()), self._shares), self._scenario.cells.digest_ms / 1000
        for name, cell in cells.items():
            for each in cell.tiers:
                each.share = shares[name].get(each.tier.name, each.tier.guaranteed_share)
        for name, chances in found.items():
            deciding = min(loads[name].deciding, float(cells[name].workers))
            for destination, chance in chances.items():
                moving = min(cells[name].workers, poisson_count(deciding * chance, self._random))
                cells[name].workers -= moving
                cells[destination].coming.extend([now + BEAT_S / 2 + self._scenario.cells.move_ms / 1000] * moving)
                self.figures.moves += moving
        return max(1, round(until_next_s(moving=any(found.values()), calm_s=calm_s) / self._scenario.step_s))

    def _change(self, change: ScenarioChange, now: float) -> None:
        if change.gpus is not None:
            self._resize(change.gpus)
        for cell in self._cells:
            if cell.name == change.cell and change.state == "lost":
                cell.isolated, cell.stopped_until = True, now + self._scenario.cells.outage_s
            elif cell.name == change.cell:
                cell.is_open = change.state == "open"
                self._assign()

    def _close(self) -> None:
        """Add the figures of single customers: those of a class are equal."""
        for name, each in self._scenario.customers.items():
            figures = self.figures.classes[name]
            unmet = sum(figures.refused[code.value] for code in _CAPACITY) / each.count
            waiting = figures.queue_ms / 1000 / self._scenario.duration_s / each.count
            one = CustomerFairness(each.tier, figures.gpu_ms / each.count / each.weight, unmet, waiting)
            self.figures.fairness += [one] * min(each.count, 100)
