"""The parts of a customer's limits in one cell: what admission applies, and what the allotter may write."""

from collections.abc import Sequence
from typing import Any

import pytest

from contract.builders import CUSTOMER, admit, everything, outcomes
from customer_limits import in_force
from pool import Pool
from ratelimit.limits import REQUEST_BUCKET, Bucket
from scheduler.protocol.limits import (
    REMOVED,
    Allotments,
    Allotted,
    Grant,
    GrantState,
    LimitState,
    Parts,
    PartsOrder,
    PartsState,
)

RATE, BURST, LEASE_MS = 0.001, 100.0, 3000
BUCKET = Bucket(REQUEST_BUCKET, RATE, BURST)


class Allotter:
    """The calls of one allotter to one cell."""

    def __init__(self, pool: Pool, name: str = "one", epoch: int = 1) -> None:
        self.pool = pool
        self.name = name
        self.epoch = epoch
        self.number = 0
        self._allotments = Allotments(pool.client, pool.keys)

    async def call(self, *orders: PartsOrder, left_ms: int = LEASE_MS, number: int | None = None) -> Allotted:
        """A call whose leases hold for so long."""
        self.number += 1
        ends_ms = await self.pool.now_ms() + left_ms if orders else 0
        number = self.number if number is None else number
        return await self._allotments.allot(self.name, self.epoch, number, ends_ms, orders)

    async def give(
        self, rates: int, concurrency: int = 10_000, quotas: int = 10_000, *, grants: Sequence[Grant] = (), **more: Any
    ) -> PartsState:
        """Set the parts of the default customer."""
        parts = Parts(rates, concurrency, quotas)
        reply = await self.call(PartsOrder("customer", [BUCKET], parts, grants), **more)
        assert reply.accepted
        return reply.states[0]

    async def read(self, *quotas: tuple[str, int]) -> PartsState:
        """The parts of the default customer."""
        order = PartsOrder("customer", [BUCKET], None, [Grant(*quota) for quota in quotas])
        return (await self.call(order)).states[0]

    async def remove(self, *quotas: tuple[str, int]) -> PartsState:
        """The customer uses only this cell from here on."""
        order = PartsOrder("customer", [BUCKET], REMOVED, [Grant(*quota) for quota in quotas])
        return (await self.call(order)).states[0]


@pytest.fixture
def allotter(pool: Pool) -> Allotter:
    """An allotter of the default cell."""
    return Allotter(pool)


async def fill(pool: Pool, tokens: float) -> None:
    """Set the level of the customer's bucket of requests."""
    await pool.client.hset(CUSTOMER, "tokens", tokens)


async def level(pool: Pool, spread: int = 4) -> float:
    """What is left of the customer's requests here."""
    left = await LimitState(pool.client, pool.keys).read("customer", in_force(rate=RATE, burst=BURST, spread=spread))
    return left.buckets[0].left


async def requests(pool: Pool, count: int, **limits: Any) -> list[str]:
    """The outcomes of so many requests of a customer of four cells."""
    return await admit(pool, count, **{"rate": RATE, "burst": BURST, "spread": 4} | limits)


async def test_without_parts_a_customer_of_several_cells_has_nothing_here(pool: Pool) -> None:
    """Until the allotter has counted the cell. The client may retry in a second; nothing is written."""
    before = await everything(pool.client)
    verdicts = await pool.admit([pool.submission(rate=RATE, burst=BURST, spread=4)])

    assert outcomes(verdicts) == ["customer_limit"]
    assert verdicts[0].retry_after_ms == 1000
    assert await everything(pool.client) == before


async def test_a_new_cell_begins_with_empty_buckets(pool: Pool, allotter: Allotter) -> None:
    """Also where the customer had tokens in an earlier time: they could be spent in another cell."""
    await fill(pool, BURST)
    await allotter.give(2500)

    assert await level(pool) == pytest.approx(0, abs=0.01)
    assert await requests(pool, 1) == ["customer_limit"]


async def test_rates_burst_and_concurrency_are_the_part(pool: Pool, allotter: Allotter) -> None:
    """A quarter of a burst of 100 are 25 requests. Of 10 concurrent requests a third are 3."""
    await allotter.give(2500)
    await fill(pool, BURST)
    assert await requests(pool, 30) == ["accepted"] * 25 + ["customer_limit"] * 5

    await allotter.give(2500, 3399)
    await pool.client.delete("rl:leases:customer")
    await fill(pool, BURST)
    assert await requests(pool, 5, max_concurrency=10) == ["accepted"] * 3 + ["concurrency"] * 2


async def test_parts_hold_for_requests_of_gateways_that_do_not_know_of_them(pool: Pool, allotter: Allotter) -> None:
    """A gateway with an older catalog sends the whole limits."""
    await allotter.give(1000)
    await fill(pool, BURST)

    assert await requests(pool, 12, spread=1) == ["accepted"] * 10 + ["customer_limit"] * 2


async def test_after_its_lease_half_of_a_part_holds(pool: Pool, allotter: Allotter) -> None:
    """Also for one of a server whose clock went back: it would be longer than any lease."""
    await allotter.give(2000, 10_000)
    for ends_ms in (await pool.now_ms() - 1, await pool.now_ms() + 60_000):
        await pool.client.hset(CUSTOMER, mapping={"share": f"{ends_ms} 2000 10000 10000", "tokens": BURST})
        await pool.client.delete("rl:leases:customer")

        assert await requests(pool, 12) == ["accepted"] * 10 + ["customer_limit"] * 2


async def test_a_part_too_small_for_one_request_admits_none(pool: Pool, allotter: Allotter) -> None:
    """Instead of a concurrency of 0, which would mean that there is no limit."""
    await allotter.give(2500, 999)

    verdicts = await pool.admit([pool.submission(rate=1e6, burst=1e6, max_concurrency=10, spread=4)])
    assert (verdicts[0].outcome, verdicts[0].retry_after_ms) == ("customer_limit", 1000)


async def test_a_lowered_part_drops_tokens_and_a_raised_one_adds_none(pool: Pool, allotter: Allotter) -> None:
    """Without requests in between: what other cells had meanwhile must not be here too."""
    await allotter.give(6000)
    await fill(pool, 50.0)
    await allotter.give(2000)
    assert await level(pool) == pytest.approx(20, abs=0.01)

    await allotter.give(8000)
    assert await level(pool) == pytest.approx(20, abs=0.01)


async def test_tokens_above_half_of_a_part_are_lost_with_its_lease(pool: Pool, allotter: Allotter) -> None:
    """Also if no request came until the lease was renewed: meanwhile other cells may have had the other half."""
    await allotter.give(6000)
    await pool.client.hset(CUSTOMER, mapping={"share": "1 6000 10000 10000", "tokens": 60})
    await allotter.give(6000)

    assert await level(pool) == pytest.approx(30, abs=0.01)


async def test_an_empty_bucket_refills_at_the_part_of_the_rate(pool: Pool, allotter: Allotter) -> None:
    """A debt stays one."""
    order = PartsOrder("customer", [Bucket(REQUEST_BUCKET, 100.0, BURST)], Parts(2500, 10_000, 0))
    await allotter.call(order)
    await pool.client.hset(CUSTOMER, mapping={"tokens": -5})
    at = int(await pool.client.hget(CUSTOMER, "at"))
    await pool.client.hset(CUSTOMER, "at", at - 400_000)
    left = await LimitState(pool.client, pool.keys).read("customer", in_force(rate=100.0, burst=BURST, spread=4))

    assert left.buckets[0].left == pytest.approx(5 + 25 * (await pool.now_ms() - at / 1000) / 1000, abs=2.5)


async def test_demand_counts_rejected_requests_too(pool: Pool, allotter: Allotter) -> None:
    """But not those of customers that use one cell."""
    await allotter.give(2500)
    await fill(pool, 2.0)
    await requests(pool, 5)
    await requests(pool, 3)
    await pool.admit([pool.submission(customer_id="other")])

    state = await allotter.read()
    assert (state.asked, state.open) == (8, 2)
    assert await pool.client.hexists("rl:customer:other", "asked") == 0


async def test_open_requests_are_reported(pool: Pool, allotter: Allotter) -> None:
    """A cell that has more open than its part counts with them."""
    await allotter.give(2500)
    await fill(pool, 9.0)
    await requests(pool, 5, max_concurrency=100)

    assert (await allotter.give(1000)).open == 5


async def test_one_cell_again(pool: Pool, allotter: Allotter) -> None:
    """Without parts the limits are whole, and the bucket has what it had."""
    await allotter.give(2500)
    await fill(pool, 20.0)
    state = await allotter.remove()

    assert (state.parts, (await allotter.read()).parts) == (None, None)
    assert await level(pool, spread=1) == pytest.approx(20, abs=0.01)
    assert await pool.client.exists("rl:shared") == 0


# The claim


async def test_another_allotter_waits_until_the_claim_is_over(pool: Pool, allotter: Allotter) -> None:
    """Then the calls of the first one are rejected, whatever they contain."""
    await allotter.give(2500)
    other = Allotter(pool, "two", 2)
    reply = await other.call()
    assert (reply.accepted, reply.epoch, list(reply.customers)) == (False, 1, ["customer"])
    assert 0 < reply.held_ms <= 3000

    await pool.client.hset("allotter", "until", 1)
    assert (await other.call()).accepted
    assert not (await allotter.call(PartsOrder("customer", [BUCKET], Parts(9000, 0, 0)))).accepted
    state = (await other.call(PartsOrder("customer", [BUCKET], None))).states[0]
    assert state.parts == Parts(2500, 10_000, 10_000)


async def test_an_older_epoch_is_rejected_although_the_claim_is_over(pool: Pool, allotter: Allotter) -> None:
    """An allotter that was suspended does not take over from a newer one."""
    await Allotter(pool, "two", 2).call()
    await pool.client.hset("allotter", "until", 1)

    assert not (await allotter.call()).accepted


@pytest.mark.parametrize("left_ms", [-1, 10_000])
async def test_a_call_that_is_executed_late_changes_nothing(pool: Pool, allotter: Allotter, left_ms: int) -> None:
    """Nor one whose lease would be longer than any, because the server's clock went back."""
    await allotter.give(2500)
    reply = await allotter.call(PartsOrder("customer", [BUCKET], Parts(9000, 0, 0)), left_ms=left_ms)

    assert (reply.accepted, (await allotter.read()).parts) == (False, Parts(2500, 10_000, 10_000))


async def test_a_call_that_was_overtaken_changes_nothing(pool: Pool, allotter: Allotter) -> None:
    """A call on a connection that was replaced may be executed after later ones."""
    await allotter.give(2500)
    reply = await allotter.call(PartsOrder("customer", [BUCKET], Parts(9000, 0, 0)), number=1)

    assert (reply.accepted, (await allotter.read()).parts) == (False, Parts(2500, 10_000, 10_000))


async def test_epoch_0_only_reads(pool: Pool) -> None:
    """Whether an allotter is active, without a claim."""
    before = await everything(pool.client)
    reply = await Allotter(pool, epoch=0).call()

    assert (reply.accepted, reply.epoch, reply.held_ms) == (False, 0, 0)
    assert await everything(pool.client) == before


# Quotas


QUOTA = ("1year", 100)


async def quota(pool: Pool, count: int, **limits: Any) -> list[str]:
    """The outcomes of so many requests of a customer with a quota."""
    return await requests(pool, count, rate=1e6, burst=1e6, quotas=(QUOTA,), **limits)


async def with_quota(allotter: Allotter, part: int, grant: int | None = None, *, others: bool = True) -> GrantState:
    """Set the part of new windows and, in the present one, the grant."""
    window = (await allotter.read(QUOTA)).grants[0].window
    bucket = Bucket(REQUEST_BUCKET, 1e6, 1e6)
    grants = [Grant(*QUOTA, -1 if grant is None else window, grant or 0, others)]
    reply = await allotter.call(PartsOrder("customer", [bucket], Parts(10_000, 10_000, part), grants))
    await allotter.pool.client.hset(CUSTOMER, "tokens", 1000)
    return reply.states[0].grants[0]


async def test_a_new_cell_has_nothing_of_the_present_window(pool: Pool, allotter: Allotter) -> None:
    """The other cells may have spent it. The client may retry soon, since others may have some."""
    assert (await with_quota(allotter, 2500)).grant == 0

    verdicts = await pool.admit([pool.submission(quotas=(QUOTA,), spread=4)])
    assert (verdicts[0].outcome, verdicts[0].retry_after_ms) == ("quota", 1000)


async def test_a_cell_spends_its_grant(pool: Pool, allotter: Allotter) -> None:
    """And no more: the last unit is in one cell only."""
    await with_quota(allotter, 2500, 3, others=False)
    verdicts = await pool.admit([pool.submission(quotas=(QUOTA,), spread=4) for _ in range(4)])

    assert outcomes(verdicts) == ["accepted"] * 3 + ["quota"]
    assert verdicts[3].retry_after_ms > 1000  # Until the end of the window: no cell has any.
    assert (await allotter.read(QUOTA)).grants[0][1:] == (3, 3)


async def test_a_grant_shrinks_to_what_is_spent(pool: Pool, allotter: Allotter) -> None:
    """So that the allotter can give the rest to others."""
    await with_quota(allotter, 2500, 50)
    await quota(pool, 7)

    assert (await with_quota(allotter, 2500, 2)).grant == 7
    assert await quota(pool, 1) == ["quota"]


async def test_a_new_window_begins_with_the_part(pool: Pool, allotter: Allotter) -> None:
    """Without a call of the allotter; a changed part changes only the windows after it."""
    await with_quota(allotter, 2500, 50)
    await pool.client.hset(CUSTOMER, mapping={"g:1year": "1 50 1", "q:1year": "1 50"})
    assert (await allotter.read(QUOTA)).grants[0][1:] == (0, 25)

    assert (await with_quota(allotter, 9000)).grant == 25
    assert await quota(pool, 26) == ["accepted"] * 25 + ["quota"]


async def test_with_one_cell_again_what_others_were_granted_is_spent(pool: Pool, allotter: Allotter) -> None:
    """The cell has what it was granted and has not spent."""
    await with_quota(allotter, 2500, 10)
    await quota(pool, 4)
    await allotter.remove(QUOTA)

    assert await quota(pool, 7, spread=1) == ["accepted"] * 6 + ["quota"]
