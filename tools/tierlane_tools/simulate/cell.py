"""A cell in virtual time: gateways, queues and dispatcher of one pool, with the system's own policies.

Real are the batch policy (`scheduler/batching/policy.py`, `plan`), the arrival rate and service times, demand
meter, capacity, tier limits and customer limits of the gateway (`gateway/limits/`). Models are the queues (`fair_queue`) and
the checks of admission (`admission`). All gateways of a cell compute the same limits, so one of them is simulated; of two
schedulers the first acts, so one dispatcher is simulated.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random

from gateway.inference.events import SLO_FAILURES
from gateway.limits.capacity import LiveLimits, slot_places
from gateway.limits.customer_limits import CustomerLimits
from gateway.limits.demand import DemandMeter
from gateway.limits.rejections import is_capacity_rejection
from ledger.catalog.snapshot import Snapshot
from ratelimit.request_limits import FUNCTION
from scheduler.batching.service import pool_service
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.cells.moves import CellState
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Submission, SubmissionGroup
from scheduler.protocol.pool_view import GatewayStats, Observation, TierDepth, WorkerView
from scheduler.states import Admission
from tierlane_tools.simulate.admission import AdmissionModel, CustomerAccount
from tierlane_tools.simulate.dispatcher import CellDispatcher, age_ms
from tierlane_tools.simulate.events import EventLoop
from tierlane_tools.simulate.fair_queue import FairQueue, QueuedRequest
from tierlane_tools.simulate.results import Recorder
from tierlane_tools.simulate.scenario import SimulationScenario
from tierlane_tools.simulate.worker import MovesDocument, SimulatedBatch, SimulatedWorker

SERVICE_S = 1.0
"""The interval at which a scheduler reads the service times."""
LEASE_S, GONE_S = 0.6, 1.0
"""The lease of a batch, and the time after which a silent worker is not counted any more."""
MOST_LOSSES = 2
NO_GPU_RETRY_MS = 1000.0
LEAST_PAUSE_MS = 100.0  # Of a user of a closed loop after a rejection.


class SimulatedCell:
    """One cell. `accounts`: all customers; `departs`: called for a worker that leaves, with the name of its next cell.

    `retry` is called with a rejected request that is sent again, `over` with a customer and its user when a request has ended for
    good, and the ms after which that user may send the next one.
    """

    def __init__(
        self,
        name: str,
        loop: EventLoop,
        *,
        scenario: SimulationScenario,
        snapshot: Snapshot,
        accounts: Sequence[CustomerAccount],
        recorder: Recorder,
        random: Random,
        retry: Callable[[CustomerAccount, float, int, int], None],
        over: Callable[[CustomerAccount, int, float], None],
    ) -> None:
        self.name = name
        self.accepts = True
        self.isolated = False  # It was lost: its workers stay, and publish nothing.
        self._loop = loop
        self._scenario = scenario
        self._snapshot = snapshot
        self._accounts = accounts
        self._recorder = recorder
        self._retry = retry
        self._over = over
        batch = scenario.model.max_batch_size
        self.has_slots = scenario.costs.slots > 0
        self.slots = self.free_slots = 0  # Of its workers.
        slots = scenario.costs.slots * scenario.gpus
        places = slot_places(slots) if slots else batch
        self.queues = {tier.name: FairQueue(places, self._may_run) for tier in snapshot.tiers}
        self.ready: deque[SimulatedBatch] = deque()
        self.poppers: deque[SimulatedWorker] = deque()
        self.workers: list[SimulatedWorker] = []
        self.moves = MovesDocument()
        self.leased = 0
        self.formed_s = -math.inf
        self.live = LiveLimits("default")
        self._meter = DemandMeter(name, 0.0)
        self._customer_limits = CustomerLimits(self.live, self._meter, lambda: loop.now)
        self._admission = AdmissionModel(self.queues, random)
        self._run_ms = 0
        self._stats: list[GatewayStats] = []
        self.leaving: Callable[[SimulatedWorker, str], None] = lambda *_: None
        tiers = [TierPolicy(tier.name, tier.priority, tier.guaranteed_share, tier.paused) for tier in snapshot.tiers]
        settings = scenario.scheduler
        self._policy = BatchPolicy(
            batch,
            scenario.model.max_wait_ms,
            settings.batch_lookahead_workers,
            settings.ageing_ms,
            [tier for tier in tiers if not tier.paused],
            background_share=0.0,  # There are no jobs.
            headroom=settings.batch_headroom,
        )
        self.dispatcher = CellDispatcher(self, loop, self._policy)

    @property
    def depth(self) -> int:
        """Requests in all queues."""
        return sum(queue.depth for queue in self.queues.values())

    @property
    def _is_first_idle(self) -> bool:
        """Whether a worker that has just become idle is the only one, or no batch runs."""
        return not self.leased or self.healthy - self.leased == 1

    @property
    def healthy(self) -> int:
        """Workers that count."""
        return len(self.workers)

    def share(self, shares: Mapping[str, float]) -> None:
        """Set the guaranteed shares of tiers in this cell; those of their rows if it is empty."""
        self.dispatcher.policy = self._policy.with_shares(shares)

    def start(self) -> None:
        """Begin the readings of service times."""
        self._loop.every(SERVICE_S, self._read_service)
        self.dispatcher.turn()

    # Gateway.

    def beat(self) -> Observation:
        """The heartbeat of the gateway, and its observation."""
        now = self._loop.now
        for queue in self.queues.values():
            queue.drop_expired(now)
        tiers = [tier.name for tier in self._snapshot.tiers]
        self._stats = [self.live.published(self._meter.heartbeat(tiers, now))]
        return self.observed()

    def observed(self) -> Observation:
        """The cell now."""
        now, ready = self._loop.now, len(self.ready)
        views = self._reported()
        depths = {name: TierDepth(name, queue.depth, age_ms(queue, now)) for name, queue in self.queues.items()}
        return Observation(round(now * 1000), depths, views, self._stats, ready, self.leased, 0, 0)

    def _reported(self) -> list[WorkerView]:
        """The last heartbeats of its workers."""
        return [worker.reported for worker in self.workers if worker.reported is not None]

    def limit(self, own: Observation, whole: Observation) -> None:
        """Compute the limits again. `whole`: the observation of all cells."""
        self.live.observe(own, self._snapshot, self._loop.now, whole)
        self._run_ms = math.ceil(max((view.service_p95_ms for view in whole.workers), default=self._run_ms))

    def arrive(self, account: CustomerAccount, words: float, tries: int, user: int) -> None:
        """A request of a customer; `tries`: how often it may still be sent again; `user`: of a closed loop, else -1."""
        now, identity = self._loop.now, account.identity
        self._meter.arrived(identity.tier, identity.customer_name)
        self._recorder.arrived(account, self.name)
        if self.live.no_gpu(now):
            self._meter.shed(identity.tier)
            self._recorder.refused(account, ErrorCode.NO_CAPACITY.value, "no_gpu")
            self._send_again(account, words, tries, user, NO_GPU_RETRY_MS)
            return
        limits = self._customer_limits.limits(identity)
        submission = Submission(
            id="",
            group=SubmissionGroup(identity.tier, identity.customer_id, identity.key_id, "model", limits),
            nonce="",
            input_bytes=0,
            total_ms=self._scenario.model.total_ms,
            queue_ms=identity.max_queue_ms or FUNCTION.queue_ms,
            tokens=round(words),
            body=b"",
        )
        current = self.live.current(self._snapshot)._replace(run_ms=self._run_ms)
        verdict = self._admission.decide(account, submission, current, now)
        reduced_only = self._customer_limits.judged(identity, submission, verdict)
        if verdict.outcome is Admission.ACCEPTED:
            queue_until_s, deadline_s = now + submission.queue_ms / 1000, now + submission.total_ms / 1000
            request = QueuedRequest(account.number, now, queue_until_s, deadline_s, words)
            request.user = user
            urgent = self.queues[identity.tier].push(request, identity.weight)
            self.dispatcher.admitted(self.depth, urgent=urgent)
            return
        error = self._customer_limits.rejection_error(identity, verdict, base_limit_allows=reduced_only)
        if is_capacity_rejection(error.code):
            self._meter.shed(identity.tier)
        self._recorder.refused(account, error.code.value, verdict.outcome.value)
        self._send_again(account, words, tries, user, error.retry_after_ms or 0)

    def _send_again(self, account: CustomerAccount, words: float, tries: int, user: int, retry_ms: float) -> None:
        if tries > 0 and retry_ms > 0:
            self._loop.after(retry_ms / 1000, self._retry, account, words, tries - 1, user)
        else:
            self._over(account, user, max(LEAST_PAUSE_MS, retry_ms))

    def _may_run(self, request: QueuedRequest) -> bool:
        """Whether a request that leaves its queue still has time."""
        now = self._loop.now
        if now >= request.deadline_s:
            self._failed(request, ErrorCode.DEADLINE_EXCEEDED)
        elif now >= request.queue_until_s and not request.attempts:
            self._failed(request, ErrorCode.QUEUE_TIMEOUT)
        else:
            return True
        return False

    def _failed(self, request: QueuedRequest, code: ErrorCode) -> None:
        account = self._accounts[request.customer]
        account.in_use -= 1
        if code in SLO_FAILURES:
            self._meter.failed(account.identity.tier)
        self._recorder.failed(account, code.value, request.arrived_s)
        self._over(account, request.user, 0.0)

    # Scheduler.

    def _read_service(self) -> None:
        self.dispatcher.service = pool_service(self._reported(), self.dispatcher.service)

    def form(self, picks: Sequence[tuple[str, int]], ready_limit: int) -> int:
        """Form a batch, unless enough are ready. Returns its size."""
        if len(self.ready) >= ready_limit:
            return 0
        requests: list[QueuedRequest] = []
        tiers, empty_part, goes_first = list[str](), 0.0, False
        for tier, places in picks:
            if empty_part:  # A batch of quiet customers takes no others.
                break
            taken, quiet_only, first = self.queues[tier].take(places, alone=not requests)
            if taken:
                tiers.append(tier)
                goes_first = goes_first or first
                empty_part = max(1e-9, 1 - len(taken) / places) if quiet_only else 0.0
            requests += taken
        if not requests:
            return 0
        batch = SimulatedBatch(self, requests, empty_part, tiers[0] if len(tiers) == 1 else "")
        self.leased += 1
        self.formed_s = self._loop.now
        if goes_first and all(each.tier == tiers[0] for each in self.ready):
            self.ready.appendleft(batch)
        else:
            self.ready.append(batch)
        self.offer()
        return len(requests)

    def offer(self) -> None:
        """Give ready batches to the workers that wait, those first that wait longest."""
        while self.ready and self.poppers:
            self.poppers.popleft().take(self.ready.popleft())

    # Workers: the calls of `BatchSource`.

    def claimed(self, batch: SimulatedBatch) -> bool:
        """Requests whose deadline has passed end at the claim."""
        now = self._loop.now
        kept = []
        for request in batch.requests:
            if now < request.deadline_s:
                kept.append(request)
            else:
                self._failed(request, ErrorCode.DEADLINE_EXCEEDED)
        batch.requests = kept
        if not kept:
            self.leased -= 1
        elif self.has_slots:  # What waits has got all slots that were free.
            return True
        self._loop.after(0.0, self.dispatcher.worker_changed, not kept and self._is_first_idle)
        return bool(kept)

    def started(self, batch: SimulatedBatch, run_s: float) -> None:
        """A run begins."""
        self._recorder.run(self.name, len(batch.requests), self._loop.now, run_s)

    def finished(self, batch: SimulatedBatch, run_ms: float) -> None:
        """A run ended: replies, and the costs of the customers."""
        now, words = self._loop.now, batch.words
        self.leased -= 1
        by_tier: dict[str, list[tuple[QueuedRequest, float]]] = {}
        for request in batch.requests:
            account = self._accounts[request.customer]
            account.in_use -= 1
            cost_ms = run_ms * request.words / words
            latency_ms = (now - request.arrived_s) * 1000 + self._scenario.costs.call_ms
            tier = account.identity.tier
            self._meter.answered(tier, latency_ms, now)
            self._recorder.completed(account, request, latency_ms, cost_ms, self._scenario.costs.call_ms)
            self._over(account, request.user, self._scenario.costs.call_ms)
            by_tier.setdefault(tier, []).append((request, cost_ms))
        for tier, costs in by_tier.items():
            self.queues[tier].settle(costs, batch.empty_part)
        self._loop.after(0.0, self.dispatcher.worker_changed, self._is_first_idle)

    def lost(self, batch: SimulatedBatch) -> None:
        """Its worker was lost: when the lease ends, the requests run again, ahead of others, or fail."""
        self._loop.after(LEASE_S, self._lease_ended, batch)

    def _lease_ended(self, batch: SimulatedBatch) -> None:
        batch.losses += 1
        for request in batch.requests:
            request.attempts += 1
        if batch.losses > MOST_LOSSES:
            self.leased -= 1
            for request in batch.requests:
                self._failed(request, ErrorCode.WORKER_LOST)
            return
        self.ready.appendleft(batch)
        self.offer()

    def broken(self, batch: SimulatedBatch) -> None:
        """Its engine was lost after the response had begun."""
        self.leased -= 1
        for request in batch.requests:
            self._failed(request, ErrorCode.WORKER_LOST)
        self._loop.after(0.0, self.dispatcher.worker_changed, self._is_first_idle)

    def returned(self, batch: SimulatedBatch) -> None:
        """Its requests did not run. They go to the head of their queue."""
        self.leased -= 1
        for request in batch.requests:
            self.queues[self._accounts[request.customer].identity.tier].put_back(request)
        self._loop.after(0.0, self.dispatcher.turn)

    def more_slots(self) -> None:
        """A worker has found that it has more slots."""
        self._loop.after(0.0, self.dispatcher.turn)

    def count_slots(self, slots: int, free: int) -> None:
        """A worker has so many more slots, and free ones."""
        self.slots += slots
        self.free_slots += free

    def add(self, worker: SimulatedWorker) -> None:
        """A worker serves this cell from now on."""
        self.workers.append(worker)
        worker.join(self)
        self.dispatcher.turn()

    def remove(self, worker: SimulatedWorker) -> None:
        """It does not any more."""
        if worker in self.workers:
            self.workers.remove(worker)
            self.count_slots(-worker.counted[0], -worker.counted[1])
            worker.counted = (0, 0)

    def departs(self, worker: SimulatedWorker, destination: str) -> None:
        """It moves to another cell. Until it has arrived there, it counts here."""
        self.leaving(worker, destination)

    # Moves.

    @property
    def state(self) -> CellState:
        """What schedulers see of it."""
        return CellState("open" if self.accepts else "draining", self.observed())
