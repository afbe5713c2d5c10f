"""How each call of a customer ends, told in one place to who counts and to who writes a line: once a call.

What is called here stands between an answer and its writing: it only adds, and logs only where that was asked for.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.asking import Asking
from gateway.catalog import IdentityView
from gateway.inference.pending import Waiter
from gateway.limits.demand import Meter
from gateway.metrics.counters import ACCEPTED, UNKNOWN, Tally
from gateway.our_fault import OUR_FAULT
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.replies import Reply


class Told(Protocol):
    """Who is told each call's end, where that was asked for: the log, the traces."""

    def completed(
        self, endpoint: str, identity: IdentityView, waiter: Waiter, replies: Sequence[Reply], seconds: float, /
    ) -> None: ...

    def failed(
        self,
        endpoint: str,
        request_id: str,
        identity: IdentityView | None,
        waiter: Waiter | None,
        error: RequestError,
        /,
    ) -> None: ...

    def accepted(self, endpoint: str, request_id: str, identity: IdentityView, waiter: Waiter, /) -> None: ...


class Both:
    """Two who are told."""

    def __init__(self, one: Told, other: Told) -> None:
        self._two = one, other

    def completed(
        self, endpoint: str, identity: IdentityView, waiter: Waiter, replies: Sequence[Reply], seconds: float
    ) -> None:
        """As `Told` says."""
        for each in self._two:
            each.completed(endpoint, identity, waiter, replies, seconds)

    def failed(
        self, endpoint: str, request_id: str, identity: IdentityView | None, waiter: Waiter | None, error: RequestError
    ) -> None:
        """As `Told` says."""
        for each in self._two:
            each.failed(endpoint, request_id, identity, waiter, error)

    def accepted(self, endpoint: str, request_id: str, identity: IdentityView, waiter: Waiter) -> None:
        """As `Told` says."""
        for each in self._two:
            each.accepted(endpoint, request_id, identity, waiter)


def told_to(one: Told | None, other: Told | None) -> Told | None:
    """Those of the two that are there, as one: a call's end costs one look, whoever is told."""
    return Both(one, other) if one is not None and other is not None else one or other


class Ends:
    """Of one pool. `endpoint` is the address that was called; `seconds` is since the call arrived."""

    __slots__ = ("_log", "_meter", "_pool", "_tally")

    def __init__(self, tally: Tally, log: Told | None, pool: str, meter: Meter) -> None:
        self._tally = tally
        self._meter = meter
        self._log = log
        self._pool = pool

    def completed(
        self, endpoint: str, identity: IdentityView, waiters: Sequence[Waiter], replies: Sequence[Reply], seconds: float
    ) -> None:
        """It was answered with what the model gave."""
        tier, model = identity.tier, waiters[0].submission.model
        self._tally.completed(tier, endpoint, seconds)
        for reply in replies:
            self._tally.ran(tier, self._pool, model, reply)
        if self._log is not None:
            self._log.completed(endpoint, identity, waiters[0], replies, seconds)

    def failed(
        self, endpoint: str, request_id: str, identity: IdentityView, waiter: Waiter | None, error: RequestError
    ) -> None:
        """It was answered with an error; `waiter` where it came so far."""
        self._tally.failed(identity.tier, endpoint, error.code, waiter.verdict if waiter else None)
        if error.code in OUR_FAULT:
            self._meter.failed(identity.tier)
        if self._log is not None:
            self._log.failed(endpoint, request_id, identity, waiter, error)

    def known(self, identify: Callable[[Asking], IdentityView], asking: Asking, endpoint: str) -> IdentityView:
        """Who asks for inference. Raises RequestError, which is told as that of nobody."""
        try:
            return identify(asking)
        except RequestError as error:
            self.unknown(endpoint, asking.request_id, error)
            raise

    def unknown(self, endpoint: str, request_id: str, error: Exception) -> None:
        """It was answered with an error before it was known whose it is."""
        if not isinstance(error, RequestError):
            error = RequestError(ErrorCode.INTERNAL_ERROR)
        self._tally.failed(UNKNOWN, endpoint, error.code)
        if self._log is not None:
            self._log.failed(endpoint, request_id, None, None, error)

    def accepted(self, endpoint: str, request_id: str, identity: IdentityView, waiter: Waiter) -> None:
        """A job was promised."""
        self._tally.ended(identity.tier, endpoint, ACCEPTED)
        if self._log is not None:
            self._log.accepted(endpoint, request_id, identity, waiter)

    def left(self, endpoint: str, request_id: str, identity: IdentityView, waiter: Waiter | None) -> None:
        """Its client did not wait."""
        error = RequestError(ErrorCode.CANCELLED)
        self.failed(endpoint, request_id, identity, waiter, error)
