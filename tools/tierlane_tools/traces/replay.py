"""A trace as it is replayed: a part of its time, scaled in speed and rate, split over tiers and customers.

The file is read as a stream, once more before that if a rate is wanted, so that only the replayed requests are in memory.
What was left out or changed is counted, and told as notes.
"""

import math
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from random import Random
from typing import NamedTuple

from tierlane_tools.bench.plan.mix import Mix, tier_at
from tierlane_tools.traces.formats import read_requests
from tierlane_tools.traces.plan import TraceOptions
from tierlane_tools.traces.request import TraceError, TraceRequest

MOST_REQUESTS = 5_000_000
"""Of a replay; each takes about 250 bytes."""
COPY_GAPS = 2.0
"""Another copy of a session comes up to so many mean gaps of the trace later, so that copies are no burst of equal requests."""
_COUNTED = (
    *("read", "not in order of time", "outside of the chosen time", "without an answer"),
    *("without a prompt", "shortened"),
)
"""What is told of a file, if there is any."""
END_S = 0.001
"""After the last request."""
_COPY_BLOCKS = 1 << 48
"""Between the blocks of two copies of a request, which share no prefix."""


class ReplayedRequest(NamedTuple):
    """A request of a replay. `at_s`: seconds from its start. `tier`: the place in the mix; `share`: the customer of the tier as a
    point in 0..1. `session`: of several requests, "" for a request of its own. `blocks`: see `TraceRequest`.
    """

    at_s: float
    tier: int
    share: float
    input_tokens: int
    output_tokens: int
    session: str
    blocks: tuple[int, ...]
    customer: str


class _Copy(NamedTuple):
    """One copy of a session, 0 for the original, and how much later it comes, in seconds of the replay."""

    number: int
    shift_s: float


class TraceReplay:
    """One replay. The file is read once here, for its first and last time and its rate, and again for the requests."""

    def __init__(self, options: TraceOptions) -> None:
        """Raises TraceError."""
        self._options = options
        self._random = Random(f"{options.seed}/trace")
        self._bounds = options.mix.cumulative()
        self._once = [_Copy(0, 0.0)]
        self._copies_of: dict[str, list[_Copy]] = {}
        self._places: dict[str, tuple[int, float]] = {}
        self._counts: Counter[str] = Counter()
        self._count = 0
        first_s, last_s, arrivals = self._scan()
        self._begin_s = options.from_s if math.isfinite(options.from_s) else first_s
        end_s = options.to_s if math.isfinite(options.to_s) else last_s + options.spread_s
        self.ends_s = (end_s - self._begin_s) / options.speed + END_S
        """Seconds of the whole replay."""
        self._gap_s = self.ends_s / arrivals
        self._copies = 1.0 if options.rate is None else options.rate * self._gap_s

    def sorted_requests(self) -> list[ReplayedRequest]:
        """All requests by time. Raises TraceError."""
        return sorted(self.requests(), key=itemgetter(0))

    def requests(self) -> Iterator[ReplayedRequest]:
        """The requests in the order of the file, copies after each other. Raises TraceError, while they are taken too."""
        options = self._options
        for file_s, request in self._chosen():
            read, written = self._lengths(request)
            due_s = file_s - self._begin_s
            if options.spread_s:
                due_s += options.spread_s * self._random.random()
            for copy in self._copies_for(request):
                at_s = due_s / options.speed + copy.shift_s
                if at_s >= self.ends_s:
                    continue
                self._count += 1
                if self._count > MOST_REQUESTS:
                    raise TraceError(
                        f"--trace: there are more than {MOST_REQUESTS:,} requests; choose a part with --trace-to or --trace-rate."
                    )
                tier, share = self._place(request, copy)
                blocks, session = request.blocks, request.session
                if copy.number:
                    blocks = tuple(block + copy.number * _COPY_BLOCKS for block in blocks)
                    session = session and f"{session}/{copy.number}"
                yield ReplayedRequest(at_s, tier, share, read, written, session, blocks, request.customer)
        if not self._count:
            raise TraceError(f"--trace: no request of {options.path} is left: {self._summary()}.")

    def _scan(self) -> tuple[float, float, int]:
        """First and last second of the chosen part, since the first line, and the number of its requests."""
        first_s, last_s, count = math.inf, -math.inf, 0
        for file_s, _ in self._chosen(counts=False):
            first_s, last_s = min(first_s, file_s), max(last_s, file_s)
            count += 1
        if not count:
            options = self._options
            whole = math.isinf(options.from_s) and math.isinf(options.to_s)
            part = "" if whole else " between --trace-from and --trace-to"
            raise TraceError(f"--trace: {options.path} has no answered request{part}.")
        return first_s, last_s, count

    def _chosen(self, *, counts: bool = True) -> Iterator[tuple[float, TraceRequest]]:
        """The answered requests of the chosen part of time, with their seconds since the first line."""
        options, base_s, last_s = self._options, math.nan, -math.inf
        read = disordered = outside = failed = 0
        for request in read_requests(options.path, options.format):
            if not read:
                base_s = request.at_s
            read += 1
            file_s = request.at_s - base_s
            if file_s < last_s:
                disordered += 1
            else:
                last_s = file_s
            if not options.from_s <= file_s < options.to_s:
                outside += 1
            elif request.failed:
                failed += 1
            else:
                yield file_s, request
        if counts:
            self._counts.update(dict(zip(_COUNTED, (read, disordered, outside, failed), strict=False)))

    def _lengths(self, request: TraceRequest) -> tuple[int, int]:
        options, read, written = self._options, request.input_tokens, request.output_tokens
        if 0 < read <= options.max_input and written <= options.max_output:
            return read, written
        self._counts["without a prompt" if not read else "shortened"] += 1
        return min(options.max_input, max(1, read)), min(options.max_output, written)

    def _copies_for(self, request: TraceRequest) -> list[_Copy]:
        """How often a request is sent; all requests of a session as often, each copy with the same delay."""
        if self._copies == 1.0:
            return self._once
        known = self._copies_of.get(request.session) if request.session else None
        if known is None:
            draw = self._random.random
            whole = int(self._copies)
            known = [
                _Copy(number, draw() * COPY_GAPS * self._gap_s if number else 0.0)
                for number in range(whole + (draw() < self._copies - whole))
            ]
            if request.session:
                self._copies_of[request.session] = known
        return known

    def _place(self, request: TraceRequest, copy: _Copy) -> tuple[int, float]:
        """The tier and customer: those of the file, of the rule, or drawn, for all requests of a session the same."""
        tiers = self._options.mix.tiers
        key = request.customer or (request.session and f"{request.session}/{copy.number}")
        known = self._places.get(key) if key else None
        if known is None:
            known = tier_at(self._bounds, self._random.random()), self._random.random()
            if key:
                self._places[key] = known
        tier = known[0]
        if request.tier in tiers:
            tier = tiers.index(request.tier)
        if self._options.by is not None:
            name, by_value = self._options.by
            tier = by_value.get(getattr(request, name), tier)
        return tier, known[1]

    def _summary(self) -> str:
        return ", ".join(f"{self._counts[name]:,} {name}" for name in _COUNTED if self._counts[name])

    @property
    def mix(self) -> Mix:
        """Its tiers, in the order of their numbers in requests."""
        return self._options.mix

    @property
    def notes(self) -> dict[str, str]:
        """What was read, left out and changed, once all requests were taken."""
        replayed = f"{self._count:,} requests in {self.ends_s:,.4g} s, {self._count / self.ends_s:,.4g}/s"
        return {"trace": self._summary(), "replayed": replayed}
