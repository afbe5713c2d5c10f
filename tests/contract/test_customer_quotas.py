"""Quotas of requests of a customer: windows, counts, retry times, lifetimes."""

import pytest

from contract.builders import CUSTOMER, accept, admit, outcomes, spent
from pool import Pool
from scheduler.errors import ErrorCode
from scheduler.states import Admission


async def test_a_quota_keeps_its_count_when_the_amount_changes(pool: Pool) -> None:
    """Another amount of the same period continues the count; another period begins at 0."""
    assert await admit(pool, 3, quotas=[("1day", 2)]) == ["accepted", "accepted", "quota"]

    raised = await pool.admit([pool.submission(quotas=[("1day", 3)]) for _ in range(2)])
    assert outcomes(raised) == ["accepted", "quota"]
    assert [v.left.quotas[0][0] for v in raised] == [0, 0]
    assert await admit(pool, quotas=[("1day", 1)]) == ["quota"]
    assert await admit(pool, quotas=[("1month", 1)]) == ["accepted"]


async def test_all_quotas_apply_and_a_rejection_counts_in_none(pool: Pool) -> None:
    """The smaller quota rejects with the end of its window; the larger one is not charged."""
    verdicts = await pool.admit([pool.submission(quotas=[("1day", 1), ("1month", 5)]) for _ in range(3)])

    assert outcomes(verdicts) == ["accepted", "quota", "quota"]
    assert [q[0] for q in verdicts[2].left.quotas] == [0, 4]
    day_ms, month_ms = (q[1] for q in verdicts[0].left.quotas)
    assert 0 < day_ms <= min(86_400_000, month_ms) <= 31 * 86_400_000
    assert verdicts[1].retry_after_ms == pytest.approx(day_ms, abs=5000)
    assert await pool.client.pttl(CUSTOMER) >= month_ms


async def test_the_retry_time_of_two_used_quotas_is_the_later_end(pool: Pool) -> None:
    """Regression: the end of the day does not help while the year's quota is used."""
    verdicts = await pool.admit([pool.submission(quotas=[("1day", 1), ("1year", 1)]) for _ in range(2)])

    assert verdicts[1].outcome is Admission.QUOTA
    assert verdicts[1].retry_after_ms == verdicts[1].left.quotas[1][1]


async def test_a_new_window_begins_at_zero(pool: Pool) -> None:
    """The count of a past window does not apply to the current one."""
    await admit(pool, 2, quotas=[("1day", 2)])
    window, count = (await pool.client.hget(CUSTOMER, "q:1day")).split()
    assert count == b"2"
    await pool.client.hset(CUSTOMER, "q:1day", f"{int(window) - 1} 2")

    assert await admit(pool, 3, quotas=[("1day", 2)]) == ["accepted", "accepted", "quota"]


async def test_a_refund_does_not_change_a_new_window(pool: Pool) -> None:
    """The request was counted in a window that has ended."""
    request = await accept(pool, quotas=[("1day", 2)])
    window, _ = (await pool.client.hget(CUSTOMER, "q:1day")).split()
    await pool.client.hset(CUSTOMER, "q:1day", f"{int(window) + 1} 2")

    await pool.terminations.cancel([(request.id, ErrorCode.WORKER_LOST)])

    assert await spent(pool, "1day") == b"2"


async def test_a_gateway_without_the_quota_does_not_shorten_its_lifetime(pool: Pool) -> None:
    """Regression: a gateway that did not know a new quota yet wrote the hash with a shorter TTL."""
    await admit(pool, 2, quotas=[("1year", 2)])
    before = await pool.client.pttl(CUSTOMER)

    await admit(pool)

    assert await pool.client.pttl(CUSTOMER) >= before - 60_000
