"""A minute under load in which workers, then model processes, die by SIGKILL in the middle of their batches."""

import asyncio
from collections import Counter

import pytest

from faults import killed_mid_batch
from load import ALL_WELL, load, verdict
from stack import Stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


REFUSALS = {"reduced_capacity", "shed_for_priority", "queue_full", "rate_limit_exceeded"}
"""What limits say that follow three GPUs instead of four: refused before acceptance, so nothing is lost by it."""


@pytest.mark.parametrize("role", ["worker", "model"])
async def test_a_minute_of_kills_loses_nothing(chaos_stack: Stack, role: str) -> None:
    """At 70 % load one of four dies mid-batch every two seconds: what was accepted has one answer in time and one row.

    Of those whose worker was killed with them at least 99 % complete.
    """
    answers, gone = await asyncio.gather(
        load(chaos_stack, 0.7 * 640, 60.0, ("enterprise", "paid", "free")), killed_mid_batch(chaos_stack, role, 27, 2.0)
    )
    refused = [a for a in answers if a.code in REFUSALS]
    taken = [a for a in answers if a.code not in REFUSALS]
    rows = await chaos_stack.audited([a.request_id for a in taken if a.request_id])
    victims = [row for row in rows.values() if row["attempts"] > 1 or row["status"] == "failed"]
    lost = [row for row in victims if row["status"] == "failed"]
    codes = Counter(a.code for a in answers)
    print(f"{role}: {len(answers)} sent, {len(refused)} refused, {len(victims)} victims, {len(lost)} failed, {codes}")

    assert len(set(gone)) == 27
    assert verdict(answers) == ALL_WELL | {"failed": len(refused) + len(lost)}
    assert not any((await chaos_stack.rows([a.request_id for a in refused if a.request_id])).values())
    assert len(victims) > 27
    assert len(lost) <= 0.01 * len(victims)
    await chaos_stack.healthy(4, timeout_s=30.0)
