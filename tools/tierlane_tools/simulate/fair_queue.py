"""A model of the tier queue with its backlogs: start-time fair queueing between the customers of a tier, by GPU time.

The system's own implementation is in Lua (`scheduler/lua/includes/fair_order.lua`, `backlogs.lua`, `settlement.lua`); this is a small model
of it for simulations, which a test compares with the scripts. Differences: keys have no weights of their own, each visit of a
customer takes one request (the scripts take several if many customers wait), and large bodies are not separated.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

LEAD = 256
"""The largest distance of a customer's tag from the virtual time when it returns, in requests of mean cost."""
SAMPLES = 16
"""So many new costs replace a mean."""
REFUND = 64
"""How far below the virtual time the correction of an estimate may put a tag, in requests of mean cost."""
APART_SHARE, APART_MOST = 0.02, 16.0
"""The part of the GPU time for empty places of batches of quiet customers, and its most, in mean requests."""


class QueuedRequest:
    """A request from its arrival to its end. Times in seconds; `words`: its length; `estimate`: what its customer was charged;
    `first_s`: when its first token was there, 0 if all come at once. `user`: of a closed loop, else -1. `withdrawn`: it has left a slot
    for a request of a higher tier.
    """

    __slots__ = (
        "arrived_s",
        "attempts",
        "customer",
        "deadline_s",
        "estimate",
        "first_s",
        "flow",
        "queue_until_s",
        "started_s",
        "user",
        "withdrawn",
        "words",
    )

    def __init__(self, customer: int, arrived_s: float, queue_until_s: float, deadline_s: float, words: float) -> None:
        self.customer = customer
        self.arrived_s = arrived_s
        self.queue_until_s = queue_until_s
        self.deadline_s = deadline_s
        self.words = words
        self.user = -1
        self.withdrawn = False
        self.started_s = self.first_s = 0.0
        self.attempts = 0
        self.flow: CustomerFlow | None = None  # If it left a backlog.
        self.estimate = 0.0


class CustomerFlow:
    """The backlog of one customer. `tag`: the GPU time that it received, divided by its weight, in virtual time."""

    __slots__ = ("backlog", "cost", "is_known", "tag", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tag = 0.0
        self.cost = 0.0
        self.is_known = False
        self.backlog: deque[QueuedRequest] = deque()


class FairQueue:
    """One tier: a queue of `places`, and the backlogs of customers behind it.

    `may_run(request)` tells whether a request that leaves still runs; one that does not has been ended by the call.
    """

    def __init__(self, places: int, may_run: Callable[[QueuedRequest], bool]) -> None:
        self._places = places
        self._may_run = may_run
        self._queue: deque[QueuedRequest] = deque()
        self._flows: dict[int, CustomerFlow] = {}
        self._waiting: list[tuple[float, int, CustomerFlow]] = []  # Flows with a backlog, by tag.
        self._numbers = count()
        self.in_backlogs = 0
        self.virtual_time = 0.0
        self.weights = 0.0
        self.mean_cost = 1.0
        self._apart_ms = 1.0
        self.quiet = 0
        """1: a customer without a backlog, and with less than its share, sent a request; 2: it waited for one batch."""

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return len(self._queue) + self.in_backlogs

    @property
    def queued(self) -> int:
        """Those in the tier queue."""
        return len(self._queue)

    def oldest_s(self) -> float | None:
        """The arrival of the oldest request, as far as the scripts look: the head of the queue and of two backlogs."""
        heads = [self._queue[0].arrived_s] if self._queue else []
        heads += [entry[2].backlog[0].arrived_s for entry in self._waiting[:1] + self._waiting[-1:]]
        return min(heads, default=None)

    def length(self, customer: int) -> int:
        """Requests of a customer in its backlog."""
        flow = self._flows.get(customer)
        return len(flow.backlog) if flow else 0

    def drop_expired(self, now: float) -> None:
        """End the requests at the head of the queue and of each backlog whose time in the queue is over."""
        while self._queue and self._queue[0].queue_until_s <= now:
            self._may_run(self._queue.popleft())
        for entry in list(self._waiting):
            flow = entry[2]
            while flow.backlog and flow.backlog[0].queue_until_s <= now:
                self._may_run(flow.backlog.popleft())
                self.in_backlogs -= 1
            if not flow.backlog:
                self._waiting.remove(entry)
                self.weights = self.weights - flow.weight if self._waiting else 0.0

    def own(self, customer: int, weight: float) -> float:
        """How many requests leave before the next one of this customer: its own, in proportion to the weights of all."""
        flow = self._flows.get(customer)
        if flow is None or not flow.backlog:
            return 0.0
        cost = flow.cost if flow.is_known else self.mean_cost
        return len(flow.backlog) * cost / self.mean_cost * max(self.weights, weight) / weight

    def push(self, request: QueuedRequest, weight: float) -> bool:
        """Add a request. Returns whether a batch of quiet customers should leave now."""
        if not self.in_backlogs and len(self._queue) < self._places:
            self._queue.append(request)
            return False
        flow = self._flows.setdefault(request.customer, CustomerFlow(weight))
        urgent = False
        if not flow.backlog:
            most = self.virtual_time + LEAD * self.mean_cost / weight
            flow.tag, flow.weight = max(self.virtual_time, min(flow.tag, most)), weight
            insort(self._waiting, (flow.tag, next(self._numbers), flow))
            self.weights += weight
            if flow.tag <= self.virtual_time and self.in_backlogs:
                urgent, self.quiet = self.quiet == 0, max(1, self.quiet)
        flow.backlog.append(request)
        self.in_backlogs += 1
        return urgent

    def put_back(self, request: QueuedRequest) -> None:
        """A request that left returns to the head."""
        self._queue.appendleft(request)

    def take(self, places: int, *, alone: bool) -> tuple[list[QueuedRequest], bool, bool]:
        """Up to `places` requests that may run. `alone`: no other request is in the batch yet.

        Returns also whether they are those of quiet customers only, and whether their batch leaves before ready ones.
        """
        taken: list[QueuedRequest] = []
        while self._queue and len(taken) < places:
            request = self._queue.popleft()
            if self._may_run(request):
                taken.append(request)
        if taken or not alone:
            self._from_backlogs(taken, places)
            return taken, False, False
        highest, skipped, first = self._quiet_only(places)
        self._from_backlogs(taken, places, highest, skipped)
        if not taken:
            highest, first = math.inf, False
            self._from_backlogs(taken, places)
        return taken, highest < math.inf, first

    def _quiet_only(self, places: int) -> tuple[float, int, bool]:
        """The highest tag of the customers that join this batch, how many wait for the next one, and whether the batch leaves first.

        A batch of quiet customers takes the time of its empty places. Without time left for that they wait for one batch of the others;
        then others fill theirs.
        """
        quiet, self.quiet = self.quiet, 0
        before = bisect_right(self._waiting, self.virtual_time, key=lambda entry: entry[0]) if quiet else 0
        if not before or before == len(self._waiting):
            return math.inf, 0, False
        if self._apart_ms > 0 or before >= places:
            return self.virtual_time, 0, True
        if quiet == 1:
            self.quiet = 2
            return math.inf, before, False
        return math.inf, 0, True

    def _from_backlogs(
        self, taken: list[QueuedRequest], places: int, highest: float = math.inf, skipped: int = 0
    ) -> None:
        """Take the requests of the customers with the lowest tags, without the first `skipped` customers."""
        while skipped < len(self._waiting) and len(taken) < places:
            tag, _, flow = self._waiting[skipped]
            if tag > highest:
                return
            del self._waiting[skipped]
            # The oldest request of its backlog, charged at the mean cost of its customer.
            request = flow.backlog.popleft()
            self.in_backlogs -= 1
            if self._may_run(request):
                self.virtual_time = max(self.virtual_time, flow.tag)
                request.flow, request.estimate = flow, flow.cost if flow.is_known else self.mean_cost
                flow.tag += request.estimate / flow.weight
                taken.append(request)
            if flow.backlog:
                insort(self._waiting, (flow.tag, next(self._numbers), flow))
            else:
                self.weights = self.weights - flow.weight if self._waiting else 0.0

    def settle(self, requests: Sequence[tuple[QueuedRequest, float]], empty_part: float) -> None:
        """Requests of one batch ended, each with its part of the GPU time in ms; `empty_part`: of the places of a quiet batch."""
        sums: dict[int, tuple[CustomerFlow, float, float, int]] = {}
        for request, cost in requests:
            if request.flow is not None:
                flow, change, total, number = sums.get(id(request.flow), (request.flow, 0.0, 0.0, 0))
                sums[id(flow)] = flow, change + cost - request.estimate, total + cost, number + 1
        if not sums:
            return
        for flow, change, total, number in sums.values():
            tag = flow.tag + change / flow.weight
            if flow.backlog and change:  # It gets another place in the order.
                place = bisect_left(self._waiting, flow.tag, key=lambda entry: entry[0])
                while self._waiting[place][2] is not flow:
                    place += 1
                del self._waiting[place]
                if change < 0:
                    tag = max(tag, self.virtual_time - REFUND * self.mean_cost / flow.weight)
                insort(self._waiting, (tag, next(self._numbers), flow))
            flow.tag = tag
            if self._waiting:  # GPUs that are not full are shared by fewer requests, each of which costs more.
                flow.cost = _moving_mean(flow.cost if flow.is_known else self.mean_cost, total, number)
                flow.is_known = True
        total, number = sum(each[2] for each in sums.values()), sum(each[3] for each in sums.values())
        if self._waiting:
            self.mean_cost = _moving_mean(self.mean_cost, total, number)
        most = APART_MOST * self.mean_cost
        self._apart_ms = max(-most, min(most, self._apart_ms + total * (APART_SHARE - empty_part)))


def _moving_mean(mean: float, total: float, number: int) -> float:
    return max(0.001, mean + (total / number - mean) * min(0.5, number / SAMPLES))
