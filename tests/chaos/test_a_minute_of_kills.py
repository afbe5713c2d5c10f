"""A minute under load in which workers, then model processes, die by SIGKILL in the middle of their batches."""

import asyncio

import pytest

from faults import killed_mid_batch
from load import ALL_WELL, load, one_row_each, verdict
from stack import Stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


@pytest.mark.parametrize("role", ["worker", "model"])
async def test_a_minute_of_kills_loses_nothing(chaos_stack: Stack, role: str) -> None:
    """At 70 % load one of four dies mid-batch every two seconds: each request has one answer in time and one row."""
    answers, gone = await asyncio.gather(
        load(chaos_stack, 0.7 * 640, 60.0, ("enterprise", "paid", "free")), killed_mid_batch(chaos_stack, role, 27, 2.0)
    )

    assert len(set(gone)) == 27
    assert verdict(answers) == ALL_WELL
    assert await one_row_each(chaos_stack, answers) > 0
    await chaos_stack.healthy(4, timeout_s=30.0)
