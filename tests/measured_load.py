"""Measured open-loop load: streams of requests on the generator of `tierlane bench`, counted by intervals."""

import gc
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple
from urllib.parse import urlsplit

from tierlane_tools.bench.http_client import RequestForm
from tierlane_tools.bench.load import OpenLoad, Phase
from tierlane_tools.bench.measurement.statistics import TierStatistics
from tierlane_tools.bench.plan.arrivals import Arrivals, schedule
from tierlane_tools.bench.plan.inputs import TAG_CHARACTERS, Inputs, filler_of
from tierlane_tools.bench.plan.mix import Mix
from tierlane_tools.bench.verification.output_check import OutputCheck, Verify

CONNECTIONS = 512
TIMEOUT_S = 10.0
_tags = count(1)


class Stream(NamedTuple):
    """Requests of one key at a mean rate per second, as a Poisson process."""

    key: str
    rate: float


Interval = Mapping[str, TierStatistics]
"""The outcomes of the requests that were due in one interval, by stream."""


class MeasuredLoad:
    """One run. `seconds` are the lengths of its intervals; a request counts in the one in which it was due. `size`: bytes of
    each input.
    """

    def __init__(
        self, url: str, streams: Mapping[str, Stream], seconds: Sequence[float], seed: int, size: int = 32
    ) -> None:
        total = sum(stream.rate for stream in streams.values())
        mix = Mix(tuple(streams), tuple(stream.rate / total for stream in streams.values()))
        ends = [sum(seconds[: n + 1]) for n in range(len(seconds))]
        self._phases = [Phase(end, [TierStatistics(name) for name in streams]) for end in ends]
        inputs = Inputs(f"{next(_tags):0{TAG_CHARACTERS}x}", filler_of(size))
        self._check = OutputCheck(Verify.REVERSED, inputs)
        address = urlsplit(url)
        forms = [[RequestForm(address.netloc, "/v1/inference", stream.key, inputs)] for stream in streams.values()]
        due = schedule(Arrivals.POISSON, total, ends[-1], mix, seed)
        self._load = OpenLoad(due, self._phases, forms, inputs, self._check)
        self._load.connect(address.hostname or "", address.port or 80, connections=CONNECTIONS, timeout_s=TIMEOUT_S)

    async def run(self) -> list[Interval]:
        """Send all requests; returns the intervals once each has its outcome. No output may belong to another request."""
        gc.collect()
        gc.disable()  # Its pauses would count as latency.
        try:
            self._load.begin()
            await self._load.finish()
        finally:
            gc.enable()
        assert self._check.crossed == 0
        assert self._load.ids.repeated() == 0
        return [{counters.name: counters for counters in phase.tallies} for phase in self._phases]

    @property
    def late_ms(self) -> float:
        """How late requests were sent, 99th percentile in ms; more than a few mean that this machine is too busy."""
        return 1000 * max(phase.lag.quantile(0.99) or 0.0 for phase in self._phases)


def p99_ms(counters: TierStatistics) -> float:
    """The 99th percentile of the latency of 200s in ms, from the time at which each was due."""
    return 1000 * (counters.latency.quantile(0.99) or 0.0)


def figures(name: str, interval: Interval, seconds: float) -> str:
    """One line with the figures of an interval."""
    parts = [
        f"{counters.name} {counters.scheduled / seconds:.0f}/s sent, {counters.ok / seconds:.1f}/s served, "
        f"p50 {1000 * (counters.latency.quantile(0.5) or 0):.0f} ms, p99 {p99_ms(counters):.0f} ms, "
        f"{dict(counters.errors)}, {counters.missing} unanswered"
        for counters in interval.values()
    ]
    return f"{name}: " + "; ".join(parts)
