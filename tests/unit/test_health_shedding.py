"""The first sentence that on-call reads: who is shed, how much, why and since when."""

from typing import Any

import msgspec
import pytest

from gateway.direct.mode import DirectView
from gateway.operations.health_checks import Flow, health, shedding
from gateway.operations.health_losses import Loss
from health_inputs import health_inputs
from scheduler.protocol.pool_view import GatewayStats, Observation, TierStats, WorkerView

AT_14_02 = 14 * 3_600_000 + 2 * 60_000
WELL = Flow(100.0, 0.0, 100.0)


@pytest.mark.parametrize(
    ("tiers", "capacity_rps", "losses", "reason"),
    [
        ({"paid": WELL, "free": WELL}, 310.0, (), None),
        ({"paid": WELL, "free": WELL}, 310.0, (Loss("gpu-3", AT_14_02),), None),  # a loss alone is not its news
        ({"free": Flow(100.0, 1.9, 100.0)}, 310.0, (), None),  # the edge of a limit that works
        ({"free": Flow(1.0, 0.4, 1.0)}, 310.0, (), None),  # two in five seconds
        (
            {"paid": Flow(200.0, 0.0, 200.0), "free": Flow(280.0, 106.4, 280.0)},
            310.0,
            (Loss("gpu-3", AT_14_02),),
            "free is shed 38%: capacity 310/s under demand 480/s since gpu-3 was lost at 14:02 UTC.",
        ),
        (
            {"paid": Flow(200.0, 10.0, 200.0), "free": Flow(280.0, 280.0, 280.0)},
            160.0,
            (Loss("gpu-1", AT_14_02 + 90_000), Loss("gpu-3", AT_14_02)),
            "paid is shed 5%, free is shed 100%: capacity 160/s under demand 480/s since gpu-3 and 1 more were lost at 14:02 UTC.",
        ),
        (
            {"free": Flow(280.0, 28.0, 280.0)},
            310.0,
            (),
            "free is shed 10%: demand 280/s within capacity 310/s, but too many wait.",
        ),
        ({"free": Flow(0.0, 5.0, 4.0)}, 1.0, (), "free is shed 100%: capacity 1/s under demand 4/s."),
    ],
)
def test_the_reason(tiers: dict[str, Flow], capacity_rps: float, losses: tuple[Loss, ...], reason: str | None) -> None:
    """Degraded where there is one."""
    found = shedding(tiers, capacity_rps, losses)

    assert (found.reason, found.level) == (reason, "healthy" if reason is None else "degraded")


def test_what_keeps_requests_out_is_told_instead_of_capacity() -> None:
    """Neither capacity nor a queue is the cause where nothing is let in."""
    found = shedding({"free": Flow(10.0, 10.0, 10.0)}, 310.0, (), "Redis is short of memory")

    assert found.reason == "free is shed 100%: Redis is short of memory."


OBSERVED = Observation(
    0, {}, [], [GatewayStats("g1", 0.0, {"free": TierStats(5.0, 5.0, 0.0, arrived_rps=5.0)})], 0, 0, 0, 0
)
SICK = WorkerView("w1", "down", 0.0, 0, 0.0, False, 0.0, 0.0, "tiny", "v1")
FULL = DirectView(
    active=True, for_s=1.0, workers=1, serves=False, waiting=0, spool_bytes=9, spool_problem="It is full.", bad_lines=0
)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"short_of_memory": True}, "Redis is short of memory and is given no new requests (see redis:memory)"),
        ({"direct": FULL}, "the gateway's spool takes no more while requests go past Redis (see direct:spool)"),
        ({"workers": [SICK]}, "no GPU is healthy (see gpus:healthy)"),
        ({}, "demand 5/s within capacity 160/s, but too many wait"),
    ],
)
def test_each_cause_has_its_own_words(changes: dict[str, Any], why: str) -> None:
    """Backpressure, a full spool, no GPU, and queues that are too long."""
    seen = msgspec.structs.replace(OBSERVED, workers=changes.pop("workers", []))
    _, document = health(health_inputs(observation=seen, factors={"free": 1.0}, **changes))

    assert document["reasons"][0] == f"free is shed 100%: {why}."
