"""Overshoot zero: four gateways hammering one key of 100/s and burst 20 for half a minute, in calm and in trouble."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from admin import NewCustomer, add_customer, known, sql
from eventually import eventually
from overshoot import InForce, always, entered, gateways_of, hammer, judge, never_over
from stack import Stack, start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

RATE, BURST = 100.0, 20.0
SECONDS, CONNECTIONS = 30.0, 24
CHANGES = (20.0, 200.0, 50.0, 150.0, 20.0, 120.0, 200.0, 35.0, 180.0, 60.0)
OBEYED_MS = 1000.0  # A gateway may hold the old rate so long after the change was committed.
CAN_SERVE = ("--backend", "simulated:10", "--workers", "2")  # Far more than the key may ask for.


@pytest.fixture(scope="module")
def four_gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Four gateways that share a port, before GPUs that are bored."""
    with start_stack(tmp_path_factory.mktemp("four"), *CAN_SERVE, "--gateways", "4") as stack:
        yield stack


async def hammered_customer(stack: Stack, name: str) -> NewCustomer:
    """A new customer with a full bucket that all four gateways know."""
    await stack.healthy(2)
    limits = {"requests_per_second": RATE, "burst": BURST, "max_concurrency": 1000}
    customer = await add_customer(stack, name, "paid", **limits)
    await known(customer, stack.url, times=30)
    return customer


async def test_four_gateways_admit_what_one_bucket_holds(four_gateways: Stack) -> None:
    """Never more than burst + rate x time, in any stretch of the half minute, and hardly less."""
    customer = await hammered_customer(four_gateways, "calm")
    seen = await hammer(four_gateways, customer, CONNECTIONS, SECONDS)
    found = await entered(four_gateways, customer)
    finding = judge(seen, found, BURST, always(RATE))
    print(finding.told("calm"), dict(seen.refused))

    assert finding.sent > 5 * finding.admitted
    never_over(finding, seen, found, RATE)
    assert finding.admitted == finding.completed > 0.95 * finding.bound
    assert set(seen.refused) == {"rate_limit_exceeded"}
    assert len(await gateways_of(four_gateways, seen.completed)) == 4


async def changed(stack: Stack, customer: NewCustomer) -> list[InForce]:
    """Ten rates one after the other; when each could be in force anywhere.

    One that is set may hold from the moment at which its UPDATE is sent; the one before it until a second after the
    commit. Redis and this test run on one machine, so their clocks are one.
    """
    rates, rate, since = [], RATE, 0.0
    for new in CHANGES:
        await asyncio.sleep(SECONDS / (len(CHANGES) + 1))
        sent = time.time() * 1000
        await sql(stack, "UPDATE customers SET requests_per_second = $1 WHERE name = $2", new, customer.name)
        rates.append(InForce(since, time.time() * 1000 + OBEYED_MS, rate))
        rate, since = new, sent
    return [*rates, InForce(since, float("inf"), rate)]


async def test_ten_changed_rates_admit_no_more_than_the_highest_in_force(four_gateways: Stack) -> None:
    """Whatever the rate was told meanwhile: a lowered one is obeyed by all within a second, and none gives for the past."""
    customer = await hammered_customer(four_gateways, "changed")
    changing = asyncio.create_task(changed(four_gateways, customer))
    seen = await hammer(four_gateways, customer, CONNECTIONS, SECONDS)
    rates = await changing
    found = await entered(four_gateways, customer)
    finding = judge(seen, found, BURST, rates)
    moments = sorted(found.at_ms.values())
    lowest = sum(
        (min(r.until_ms - OBEYED_MS, moments[-1]) - max(r.since_ms, moments[0])) / 1000 * r.rate for r in rates
    )
    print(finding.told("rate changed ten times"), f"the rates alone give {lowest:.0f}")

    never_over(finding, seen, found, max(CHANGES))
    assert finding.admitted > 0.7 * lowest  # A rate that rises is obeyed later, and gives nothing for the time before.
    assert set(seen.refused) == {"rate_limit_exceeded"}


async def killed_in_turn(stack: Stack, until: float) -> list[int]:
    """SIGKILL of one gateway after the other; `up` starts each again."""
    gone: list[int] = []
    while time.monotonic() < until:
        await asyncio.sleep(3.0)
        name = f"gateway-{len(gone) % 4 + 1}"
        pid = await eventually(lambda name=name: stack.pids("gateway").get(name), f"{name} runs", 10.0)
        os.kill(pid, signal.SIGKILL)
        gone.append(pid)
    return gone


async def test_killed_gateways_admit_no_more(four_gateways: Stack) -> None:
    """What a gateway had spent stays spent, and what it was paid back for is counted once."""
    customer = await hammered_customer(four_gateways, "killed")
    killing = asyncio.create_task(killed_in_turn(four_gateways, time.monotonic() + SECONDS - 5.0))
    seen = await hammer(four_gateways, customer, CONNECTIONS, SECONDS)
    gone = await killing
    found = await entered(four_gateways, customer)
    finding = judge(seen, found, BURST, always(RATE))
    print(finding.told(f"{len(gone)} gateways killed"), f"{len(found.given_back)} given back", dict(seen.refused))

    assert len(set(gone)) == len(gone) >= 7
    never_over(finding, seen, found, RATE)
    assert finding.admitted > 0.8 * finding.bound
    assert len(await gateways_of(four_gateways, seen.completed)) > 4  # Some of them were started again.
    await eventually(lambda: len(four_gateways.pids("gateway")) == 4, "four gateways", 15.0)
