"""Overshoot zero, the short story: two gateways on one port, one key of 100/s and burst 20, six seconds."""

from collections.abc import Iterator

import pytest

from admin import add_customer, known
from overshoot import always, entered, gateways_of, hammer, judge, never_over
from stack import Stack, start_stack

RATE, BURST = 100.0, 20.0
CAN_SERVE = ("--backend", "simulated:10", "--workers", "2")  # Far more than the key may ask for.


@pytest.fixture(scope="module")
def two_gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways that share a port, before GPUs that are bored."""
    with start_stack(tmp_path_factory.mktemp("two"), *CAN_SERVE, "--gateways", "2") as stack:
        yield stack


async def test_two_gateways_admit_what_one_bucket_holds(two_gateways: Stack) -> None:
    """Six seconds of 16 connections over both: never more than burst + rate x time, and not much less."""
    limits = {"requests_per_second": RATE, "burst": BURST, "max_concurrency": 1000}
    customer = await add_customer(two_gateways, "hammered", "paid", **limits)
    await known(customer, two_gateways.url, times=10)

    seen = await hammer(two_gateways, customer, connections=16, seconds=6.0)
    found = await entered(two_gateways, customer)
    finding = judge(seen, found, BURST, always(RATE))
    print(finding.told("two gateways"))

    assert finding.sent > 3 * finding.admitted
    never_over(finding, seen, found, RATE)
    assert finding.admitted == finding.completed > 0.9 * finding.bound
    assert set(seen.refused) == {"rate_limit_exceeded"}
    assert len(await gateways_of(two_gateways, seen.completed)) == 2
