"""The load itself: sends what is due, looks for what is overdue, and files each end under its tier.

One timer sends everything that is due, at most once a millisecond; one sweep a tenth of a second finds timeouts.
Nothing is made per request but the `Pending` itself: no task, no timer, no future.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence

import msgspec

from tierlane.bench.answer_ids import AnswerIds, fate_of, request_id_hex
from tierlane.bench.connection import Pending
from tierlane.bench.connection_pool import ConnectionPool
from tierlane.bench.histogram import Histogram
from tierlane.bench.inputs import Inputs
from tierlane.bench.output_check import OutputCheck
from tierlane.bench.schedule import Due
from tierlane.bench.tally import Silence, TierTally
from tierlane.bench.wire import RequestForm, Response

TICK_S = 0.001
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


class Load:
    """One run. Start it with `begin`; everything else may be read at any time."""

    def __init__(
        self,
        schedule: Iterator[Due],
        phases: Sequence[Phase],
        forms: Sequence[RequestForm],
        inputs: Inputs,
        check: OutputCheck,
    ) -> None:
        """`phases` in order of time; `forms` in the order of the mix. `connect` must be called before `begin`."""
        self._schedule = schedule
        self._phases = list(phases)
        self._phase = 0
        self._forms = forms
        self._inputs = inputs
        self._check = check
        self._next: Due | None = None
        self._number = 0  # Requests taken from the schedule.
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
        self._advance()
        self._tick()
        self._sweep()

    async def finish(self) -> None:
        """Wait until every request of the schedule has its end, then close all connections."""
        try:
            await self._done.wait()
        finally:
            self._done.set()
            await self.pool.close()

    def stop(self) -> None:
        """End early: nothing more is sent, what is under way counts as STOPPED."""
        self._next = None
        self._done.set()

    def _advance(self) -> None:
        self._next = next(self._schedule, None)
        if self._next is None and self._settled == self._number:
            self._done.set()

    def _tick(self) -> None:
        now_s = self.elapsed_s()
        # What falls due during this loop waits for the next one, so that answers are read in between.
        while self._next is not None and self._next.at_s <= now_s:
            self._send(self._next)
            self._advance()
        if self._next is not None:
            # Never under a tick: the loop's timers have a resolution of a millisecond, and less would spin.
            asyncio.get_running_loop().call_later(max(TICK_S, self._next.at_s - now_s), self._tick)

    def _send(self, due: Due) -> None:
        phase = self._phases[self._phase]
        while due.at_s >= phase.until_s:
            self._phase += 1
            phase = self._phases[self._phase]
        tally = phase.tallies[due.tier]
        tally.scheduled += 1
        phase.lag.record(clock() - self._started - due.at_s)
        self._number += 1
        self.pool.submit(Pending(due.at_s, due.tier, self._inputs.nonce(self._number), tally))

    def _encode(self, pending: Pending) -> bytes:
        return self._forms[pending.tier].encode(pending.nonce)

    def _answered(self, pending: Pending, response: Response) -> None:
        latency_s = clock() - self._started - pending.due_s
        self.answers += 1
        status = response.status
        if status == 200:
            pending.tally.completed(latency_s)
            self._check.look(pending.nonce, response.body)
            code = ""
        else:
            code = error_code(response.body)
            pending.tally.failed(status, code, latency_s)
        self.ids.add(fate_of(status, code), request_id_hex(response))
        self._settle()

    def _silent(self, pending: Pending, why: Silence, detail: str) -> None:
        pending.tally.unanswered(why)
        if detail:
            self.details.setdefault(why, detail)
        self._settle()

    def _settle(self) -> None:
        self._settled += 1
        if self._next is None and self._settled == self._number:
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
