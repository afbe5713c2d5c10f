"""Health by outcome: windows of counts, levels of failing traffic and of objectives, how long a level is held; jobs."""

from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from configs import job_config
from gateway.limits.outcomes import OutcomeMeter
from gateway.operations.health.collector import AWAY_S, HealthCollector
from gateway.operations.health.outcomes import (
    HOLD_MS,
    HeldLevels,
    TierObjective,
    TierResult,
    levels_now,
    outcome_level,
    tier_results,
)
from ledger.jobs import UNTRIED
from scheduler.errors import ErrorCode
from scheduler.protocol.pool_view import GatewayStats, Observation, TierOutcomes, TierStats


def test_outcomes_are_counted_over_four_windows() -> None:
    """Rejections for lack of capacity use the error budget only, errors of clients none of it; tiers that are gone and old
    slots are dropped.
    """
    meter = OutcomeMeter()
    for second in range(3700):
        meter.completed("free")
        if second % 10 == 0:
            meter.failed("free", ErrorCode.GPU_TIMEOUT)
            meter.failed("free", ErrorCode.QUEUE_FULL)
            meter.refused("free", ErrorCode.RATE_LIMIT_EXCEEDED)
        counts = meter.heartbeat(["free"], float(second))["free"]

    others = {"queue_full": 6, "rate_limit_exceeded": 6}
    assert counts == TierOutcomes(10, 1, 60, {"gpu_timeout": 6}, (360, 60), (4320, 720), others)
    assert meter.heartbeat(["free"], 3715.0)["free"].failed_10s == 0
    assert meter.heartbeat(["free"], 9000.0)["free"] == TierOutcomes()
    assert meter.heartbeat(["paid"], 9001.0) == {"paid": TierOutcomes()}


def counts(completed_10s: int, failed_10s: int, completed_60s: int = 0, failed_60s: int = 0) -> TierOutcomes:
    failed = max(failed_60s, failed_10s)
    return TierOutcomes(completed_10s, failed_10s, max(completed_60s, completed_10s), {"gpu_timeout": failed})


@pytest.mark.parametrize(
    ("each", "level"),
    [
        (counts(0, 0), "healthy"),
        (counts(0, 2), "healthy"),  # too few
        (counts(0, 3), "down"),
        (counts(1, 9), "down"),
        (counts(2, 9), "degraded"),
        (counts(57, 3), "degraded"),
        (counts(58, 3), "healthy"),
        (counts(0, 3, 600, 3), "down"),  # It began in the last ten seconds.
        (counts(30, 0, 100, 50), "healthy"),  # It has ended.
        (counts(0, 1, 0, 3), "down"),  # A request every twenty seconds.
        (counts(0, 0, 0, 3), "degraded"),  # The same, between two requests.
        (counts(0, 0, 3, 3), "healthy"),
        (counts(9, 1, 54, 6), "degraded"),  # A few failures all the time.
        (counts(9, 1, 59, 1), "healthy"),
    ],
)
def test_levels_of_failing_traffic(each: TierOutcomes, level: str) -> None:
    """`down`: nearly all of at least three requests fail. With few requests in ten seconds, those of a minute count."""
    assert outcome_level(each) == level


def test_a_level_is_held_for_some_seconds() -> None:
    """The worst level within that time is shown, so that health does not alternate."""
    held = HeldLevels()
    held.update({"free": "down", "paid": "healthy"}, 1000)
    held.update({"free": "degraded"}, 2000)

    assert held.levels == {"free": "down"}
    held.update({}, 1000 + HOLD_MS)
    assert held.levels == {"free": "degraded"}
    held.update({}, 2000 + HOLD_MS)
    assert held.levels == {}


def observed(*several: TierOutcomes, p95_ms: float = 100.0) -> Observation:
    stats = {"free": TierStats(1.0, 0.0, p95_ms)}
    gateways = [GatewayStats(f"g{n}", 1.0, stats, outcomes={"free": each}) for n, each in enumerate(several)]
    return Observation(0, {}, [], gateways, 0, 0, 0, 0)


def test_a_level_is_not_held_while_redis_is_not_available() -> None:
    """Outcomes from before an outage of Redis do not keep a gateway `down` that serves without Redis."""
    unused: Any = None
    catalog: Any = SimpleNamespace(
        snapshot=SimpleNamespace(tiers=[SimpleNamespace(name="free", slo_ms=None, slo_success=None)])
    )
    seen = observed(counts(0, 9))
    heartbeat = SimpleNamespace(observation=seen, whole=seen, redis_problem=None, age_s=lambda: 0.0)
    parts: Any = SimpleNamespace(config=SimpleNamespace(place="default"), heartbeat=heartbeat)
    collector = HealthCollector(catalog, unused, unused, unused)

    assert collector._updated_memory(parts).held.levels["free"] == "down"
    heartbeat.redis_problem, heartbeat.age_s = "refused", lambda: HOLD_MS / 1000 - 0.1
    assert collector._updated_memory(parts).held.levels["free"] == "down"
    heartbeat.age_s = lambda: HOLD_MS / 1000
    assert collector._updated_memory(parts).held.levels == {}


ROW = "The catalog stays at version 7, because a row is invalid."
GONE = "PostgreSQL at host/db is not responding: refused."
KNOWN_S = 900.0


class JobsSeen(NamedTuple):
    """What health sees: the problem of the store, and the catalog after `silent_s`."""

    store: str | None = UNTRIED
    problem: str | None = GONE
    silent_s: float = AWAY_S + 0.5
    bad_row: bool = False
    loaded: bool = True
    session_url: str = "url"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (JobsSeen(), GONE),
        (JobsSeen(session_url=""), GONE),
        (JobsSeen(store=None), None),  # Jobs were stored.
        (JobsSeen(store="Full."), "Full."),
        (JobsSeen(store="Full.", problem=None, silent_s=0.5), "Full."),
        (JobsSeen(session_url="direct"), None),  # The path of the catalog is away, not that of jobs.
        (JobsSeen(store="Full.", session_url="direct"), "Full."),
        (JobsSeen(silent_s=1.0), None),  # A reconnect.
        (JobsSeen(problem="The catalog has not been read yet.", loaded=False), None),  # At the start.
        (JobsSeen(problem=ROW, bad_row=True, silent_s=1.0), None),
        (JobsSeen(bad_row=True), GONE),  # An outage while a row is invalid.
        (JobsSeen(problem=None), None),
    ],
)
def test_why_jobs_cannot_be_stored(seen: JobsSeen, expected: str | None) -> None:
    """The store knows best; if it was not tried, the catalog does, if it uses the same server and that is away for long."""
    unused: Any = None
    catalog: Any = SimpleNamespace(problem=None, bad_row=seen.bad_row, left_s=KNOWN_S, age_s=lambda: 0.0, snapshot=None)
    config = SimpleNamespace(jobs=job_config("url", session_url=seen.session_url))
    parts: Any = SimpleNamespace(config=config, jobs=SimpleNamespace(problem=seen.store))
    collector = HealthCollector(catalog, unused, unused, unused)
    collector._jobs_problem(parts)

    catalog.problem, catalog.left_s = seen.problem, KNOWN_S - seen.silent_s if seen.loaded else -inf
    catalog.snapshot = object() if seen.loaded else None
    # With an invalid row the age grows, although PostgreSQL answers.
    catalog.age_s = lambda: 3600.0 if seen.bad_row else seen.silent_s if seen.loaded else inf

    assert collector._jobs_problem(parts) == expected
    config.jobs = None
    assert collector._jobs_problem(parts) is None


def test_results_are_sums_over_gateways() -> None:
    """A gateway that reports no outcomes, such as an older one, is not counted."""
    one = TierOutcomes(5, 3, 20, {"gpu_timeout": 4}, (100, 1), (1000, 2), {"queue_full": 3})
    two = TierOutcomes(5, 7, 30, {"gpu_timeout": 4, "internal_error": 2}, (100, 1), (1000, 6), {"queue_full": 1})
    seen = observed(one, two)
    seen.gateways.append(GatewayStats("old", 1.0, {}))
    result = tier_results(["free"], {"free": TierObjective(200, 0.99)}, seen)["free"]

    assert (result.error_ratio_10s, result.error_ratio_60s) == (0.5, 10 / 60)
    assert (result.burn_rate_5m, result.burn_rate_1h) == (pytest.approx(1.0), pytest.approx(0.4))
    assert result.outcomes.codes_60s == {"gpu_timeout": 8, "internal_error": 2}
    assert result.outcomes.others_60s == {"queue_full": 4}
    assert tier_results(["free"], {}, seen)["free"].burn_rate_1h is None


@pytest.mark.parametrize(
    ("objective", "changes", "levels"),
    [
        (TierObjective(), {}, set()),
        (TierObjective(89), {"completed_10s": 2}, set()),  # too few
        (TierObjective(100), {}, set()),  # p95 is rounded up by at most 12 %.
        (TierObjective(89), {}, {"p95:free"}),
        (TierObjective(None, 0.99), {}, {"burn:free"}),
        (TierObjective(None, 0.995), {}, {"burn:free", "fast:free"}),
        (TierObjective(None, 0.9), {}, set()),
        (TierObjective(None, 0.995), {"budget_5m": (100, 0)}, set()),  # It has ended.
        (TierObjective(None, 0.995), {"budget_1h": (90, 9)}, set()),  # too few
    ],
)
def test_missed_objectives(objective: TierObjective, changes: dict[str, Any], levels: set[str]) -> None:
    """p95 over `slo_ms`, and the error budget of `slo_success` used 6 or 14.4 times too fast over both windows."""
    outcomes = replace(TierOutcomes(completed_10s=3, budget_5m=(100, 8), budget_1h=(1000, 80)), **changes)

    now = levels_now({"free": TierResult(outcomes, 100.0, objective)})

    assert {name for name, level in now.items() if level != "healthy"} == levels
