"""Figures of all gateways: the fill of batches and the customers with the most requests."""

import pytest

from gateway.limits.top_customers import MOST_COUNTED, SPAN_S, TOP_CUSTOMERS, TopCustomers
from gateway.metrics.counters import Counters
from gateway.operations.dashboard.state import MAX_CUSTOMERS, CustomerState, batch_fill, top_customers
from scheduler.protocol.pool_view import CustomerGpuTime, CustomerRate, GatewayStats
from scheduler.protocol.replies import Reply


def stats(*busiest: CustomerRate) -> GatewayStats:
    return GatewayStats("g", 0.0, {}, busiest=list(busiest))


@pytest.mark.parametrize(("batches", "filled", "fill"), [(0.0, 0.0, None), (16.0, 12.0, 0.75), (1.0, 1.001, 1.0)])
def test_batch_fill(batches: float, filled: float, fill: float | None) -> None:
    """It is None where no batch ran."""
    assert batch_fill(filled, batches) == fill


def test_top_customers_of_all_gateways() -> None:
    """Rates are added up by name and tier, and the list is short."""
    first = [CustomerRate("acme", "paid", 4.0), CustomerRate("zeta", "free", 9.0)]
    second = [CustomerRate("acme", "paid", 7.0), CustomerRate("acme", "free", 1.0)]

    assert top_customers([stats(*first), stats(*second)]) == [
        CustomerState("acme", "paid", 11.0),
        CustomerState("zeta", "free", 9.0),
        CustomerState("acme", "free", 1.0),
    ]
    timed = GatewayStats(
        "g", 0.0, {}, gpu_ms={"free": 40.0}, gpu_times=[CustomerGpuTime("zeta", "free", 1, 30.0, 0, 0)]
    )
    assert top_customers([stats(*first), timed])[0] == CustomerState("zeta", "free", 9.0, 30.0, 0.75)
    many = [CustomerRate(f"c{n}", "free", float(n)) for n in range(9)]
    assert len(top_customers([stats(*many)])) == MAX_CUSTOMERS


def test_the_rate_of_a_customer_rises_and_decays() -> None:
    """A steady customer reaches its rate; an inactive one leaves the list; two heartbeats at one time are harmless."""
    counter = TopCustomers()
    counter.count("acme", "free")
    assert counter.heartbeat(0.0) == []
    for _ in range(200):
        for _ in range(5):
            counter.count("acme", "free")
        rates = counter.heartbeat(0.25)
    assert rates == [CustomerRate("acme", "free", 20.0)]
    (fading,) = counter.heartbeat(SPAN_S)
    assert fading.rps == pytest.approx(20.0 / 2.718, abs=0.01)

    assert counter.heartbeat(10 * SPAN_S) == []


def test_memory_is_bounded_for_many_customers() -> None:
    """The busiest customer is kept, and the heartbeat stays small."""
    counter = TopCustomers()
    for n in range(MOST_COUNTED + 500):
        counter.count(f"c{n}", "free")
    for _ in range(9):
        counter.count("c7", "free")
    rates = counter.heartbeat(0.25)

    assert (len(rates), rates[0].name) == (TOP_CUSTOMERS, "c7")
    assert len(counter.heartbeat(0.25)) == TOP_CUSTOMERS


def test_batches_are_counted_from_replies() -> None:
    """Each request of a batch of n counts 1/n; the fill needs the known size of a full batch."""
    counters = Counters()
    reply = Reply("r", "acme", "n", "completed", "", 1, 1.0, "b", 4, "w", 50.0, 5, "v1", "o")
    counters.ran("free", "/v1/inference", "default", "tiny", reply)
    counters.full_batches({("default", "tiny"): 8})
    for _ in range(6):
        counters.ran("free", "/v1/inference", "default", "tiny", reply)
        counters.ran("free", "/v1/inference", "other", "tiny", reply)

    assert counters.batches("default") == (1.5, 0.75)
    assert counters.batches("other") == (0.0, 0.0)
