"""Requests of customers whose limits are not in their cell yet: they wait here until the limits have arrived.

`admit` rejects them as `elsewhere`. The limits of all waiting customers are then taken from the other cells and
stored in this one, in two calls of Redis for up to 64 customers; then the requests are admitted. If the home of a
customer is another cell meanwhile, its requests are submitted there, and a request whose Idempotency-Key another cell
knows is submitted in that one. A gateway whose catalog is older than the one that decided submits requests in the
home of which it learns so; those with an Idempotency-Key, or of a key with its own limit, wait for the newer catalog.
A cell that does not respond is not waited for: customers that it may have had start with empty buckets.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import structlog
from msgspec.structs import replace

from gateway.inference.pending import PendingRequest
from ledger.catalog.follower import Catalog
from ratelimit.limits import Bucket
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.fault_log import LoggedFaults
from scheduler.protocol.admission import Residence, Submission, Verdict
from scheduler.protocol.handover import MAX_CUSTOMERS, ArrivingLimits, Left, LimitsHandover, Wanted
from scheduler.states import Admission

RETRY_S = 0.05
"""Between two attempts, and looks at the catalog."""

MAX_HELD = 4096
HELD_S = 5.0
"""The longest wait; an interactive request waits at most until its deadline."""

FORCED_S = 3.0
"""A gateway that has waited for so long with the newest catalog follows it: PostgreSQL has lost the newer version."""

log = structlog.get_logger("gateway")


class HomesView(Protocol):
    """The cells of customers by the current catalog."""

    @property
    def version(self) -> int: ...

    def now(self, customer_id: str) -> tuple[Residence, tuple[str, ...]]: ...

    def former(self, customer_id: str, home: str) -> frozenset[str]: ...


class HeldRequest(NamedTuple):
    """A request, with its list, and what submits it to admission again."""

    pending: PendingRequest
    submit: Callable[[PendingRequest], bool]
    since: float  # Monotonic seconds.


class Handover:
    """The waiting requests of one place. `others`: those of the other cells, by name. `answers`: whether its Redis responds."""

    def __init__(
        self,
        scripts: LimitsHandover,
        catalog: Catalog,
        cell: str,
        *,
        homes: HomesView,
        others: Callable[[], "Mapping[str, Handover]"],
        answers: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scripts = scripts
        self.cell = cell
        self.answers = answers
        self._homes = homes
        self._others = others
        self._catalog = catalog
        self._clock = clock
        self._held: dict[str, list[HeldRequest]] = {}  # By customer.
        self._newer: dict[str, int] = {}  # The versions of newer catalogs that decided otherwise, by customer.
        self._wake = asyncio.Event()
        self.done = 0  # Customers whose requests wait no more.

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, pending: PendingRequest, submit: Callable[[PendingRequest], bool]) -> None:
        """Keep a request until the limits of its customer have arrived."""
        if len(self) >= MAX_HELD:
            _finish(pending, ErrorCode.NO_CAPACITY)
            return
        self._held.setdefault(pending.submission.customer_id, []).append(HeldRequest(pending, submit, self._clock()))
        self._wake.set()

    def ask(self, submission: Submission) -> None:
        """Let the limits of a customer arrive; the caller submits the request again."""
        self.hold(PendingRequest(submission, self._clock()), lambda _: True)

    async def run(self) -> None:
        """Work while requests wait; never returns."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._held:
                before, progressed = self.done, False
                with LoggedFaults("limits have not arrived"):
                    await self.turn()
                    progressed = self.done > before
                if self._held and not progressed:
                    await asyncio.sleep(RETRY_S)

    async def turn(self) -> None:
        """One attempt for the customers that have waited longest."""
        now = self._clock()
        for customer_id, waiting in list(self._held.items()):
            for each in waiting:
                if now - each.since > HELD_S:
                    _finish(each.pending, ErrorCode.NO_CAPACITY)
            self._held[customer_id] = [each for each in waiting if not _ended(each.pending)]
            if not self._held[customer_id]:
                del self._held[customer_id]
                self._newer.pop(customer_id, None)

        homes, others = self._homes, self._others()
        arriving: list[str] = []
        for customer_id in list(islice(self._held, MAX_CUSTOMERS)):
            self._held[customer_id] = self._held.pop(customer_id)  # The others are first in the next turn.
            home, cells = homes.now(customer_id)
            if self.cell not in cells:
                if not cells or cells[0] in others:  # Else its home is not served yet.
                    self._release(customer_id, Verdict(Admission.ELSEWHERE))
            elif home is Residence.SPREAD:
                self._submit(customer_id)
            else:
                arriving.append(customer_id)
        if not homes.version or not arriving:
            return
        is_new = self._catalog.age_s() < FORCED_S / 2
        late = [each for each in arriving if each in self._newer and now - self._held[each][0].since > FORCED_S]
        forced = late if is_new else []
        await self._arrive([each for each in arriving if each not in forced], homes.version, others)
        for customer_id in forced:
            await self._arrive([customer_id], self._newer[customer_id] + 1, others)

    async def _arrive(self, customers: Sequence[str], version: int, others: "Mapping[str, Handover]") -> None:
        """Move the limits of customers to this cell."""
        if not customers:
            return
        keys: dict[str, dict[str, Bucket]] = {}  # The limits of the keys of waiting requests that have their own.
        wanted: dict[str, Wanted] = {}
        for customer_id in customers:
            waiting = [each.pending for each in self._held[customer_id]]
            submissions = [pending.submission for pending in waiting]
            keys[customer_id] = {
                each.api_key_id: each.limits.key for each in submissions if each.limits.key is not None
            }
            idempotency = tuple(key for pending in waiting for key in _idempotency(pending))
            wanted[customer_id] = Wanted(tuple(keys[customer_id]), idempotency)
        answers = await asyncio.gather(*(_left(other, version, wanted) for other in others.values()))
        left = {name: answer for name, answer in zip(others, answers, strict=True) if answer is not None}
        arrivals: list[ArrivingLimits] = []
        for customer_id in customers:
            states = {name: answer[customer_id] for name, answer in left.items()}
            if newer := max((each.newer for each in states.values()), default=0):
                self._newer[customer_id] = newer
                home = next((name for name, each in states.items() if each.is_home), None)
                if home is not None and wanted[customer_id] == Wanted():  # The rest needs the newer catalog.
                    self._release(customer_id, Verdict(Admission.ELSEWHERE, stored_id=home))
                continue
            limits = self._held[customer_id][0].pending.submission.limits if customer_id in self._held else None
            if limits is not None:
                is_lost = not self._homes.former(customer_id, self.cell) <= left.keys()
                arrivals.append(ArrivingLimits(customer_id, limits, keys[customer_id], states, is_lost))
        await self._store(arrivals, version)

    async def _store(self, arrivals: Sequence[ArrivingLimits], version: int) -> None:
        if not arrivals:
            return
        try:
            found = await self.scripts.arrive(version, arrivals)
        except RedisUnavailable:  # Admission decides, as for every request without Redis; it still checks the home.
            found = [0] * len(arrivals)
        for arrival, newer in zip(arrivals, found, strict=True):
            if newer:
                self._newer[arrival.customer_id] = newer
            else:
                self._submit(arrival.customer_id, arrival.states)
        if lost := [each.customer_id for each in arrivals if each.is_empty]:
            log.warning("customers start with empty buckets: their former cell does not respond", customers=len(lost))

    def _submit(self, customer_id: str, states: Mapping[str, Left] | None = None) -> None:
        """Submit the requests of a customer to admission again; in another cell, if that knows their Idempotency-Keys."""
        home, _ = self._homes.now(customer_id)
        for each in self._taken(customer_id):
            if _ended(each.pending):
                continue
            keys = _idempotency(each.pending)
            knows = next((cell for cell, left in (states or {}).items() if not left.known.isdisjoint(keys)), None)
            if knows is not None:
                _finish(each.pending, Verdict(Admission.ELSEWHERE, stored_id=knows))
                continue
            for member in _members(each.pending):
                asked = keys and states is not None and home is Residence.HERE
                group = replace(member.submission.group, home=Residence.ASKED if asked else home)
                member.submission = replace(member.submission, group=group)
            if not each.submit(each.pending):
                _finish(each.pending, ErrorCode.QUEUE_FULL)

    def _release(self, customer_id: str, outcome: Verdict) -> None:
        """The calls of these requests submit them in the cell that is the home now."""
        for each in self._taken(customer_id):
            if not _ended(each.pending):
                _finish(each.pending, outcome)

    def _taken(self, customer_id: str) -> Sequence[HeldRequest]:
        self.done += 1
        self._newer.pop(customer_id, None)
        return self._held.pop(customer_id, ())


async def _left(other: Handover, version: int, customers: Mapping[str, Wanted]) -> Mapping[str, Left] | None:
    """What another cell had left; None if it does not respond."""
    if not other.answers():
        return None
    try:
        return await other.scripts.leave(version, customers)
    except RedisUnavailable:
        return None


def _members(pending: PendingRequest) -> Sequence[PendingRequest]:
    return pending.together or (pending,)


def _idempotency(pending: PendingRequest) -> list[str]:
    """The Idempotency-Keys of a request with its list."""
    return [member.submission.idempotency for member in _members(pending) if member.submission.idempotency]


def _ended(pending: PendingRequest) -> bool:
    """Whether a request needs no admission any more: it has an outcome, or direct mode has taken it."""
    return all(each.done or each.gone or each.direct for each in _members(pending))


def _finish(pending: PendingRequest, outcome: Verdict | ErrorCode) -> None:
    for member in _members(pending):
        if not member.direct:
            member.finish(outcome)
