"""The retry budget of a pool: a fifth of what was accepted lately and ten a second, so that losses never snowball."""

import pytest

from pool import Pool
from scheduler.errors import ErrorCode

FULL = 100.0


async def tokens(pool: Pool) -> float:
    found = await pool.client.hget(pool.keys.retry_budget, "tokens")
    return float(found) if found else FULL


async def set_balance(pool: Pool, balance: float, age_ms: int = 0) -> None:
    """As if the balance had been this so long ago (negative: TIME went backwards since)."""
    seconds, micros = await pool.client.time()
    at = seconds * 1_000_000 + micros - age_ms * 1000
    await pool.client.hset(pool.keys.retry_budget, mapping={"tokens": balance, "at": at})
    await pool.client.pexpire(pool.keys.retry_budget, 60_000)


async def test_each_retried_member_takes_one(pool: Pool) -> None:
    """Three members run again: three tokens."""
    claimed = await pool.running(3)
    await set_balance(pool, 50.0)

    await pool.batches.fail(claimed.batch_id, claimed.token, ErrorCode.WORKER_LOST, 0)

    assert await tokens(pool) == pytest.approx(47.0, abs=0.6)  # and the little that came in meanwhile


async def test_an_accepted_request_brings_a_fifth(pool: Pool) -> None:
    """Ten accepted requests pay for two retries; what is rejected brings nothing."""
    await set_balance(pool, FULL)
    await pool.queue(10)
    await pool.admit([pool.submission(rate=0.0, burst=0.0)])

    assert await tokens(pool) == pytest.approx(102.0, abs=0.1)


async def test_a_request_that_is_told_again_brings_nothing(pool: Pool) -> None:
    """It brought its share when it was accepted first."""
    await set_balance(pool, FULL)

    await pool.admit([pool.submission(again=True)])

    assert await tokens(pool) == FULL


async def test_without_budget_a_batch_ends(pool: Pool) -> None:
    """When whole fleets die, retries would only double the load: the members end at once, and are no dead letters."""
    claimed = await pool.running(2)
    await set_balance(pool, 0.0)

    assert await pool.batches.fail(claimed.batch_id, claimed.token, ErrorCode.GPU_TIMEOUT, 0) is True

    replies = await pool.results.fetch([r.id for r in claimed.requests])
    assert [r.error_code for r in replies if r] == ["worker_lost"] * 2
    assert await pool.letters() == []
    assert await pool.pop() is None
    assert await pool.inflight() == {}
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_what_is_left_goes_to_the_oldest(pool: Pool) -> None:
    """A budget of two lets two of four run again."""
    claimed = await pool.running(4)
    await set_balance(pool, 2.0)

    await pool.reaped()

    assert await pool.states([r.id for r in claimed.requests]) == ["processing"] * 2 + ["failed"] * 2
    assert [r.id for r in (await pool.claim_next()).requests] == [r.id for r in claimed.requests[:2]]


@pytest.mark.parametrize("balance", [0.0, 1000.0])
async def test_old_credit_and_old_debt_fade(pool: Pool, balance: float) -> None:
    """After a minute the balance is what ten a second leave, whatever it was; ten seconds take it most of the way."""
    await set_balance(pool, balance, age_ms=60_000)
    await pool.queue(1)
    assert await tokens(pool) == pytest.approx(FULL, abs=3)

    await set_balance(pool, balance, age_ms=10_000)
    await pool.queue(1)
    assert await tokens(pool) == pytest.approx(FULL + (balance - FULL) * 0.37, abs=5)


async def test_a_clock_that_went_backwards_neither_gives_nor_takes(pool: Pool) -> None:
    """The balance stays, and moves on from the new time."""
    await set_balance(pool, 10.0, age_ms=-3_600_000)

    await pool.queue(5)

    assert await tokens(pool) == pytest.approx(11.0)
    seconds, _ = await pool.client.time()
    assert float(await pool.client.hget(pool.keys.retry_budget, "at")) / 1e6 == pytest.approx(seconds, abs=5)


async def test_the_budget_is_forgotten_when_it_says_nothing_more(pool: Pool) -> None:
    """A missing balance counts as full, so it needs to be kept only until then."""
    await pool.queue(1)

    assert 0 < await pool.client.pttl(pool.keys.retry_budget) <= 60_000
