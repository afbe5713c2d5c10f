"""What gateways tell together: the fill of batches, and the customers that ask most, counted here and added up there."""

import pytest

from gateway.limits.demand import KEPT, MOST_COUNTED, SPAN_S, TOP_CUSTOMERS, TopCustomers
from gateway.metrics.counters import Counters
from gateway.operations.state import MAX_CUSTOMERS, batch_fill, top_customers
from scheduler.protocol.pool_view import CustomerRate, GatewayStats
from scheduler.protocol.replies import Reply


def stats(name: str, batches: float = 0.0, filled: float = 0.0, *asking: CustomerRate) -> GatewayStats:
    return GatewayStats(name, 0.0, {}, batches_per_second=batches, filled_per_second=filled, busiest=list(asking))


@pytest.mark.parametrize(
    ("told", "fill"),
    [
        ([], None),
        ([(0.0, 0.0)], None),
        ([(4.0, 1.0)], 0.25),
        ([(4.0, 1.0), (12.0, 11.0)], 0.75),  # By batches, not by gateways.
        ([(1.0, 1.001)], 1.0),
    ],
)
def test_the_fill_of_batches_is_that_of_all_gateways(told: list[tuple[float, float]], fill: float | None) -> None:
    """None where no batch ran: nothing is not empty."""
    assert batch_fill([stats("g", *each) for each in told]) == fill


def test_customers_are_added_up_over_gateways_and_few_are_shown() -> None:
    """The same name in two tiers is two: a request may have lowered its tier."""
    first = [CustomerRate("acme", "paid", 4.0), CustomerRate("zeta", "free", 9.0)]
    second = [CustomerRate("acme", "paid", 7.0), CustomerRate("acme", "free", 1.0)]

    assert top_customers([stats("g1", 0.0, 0.0, *first), stats("g2", 0.0, 0.0, *second)]) == [
        ("acme", "paid", 11.0),
        ("zeta", "free", 9.0),
        ("acme", "free", 1.0),
    ]
    many = [CustomerRate(f"c{n}", "free", float(n)) for n in range(9)]
    assert len(top_customers([stats("g1", 0.0, 0.0, *many)])) == MAX_CUSTOMERS


def test_a_steady_customer_comes_to_its_rate_and_leaves_the_list_when_it_is_gone() -> None:
    """Over about five seconds either way."""
    counter = TopCustomers()
    for _ in range(200):
        for _ in range(5):
            counter.count("acme", "free")
        told = counter.heartbeat(0.25)
    assert told == [CustomerRate("acme", "free", 20.0)]
    (fading,) = counter.heartbeat(SPAN_S)
    assert fading.rps == pytest.approx(20.0 / 2.718, abs=0.01)

    assert counter.heartbeat(10 * SPAN_S) == []


def test_of_very_many_customers_few_are_kept() -> None:
    """Who asks most is among them; memory and the heartbeat stay small."""
    counter = TopCustomers()
    for n in range(MOST_COUNTED + 500):
        counter.count(f"c{n}", "free")
    for _ in range(9):
        counter.count("c7", "free")
    told = counter.heartbeat(0.25)

    assert (len(told), told[0].name) == (TOP_CUSTOMERS, "c7")
    assert len(counter.heartbeat(0.25)) == TOP_CUSTOMERS
    assert KEPT < MOST_COUNTED


def test_a_beat_without_time_says_nothing_new() -> None:
    """Two at one moment of the clock divide by nothing."""
    counter = TopCustomers()
    counter.count("acme", "free")

    assert counter.heartbeat(0.0) == []


def test_batches_are_counted_from_their_answers() -> None:
    """Each request of a batch of n is 1/n of it; where a full batch is not known yet it does not count; others' pools neither."""
    counters = Counters()
    reply = Reply("r", "acme", "n", "completed", "", 1, 1.0, "b", 4, "w", 50.0, 5, "v1", "o")
    counters.ran("free", "default", "tiny", reply)
    counters.full_batches({("default", "tiny"): 8})
    for _ in range(6):
        counters.ran("free", "default", "tiny", reply)
        counters.ran("free", "other", "tiny", reply)

    assert counters.batches("default") == (1.5, 0.75)
    assert counters.batches("other") == (0.0, 0.0)
