"""Health by outcome: the requests of each tier that fail, latency and error budget against the tier's objectives.

Levels are computed from sums over all gateways. A level is held for some time after it was last reached, so that health
does not alternate between two samples. All but the memory of that are pure functions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.limits.capacity import is_slow
from gateway.limits.refusals import refusals_of
from gateway.operations.figures import sum_counts
from gateway.operations.health.advice import finding
from gateway.operations.health.model import LEVELS, HealthFinding, Status, shortened
from scheduler.protocol.pool_view import Observation, TierOutcomes, WorkerView

MIN_REQUESTS = 3
"""Fewer ended or failed requests are no evidence."""

DEGRADED_RATIO = 0.05
DOWN_RATIO = 0.9
FAST_BURN = 14.4  # 2 % of a month's error budget in an hour, as in deploy/prometheus/rules.yaml.
BURN = 6.0
MIN_BAD = 10  # Failures in an hour. With fewer, a burn rate says little.
BUCKET = 2 ** (1 / 6)  # p95 is rounded up to the end of its bucket.
HOLD_MS = 5_000
ALL = "*"
NAMED_WORKERS = 3

_TIMEOUTS = ("queue_timeout", "deadline_exceeded", "gpu_timeout", "model_too_slow")


class TierObjective(NamedTuple):
    """A tier's `slo_ms` and `slo_success`; None: no objective."""

    ms: int | None = None
    success: float | None = None


class TierResult(NamedTuple):
    """Outcomes and p95 of one tier over all gateways, and its objective."""

    outcomes: TierOutcomes
    p95_ms: float = 0.0
    objective: TierObjective = TierObjective()

    @property
    def error_ratio_10s(self) -> float:
        return _ratio(self.outcomes.failed_10s, self.outcomes.completed_10s)

    @property
    def error_ratio_60s(self) -> float:
        return _ratio(self.outcomes.failed_60s, self.outcomes.completed_60s)

    @property
    def burn_rate_5m(self) -> float | None:
        return self._burn(self.outcomes.budget_5m)

    @property
    def burn_rate_1h(self) -> float | None:
        return self._burn(self.outcomes.budget_1h)

    def _burn(self, budget: tuple[int, int]) -> float | None:
        """How many times faster than allowed the error budget is used."""
        total, bad = budget
        if self.objective.success is None:
            return None
        return bad / total / (1 - self.objective.success) if total else 0.0


def _ratio(failed: int, completed: int) -> float:
    return failed / (failed + completed) if failed else 0.0


def tier_results(
    names: Sequence[str], objectives: Mapping[str, TierObjective], seen: Observation | None
) -> dict[str, TierResult]:
    """The results of each tier: sums over all gateways, and the highest p95, since percentiles cannot be added."""
    gateways = seen.gateways if seen else []
    return {
        name: TierResult(
            total([each.outcomes[name] for each in gateways if name in each.outcomes]),
            max((each.tiers[name].p95_ms for each in gateways if name in each.tiers), default=0.0),
            objectives.get(name, TierObjective()),
        )
        for name in names
    }


def total(parts: Sequence[TierOutcomes]) -> TierOutcomes:
    """The sum."""
    return TierOutcomes(
        sum(each.completed_10s for each in parts),
        sum(each.failed_10s for each in parts),
        sum(each.completed_60s for each in parts),
        sum_counts([each.codes_60s for each in parts]),
        (sum(each.budget_5m[0] for each in parts), sum(each.budget_5m[1] for each in parts)),
        (sum(each.budget_1h[0] for each in parts), sum(each.budget_1h[1] for each in parts)),
        sum_counts([each.others_60s for each in parts]),
    )


def outcome_level(each: TierOutcomes) -> Status:
    """The level of these outcomes: `down` if nearly all requests fail. With few requests, those of 60 s count."""
    ended_10s, ended_60s = each.completed_10s + each.failed_10s, each.completed_60s + each.failed_60s
    if not each.failed_10s:
        # No request ended in 10 s, so nothing shows that the fault is over; at low rates the level would alternate.
        return "degraded" if not ended_10s and _nearly_all(each.failed_60s, ended_60s) else "healthy"
    if _nearly_all(*((each.failed_10s, ended_10s) if ended_10s >= MIN_REQUESTS else (each.failed_60s, ended_60s))):
        return "down"
    windows = ((each.failed_10s, ended_10s), (each.failed_60s, ended_60s))
    some = any(failed >= MIN_REQUESTS and failed >= DEGRADED_RATIO * ended for failed, ended in windows)
    return "degraded" if some else "healthy"


def _nearly_all(failed: int, ended: int) -> bool:
    return failed >= MIN_REQUESTS and failed >= DOWN_RATIO * ended


def levels_now(results: Mapping[str, TierResult]) -> dict[str, Status]:
    """The present levels: of each tier, of ALL tiers together, and `degraded` for each missed objective."""
    levels: dict[str, Status] = {name: outcome_level(each.outcomes) for name, each in results.items()}
    levels[ALL] = outcome_level(total([each.outcomes for each in results.values()]))
    for name, each in results.items():
        if each.objective.ms is not None and each.outcomes.completed_10s >= MIN_REQUESTS:
            levels[f"p95:{name}"] = "degraded" if each.p95_ms / BUCKET > each.objective.ms else "healthy"
        rate = min(each.burn_rate_5m or 0.0, each.burn_rate_1h or 0.0)
        for kind, threshold in (("fast", FAST_BURN), ("burn", BURN)):
            if rate >= threshold and each.outcomes.budget_1h[1] >= MIN_BAD:
                levels[f"{kind}:{name}"] = "degraded"
    return levels


class HeldLevels:
    """Levels that are held for HOLD_MS after they were last reached."""

    def __init__(self) -> None:
        self._reached: dict[tuple[str, Status], int] = {}

    def update(self, levels: Mapping[str, Status], now_ms: int) -> None:
        """Process the present levels. `now_ms`: of Redis' clock."""
        self._reached |= {(key, level): now_ms for key, level in levels.items() if level != "healthy"}
        self._reached = {each: at_ms for each, at_ms in self._reached.items() if 0 <= now_ms - at_ms < HOLD_MS}

    @property
    def levels(self) -> dict[str, Status]:
        """The worst held level of each key that is not healthy."""
        return dict(sorted(self._reached, key=lambda each: LEVELS.index(each[1])))


class CauseInputs(NamedTuple):
    """The evidence for a cause beside the error codes. `total_ms`: TIERLANE_TOTAL_REQUEST_MS. `customer`: see `failing_customer`."""

    workers: Sequence[WorkerView]
    restarts: int = 0  # Of model processes in the last minute.
    total_ms: int = 4000
    customer: str = ""


class Cause(NamedTuple):
    """Why requests fail: code, clause, and the affected processes or tiers."""

    code: str
    clause: str
    about: str


def failing_tiers(
    results: Mapping[str, TierResult], held: Mapping[str, Status], evidence: CauseInputs
) -> HealthFinding:
    """Whether requests end in errors of the service or in timeouts, and why."""
    name, worst = "tiers:outcomes", round(max((each.error_ratio_10s for each in results.values()), default=0.0), 4)
    failing = [tier for tier in results if held.get(tier, "healthy") != "healthy"]
    if not failing and held.get(ALL, "healthy") == "healthy":
        return HealthFinding(name, "component", "healthy", worst, "ratio")
    failing = failing or [tier for tier, each in results.items() if each.outcomes.codes_60s]
    outcomes = total([results[tier].outcomes for tier in failing])
    codes = outcomes.codes_60s
    verb = "time out" if 2 * sum(codes.get(code, 0) for code in _TIMEOUTS) >= sum(codes.values()) else "fail"
    shares: list[str] = []
    for tier in failing:
        ratio, minute = results[tier].error_ratio_10s, ""
        if ratio < DEGRADED_RATIO:
            ratio, minute = results[tier].error_ratio_60s, " of the last minute"
        shares.append(f"{tier}: {ratio:.0%} of requests{minute} {verb}")
    requests = ", ".join(shares) or "Requests fail"
    if evidence.customer:
        clause = f"nearly all are of customer {evidence.customer}, whose inputs may be the cause: others are answered"
        cause = Cause("requests_of_one_customer_fail", clause, evidence.customer)
    else:
        cause = failure_cause(outcomes, failing, evidence)
    level: Status = "down" if held.get(ALL) == "down" else "degraded"
    reason = f"{requests}; {cause.clause}."
    return finding(name, "component", worst, "ratio", reason, cause.code, cause.about, level=level)


def failure_cause(outcomes: TierOutcomes, tiers: Sequence[str], evidence: CauseInputs) -> Cause:
    """The cause, from the error codes and the state of the workers."""
    codes, workers = outcomes.codes_60s, evidence.workers
    slow = [worker for worker in workers if is_slow(worker)]
    failed, timeouts = sum(codes.values()), sum(codes.get(code, 0) for code in _TIMEOUTS)
    if slow and 2 * timeouts >= failed:
        return Cause("model_too_slow", slow_batches(slow[0]), shortened([each.id for each in slow], NAMED_WORKERS))
    # Of the requests in and behind a batch that reaches its limit, many reach another of their own limits first. The model
    # process is then replaced; lost in another way, it would fail requests with other codes.
    killed = evidence.restarts > 0 and not outcomes.completed_60s and "worker_lost" not in codes
    hung = killed or 10 * (codes.get("gpu_timeout", 0) + codes.get("model_too_slow", 0)) >= failed
    if 2 * timeouts >= failed > 0 and hung:  # On workers that do not report themselves as slow.
        backends = {worker.backend for worker in workers}
        named = f"batches of `{backends.pop()}`" if len(backends) == 1 else "batches"
        limit = max((worker.timeout_ms for worker in workers), default=0.0)
        value = f" = {limit:,.0f}" if limit > 0 else ""
        clause = f"{named} do not finish within their time limit, TIERLANE_GPU_TIMEOUT_MS{value}"
        return Cause("requests_time_out", clause, "")
    worst = max(codes, key=lambda code: codes[code], default="internal_error")
    if worst == "deadline_exceeded":
        clause = f"queue and model together take longer than TIERLANE_TOTAL_REQUEST_MS = {evidence.total_ms:,}"
        return Cause("requests_time_out", clause, "")
    if worst == "queue_timeout":
        return Cause("requests_wait_too_long", "they wait in the queue longer than `max_queue_ms`", ", ".join(tiers))
    if worst == "worker_lost":
        return Cause("requests_lose_workers", "workers are lost while they run them", "")
    return Cause("requests_fail", f"most with the error {worst}", worst)


def slow_batches(worker: WorkerView) -> str:
    """The clause about a worker whose model is slower than its time limit."""
    limit = f"TIERLANE_GPU_TIMEOUT_MS = {worker.timeout_ms:,.0f}"
    if worker.model_ms > worker.timeout_ms:
        return f"batches of `{worker.backend}` take {worker.model_ms:,.0f} ms, over {limit}"
    return f"batches of `{worker.backend}` do not finish within {limit}"


def refused_customers(seen: Observation | None) -> HealthFinding:
    """Whether the model refuses all requests of several customers: the cause is then not their clients."""
    found = refusals_of(seen.gateways if seen else [])
    customers = f"{found.refused} of {found.refused + found.served} customers"
    reason = f"The model refuses all requests of {customers} with 400." if found.by_model else None
    return finding("tiers:refusals", "component", found.refused, "customers", reason, "model_refuses")


def missed_objectives(results: Mapping[str, TierResult], held: Mapping[str, Status]) -> list[HealthFinding]:
    """Whether p95 is within `slo_ms`, and the error budget of `slo_success` lasts. Without objectives, no finding."""
    findings: list[HealthFinding] = []
    timed = {name: each for name, each in results.items() if each.objective.ms is not None}
    if timed:
        late = {name: each for name, each in timed.items() if f"p95:{name}" in held}
        worst = max(each.p95_ms for each in timed.values())
        named = ", ".join(
            f"{name} {each.p95_ms:,.0f} ms, objective {each.objective.ms:,} ms" for name, each in late.items()
        )
        reason = f"p95 is over the objective: {named}." if late else None
        code = "latency_over_objective"
        findings.append(finding("tiers:p95", "component", worst, "ms", reason, code, ", ".join(late)))
    budgeted = {name: each for name, each in results.items() if each.objective.success is not None}
    if budgeted:
        fast = any(f"fast:{name}" in held for name in budgeted)
        burning = {n: each for n, each in budgeted.items() if f"fast:{n}" in held or f"burn:{n}" in held}
        worst = round(max(each.burn_rate_1h or 0.0 for each in budgeted.values()), 2)
        named = ", ".join(
            f"{name} {each.burn_rate_5m:.1f} times too fast over 5 min and {each.burn_rate_1h:.1f} over 1 h"
            for name, each in burning.items()
        )
        reason = f"The error budget is used: {named}." if burning else None
        code = "budget_burns_fast" if fast else "budget_burns"
        findings.append(finding("tiers:burn_rate", "component", worst, "", reason, code, ", ".join(burning)))
    return findings
