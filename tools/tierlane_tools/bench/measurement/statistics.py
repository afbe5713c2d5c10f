"""The counts of a run by tier: the only state that the load writes and the report reads."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from tierlane_tools.bench.measurement.histogram import Histogram


class UnansweredCause(StrEnum):
    """Why a request has no answer."""

    TIMEOUT = "timeout"
    """The request was sent, and no response arrived within the timeout."""
    CLOSED = "closed"
    """The server closed the connection first."""
    CONNECT = "connect"
    """No connection could be opened."""
    NOT_SENT = "not_sent"
    """All connections stayed busy for the whole timeout."""
    MALFORMED = "malformed"
    """The received bytes are not a valid response."""
    STOPPED = "stopped"
    """The run was interrupted."""


class TierStatistics:
    """The counts of one tier. `good_s`: the latency up to which a 200 is good, in seconds. `tokens`: of the streams of a trace."""

    __slots__ = (
        "error_latency",
        "errors",
        "first_token",
        "good",
        "good_s",
        "latency",
        "name",
        "scheduled",
        "sent",
        "silent",
        "tokens",
        "wanted_tokens",
    )

    def __init__(self, name: str, good_s: float = math.inf) -> None:
        self.name = name
        self.good_s = good_s
        self.scheduled = 0
        self.sent = 0
        self.good = 0
        self.latency = Histogram()  # Of 200 answers, from the due time.
        self.error_latency = Histogram()  # Of all other answers.
        self.first_token = Histogram()  # Of streams with a 200, from the due time.
        self.tokens = self.wanted_tokens = 0
        self.errors: Counter[tuple[int, str]] = Counter()  # By HTTP status and error code.
        self.silent: Counter[UnansweredCause] = Counter()

    def completed(self, latency_s: float) -> None:
        """Count a 200."""
        self.latency.record(latency_s)
        if latency_s <= self.good_s:
            self.good += 1

    def failed(self, status: int, code: str, latency_s: float) -> None:
        """Count any other answer."""
        self.errors[status, code] += 1
        self.error_latency.record(latency_s)

    def unanswered(self, why: UnansweredCause) -> None:
        """Count a request that got no answer."""
        self.silent[why] += 1

    @property
    def ok(self) -> int:
        """200 answers."""
        return self.latency.count

    @property
    def failures(self) -> int:
        """Answers other than 200."""
        return self.error_latency.count

    @property
    def answered(self) -> int:
        """Answers of any kind."""
        return self.ok + self.failures

    @property
    def missing(self) -> int:
        """Requests without an answer."""
        return self.silent.total()

    @classmethod
    def merged(cls, name: str, parts: Iterable["TierStatistics"]) -> "TierStatistics":
        """The sum of several tallies."""
        whole, tallies = cls(name), list(parts)
        for part in tallies:
            whole.scheduled += part.scheduled
            whole.sent += part.sent
            whole.good += part.good
            whole.tokens += part.tokens
            whole.wanted_tokens += part.wanted_tokens
            whole.errors += part.errors
            whole.silent += part.silent
        whole.latency = Histogram.merged(part.latency for part in tallies)
        whole.first_token = Histogram.merged(part.first_token for part in tallies)
        whole.error_latency = Histogram.merged(part.error_latency for part in tallies)
        return whole


def new_tallies(tiers: Sequence[str], good_s: Mapping[str, float]) -> list[TierStatistics]:
    """One empty tally a tier."""
    return [TierStatistics(tier, good_s.get(tier, math.inf)) for tier in tiers]
