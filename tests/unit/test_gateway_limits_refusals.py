"""Customers whose requests the model refuses: counted by gateway, united over all, and judged."""

from collections.abc import Sequence

import pytest

from gateway.limits.refusals import MOST_COUNTED, MOST_PUBLISHED, RefusalMeter, Refusals, refusals_of
from scheduler.protocol.pool_view import GatewayStats


def gateway(served: Sequence[str] = (), refused: Sequence[str] = (), times: int = 3) -> GatewayStats:
    """A heartbeat after these answers and refusals."""
    meter = RefusalMeter()
    for customer in served:
        meter.served(customer)
    for customer in refused:
        for _ in range(times):
            meter.refused(customer)
    numbers = meter.heartbeat(1.0)
    return GatewayStats("g", 0.0, {}, refused=numbers[0], served=numbers[1])


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
    assert [len(each) for each in meter.heartbeat(1.0)] == [MOST_PUBLISHED] * 2
    assert [len(each) for each in meter.heartbeat(6.0)] == [MOST_PUBLISHED] * 2
    assert meter.heartbeat(11.0) == ([], [])
