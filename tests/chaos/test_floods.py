"""Floods: ten times the capacity from one tier neither slows higher tiers nor takes the share of lower tiers.

The capacity is `capacity_rps` of health: the measured rate of all healthy GPUs times `target_utilization`. Limits give
out no more than that; the rest of the GPUs' rate absorbs bursts.
"""

from collections.abc import Iterator

import pytest

from admin import NO_LIMITS, add_customer
from eventually import eventually
from measured_load import Interval, MeasuredLoad, Stream, figures, p99_ms
from stack import Stack, start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

EIGHT_SMALL = ("--backend", "simulated:100", "--workers", "8", "--max-batch-size", "2")
CALM_RATE = 40.0  # Requests/s of enterprise without a flood: under a third of the capacity.
WARM_S, MEASURED_S = 4.0, 30.0
FLOODS = {**NO_LIMITS, "spread": 4}
"""Limits of a customer that sends more than a cell serves: it uses up to four cells, or the only one."""


@pytest.fixture(scope="module")
def eight_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Eight simulated GPUs with batches of two in 100 ms: 160 requests/s, so that ten times as much can be sent."""
    with start_stack(tmp_path_factory.mktemp("eight"), *EIGHT_SMALL) as stack:
        yield stack


async def usable_capacity(stack: Stack) -> float:
    """The capacity once the GPUs are measured: 85 % of 8 x 2 in 100 ms, so 136, less the overhead of a batch."""
    await stack.healthy(8)

    async def measured() -> float:
        health = await stack.health()
        full = all(tier["effective_limit_ratio"] == 1.0 for tier in health["tiers"].values())
        return float(health["capacity_rps"]) if full else 0.0

    return await eventually(measured, "full limits", 20.0)


async def measured(stack: Stack, streams: dict[str, Stream], seed: int) -> Interval:
    """The results of the load after its warm-up."""
    load = MeasuredLoad(stack.url, streams, (WARM_S, MEASURED_S), seed)
    _, interval = await load.run()
    print(f"requests were sent late by {load.late_ms:.1f} ms (p99)")
    return interval


def served(interval: Interval) -> float:
    """Responses 200 per second over all streams."""
    return sum(counters.ok for counters in interval.values()) / MEASURED_S


async def test_a_flood_of_free_does_not_slow_enterprise(eight_gpus: Stack) -> None:
    """At ten times the capacity the p99 of enterprise stays within 1.2 x of its p99 alone, and the GPUs stay busy."""
    stack = eight_gpus
    flooder = await add_customer(stack, "flood-free", "free", **FLOODS)
    calm = Stream(stack.key("enterprise"), CALM_RATE)
    unloaded = await measured(stack, {"enterprise": calm}, seed=1)
    capacity = await usable_capacity(stack)
    flood = await measured(stack, {"enterprise": calm, "free": Stream(flooder.key, 10 * capacity)}, seed=2)
    ratio = p99_ms(flood["enterprise"]) / p99_ms(unloaded["enterprise"])
    print(figures("unloaded", unloaded, MEASURED_S))
    print(figures("flood of free", flood, MEASURED_S))
    print(
        f"capacity {capacity:.0f}/s, served {served(flood):.1f}/s = {served(flood) / capacity:.1%}, p99 x {ratio:.2f}"
    )

    assert (flood["enterprise"].failures, flood["enterprise"].missing) == (0, 0)
    assert flood["free"].missing == 0
    assert ratio <= 1.2
    assert served(flood) >= 0.95 * capacity


async def test_a_flood_of_enterprise_does_not_take_the_share_of_free(eight_gpus: Stack) -> None:
    """Free sends twice its guaranteed tenth of the capacity, and gets the tenth."""
    stack = eight_gpus
    flooder = await add_customer(stack, "flood-enterprise", "enterprise", **FLOODS)
    customer = await add_customer(stack, "steady-free", "free", **NO_LIMITS)
    capacity = await usable_capacity(stack)
    streams = {"enterprise": Stream(flooder.key, 10 * capacity), "free": Stream(customer.key, 0.2 * capacity)}
    flood = await measured(stack, streams, seed=3)
    share = flood["free"].ok / MEASURED_S / capacity
    print(figures("flood of enterprise", flood, MEASURED_S))
    print(f"capacity {capacity:.0f}/s, served {served(flood) / capacity:.1%}, free has {share:.1%}")

    assert flood["free"].missing == 0
    assert share >= 0.95 * 0.10  # Random arrivals vary by 5 % in 30 s.
    assert served(flood) >= 0.95 * capacity
