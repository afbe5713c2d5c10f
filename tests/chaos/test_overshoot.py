"""No overshoot: four gateways serve one key with 100/s and burst 20 far above its limit, also during faults."""

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
OBEYED_MS = 1000.0  # For this long after the commit a gateway may use the old rate.
CAN_SERVE = ("--backend", "simulated:10", "--workers", "2")  # Far more than the limit of the key.


@pytest.fixture(scope="module")
def four_gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Four gateways that share a port, before mostly idle GPUs."""
    with start_stack(tmp_path_factory.mktemp("four"), *CAN_SERVE, "--gateways", "4") as stack:
        yield stack


async def hammered_customer(stack: Stack, name: str) -> NewCustomer:
    """A new customer with a full bucket, known to all four gateways."""
    await stack.healthy(2)
    limits = {"requests_per_second": RATE, "burst": BURST, "max_concurrency": 1000}
    customer = await add_customer(stack, name, "paid", **limits)
    await known(customer, stack.url, times=30)
    return customer


async def test_four_gateways_admit_what_one_bucket_holds(four_gateways: Stack) -> None:
    """At most burst + rate x time in any interval, and at least 95 % of it."""
    customer = await hammered_customer(four_gateways, "calm")
    sent = await hammer(four_gateways, customer, CONNECTIONS, SECONDS)
    admitted = await entered(four_gateways, customer)
    finding = judge(sent, admitted, BURST, always(RATE))
    print(finding.told("calm"), dict(sent.refused))

    assert finding.sent > 5 * finding.admitted
    never_over(finding, sent, admitted, RATE)
    assert finding.admitted == finding.completed > 0.95 * finding.bound
    assert set(sent.refused) == {"rate_limit_exceeded"}
    assert len(await gateways_of(four_gateways, sent.completed)) == 4


async def changed(stack: Stack, customer: NewCustomer) -> list[InForce]:
    """Set ten rates one after the other; returns when each may have been in force.

    A rate may be in force from the UPDATE until a second after the commit of the next one. Redis and this test share
    the clock of the machine.
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
    """All gateways apply a lower rate within a second, and a higher rate adds no tokens for the past."""
    customer = await hammered_customer(four_gateways, "changed")
    changing = asyncio.create_task(changed(four_gateways, customer))
    sent = await hammer(four_gateways, customer, CONNECTIONS, SECONDS)
    rates = await changing
    admitted = await entered(four_gateways, customer)
    finding = judge(sent, admitted, BURST, rates)
    moments = sorted(admitted.at_ms.values())
    lowest = sum(
        (min(r.until_ms - OBEYED_MS, moments[-1]) - max(r.since_ms, moments[0])) / 1000 * r.rate for r in rates
    )
    print(finding.told("rate changed ten times"), f"the rates alone give {lowest:.0f}")

    never_over(finding, sent, admitted, max(CHANGES))
    assert finding.admitted > 0.7 * lowest  # A higher rate counts only from the time at which it is applied.
    assert set(sent.refused) == {"rate_limit_exceeded"}


async def killed_in_turn(stack: Stack, until: float) -> list[int]:
    """Kill one gateway after the other; `tierlane up` restarts them."""
    killed: list[int] = []
    while time.monotonic() < until:
        await asyncio.sleep(3.0)
        name = f"gateway-{len(killed) % 4 + 1}"
        pid = await eventually(lambda name=name: stack.pids("gateway").get(name), f"{name} runs", 10.0)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    return killed


async def test_killed_gateways_admit_no_more(four_gateways: Stack) -> None:
    """Tokens that a killed gateway spent stay spent, and refunds count once."""
    customer = await hammered_customer(four_gateways, "killed")
    killing = asyncio.create_task(killed_in_turn(four_gateways, time.monotonic() + SECONDS - 5.0))
    sent = await hammer(four_gateways, customer, CONNECTIONS, SECONDS)
    killed = await killing
    admitted = await entered(four_gateways, customer)
    finding = judge(sent, admitted, BURST, always(RATE))
    print(finding.told(f"{len(killed)} gateways killed"), f"{len(admitted.given_back)} refunded", dict(sent.refused))

    assert len(set(killed)) == len(killed) >= 7
    never_over(finding, sent, admitted, RATE)
    assert finding.admitted > 0.8 * finding.bound
    assert len(await gateways_of(four_gateways, sent.completed)) > 4  # Restarted gateways have new names.
    await eventually(lambda: len(four_gateways.pids("gateway")) == 4, "four gateways", 15.0)
