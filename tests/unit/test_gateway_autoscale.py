"""Scale advice: the inputs from observations and limits, and the document."""

from types import SimpleNamespace
from typing import Any

from configs import scale_rules
from gateway.autoscale import ScaleAdvice, scale_document
from gateway.limits.capacity import LiveLimits
from ledger.catalog.snapshot import Model, Snapshot, Tier
from scheduler.protocol.pool_view import GatewayStats, Observation, TierDepth, TierStats, WorkerView

TINY = Model("tiny", "default", 32, None, 40, 100.0, 0.8, 0, True)
TIERS = (
    Tier("enterprise", 1, 0.05, (100.0, 200.0, 8, None), 500, 2000, None, None),
    Tier("free", 3, 0.10, (10.0, 20.0, 8, None), 500, 2000, None, None),
)
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())


def worker(name: str, busy: float, *, healthy: bool = True, rps: float = 0.0) -> WorkerView:
    measured = {"base_ms": 32 * 1000 / rps if rps else 0.0, "seen_batch": 32 * (rps > 0)}
    return WorkerView(name, "busy", busy, 1, rps, 50.0, "tiny", "v1", age_ms=10.0, healthy=healthy, **measured)


class Setup:
    """Advice over literal observations, on a virtual clock."""

    def __init__(self, **rules: Any) -> None:
        self.now, self.age_s = 0.0, 0.1
        self.limits = LiveLimits("default")
        self.heartbeat: Any = SimpleNamespace(whole=None, age_s=lambda: self.age_s)
        self.advice = ScaleAdvice(
            scale_rules(**rules),
            "default",
            catalog=SimpleNamespace(snapshot=SNAPSHOT),
            heartbeat=self.heartbeat,
            limits=self.limits,
            clock=lambda: self.now,
        )

    def observe(self, *workers: WorkerView, demand: float, waiting: int = 0, seconds: int = 1) -> dict[str, Any]:
        """The document after so many seconds."""
        tiers = {"enterprise": TierStats(demand, 0.0, 0.0), "free": TierStats(0.0, 0.0, 0.0)}
        depths = {"enterprise": TierDepth("enterprise", 0, 0.0), "free": TierDepth("free", waiting, 0.0)}
        seen = Observation(0, depths, list(workers), [GatewayStats("g", demand, tiers)], 0, 0, 0, 0)
        for _ in range(seconds):
            self.now += 1.0
            self.heartbeat.whole = seen
            self.limits.observe(seen, SNAPSHOT, self.now)
            self.advice.update()
        return self.advice.document()


def test_without_an_observation_the_minimum_is_advised() -> None:
    """The document of several pools has the first pool at its top."""
    document = Setup(least=2, most=8).advice.document()
    other = Setup(least=3).advice.document()

    assert (document["current_workers"], document["recommended_workers"], document["inputs"]) == (0, 2, None)
    assert (document["min_workers"], document["max_workers"], document["last_step"]) == (2, 8, None)
    assert scale_document({"default": document, "slow": other}) == {
        **document,
        "pools": {"default": document, "slow": other},
    }


def test_the_inputs_are_those_of_the_observation() -> None:
    """Backlog by tier, demand of all gateways, rate and utilization of the healthy workers."""
    setup = Setup()
    workers = [worker("a", 0.5), worker("b", 0.7), worker("c", 0.9, healthy=False)]

    assert setup.observe(*workers, demand=120.0, waiting=7)["inputs"] == {
        "backlog": {"enterprise": 0, "free": 7},
        "demand_rps": 120.0,
        "capacity_rps": 160.0,
        "rps_per_worker": 100.0,
        "target_utilization": 0.8,
        "target_wait_ms": 500.0,
        "busy": 0.6,
        "utilization": 0.6,
        "known_workers": 3,
    }
    assert (setup.advice.healthy, setup.advice.recommended) == (2, 2)


def test_utilization_is_demand_over_the_measured_rate() -> None:
    """A worker busy with batches of one is not fully used; a measured rate is kept."""
    setup = Setup()
    inputs = setup.observe(worker("a", 0.9, rps=640.0), demand=64.0)["inputs"]

    assert (inputs["busy"], round(inputs["utilization"], 6), inputs["rps_per_worker"]) == (0.9, 0.1, 640.0)
    assert setup.observe(worker("a", 0.9), demand=64.0)["inputs"]["rps_per_worker"] == 640.0


def test_the_last_step_is_reported_and_a_stale_observation_changes_nothing() -> None:
    """While Redis is unavailable the last advice stands."""
    setup = Setup(need_s=3.0)
    setup.observe(worker("a", 1.0), demand=200.0, seconds=5)
    setup.now += 1.0
    document = setup.advice.document()

    assert (document["current_workers"], document["recommended_workers"]) == (1, 3)
    step = document["last_step"]
    assert (step["direction"], step["before"], step["after"], step["age_s"]) == ("up", 1, 3, 2.0)
    assert step["reason"] == document["reason"] != ""
    setup.age_s = 2.1
    assert setup.observe(worker("a", 1.0), demand=900.0, seconds=10)["recommended_workers"] == 3
    setup.age_s = 0.1
    assert setup.observe(worker("a", 1.0), demand=900.0, seconds=10)["recommended_workers"] > 3
