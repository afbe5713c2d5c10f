"""`form_batch` with a budget of tokens: what a batch may cost, who goes together, and who is not passed over for ever."""

from collections.abc import Sequence

import pytest

from pool import TIERS, Pool

TOKENS = 100


async def waiting(pool: Pool, lengths: Sequence[int], tier: str = "free") -> list[str]:
    """A request of each length, in tokens, oldest first."""
    return [(await pool.queue(1, tier, body=b"x" * 4 * length))[0] for length in lengths]


async def formed(
    pool: Pool, picks: Sequence[tuple[str, int]], budget: int = TOKENS, aged_ms: float = 1000
) -> list[str]:
    """The ids of the next batch, oldest first a tier."""
    batch_id = f"batch-{await pool.client.incr('budget-tests')}"
    await pool.client.expire("budget-tests", 60)
    await pool.batches.form(batch_id, picks, 100, TIERS, max_tokens=budget, aged_ms=aged_ms)
    lists = await pool.inflight()
    return [i for tier, _ in picks for i in lists.get(f"inflight:{tier}:{batch_id}", [])]


@pytest.mark.parametrize(
    ("lengths", "members"),
    [
        ([30, 30, 30, 30], [0, 1, 2]),  # three times 30 is within 100
        ([10, 10, 50, 10], [0, 1, 3]),  # two of 50 would be, four would not: the shorter ones are padded
        ([500, 10, 10], [0]),  # over the budget by itself: alone
        ([10, 500, 10], [0, 2]),  # and never together with others
        ([25, 25, 25, 25], [0, 1, 2, 3]),
        ([100, 100], [0]),
    ],
)
async def test_a_batch_costs_its_members_times_the_longest(pool: Pool, lengths: list[int], members: list[int]) -> None:
    """No batch is over the budget but one of a single request; what does not fit stays."""
    ids = await waiting(pool, lengths)

    assert await formed(pool, [("free", 8)]) == [ids[i] for i in members]


async def test_what_stays_keeps_its_place(pool: Pool) -> None:
    """Those that were looked at and left stand at the head as before, oldest first."""
    ids = await waiting(pool, [10, 90, 10, 95, 10])

    assert await formed(pool, [("free", 3)]) == [ids[0], ids[2], ids[4]]
    assert await formed(pool, [("free", 3)]) == [ids[1]]
    assert await formed(pool, [("free", 3)]) == [ids[3]]


async def test_similar_lengths_go_together(pool: Pool) -> None:
    """With more waiting than places, those like the oldest go with it, oldest first among them."""
    ids = await waiting(pool, [100, 10, 110, 12, 95, 11])

    assert await formed(pool, [("free", 3)], budget=10_000) == [ids[0], ids[2], ids[4]]
    assert await formed(pool, [("free", 3)], budget=10_000) == [ids[1], ids[3], ids[5]]


async def test_the_oldest_always_goes(pool: Pool) -> None:
    """However unlike the others it is: each batch takes the head of the line, so nobody is passed over for ever."""
    ids = await waiting(pool, [90, *[5] * 20])

    assert (await formed(pool, [("free", 4)]))[0] == ids[0]


async def test_who_has_waited_long_is_not_passed_over(pool: Pool) -> None:
    """From that age on the length no longer matters, only the budget."""
    ids = await waiting(pool, [10, 80, 10, 10, 10])
    await pool.aged(ids[:2], 1500)

    assert await formed(pool, [("free", 2)], budget=1000) == ids[:2]


async def test_a_higher_tier_goes_first(pool: Pool) -> None:
    """Places and budget are the higher tier's first, whatever length the others have."""
    free = await waiting(pool, [10, 10, 10])
    paid = await waiting(pool, [40, 40], "paid")

    assert await formed(pool, [("paid", 2), ("free", 3)]) == paid
    assert await formed(pool, [("free", 3)]) == free


async def test_a_long_one_of_a_lower_tier_has_its_turn(pool: Pool) -> None:
    """Beside a stream of a higher tier it would never fit: once it has waited long, the batch is built around it."""
    (long,) = await waiting(pool, [90])
    await pool.aged([long], 1500)
    paid = await waiting(pool, [10, 10], "paid")

    assert await formed(pool, [("paid", 2), ("free", 1)]) == [long]
    assert await formed(pool, [("paid", 2), ("free", 1)]) == paid


async def test_what_is_looked_at_is_bounded(pool: Pool) -> None:
    """Twice the places: a similar one far behind in the line is not searched for."""
    ids = await waiting(pool, [10, 90, 90, 90, 10])

    assert await formed(pool, [("free", 2)], budget=1000) == ids[:2]
    assert await pool.depth("free") == 3


async def test_every_member_is_accounted_for(pool: Pool) -> None:
    """Over many batches of mixed lengths each request is in exactly one, and none is left."""
    ids = await waiting(pool, [1 + 37 * i % 120 for i in range(60)])
    seen: list[str] = []
    while await pool.depth("free"):
        seen += await formed(pool, [("free", 8)])

    assert sorted(seen) == sorted(ids)
    assert await pool.states(ids) == ["processing"] * 60
