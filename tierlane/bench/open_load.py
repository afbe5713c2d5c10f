"""Open loop: requests go out when the schedule says, whatever comes back, and latency counts from that moment."""

import asyncio
from collections.abc import Iterator, Sequence

from tierlane.bench.http_client import RequestForm
from tierlane.bench.inputs import Inputs
from tierlane.bench.load import Load, Phase, clock
from tierlane.bench.output_check import OutputCheck
from tierlane.bench.schedule import Due

TICK_S = 0.001


class OpenLoad(Load):
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
            self._phase.lag.record(clock() - self._started - due.at_s)
            # Known before the request can end, since the last end closes the run.
            due = self._next = next(self._schedule, None)
            self.pool.submit(pending)
        if due is not None:
            # Never under a tick: the loop's timers have a resolution of a millisecond, and less would spin.
            asyncio.get_running_loop().call_later(max(TICK_S, due.at_s - now_s), self._tick)
