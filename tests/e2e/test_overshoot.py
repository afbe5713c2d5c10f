"""Two gateways on one port enforce the limit of one key together."""

from pathlib import Path

from admin import add_customer, known
from overshoot import always, entered, gateways_of, hammer, judge, never_over
from stack import start_stack

RATE, BURST = 100.0, 20.0


async def test_two_gateways_accept_what_one_bucket_holds(tmp_path: Path) -> None:
    """Six seconds on 16 connections: never more than burst + rate x time are accepted, and not much less."""
    options = ("--backend", "simulated:10", "--workers", "2", "--gateways", "2")
    with start_stack(tmp_path, *options) as stack:
        limits = {"requests_per_second": RATE, "burst": BURST, "max_concurrency": 1000}
        customer = await add_customer(stack, "hammered", "paid", **limits)
        await known(customer, stack.url, times=10)

        seen = await hammer(stack, customer, connections=16, seconds=6.0)
        found = await entered(stack, customer)
        finding = judge(seen, found, BURST, always(RATE))

        assert finding.sent > finding.bound
        never_over(finding, seen, found, RATE)
        assert finding.admitted == finding.completed > 0.9 * finding.bound
        assert set(seen.refused) == {"rate_limit_exceeded"}
        assert len(await gateways_of(stack, seen.completed)) == 2
