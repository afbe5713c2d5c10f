"""Whether an endpoint accepts requests now.

Closed while the server asks for a pause, and while it is unavailable or rejects the key. After a pause it opens by
itself, otherwise when a probe succeeds. Each change is reported.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable

from gpu_pool.backends.openai_endpoint.faults import EndpointFault, FaultCause

STRIKES = 3
"""After this many lost requests in a row, of more than one customer, no more are sent until a probe succeeds."""
FIRST_S, LONGEST_BUSY_S, LONGEST_PROBE_S = 0.25, 1.0, 5.0
BRIEF_S = 1.5
"""An endpoint whose pauses since its last answer sum up to at most this is busy; beyond that it counts as away. Gateways
wait two seconds (gateway/limits/capacity.py) before they reject for lack of GPUs; it is reported earlier.
"""

AvailabilityCallback = Callable[[bool, str, bool], None]
"""Called with whether requests are accepted, the reason if not, and whether for a short time only.

A reason although requests are accepted: what is wrong with the endpoint meanwhile.
"""

BUSY = EndpointFault("The endpoint accepts no more requests for now.", FaultCause.OVERLOADED)
SILENT = EndpointFault("The endpoint does not respond.", FaultCause.TIMEOUT)


class Pauses:
    """Growing waiting times, reset by a request that succeeds."""

    def __init__(self) -> None:
        self.worked()

    def worked(self) -> None:
        """A request was answered."""
        self._busy_s = self._probe_s = FIRST_S
        self._left_alone_s = 0.0

    def busy_s(self, asked_s: float | None) -> float:
        """The pause before a busy server gets more: as it asks, else longer each time."""
        if asked_s is not None:
            return asked_s
        wait_s, self._busy_s = self._busy_s, min(LONGEST_BUSY_S, 2 * self._busy_s)
        return wait_s

    def brief(self, wait_s: float) -> bool:
        """The pause is extended by `wait_s`; whether all pauses since the last answer together are short."""
        self._left_alone_s += wait_s
        return self._left_alone_s <= BRIEF_S

    def probe_s(self) -> float:
        """Time to the next probe of an endpoint that is away."""
        wait_s, self._probe_s = self._probe_s, min(LONGEST_PROBE_S, 2 * self._probe_s)
        return wait_s


class Failures:
    """The requests that were lost, refused or not usably answered since the last answer, and their customers.

    Requests of one customer say nothing about the endpoint: their inputs may be the cause. Those of unknown customers (0) count
    as of several.
    """

    def __init__(self) -> None:
        self.worked()

    def worked(self) -> None:
        """A request was answered."""
        self._lost = 0
        self._losers: set[int] = set()
        self._refused: set[int] = set()
        self._unusable: set[int] = set()

    def lost(self, customer: int) -> bool:
        """A request was lost; whether so many were that the endpoint may be the cause."""
        self._lost += 1
        self._losers.add(customer)
        return self._lost >= STRIKES

    @property
    def of_several(self) -> bool:
        """Whether requests of several customers were lost."""
        return _are_several(self._losers)

    def refused(self, customer: int) -> bool:
        """The server asked for a pause; whether it did so for several customers."""
        self._refused.add(customer)
        return _are_several(self._refused)

    def unusable(self, customer: int) -> bool:
        """The output was invalid, or the key rejected; whether it was so for several customers."""
        self._unusable.add(customer)
        return _are_several(self._unusable)


def _are_several(customers: set[int]) -> bool:
    return len(customers) > 1 or 0 in customers


class EndpointAvailability:
    """`probe` returns why the endpoint cannot be used, or ""."""

    def __init__(self, probe: Callable[[], Awaitable[str]]) -> None:
        self._probe = probe
        self._pauses = Pauses()
        self._failures = Failures()
        self._work: asyncio.Task[None] | None = None
        self.report: AvailabilityCallback = lambda *_: None
        self.closed = ""
        """Why no request is accepted; "" if requests are."""
        self._silent = False

    def worked(self) -> None:
        """A request was answered."""
        self._pauses.worked()
        self._failures.worked()

    def busy(self, asked_s: float | None, customer: int) -> float:
        """The server refused a request while no other ran, and asked for a pause, of `asked_s` seconds if it gave a time.

        Returns the seconds after which this request may be tried again. Others are not held up, unless the server has refused
        requests of several customers.
        """
        if self.closed:
            return 0.0
        if not self._failures.refused(customer):
            return self._pauses.busy_s(None)
        wait_s = self._pauses.busy_s(asked_s)
        self._close(BUSY, wait_s, brief=self._pauses.brief(wait_s))
        return 0.0

    def failed(self, reason: str, customer: int, *, reached: bool) -> None:
        """A request was lost. `reached`: the server received it, so its input may be the cause.

        After several of one customer, a probe decides.
        """
        if not self._failures.lost(customer if reached else 0) or self.closed:
            return
        if self._failures.of_several:
            self.broken(reason)
        elif self._work is None or self._work.done():
            self._work = asyncio.create_task(self._verify(reason), name="availability")

    def unusable(self, customer: int) -> bool:
        """The output of a request was invalid, or the key rejected; whether that says something about the endpoint."""
        return self._failures.unusable(customer)

    def broken(self, reason: str) -> None:
        """The endpoint cannot be used until something changes there."""
        if not self.closed:
            self._close(reason, None, brief=False)

    def note_silence(self, *, silent: bool) -> None:
        """Report whether a server that has requests does not respond; they go on, and new ones are accepted."""
        if silent != self._silent and not self.closed:
            self._silent = silent
            self.report(True, SILENT if silent else "", False)  # noqa: FBT003 - positional in the callback

    async def close(self) -> None:
        """Stop waiting."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def _close(self, reason: str, wait_s: float | None, *, brief: bool) -> None:
        self.closed, self._silent = reason, False
        self._work = asyncio.create_task(self._reopen(wait_s), name="availability")
        self.report(False, reason, brief)  # noqa: FBT003 - positional in the callback

    async def _verify(self, reason: str) -> None:
        if await self._fault():
            self.broken(reason)

    async def _reopen(self, wait_s: float | None) -> None:
        """Open after this pause; None: when a probe succeeds."""
        await asyncio.sleep(self._pauses.probe_s() if wait_s is None else wait_s)
        while wait_s is None and (fault := await self._fault()):
            if fault != self.closed:
                self.closed = fault
                self.report(False, fault, False)  # noqa: FBT003 - positional in the callback
            await asyncio.sleep(self._pauses.probe_s())
        self.closed = ""
        self.report(True, "", False)  # noqa: FBT003 - positional in the callback

    async def _fault(self) -> str:
        try:
            return await self._probe()
        except Exception:  # noqa: BLE001 - the next probe may succeed; without one the endpoint stays closed
            traceback.print_exc()
            return "The endpoint cannot be probed."
