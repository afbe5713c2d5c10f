"""Step 6: the limits of a customer.

ratelimit/limits.py lists them. A customer has those of its tier, unless its own row has others; `stack.catalog` replaces the
tables of PostgreSQL. A rejected request is not queued and not charged.
"""

import asyncio

from integration.gateway_fixtures import Stack, accepted, stack

__all__ = ["stack"]


async def test_over_its_rate_a_customer_has_to_wait(stack: Stack) -> None:
    """A bucket of eight requests that is used for the first time holds a quarter of them; it fills at one in 50 s."""
    stack.catalog.set(key={"requests_per_second": 0.02, "burst": 8.0})

    responses = [await stack.infer() for _ in range(3)]

    assert [status for status, _, _ in responses] == [200, 200, 429]
    _, document, headers = responses[-1]
    assert document["error"]["code"] == "rate_limit_exceeded"
    assert document["error"]["message"].startswith("The rate limit of this account, 0.02 requests/s (burst 8)")
    assert int(headers["retry-after"]) > 30
    assert len(stack.worker.seen) == 2


async def test_concurrency_counts_until_a_request_ends(stack: Stack) -> None:
    """The second request is rejected while the first one is queued or runs; after its end there is a free place."""
    stack.catalog.set(key={"max_concurrency": 1})
    stack.worker.hold = True
    first = asyncio.create_task(stack.infer())
    await accepted(stack)

    _, document, _ = await stack.infer()
    stack.worker.hold = False

    assert document["error"]["message"].startswith("The concurrency limit of this account, 1 requests at a time")
    assert (await first)[0] == 200
    assert (await stack.infer())[0] == 200
