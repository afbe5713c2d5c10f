"""The counters of one gateway. The request path only adds integers.

All values are integers (times in microseconds), so that sums over processes are exact: a counter that decreased by a
rounding error would look like a restart. Tiers, models and pools over a cap are counted as `other`.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping

from ratelimit.limits import OWN_OUTCOMES
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict
from scheduler.protocol.replies import Reply
from scheduler.states import Admission

BOUNDS_US = tuple(
    1000 * ms
    for ms in (
        *(1, 2, 5, 10, 25, 50, 75, 100, 150, 250, 500, 1000, 2000, 4000, 5000, 10_000, 30_000, 60_000),
        *(120_000, 300_000, 600_000),
    )
)
"""Upper bounds of all time buckets, in microseconds. They include the deadlines, and the longest objective of a tier."""

MAX_TIERS = 32
MAX_MODELS = 64
MAX_TOKEN_SERIES = 256
OTHER, UNKNOWN = "other", "unknown"
COMPLETED, ACCEPTED = "completed", "accepted"

Series = dict[tuple[str, ...], list[int]]
"""Name and values of the labels -> one number, or for times the buckets and the sum in microseconds."""

BATCHES = "batches"
"""Name of the series (pool, model, full size, size) -> completed requests of such batches."""

SHED = frozenset(
    {
        ErrorCode.REDUCED_CAPACITY,
        ErrorCode.SHED_FOR_PRIORITY,
        ErrorCode.QUEUE_FULL,
        ErrorCode.NO_CAPACITY,
        ErrorCode.BACKPRESSURE,
    }
)
OWN_LIMITS = frozenset(map(Admission, OWN_OUTCOMES))
STAGES = {ErrorCode.QUEUE_TIMEOUT: "queue", ErrorCode.GPU_TIMEOUT: "gpu", ErrorCode.DEADLINE_EXCEEDED: "total"}


class Times:
    """A histogram of times."""

    __slots__ = ("counts", "sum_us")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_US) + 1)
        self.sum_us = 0

    def add(self, seconds: float) -> None:
        """Count a time. Negative times count as 0."""
        micros = int(seconds * 1e6) if seconds > 0 else 0
        self.counts[bisect_left(BOUNDS_US, micros)] += 1
        self.sum_us += micros

    def numbers(self) -> list[int]:
        """The buckets, then the sum in microseconds."""
        return [*self.counts, self.sum_us]


class TierCounters:
    """The counters of one tier."""

    __slots__ = ("completed", "durations", "ended", "rejected", "retries", "waits")

    def __init__(self) -> None:
        self.completed: dict[str, int] = {}  # By endpoint. Most requests end like this.
        self.ended: dict[tuple[str, str], int] = {}  # By (endpoint, outcome), of all other requests.
        self.rejected: dict[tuple[str, str], int] = {}  # Also alerts, by (metric, value of its second label).
        self.retries = 0
        self.durations = Times()
        self.waits = Times()


class ModelCounters:
    """The counters of one model. `full` is its max_batch_size, 0 while unknown."""

    __slots__ = ("full", "runs", "sizes")

    def __init__(self) -> None:
        self.full = 0
        self.sizes: dict[int, dict[int, int]] = {0: {}}  # Full size -> size -> requests.
        self.runs = Times()


class TokenCounters:
    """The tokens of one model, tier and endpoint, and the pace of their streams."""

    __slots__ = ("firsts", "paces", "read", "written")

    def __init__(self) -> None:
        self.read = 0
        self.written = 0
        self.firsts = Times()
        self.paces = Times()


class Counters:
    """All counters of a gateway."""

    def __init__(self) -> None:
        self._tiers: dict[str, TierCounters] = {}
        self._models: dict[tuple[str, str], ModelCounters] = {}
        self._tokens: dict[tuple[str, str, str], TokenCounters] = {}
        self._calls: dict[str, Times] = {}
        self._run_again = 0
        self._batch_lines = {"completed": 0, "failed": 0}

    def batch_lines(self, outcome: str, count: int) -> None:
        """Count lines of batches: `completed` or `failed`."""
        self._batch_lines[outcome] += count

    def quota_alert(self, tier: str, share: float) -> None:
        """Count a share of a quota that a customer of a tier reached."""
        tenth = f"{math.floor(share * 10 + 1e-9) / 10:g}"
        counted, key = self._tier(tier).rejected, ("tierlane_quota_alerts_total", tenth)
        counted[key] = counted.get(key, 0) + 1

    def ended(self, tier: str, endpoint: str, outcome: str) -> None:
        """Count a request that was not completed."""
        ended, key = self._tier(tier).ended, (endpoint, outcome)
        ended[key] = ended.get(key, 0) + 1

    def completed(self, tier: str, endpoint: str, seconds: float) -> None:
        """Count a completed request."""
        counted = self._tiers.get(tier) or self._tier(tier)
        completed = counted.completed
        completed[endpoint] = completed.get(endpoint, 0) + 1
        counted.durations.add(seconds)

    def ran(self, tier: str, endpoint: str, pool: str, model: str, reply: Reply) -> None:
        """Count the run of a completed request, and its tokens. A cached or collapsed reply has no run."""
        if reply.served_from:
            return
        (self._tiers.get(tier) or self._tier(tier)).waits.add(reply.queue_ms / 1000)
        counted = self._models.get((pool, model)) or self._model(pool, model)
        counted.runs.add(reply.gpu_ms / 1000)
        sizes, size = counted.sizes[counted.full], reply.batch_size
        sizes[size] = sizes.get(size, 0) + 1
        if reply.attempts > 1:
            self._run_again += reply.attempts - 1
        tokens = self._tokens.get((tier, model, endpoint)) or self._token_counters(tier, model, endpoint)
        tokens.read += max(0, reply.tokens_used - reply.output_tokens)
        tokens.written += reply.output_tokens

    def streamed(self, tier: str, endpoint: str, model: str, reply: Reply, *, first_s: float, seconds: float) -> None:
        """Count the pace of a stream that ended after `seconds`, whose first text was sent after `first_s`.

        If both are equal, all text came at once, which says nothing about the time of a token.
        """
        if reply.served_from:
            return
        tokens = self._token_counters(tier, model, endpoint)
        tokens.firsts.add(first_s)
        if reply.output_tokens > 1 and first_s < seconds:
            tokens.paces.add((seconds - first_s) / (reply.output_tokens - 1))

    def failed(self, tier: str, endpoint: str, code: ErrorCode, verdict: Verdict | None = None) -> None:
        """Count a request that got an error. `verdict` is that of its admission."""
        self.ended(tier, endpoint, code.value)
        rejected = self._tier(tier).rejected
        if code in SHED:
            key = ("tierlane_shed_total", code.value)
        elif code in STAGES:
            key = ("tierlane_deadline_exceeded_total", STAGES[code])
        elif verdict is not None and verdict.outcome in OWN_LIMITS:
            key = ("tierlane_rate_limited_total", verdict.outcome.value)
        else:
            return
        rejected[key] = rejected.get(key, 0) + 1

    def rate_limited(self, scope: str, tier: str) -> None:
        """Count a request that a limit of this gateway rejected."""
        rejected, key = self._tier(tier).rejected, ("tierlane_rate_limited_total", scope)
        rejected[key] = rejected.get(key, 0) + 1

    def retried(self, tier: str) -> None:
        """Count a request that the client marked as a retry."""
        self._tier(tier).retries += 1

    def called(self, op: str, seconds: float) -> None:
        """Count a successful Redis call."""
        times = self._calls.get(op)
        if times is None:
            times = self._calls[op] = Times()
        times.add(seconds)

    def full_batches(self, sizes: Mapping[tuple[str, str], int]) -> None:
        """Set the max_batch_size of each (pool, model)."""
        for key, counted in self._models.items():
            counted.full = sizes.get(key, counted.full)
            counted.sizes.setdefault(counted.full, {})

    def batches(self, pool: str) -> tuple[float, float]:
        """Number of batches with known size and full size, and the number of full batches with the same requests."""
        rows = [
            (full, size, requests)
            for (name, _), model in self._models.items()
            if name == pool
            for full, sizes in model.sizes.items()
            for size, requests in sizes.items()
            if full > 0 and size > 0
        ]
        return sum(count / size for _, size, count in rows), sum(count / max(full, size) for full, size, count in rows)

    def _tier(self, name: str) -> TierCounters:
        tier = self._tiers.get(name)
        if tier is None:
            name = name if len(self._tiers) < MAX_TIERS else OTHER
            tier = self._tiers.setdefault(name, TierCounters())
        return tier

    def _model(self, pool: str, name: str) -> ModelCounters:
        model = self._models.get((pool, name))
        if model is None:
            key = (pool, name) if len(self._models) < MAX_MODELS else (OTHER, OTHER)
            model = self._models.setdefault(key, ModelCounters())
        return model

    def _token_counters(self, tier: str, model: str, endpoint: str) -> TokenCounters:
        key = (tier, model, endpoint)
        if key not in self._tokens and len(self._tokens) >= MAX_TOKEN_SERIES:
            key = (OTHER, OTHER, OTHER)
        return self._tokens.setdefault(key, TokenCounters())

    def series(self) -> Series:
        """A copy of all counters."""
        found: Series = {("tierlane_retries_total", "batch"): [self._run_again]}
        found |= {("tierlane_batch_lines_total", outcome): [count] for outcome, count in self._batch_lines.items()}
        for name, tier in self._tiers.items():
            found |= {("tierlane_requests_total", name, at, COMPLETED): [count] for at, count in tier.completed.items()}
            found |= {("tierlane_requests_total", name, *key): [count] for key, count in tier.ended.items()}
            found |= {(metric, name, label): [count] for (metric, label), count in tier.rejected.items()}
            found["tierlane_client_retry_requests_total", name] = [tier.retries]
            found["tierlane_request_duration_seconds", name] = tier.durations.numbers()
            found["tierlane_queue_wait_seconds", name] = tier.waits.numbers()
        for key, model in self._models.items():
            found["tierlane_inference_duration_seconds", *key] = model.runs.numbers()
            for full, sizes in model.sizes.items():
                found |= {(BATCHES, *key, str(full), str(size)): [count] for size, count in sizes.items()}
        for labels, tokens in self._tokens.items():
            found["tierlane_input_tokens_total", *labels] = [tokens.read]
            found["tierlane_output_tokens_total", *labels] = [tokens.written]
            found["tierlane_time_to_first_token_seconds", *labels] = tokens.firsts.numbers()
            found["tierlane_time_per_output_token_seconds", *labels] = tokens.paces.numbers()
        return found | {("tierlane_redis_call_seconds", op): times.numbers() for op, times in self._calls.items()}
