"""Floods: ten times the capacity from one tier neither slows those above it nor takes the share of those below it.

Capacity is what health tells as `capacity_rps`: the measured rate of all healthy GPUs times `target_utilization`. It is
all that limits hand out, so no load can get more served; the rest of what the GPUs could do is what absorbs bursts.
"""

from collections.abc import Iterator

import pytest

from admin import NO_LIMITS, add_customer
from eventually import eventually
from measured_load import MeasuredLoad, Stream, Stretch, p99_ms, told
from stack import Stack, start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

EIGHT_SMALL = ("--backend", "simulated:100", "--workers", "8", "--max-batch-size", "2")
CALM_RATE = 40.0  # Requests/s of enterprise without a flood: under a third of the capacity.
WARM_S, MEASURED_S = 4.0, 30.0


@pytest.fixture(scope="module")
def eight_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Eight simulated GPUs of 100 ms and batches of two: 160 requests/s, so that ten times as much is sent with ease."""
    with start_stack(tmp_path_factory.mktemp("eight"), *EIGHT_SMALL) as stack:
        yield stack


async def sold(stack: Stack) -> float:
    """The capacity once the GPUs are measured: 85 % of 8 x 2 in 100 ms, so 136, less the overhead of a batch."""
    await stack.healthy(8)

    async def measured() -> float:
        health = await stack.health()
        whole = all(tier["effective_limit_ratio"] == 1.0 for tier in health["tiers"].values())
        return float(health["capacity_rps"]) if whole else 0.0

    return await eventually(measured, "limits that are whole", 20.0)


async def measured(stack: Stack, streams: dict[str, Stream], seed: int) -> Stretch:
    """The load after it has settled."""
    load = MeasuredLoad(stack.url, streams, (WARM_S, MEASURED_S), seed)
    _, stretch = await load.run()
    print(f"the load itself was late by {load.late_ms:.1f} ms (p99)")
    return stretch


def served(stretch: Stretch) -> float:
    """200s a second, over all streams."""
    return sum(counters.ok for counters in stretch.values()) / MEASURED_S


async def test_a_flood_of_free_leaves_enterprise_as_it_was(eight_gpus: Stack) -> None:
    """Ten times the capacity: enterprise's p99 within 1.2 x of its unloaded one, and the GPUs are kept busy."""
    stack = eight_gpus
    flooder = await add_customer(stack, "flood-free", "free", **NO_LIMITS)
    calm = Stream(stack.key("enterprise"), CALM_RATE)
    unloaded = await measured(stack, {"enterprise": calm}, seed=1)
    capacity = await sold(stack)
    flood = await measured(stack, {"enterprise": calm, "free": Stream(flooder.key, 10 * capacity)}, seed=2)
    ratio = p99_ms(flood["enterprise"]) / p99_ms(unloaded["enterprise"])
    print(told("unloaded", unloaded, MEASURED_S))
    print(told("flood of free", flood, MEASURED_S))
    print(
        f"capacity {capacity:.0f}/s, served {served(flood):.1f}/s = {served(flood) / capacity:.1%}, p99 x {ratio:.2f}"
    )

    assert (flood["enterprise"].failures, flood["enterprise"].missing) == (0, 0)
    assert flood["free"].missing == 0
    assert ratio <= 1.2
    assert served(flood) >= 0.95 * capacity


async def test_a_flood_of_enterprise_leaves_free_its_share(eight_gpus: Stack) -> None:
    """Free asks for twice its guaranteed tenth of the capacity, and gets the tenth."""
    stack = eight_gpus
    flooder = await add_customer(stack, "flood-enterprise", "enterprise", **NO_LIMITS)
    poor = await add_customer(stack, "poor-free", "free", **NO_LIMITS)
    capacity = await sold(stack)
    streams = {"enterprise": Stream(flooder.key, 10 * capacity), "free": Stream(poor.key, 0.2 * capacity)}
    flood = await measured(stack, streams, seed=3)
    share = flood["free"].ok / MEASURED_S / capacity
    print(told("flood of enterprise", flood, MEASURED_S))
    print(f"capacity {capacity:.0f}/s, served {served(flood) / capacity:.1%}, free got {share:.1%}")

    assert flood["free"].missing == 0
    assert share >= 0.95 * 0.10  # Arrivals are random, and so is a twentieth of what is counted in 30 s.
    assert served(flood) >= 0.95 * capacity
