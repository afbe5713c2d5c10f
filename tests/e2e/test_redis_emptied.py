"""FLUSHALL under load on a whole stack: every request is answered 200 in time and has one closed audit row."""

import asyncio

from load import ALL_WELL, load, one_row_each, verdict
from scheduler.redis_client.connections import command_client
from stack import Stack


async def test_flushall_under_load_is_not_seen_by_any_client(simulated: Stack) -> None:
    """Three times at 200 requests/s: queues, batches, leases, results and records are gone, and nobody is lost."""
    client = command_client(simulated.redis_url)
    loading = asyncio.create_task(load(simulated, 200, 5.0, ("enterprise", "paid", "free")))
    for _ in range(3):
        await asyncio.sleep(1.3)
        await client.flushall()
    await client.aclose()
    answers = await loading

    assert verdict(answers) == ALL_WELL
    await one_row_each(simulated, answers)
