"""GPU time of customers in the last minute, and Jain's index of it."""

import pytest

from gateway.limits.gpu_time import MOST_COUNTED, TOP_USED, TOP_WAITING, UNMET, GpuTimeMeter, jain_index, tier_gpu_time
from identities import identity
from scheduler.protocol.pool_view import CustomerGpuTime, GatewayStats
from scheduler.protocol.replies import Reply


def reply(cost_ms: float, queue_ms: float = 0.0) -> Reply:
    return Reply("r", "c", "n", "completed", "", 1, queue_ms, "b", 1, "w", cost_ms, 1, "v", "", cost_ms=cost_ms)


def gateway(*customers: CustomerGpuTime, total_ms: float = 0.0) -> GatewayStats:
    return GatewayStats("g", 0.0, {}, gpu_ms={"paid": total_ms}, gpu_times=list(customers))


def test_the_window_is_a_minute() -> None:
    """Costs are summed in steps of five seconds and leave exactly; requests that are not charged add nothing."""
    meter, acme = GpuTimeMeter(), identity(customer_name="acme", tier="paid")
    for second in range(121):
        meter.ran(acme, reply(0.1))
        meter.ran(acme, reply(-1.0))
        of_tiers, published = meter.heartbeat(float(second))

    assert of_tiers == {"paid": pytest.approx(6.0)}
    assert published[0].gpu_ms == meter.customer_ms("acme", "paid") == pytest.approx(6.0)
    assert meter.heartbeat(185.0) == ({}, [])


def test_memory_and_heartbeat_are_bounded() -> None:
    """Customers beyond the bound count in their tier; those that used or wait the most are published."""
    meter = GpuTimeMeter()
    for n in range(MOST_COUNTED + 100):
        meter.ran(identity(customer_name=f"c{n}", tier="paid"), reply(float(n % 50), 10.0 * (n % 70)))
    meter.unmet(identity(customer_name="c0", tier="paid"))

    of_tiers, published = meter.heartbeat(0.0)
    assert of_tiers["paid"] == sum(n % 50 for n in range(MOST_COUNTED + 100))
    assert TOP_WAITING <= len(published) <= TOP_USED + 2 * TOP_WAITING
    assert {"c0", "c49", "c69"} <= {each.name for each in published}


def test_the_id_of_a_customer_with_many_unmet_requests_is_published() -> None:
    """Others have none: heartbeats stay small."""
    meter = GpuTimeMeter()
    for n in range(UNMET + 1):
        for name in ("flood", "quiet")[: 2 if n else 1]:
            meter.unmet(identity(customer_name=name, customer_id=f"id-{name}"))
    meter.unmet(identity(customer_name="one", customer_id="id-one"))

    _, published = meter.heartbeat(0.0)
    assert {each.name: each.customer_id for each in published} == {"flood": "id-flood", "quiet": "id-quiet", "one": ""}


@pytest.mark.parametrize(
    ("values", "index"), [([], 1.0), ([3.0], 1.0), ([2.0, 2.0], 1.0), ([1.0, 0.0], 0.5), ([0.0, 0.0], 1.0)]
)
def test_jain_index(values: list[float], index: float) -> None:
    """1 if all are equal, 1/n if one has everything."""
    assert jain_index(values) == index


def test_fairness_is_that_of_customers_that_could_have_used_more() -> None:
    """Sums of all gateways per weight; a quiet customer, which waits for nothing, does not count."""
    heavy, light = (
        CustomerGpuTime("heavy", "paid", 2.0, 100.0, 0.6, 0),
        CustomerGpuTime("light", "paid", 1.0, 100.0, 0, UNMET),
    )
    quiet, other = (
        CustomerGpuTime("quiet", "paid", 1.0, 1.0, 0.1, 0),
        CustomerGpuTime("other", "free", 1.0, 9.0, 5.0, 0),
    )

    found = tier_gpu_time("paid", [gateway(heavy, quiet, total_ms=150.0), gateway(heavy, light, other, total_ms=250.0)])

    assert found.fairness == 1.0
    assert [(each.name, each.gpu_ms) for each in found.customers] == [
        ("heavy", 200.0),
        ("light", 100.0),
        ("quiet", 1.0),
    ]
    assert found.share(found.used_ms("heavy")) == 0.5
    assert tier_gpu_time("paid", [gateway(heavy, total_ms=1.0), gateway(heavy, light)]).fairness == 1.0
    starved = CustomerGpuTime("light", "paid", 1.0, 0.0, 3.0, 0)
    assert tier_gpu_time("paid", [gateway(heavy, starved), gateway(heavy)]).fairness == 0.5
