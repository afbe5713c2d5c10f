"""Pauses of the hosts that do not respond to callbacks."""

from collections.abc import Callable

from scheduler.bounded_dict import BoundedDict

MAX_CALLS_PER_HOST = 8  # So that a host that does not respond does not block the others.
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
MAX_PAUSED = 1000


class PausedHosts:
    """Hosts of customers that did not respond: one call after each pause, whose length grows until the host responds.

    Otherwise each callback to such a host would cost a connection and two statements at each of its attempts. `clock` is
    monotonic seconds. Of more than `MAX_PAUSED` hosts, those whose last failure is the oldest are forgotten.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Consecutive failures, and the end of the pause.
        self._failed: BoundedDict[str, tuple[int, float]] = BoundedDict(MAX_PAUSED)

    def paused(self) -> list[str]:
        now = self._clock()
        return [name for name, (_, until) in self._failed.items() if until > now]

    def max_calls(self, name: str) -> int:
        """The limit of concurrent calls to the host."""
        return 1 if name in self._failed else MAX_CALLS_PER_HOST

    def responded(self, name: str) -> None:
        """The host responded, with any status."""
        self._failed.pop(name, None)

    def failed(self, name: str) -> None:
        """The host did not respond. Of concurrent calls only the first counts."""
        times, until = self._failed.pop(name, (0, 0.0))
        if until <= self._clock():
            until = self._clock() + PAUSES_S[min(times, len(PAUSES_S) - 1)]
            times += 1
        self._failed[name] = times, until
