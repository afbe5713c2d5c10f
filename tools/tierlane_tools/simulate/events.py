"""Virtual time: a queue of calls, and the arrivals of requests. Nothing sleeps, and equal seeds give equal runs."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Any, NamedTuple


class EventLoop:
    """Calls in order of their time; those of one time in the order in which they were added. Times in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at a time; at once, after those that are due, if it has passed."""
        heapq.heappush(self._events, (max(self.now, time_s), next(self._numbers), call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call after a delay."""
        self.at(self.now + delay_s, call, *arguments)

    def every(self, interval_s: float, call: Callable[[], None]) -> None:
        """Call now and at each interval."""
        call()
        self.after(interval_s, self.every, interval_s, call)

    def run(self, until_s: float) -> None:
        """Make all calls up to a time, which becomes the present."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until_s:
            self.now, _, call, arguments = pop(events)
            call(*arguments)
        self.now = until_s


class Arrival(NamedTuple):
    """One request: when it arrives, the number of its customer, and its length in words."""

    at_s: float
    customer: int
    words: float


def poisson(
    steps: Sequence[tuple[float, float]],
    customers: range,
    words: float,
    words_spread: float,
    *,
    until_s: float,
    random: Random,
) -> Iterator[Arrival]:
    """Independent users: the requests of equal customers. `steps`: (from second, requests/s of each customer).

    The exponential distribution has no memory, so the time to the next request is drawn again where the rate changes.
    """
    ends = [from_s for from_s, _ in steps[1:]] + [math.inf]
    for (from_s, rate), end_s in zip(steps, ends, strict=True):
        total, now, last = rate * len(customers), from_s, min(end_s, until_s)
        while total > 0:
            now += random.expovariate(total)
            if now >= last:
                break
            customer = customers[random.randrange(len(customers))]
            yield Arrival(now, customer, drawn_length(words, words_spread, random))


def drawn_length(words: float, spread: float, random: Random) -> float:
    """The length of a request. `spread`: of the logarithm; the mean stays."""
    if not spread:
        return words
    return max(1.0, random.lognormvariate(math.log(words) - spread * spread / 2, spread))


def lengths(words: float, spread: float, random: Random) -> Iterator[float]:
    """The lengths of the requests of one user."""
    while True:
        yield drawn_length(words, spread, random)


def in_order(sources: Sequence[Iterator[Arrival]]) -> Iterator[Arrival]:
    """The arrivals of all sources in order of time."""
    return heapq.merge(*sources)
