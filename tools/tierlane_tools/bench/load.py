"""Load, open or closed: requests are carried over connections and each end is filed under its tier.

One timer sends everything that is due, at most once a millisecond; one sweep a tenth of a second finds timeouts.
Nothing is made per request but the `Pending` itself: no task, no timer, no future.

Open loop: requests go out when the schedule says, whatever comes back. Closed loop: so many users, each of whom sends
the next request when the last one is answered. That finds how much a system can do, since it never asks for more; its
latencies flatter a system that stalls, so latencies at a given load need the open loop.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import TypedDict

import msgspec

from tierlane_tools.bench.http_client import BenchResponse, ConnectionPool, Pending, RequestForm
from tierlane_tools.bench.measurement.histogram import Histogram
from tierlane_tools.bench.measurement.statistics import TierStatistics, UnansweredCause
from tierlane_tools.bench.plan.arrivals import Due, schedule
from tierlane_tools.bench.plan.inputs import Inputs
from tierlane_tools.bench.plan.mix import Mix, tier_at
from tierlane_tools.bench.plan.plan import BenchPlan, BenchUsageError, LoadMode, TargetAddress
from tierlane_tools.bench.verification.answer_ids import AnswerIds, request_id_hex
from tierlane_tools.bench.verification.fate import fate_of
from tierlane_tools.bench.verification.output_check import OutputCheck

SWEEP_S = 0.1
clock = time.perf_counter

TICK_S = 0.001

AFTER_SILENCE_S = 0.1
"""How long a user waits who got no answer: a server that is away must not make the generator spin."""


class _Fault(msgspec.Struct):
    code: str = ""


class _FaultBody(msgspec.Struct):
    error: _Fault


_decoder = msgspec.json.Decoder(_FaultBody)


class Phase:
    """The tallies of one part of the run, one a tier in the order of the mix; what is due before `until_s` is its."""

    def __init__(self, until_s: float, tallies: Sequence[TierStatistics]) -> None:
        self.until_s = until_s
        self.tallies = list(tallies)
        self.lag = Histogram()  # How late the generator itself was.


class BenchLoad(ABC):
    """One run. Start it with `begin`; everything else may be read at any time."""

    def __init__(
        self, phases: Sequence[Phase], forms: Sequence[Sequence[RequestForm]], inputs: Inputs, check: OutputCheck
    ) -> None:
        """`phases` in order of time; `forms` by tier, in the order of the mix, one a customer: they take turns."""
        self._phases = list(phases)
        self._phase = self._phases[0]
        self._forms = [cycle(of_tier).__next__ for of_tier in forms]
        self._inputs = inputs
        self._check = check
        self._number = 0  # Requests made.
        self._settled = 0
        self._done = asyncio.Event()
        self._pool: ConnectionPool | None = None
        self.started = 0.0
        """On the clock of `perf_counter`."""
        self.answers = 0
        self.ids = AnswerIds()
        self.details: dict[UnansweredCause, str] = {}  # The first sentence for each kind of silence.

    def connect(self, host: str, port: int, *, connections: int, timeout_s: float, spare: int = 0) -> None:
        """Say where to. Connections are opened as they are needed, and so that `spare` ones are free."""
        self._pool = ConnectionPool(
            host,
            port,
            cap=connections,
            timeout_s=timeout_s,
            encode=self._encode,
            on_answer=self._answered,
            on_silence=self._silent,
            spare=spare,
        )

    @property
    def pool(self) -> ConnectionPool:
        """The connections. Raises RuntimeError before `connect`."""
        if self._pool is None:
            raise RuntimeError("This is a bug: connect() must be called first.")
        return self._pool

    def elapsed_s(self) -> float:
        """Seconds since the start: the clock of the schedule."""
        return clock() - self.started

    def begin(self) -> None:
        """Start to send; `finish` must be awaited."""
        self.started = clock()
        self._start()
        self._sweep()

    async def finish(self) -> None:
        """Wait until every request has its end, then close all connections."""
        try:
            await self._done.wait()
        finally:
            self._done.set()
            await self.pool.close()

    def stop(self) -> None:
        """End early: nothing more is sent, what is under way counts as STOPPED."""
        self._give_up()
        self._done.set()

    @abstractmethod
    def _start(self) -> None:
        """Send the first requests, and see to it that the others follow."""

    @abstractmethod
    def _give_up(self) -> None:
        """Make no more requests."""

    @abstractmethod
    def _exhausted(self) -> bool:
        """Whether no more requests will be made."""

    @abstractmethod
    def _following(self) -> Pending | None:
        """What goes out next where an answer came in."""

    @abstractmethod
    def _failed(self) -> None:
        """A request ended without an answer."""

    def _made(self, due_s: float, tier: int) -> Pending:
        """A request that counts to the phase in which it is due. Times must not go back."""
        phase = self._phase
        while due_s >= phase.until_s:
            phase = self._phase = self._phases[self._phases.index(phase) + 1]
        counters = phase.tallies[tier]
        counters.scheduled += 1
        self._number += 1
        return Pending(due_s, tier, self._inputs.nonce(self._number), counters)

    def _encode(self, pending: Pending) -> bytes:
        return self._forms[pending.tier]().encode(pending.nonce)

    def _answered(self, pending: Pending, response: BenchResponse) -> Pending | None:
        self.answers += 1
        self._file(pending, response, clock() - self.started - pending.due_s)
        following = self._following()
        self._settle()
        return following

    def _file(self, pending: Pending, response: BenchResponse, latency_s: float) -> None:
        """Count an answer under its tier."""
        if response.status == 200:
            pending.counters.completed(latency_s)
            self._check.look(pending.nonce, response.body)
            self.ids.add_completed(request_id_hex(response))
        else:
            code = error_code(response.body)
            pending.counters.failed(response.status, code, latency_s)
            self.ids.add(fate_of(response.status, code), request_id_hex(response))

    def _silent(self, pending: Pending, why: UnansweredCause, detail: str) -> None:
        pending.counters.unanswered(why)
        if detail:
            self.details.setdefault(why, detail)
        self._failed()
        self._settle()

    def _settle(self) -> None:
        self._settled += 1
        if self._settled == self._number and self._exhausted():
            self._done.set()

    def _sweep(self) -> None:
        if not self._done.is_set():
            self.pool.expire(self.elapsed_s())
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


def error_code(body: bytes) -> str:
    """The code in an error body of the contract's form; empty where there is none."""
    try:
        return _decoder.decode(body).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


class OpenLoad(BenchLoad):
    """Sends a schedule."""

    def __init__(
        self,
        schedule: Iterator[Due],
        phases: Sequence[Phase],
        forms: Sequence[Sequence[RequestForm]],
        inputs: Inputs,
        check: OutputCheck,
    ) -> None:
        """As Load; the schedule ends within the last phase."""
        super().__init__(phases, forms, inputs, check)
        self._schedule = schedule
        self._next: Due | None = None

    def _start(self) -> None:
        self._next = next(self._schedule, None)
        if self._next is None:
            self._done.set()
        self._tick()

    def _give_up(self) -> None:
        self._next = None

    def _exhausted(self) -> bool:
        return self._next is None

    def _following(self) -> None:
        return None

    def _failed(self) -> None:
        return None

    def _tick(self) -> None:
        if self._next is None:
            return
        now_s = self.elapsed_s()
        due: Due | None = self._next
        # What falls due during this loop waits for the next one, so that answers are read in between.
        while due is not None and due.at_s <= now_s:
            pending = self._made(due.at_s, due.tier)
            pending.replayed = due.request
            self._phase.lag.record(clock() - self.started - due.at_s)
            # Known before the request can end, since the last end closes the run.
            due = self._next = next(self._schedule, None)
            self.pool.submit(pending)
        if due is not None:
            # Never under a tick: the loop's timers have a resolution of a millisecond, and less would spin.
            asyncio.get_running_loop().call_later(max(TICK_S, due.at_s - now_s), self._tick)


class ClosedLoad(BenchLoad):
    """So many users, until the last phase is over; then what is under way ends."""

    def __init__(
        self,
        users: int,
        mix: Mix,
        seed: int,
        *,
        phases: Sequence[Phase],
        forms: Sequence[Sequence[RequestForm]],
        inputs: Inputs,
        check: OutputCheck,
    ) -> None:
        """As Load; each request has a tier of its own, drawn from the mix."""
        super().__init__(phases, forms, inputs, check)
        self._users = users
        self._bounds = mix.cumulative()
        self._point = Random(f"{seed}/tiers").random
        self._until_s = self._phases[-1].until_s
        self._over = False

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._until_s, self._end)
        for _ in range(self._users):
            self._send()

    def _end(self) -> None:
        self._give_up()
        if self._settled == self._number:
            self._done.set()

    def _give_up(self) -> None:
        self._over = True

    def _exhausted(self) -> bool:
        return self._over

    def _following(self) -> Pending | None:
        now_s = self.elapsed_s()
        if self._over or now_s >= self._until_s:
            return None
        return self._made(now_s, tier_at(self._bounds, self._point()))

    def _failed(self) -> None:
        if not self._over:
            asyncio.get_running_loop().call_later(AFTER_SILENCE_S, self._send)

    def _send(self) -> None:
        following = self._following()
        if following is not None:
            self.pool.submit(following)


class Common(TypedDict):
    """What every load is made from."""

    phases: Sequence[Phase]
    forms: Sequence[Sequence[RequestForm]]
    inputs: Inputs
    check: OutputCheck


@dataclass(frozen=True)
class Traffic:
    """What is sent, and what is looked for in the answers. `keys`: by tier, in the order of the mix."""

    plan: BenchPlan
    keys: Sequence[Sequence[str]]
    inputs: Inputs
    check: OutputCheck

    def load(self, address: TargetAddress, phases: Sequence[Phase]) -> BenchLoad:
        """A load up to the end of the last phase. Raises UsageError for a key that cannot be used."""
        plan = self.plan
        common: Common = {
            "phases": phases,
            "forms": self._forms(address),
            "inputs": self.inputs,
            "check": self.check,
        }
        load: BenchLoad
        if plan.mode is LoadMode.CLOSED:
            load = ClosedLoad(plan.connections, plan.mix, plan.seed, **common)
        else:
            due = schedule(plan.arrivals, plan.rate, phases[-1].until_s, plan.mix, plan.seed)
            load = OpenLoad(due, **common)
        load.connect(address.host, address.port, connections=plan.connections, timeout_s=plan.timeout)
        return load

    def _forms(self, address: TargetAddress) -> list[list[RequestForm]]:
        try:
            return [
                [RequestForm(address.authority, address.path, key, self.inputs, self.plan.model) for key in of_tier]
                for of_tier in self.keys
            ]
        except ValueError as error:
            raise BenchUsageError(f"A key cannot be used: {error}") from None
