"""Customers whose requests the model refuses: counted by gateway, united over all, and judged."""

from collections.abc import Sequence

import pytest

from gateway.limits.refusals import (
    MOST_COUNTED,
    MOST_PUBLISHED,
    RefusalMeter,
    Refusals,
    failing_customer,
    refusals_of,
)
from scheduler.protocol.pool_view import GatewayStats


def gateway(
    served: Sequence[str] = (), refused: Sequence[str] = (), times: int = 3, failed: Sequence[str] = ()
) -> GatewayStats:
    """A heartbeat after these answers, refusals and failures."""
    meter = RefusalMeter()
    for customer in served:
        meter.served(customer)
    for customer in refused:
        for _ in range(times):
            meter.refused(customer)
    for customer in failed:
        meter.failed(customer, f"name of {customer}")
    found = meter.heartbeat(1.0)
    return GatewayStats("g", 0.0, {}, refused=found[0], served=found[1], failed=found[2])


@pytest.mark.parametrize(
    ("gateways", "found", "by_model"),
    [
        ([gateway(refused="ab")], Refusals(2, 0), True),
        ([gateway(refused="ab", times=2)], Refusals(0, 0), False),  # No evidence yet.
        ([gateway(refused="a")], Refusals(1, 0), False),  # One customer can be at fault alone.
        ([gateway(refused="a"), gateway(refused="a")], Refusals(1, 0), False),
        ([gateway(refused="a"), gateway(refused="b")], Refusals(2, 0), True),
        ([gateway(refused="ab"), gateway(served="b")], Refusals(1, 1), False),
        ([gateway(served="cde", refused="ab")], Refusals(2, 3), False),
        ([gateway(served="ab", refused="ab", times=4)], Refusals(0, 2), False),
        ([gateway(served="ab", refused="ab", times=5)], Refusals(2, 0), True),  # The answers were before that.
        ([], Refusals(0, 0), False),
    ],
)
def test_refusals_of_many_customers_are_the_models(
    gateways: list[GatewayStats], found: Refusals, *, by_model: bool
) -> None:
    """Of at least two customers, and of half of all; a customer that any gateway served is not refused."""
    assert (refusals_of(gateways), refusals_of(gateways).by_model) == (found, by_model)


def test_old_refusals_are_forgotten_and_customers_are_bounded() -> None:
    """After five to ten seconds; a customer's own requests do not make room for more."""
    meter = RefusalMeter()
    for number in range(2 * MOST_COUNTED):
        for _ in range(3):
            meter.refused(str(number))
        meter.served(f"s{number}")
        meter.failed(str(number), "")
    assert [len(each) for each in meter.heartbeat(1.0)] == [MOST_PUBLISHED] * 3
    assert [len(each) for each in meter.heartbeat(6.0)] == [MOST_PUBLISHED] * 3
    assert meter.heartbeat(11.0) == ([], [], [])


@pytest.mark.parametrize(
    ("gateways", "name"),
    [
        ([gateway(served="b", failed="aaaaa")], "name of a"),
        ([gateway(served="b", failed="aaaa")], ""),  # No evidence yet.
        ([gateway(failed="aaaa"), gateway(served="c", failed="a")], "name of a"),
        ([gateway(served="a", failed="aaaaa")], ""),  # No other is answered.
        ([gateway(served="bc", failed="aaaaab")], ""),  # Others fail too.
        ([], ""),
    ],
)
def test_failures_of_one_customer_are_its_inputs(gateways: list[GatewayStats], name: str) -> None:
    """Nearly all failures are its own, while another one is answered."""
    assert failing_customer(gateways) == name
