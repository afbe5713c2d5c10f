"""A minute under load in which workers, then model processes, are killed in the middle of their batches."""

import asyncio
from collections import Counter

import pytest

from faults import killed_mid_batch
from load import ALL_WELL, load, verdict
from stack import Stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


REJECTIONS = {"reduced_capacity", "shed_for_priority", "queue_full", "rate_limit_exceeded"}
"""Codes of limits for three GPUs instead of four: the request is rejected before it is accepted."""


@pytest.mark.parametrize("role", ["worker", "model"])
async def test_killed_processes_lose_nothing(chaos_stack: Stack, role: str) -> None:
    """At 70 % load one of four is killed mid-batch every two seconds: every accepted request has one answer and one row.

    Of the requests of a killed worker at least 99 % complete.
    """
    answers, killed = await asyncio.gather(
        load(chaos_stack, 0.7 * 640, 60.0, ("enterprise", "paid", "free")), killed_mid_batch(chaos_stack, role, 27, 2.0)
    )
    rejected = [a for a in answers if a.code in REJECTIONS]
    accepted = [a for a in answers if a.code not in REJECTIONS]
    rows = await chaos_stack.audited([a.request_id for a in accepted if a.request_id])
    retried = [row for row in rows.values() if row["attempts"] > 1 or row["status"] == "failed"]
    lost = [row for row in retried if row["status"] == "failed"]
    codes = Counter(a.code for a in answers)
    print(f"{role}: {len(answers)} sent, {len(rejected)} rejected, {len(retried)} retried, {len(lost)} failed, {codes}")

    assert len(set(killed)) == 27
    assert verdict(answers) == ALL_WELL | {"failed": len(rejected) + len(lost)}
    assert not any((await chaos_stack.rows([a.request_id for a in rejected if a.request_id])).values())
    assert len(retried) > 27
    assert len(lost) <= 0.01 * len(retried)
    await chaos_stack.healthy(4, timeout_s=30.0)
