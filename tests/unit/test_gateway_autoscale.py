"""The gateway's advice: from its last look at the pool and its limits to the policy's numbers, and to the document."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.autoscale import ScaleAdvice, scale_document
from gateway.limits.capacity import LiveLimits
from ledger.catalog.snapshot import Model, Snapshot, Tier
from scheduler.autoscale import ScaleRules
from scheduler.protocol.pool_view import GatewayStats, Observation, TierDepth, TierStats, WorkerView

TINY = Model("tiny", "default", 32, None, 40, 3000, 100.0, 0.8, 0, True)
TIERS = (
    Tier("enterprise", 1, 0.05, (100.0, 200.0, 8, None), 500, 2000, None, None),
    Tier("free", 3, 0.10, (10.0, 20.0, 8, None), 500, 2000, None, None),
)
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())


def worker(name: str, busy: float, *, healthy: bool = True, measured: float = 0.0) -> WorkerView:
    base_ms = 32 * 1000 / measured if measured else 0.0
    return WorkerView(
        name,
        "busy",
        busy,
        1,
        10.0,
        healthy,
        measured,
        50.0,
        "tiny",
        "v1",
        base_ms=base_ms,
        seen_batch=32 * (measured > 0),
    )


def look(*workers: WorkerView, demand: float = 0.0, waiting: int = 0) -> Observation:
    stats = GatewayStats("g", demand, {"enterprise": TierStats(demand, 0.0, 0.0), "free": TierStats(0.0, 0.0, 0.0)})
    tiers = {"enterprise": TierDepth("enterprise", 0, 0.0), "free": TierDepth("free", waiting, 0.0)}
    return Observation(0, tiers, list(workers), [stats], 0, 0, 0, 0)


class Gateway:
    """What the advice reads: the beat's last look, the limits that follow from it, and a clock."""

    def __init__(self, **rules: Any) -> None:
        self.now, self.age_s = 0.0, 0.1
        self.limits = LiveLimits("default")
        self.heartbeat: Any = SimpleNamespace(observation=None, age_s=lambda: self.age_s)
        catalog: Any = SimpleNamespace(snapshot=SNAPSHOT)
        self.advice = ScaleAdvice(
            ScaleRules(**rules),
            "default",
            catalog=catalog,
            heartbeat=self.heartbeat,
            limits=self.limits,
            clock=lambda: self.now,
        )

    def look(self, seen: Observation, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.heartbeat.observation = seen
            self.limits.observe(seen, SNAPSHOT, self.now)
            self.advice.update()


def test_before_the_first_look_it_advises_the_least() -> None:
    """With no inputs, and without a step."""
    document = Gateway(least=2, most=8).advice.document()

    assert document == {
        "current_workers": 0,
        "recommended_workers": 2,
        "min_workers": 2,
        "max_workers": 8,
        "reason": "no observation yet",
        "last_step": None,
        "inputs": None,
    }


def test_the_inputs_are_what_was_seen() -> None:
    """Backlog by tier, demand of all gateways, the rate of the healthy workers, what they are used."""
    gateway = Gateway()
    gateway.look(look(worker("a", 0.5), worker("b", 0.7), worker("c", 0.9, healthy=False), demand=120.0, waiting=7))

    assert gateway.advice.document()["inputs"] == {
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
    assert (gateway.advice.healthy, gateway.advice.recommended) == (2, 2)


def test_a_worker_that_is_busy_with_batches_of_one_is_not_used() -> None:
    """Once its rate was measured, it is used as far as the demand goes; what was measured is not forgotten."""
    gateway = Gateway()
    gateway.look(look(worker("a", 0.9, measured=640.0), demand=64.0))
    inputs = gateway.advice.document()["inputs"]
    assert inputs is not None
    assert (inputs["busy"], inputs["utilization"], inputs["rps_per_worker"]) == (0.9, pytest.approx(0.1), 640.0)

    gateway.look(look(worker("a", 0.9), demand=64.0))
    later = gateway.advice.document()["inputs"]

    assert later is not None
    assert later["rps_per_worker"] == 640.0


def test_a_need_that_lasts_is_advised_with_its_reason() -> None:
    """And the step is told for as long as it is the last."""
    gateway = Gateway(need_s=3.0)
    gateway.look(look(worker("a", 1.0), demand=200.0), seconds=5)
    gateway.now += 1.0

    document = gateway.advice.document()

    assert (document["current_workers"], document["recommended_workers"]) == (1, 3)
    assert document["reason"] == "a demand of 200/s requires 3 at 80/s per worker: 3 or more for 3 s"
    assert document["last_step"] == {
        "direction": "up",
        "before": 1,
        "after": 3,
        "reason": document["reason"],
        "age_s": 2.0,
    }


def test_a_look_that_is_too_old_is_not_put_to_the_policy() -> None:
    """Redis is away: the last advice stands, and says so."""
    gateway = Gateway(need_s=1.0)
    gateway.look(look(worker("a", 0.5), demand=20.0), seconds=3)
    gateway.age_s = 2.1

    gateway.look(look(worker("a", 1.0), demand=900.0), seconds=10)

    document = gateway.advice.document()
    assert (document["current_workers"], document["recommended_workers"]) == (1, 1)
    assert document["reason"] == "the pool cannot be observed: the last advice is kept"


def test_the_document_has_the_first_pool_at_its_top() -> None:
    """And every pool below, the first one too."""
    own, other = Gateway(least=1).advice.document(), Gateway(least=3).advice.document()

    document = scale_document({"default": own, "slow": other})

    assert document["recommended_workers"] == 1
    assert document["pools"] == {"default": own, "slow": other}
