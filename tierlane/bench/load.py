"""What every load does, open or closed: carries requests over connections and files each end under its tier.

One timer sends everything that is due, at most once a millisecond; one sweep a tenth of a second finds timeouts.
Nothing is made per request but the `Pending` itself: no task, no timer, no future.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import cycle

import msgspec

from tierlane.bench.answer_ids import AnswerIds, fate_of, request_id_hex
from tierlane.bench.connection import Pending
from tierlane.bench.connection_pool import ConnectionPool
from tierlane.bench.histogram import Histogram
from tierlane.bench.http_client import RequestForm, Response
from tierlane.bench.inputs import Inputs
from tierlane.bench.output_check import OutputCheck
from tierlane.bench.tally import Silence, TierTally

SWEEP_S = 0.1
clock = time.perf_counter


class _Fault(msgspec.Struct):
    code: str = ""


class _FaultBody(msgspec.Struct):
    error: _Fault


_decoder = msgspec.json.Decoder(_FaultBody)


class Phase:
    """The tallies of one part of the run, one a tier in the order of the mix; what is due before `until_s` is its."""

    def __init__(self, until_s: float, tallies: Sequence[TierTally]) -> None:
        self.until_s = until_s
        self.tallies = list(tallies)
        self.lag = Histogram()  # How late the generator itself was.


class Load(ABC):
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
        self._started = 0.0
        self.answers = 0
        self.ids = AnswerIds()
        self.details: dict[Silence, str] = {}  # The first sentence for each kind of silence.

    def connect(self, host: str, port: int, *, connections: int, timeout_s: float) -> None:
        """Say where to. Connections are opened as they are needed."""
        self._pool = ConnectionPool(
            host,
            port,
            cap=connections,
            timeout_s=timeout_s,
            encode=self._encode,
            on_answer=self._answered,
            on_silence=self._silent,
        )

    @property
    def pool(self) -> ConnectionPool:
        """The connections. Raises RuntimeError before `connect`."""
        if self._pool is None:
            raise RuntimeError("This is a bug: connect() must be called first.")
        return self._pool

    def elapsed_s(self) -> float:
        """Seconds since the start: the clock of the schedule."""
        return clock() - self._started

    def begin(self) -> None:
        """Start to send; `finish` must be awaited."""
        self._started = clock()
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
        tally = phase.tallies[tier]
        tally.scheduled += 1
        self._number += 1
        return Pending(due_s, tier, self._inputs.nonce(self._number), tally)

    def _encode(self, pending: Pending) -> bytes:
        return self._forms[pending.tier]().encode(pending.nonce)

    def _answered(self, pending: Pending, response: Response) -> Pending | None:
        latency_s = clock() - self._started - pending.due_s
        self.answers += 1
        if response.status == 200:
            pending.tally.completed(latency_s)
            self._check.look(pending.nonce, response.body)
            self.ids.add_completed(request_id_hex(response))
        else:
            code = error_code(response.body)
            pending.tally.failed(response.status, code, latency_s)
            self.ids.add(fate_of(response.status, code), request_id_hex(response))
        following = self._following()
        self._settle()
        return following

    def _silent(self, pending: Pending, why: Silence, detail: str) -> None:
        pending.tally.unanswered(why)
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
