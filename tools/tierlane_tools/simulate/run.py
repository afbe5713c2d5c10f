"""Runs a scenario: builds customers, cells and workers, feeds the arrivals, and moves the workers.

The seed decides everything: each source of chance has a generator of its own, so that a changed limit leaves the arrivals as
they are.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

from ledger.catalog.snapshot import Identity, Snapshot, Tier
from ratelimit.limits import LIMIT_COLUMNS, effective
from ratelimit.shares import TierShare
from scheduler.cells.moves import PoolPlan, placement, until_next_s
from scheduler.cells.placement import Cell, home
from scheduler.protocol.pool_view import Observation, combined, with_moving
from tierlane_tools.simulate.admission import CustomerAccount
from tierlane_tools.simulate.cell import GONE_S, SimulatedCell
from tierlane_tools.simulate.events import Arrival, EventLoop, in_order, lengths, poisson
from tierlane_tools.simulate.results import CellStep, ClassFigures, Figures, Recorder, SimulatedTimeline
from tierlane_tools.simulate.scenario import CustomerClass, ScenarioChange, ScenarioError, SimulationScenario
from tierlane_tools.simulate.slots import SlottedWorker
from tierlane_tools.simulate.worker import BEAT_S, MovesDocument, SimulatedWorker

LAST_STEP_S = 1.0
"""Between two looks whether requests are open, after the last one has arrived."""


def identities(scenario: SimulationScenario, tiers: Sequence[Tier]) -> list[tuple[Identity, str]]:
    """All customers of the scenario, with the names of their classes."""
    by_name, found = {tier.name: tier for tier in tiers}, []
    for name, each in scenario.customers.items():
        tier = by_name[each.tier]
        own = tuple(
            each.limits.get(column.name, whole) for column, whole in zip(LIMIT_COLUMNS, tier.limits, strict=True)
        )
        for number in range(each.count):
            customer = f"{name}-{number + 1}" if each.count > 1 else name
            identity = Identity(
                customer,
                customer,
                customer,
                tier.name,
                tier.max_queue_ms,
                tier.priority,
                limits=own,
                quotas=tuple(each.quotas.items()),
                weight=each.weight,
            )
            found.append((identity, name))
    return found


class RequestSimulation:
    """One run. `recorded`: arrivals beside those of the classes, with the numbers of customers as in `identities`. `words`: the lengths
    of the requests of a user of a closed loop, by its customer and number; None: drawn.
    """

    def __init__(
        self,
        scenario: SimulationScenario,
        recorded: Sequence[Arrival] = (),
        words: Callable[[str, int], Iterator[float]] | None = None,
    ) -> None:
        self._scenario = scenario
        self._loop = EventLoop()
        self._random = Random(f"{scenario.seed}/policies")
        tiers = scenario.tier_rows()
        self._plan = PoolPlan(
            "default",
            [TierShare(tier.name, tier.priority, tier.guaranteed_share) for tier in tiers],
            frozenset(tier.name for tier in tiers if tier.paused),
            scenario.model.max_batch_size,
            1000 / scenario.model.rps_per_gpu,
            round(GONE_S * 1000),
        )
        snapshot = Snapshot(1, tiers, {}, {}, {"model": scenario.model_row()}, ())
        self._accounts = [
            CustomerAccount(number, identity, name, effective(identity))
            for number, (identity, name) in enumerate(identities(scenario, tiers))
        ]
        names = scenario.cells.names
        self._cells = [Cell(name, scenario.cells.weights.get(name, 1.0)) for name in names]
        timeline = SimulatedTimeline([tier.name for tier in tiers], names, scenario.ends_s)
        classes = [ClassFigures(each.tier, name, each.count) for name, each in scenario.customers.items()]
        self.figures = Figures(classes, timeline)
        self._recorder = Recorder(self.figures, self._accounts, scenario.warmup_s, lambda: self._loop.now)
        self._by_name = {
            name: SimulatedCell(
                name,
                self._loop,
                scenario=scenario,
                snapshot=snapshot,
                accounts=self._accounts,
                recorder=self._recorder,
                random=Random(f"{scenario.seed}/{name}"),
                retry=self._arrive,
                over=self._user_goes_on,
            )
            for name in names
        }
        self._homes: list[SimulatedCell] = []
        self._workers: list[SimulatedWorker] = []
        self._made = 0
        self._last: dict[str, Observation] = {}
        self._seen: dict[str, Observation] = {}  # The same, with workers that have just left (`with_moving`).
        self._documents = 0
        self._arrivals = self._sources(recorded)
        self._words = words
        self._users: dict[
            tuple[int, int], Iterator[float]
        ] = {}  # By customer and number: the lengths of their requests.
        self._sending: set[tuple[int, int]] = set()
        self._slower = 1.0

    def run(self) -> Figures:
        """Run to the end, and a little further, so that the last requests end."""
        scenario, loop = self._scenario, self._loop
        self._assign_homes()
        self._resize(scenario.gpus)
        for cell in self._by_name.values():
            cell.leaving = self._moves
        for number, cell in enumerate(self._by_name.values()):
            loop.at(number * BEAT_S / len(self._by_name), loop.every, BEAT_S, partial(self._beat, cell))
            cell.start()
        for change in sorted(scenario.changes, key=lambda each: each.at_s):
            loop.at(change.at_s, self._change, change)
        if len(self._by_name) > 1:
            self._publish_moves()
        for account in self._accounts:
            for from_s, users in self._class(account).user_steps if self._class(account).users else ():
                loop.at(from_s, self._users_come, account, users)
        loop.at(self.figures.timeline.step_s, self._sample, 1)
        self._next_arrival()
        loop.run(scenario.ends_s)
        for worker in self._workers:
            worker.stop_counting()
        last_s = scenario.ends_s + scenario.model.total_ms / 1000
        while loop.now < last_s and any(account.in_use for account in self._accounts):
            loop.run(min(last_s, loop.now + LAST_STEP_S))
        self._recorder.close(scenario.duration_s)
        return self.figures

    def _sources(self, recorded: Sequence[Arrival]) -> Iterator[Arrival]:
        first, sources = 0, [iter(recorded)]
        for name, each in self._scenario.customers.items():
            numbers = range(first, first + each.count)
            first += each.count
            random = Random(f"{self._scenario.seed}/{name}")
            sources.append(
                poisson(
                    each.steps, numbers, each.words, each.words_spread, until_s=self._scenario.ends_s, random=random
                )
            )
        return in_order(sources)

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None and arrival.at_s < self._scenario.ends_s:
            self._loop.at(arrival.at_s, self._arrived, arrival)

    def _arrived(self, arrival: Arrival) -> None:
        account = self._accounts[arrival.customer]
        self._arrive(account, arrival.words, self._class(account).retries)
        self._next_arrival()

    # Closed loops.

    def _users_come(self, account: CustomerAccount, users: int) -> None:
        """From here on a customer has so many users; those that are too many leave after their requests."""
        for user in range(users):
            if (account.number, user) not in self._sending:
                self._sending.add((account.number, user))
                self._user_sends(account, user)

    def _user_sends(self, account: CustomerAccount, user: int) -> None:
        each, key = self._class(account), (account.number, user)
        now = self._loop.now
        users = next((users for from_s, users in reversed(each.user_steps) if from_s <= now), 0)
        if user >= users:
            self._sending.discard(key)
            return
        if key not in self._users:
            customer = account.identity.customer_id
            drawn = lengths(each.words, each.words_spread, Random(f"{self._scenario.seed}/{customer}/{user}"))
            self._users[key] = self._words(customer, user) if self._words else drawn
        self._arrive(account, next(self._users[key]), each.retries, user)

    def _user_goes_on(self, account: CustomerAccount, user: int, after_ms: float) -> None:
        if user >= 0:
            self._loop.after(after_ms / 1000, self._user_sends, account, user)

    def _class(self, account: CustomerAccount) -> CustomerClass:
        return self._scenario.customers[account.class_name]

    def _arrive(self, account: CustomerAccount, words: float, tries: int, user: int = -1) -> None:
        if self._loop.now < self._scenario.ends_s:
            self._homes[account.number].arrive(account, words, tries, user)

    def _assign_homes(self) -> None:
        """The cell of each customer: one of those of its class, else its home among the open cells."""
        self._homes = []
        for account in self._accounts:
            named = self._class(account).cells
            cells = [cell for cell in self._cells if cell.name in named] if named else self._cells
            chosen = cells if any(cell.is_open for cell in cells) else self._cells
            self._homes.append(self._by_name[home(account.identity.customer_id, chosen)])

    def _beat(self, cell: SimulatedCell) -> None:
        """A heartbeat: the limits of a cell follow from the last observations of all cells, those of a lost one from its own."""
        before, own = self._last.get(cell.name), cell.beat()
        cells = [] if cell.isolated else self._by_name.values()
        others = [each for each in cells if each is not cell and not each.isolated and each.name in self._seen]
        self._last[cell.name] = own
        counted = self._seen[cell.name] = with_moving(own, before) if others else own
        cell.limit(own, combined([counted, *(self._seen[each.name] for each in others)]))

    # Workers.

    def _resize(self, gpus: int) -> None:
        """Add or remove workers; new ones join the cell with the fewest for its weight, lost ones are drawn."""
        size = self._scenario.model.max_batch_size
        classes = self._scenario.customers.values()
        rates = [
            (
                each.count * (max(rate for _, rate in each.steps) + max(users for _, users in each.user_steps)),
                each.words,
            )
            for each in classes
        ]
        total = sum(rate for rate, _ in rates)
        words = sum(rate * mean for rate, mean in rates) / total if total else 10.0
        open_cells = [cell for cell in self._cells if cell.is_open] or self._cells
        while len(self._workers) < gpus:
            self._made += 1
            costs, random = self._scenario.costs, Random(f"{self._scenario.seed}/worker-{self._made}")
            sizes = [(size, size * words), (1, words)]
            name = f"worker-{self._made}"
            worker: SimulatedWorker
            if costs.slots:
                worker = SlottedWorker(name, self._loop, costs, random)
            else:
                worker = SimulatedWorker(name, self._loop, costs, random, sizes)
            worker.change_speed(self._slower)
            self._workers.append(worker)
            fewest = min(open_cells, key=lambda cell: len(self._by_name[cell.name].workers) / cell.weight)
            self._by_name[fewest.name].add(worker)
        while len(self._workers) > gpus:
            worker = self._workers.pop(self._random.randrange(len(self._workers)))
            worker.lose()
            for cell in self._by_name.values():
                self._loop.after(GONE_S, cell.remove, worker)

    def _moves(self, worker: SimulatedWorker, destination: str) -> None:
        self.figures.moves += 1
        self._loop.after(self._scenario.cells.move_ms / 1000, self._arrives, worker, self._by_name[destination])

    def _arrives(self, worker: SimulatedWorker, destination: SimulatedCell) -> None:
        if not worker.alive:
            return
        for cell in self._by_name.values():
            cell.remove(worker)
        destination.add(worker)

    def _publish_moves(self) -> None:
        self._documents += 1
        cells = {name: cell.state for name, cell in self._by_name.items() if not cell.isolated}
        chances, shares = placement(self._plan, cells)
        for name, cell in self._by_name.items():
            cell.moves = MovesDocument(self._documents, chances.get(name, {}))
            cell.share(shares.get(name, {}))
        calm_s = self._scenario.cells.digest_ms / 1000
        self._loop.after(until_next_s(moving=any(chances.values()), calm_s=calm_s), self._publish_moves)

    # Changes.

    def _change(self, change: ScenarioChange) -> None:
        if change.gpus is not None:
            self._resize(change.gpus)
        if change.slower is not None:
            self._slower = change.slower
            for worker in self._workers:
                worker.change_speed(change.slower)
        if change.killed is not None:
            engines = [each for each in self._workers if isinstance(each, SlottedWorker) and not each.killed]
            for worker in self._random.sample(engines, min(change.killed, len(engines))):
                worker.kill()
        if change.cell is None or change.state is None:
            return
        cell = self._by_name[change.cell]
        if change.state == "lost":
            cell.dispatcher.stopped = cell.isolated = True
            self._loop.after(self._scenario.cells.outage_s, self._direct, cell)
            return
        is_open = change.state == "open"
        cell.accepts = is_open
        self._cells = [each._replace(is_open=is_open) if each.name == cell.name else each for each in self._cells]
        if not any(each.is_open for each in self._cells):
            raise ScenarioError(f"changes: no cell is open at {change.at_s:g} s; leave at least one open.")
        self._assign_homes()

    def _direct(self, cell: SimulatedCell) -> None:
        """After a loss, gateways form the batches of its customers themselves, for the workers that it had."""
        cell.dispatcher.stopped = False
        cell.dispatcher.turn()

    def _sample(self, number: int) -> None:
        timeline = self.figures.timeline
        for name, cell in self._by_name.items():
            timeline.cells[name].append(CellStep(float(len(cell.workers)), float(cell.depth)))
        if number < timeline.count:
            self._loop.at((number + 1) * timeline.step_s, self._sample, number + 1)
