"""No overshoot of quotas of GPU time, tokens and money: 1,000 concurrent calls over two gateways at the last unit.

The tier is paused meanwhile, so that no request ends, whose cost would make room for another one if it is less than the
estimate.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from math import ceil

import aiohttp
import pytest
from redis.asyncio import Redis

from admin import NO_LIMITS, NewCustomer, add_customer, announced, sql
from eventually import eventually
from ratelimit.quotas import NOTATIONS, Meter, unit_of
from scheduler.redis_client.connections import command_client, tag_at
from stack import Stack, start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

CALLS = 1000
TIER = "enterprise"  # It sheds nothing.
STEP = {"gpu-s": 10, "tokens": 1, "usd": 10_000}
"""Amounts below 1 have five decimals: µs, tokens, 1e-9 USD."""

AMPLE = "100000"
PRICE = Meter(usd_per_gpu_s=2.0, usd_per_1000_tokens=0.5)
INPUT = {"input": "one two three four five six seven eight"}  # It takes 40 ms.
HELD_S = 2.0  # An idle worker would have run it long before.
KNOWN_TIMES = 20  # Successive connections, each to one of two gateways.


@pytest.fixture(scope="module")
def two_gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways that share a port, before a GPU whose time is in proportion to the words. Requests may wait for long."""
    patient = {"TIERLANE_TOTAL_REQUEST_MS": "60000"}
    options = ("--backend", "simulated:0+5", "--gateways", "2", "--workers", "1")
    with start_stack(tmp_path_factory.mktemp("two"), *options, environment=patient) as stack:
        yield stack


class MeteredCustomer:
    """A customer with one quota. Amounts are in the smallest parts of its unit."""

    def __init__(self, stack: Stack, redis: Redis, session: aiohttp.ClientSession, who: NewCustomer, unit: str) -> None:
        self._stack = stack
        self._redis = redis
        self._session = session
        self._who = who
        self._unit = unit
        self._mark, self._parts = NOTATIONS[unit]
        self.completed: list[str] = []
        self.refused: Counter[str] = Counter()

    async def set_quota(self, amount: int | None) -> None:
        """Change the quota, ample without an amount, and wait until both gateways announce it."""
        text = AMPLE if amount is None else f"{amount / self._parts:.5f}".rstrip("0").rstrip(".")
        change = "UPDATE quotas SET quota = $2 WHERE customer_id = $1"
        new = "INSERT INTO quotas (customer_id, quota) VALUES ($1, $2)"
        await sql(self._stack, new if amount is None else change, self._who.id, f"{text} {self._unit}/day")
        shown = (int(AMPLE) * self._parts if amount is None else amount) // unit_of(f"1day:{self._mark}").header_parts
        seen = 0

        async def is_known() -> bool:
            nonlocal seen
            # A gateway that does not know the key yet announces nothing.
            policy = (await announced(self._stack.url, self._who.headers)).get("RateLimit-Policy", "")
            seen = seen + 1 if f'"day-{self._mark}";q={shown};' in policy else 0
            return seen >= KNOWN_TIMES

        await eventually(is_known, "both gateways know the quota", 30.0)

    async def spent(self) -> int:
        """The counter: what was used, and what open requests reserve."""
        key = f"{tag_at(self._redis)}rl:customer:{self._who.id}"
        value = await self._redis.hget(key, f"q:1day:{self._mark}")  # type: ignore[misc]
        return int(value.split()[1]) if value else 0

    async def call(self) -> None:
        """One request, on a connection of its own or one that is free again."""
        url = f"{self._stack.url}/v1/inference"
        async with self._session.post(url, json=INPUT, headers=self._who.headers) as response:
            body = await response.json(content_type=None)
        if response.status == 200:
            self.completed.append(body["request_id"])
        else:
            self.refused[body["error"]["code"]] += 1

    async def used(self, ids: Sequence[str]) -> list[int]:
        """What requests used, by their audit rows."""
        rows = await self._stack.audited(list(ids))
        return [self._units(row["cost_ms"] * 1000, row["tokens_used"]) for row in rows.values()]

    def _units(self, gpu_us: float, tokens: int) -> int:
        return PRICE._replace(gpu_us=round(gpu_us)).units(self._mark, tokens)


@asynccontextmanager
async def metered_customer(stack: Stack, unit: str) -> AsyncIterator[MeteredCustomer]:
    """A customer whose mean cost is known. Each of its calls may have a connection of its own."""
    await stack.healthy(1)
    who = await add_customer(stack, f"metered-{unit}", TIER, **NO_LIMITS, max_queue_ms=60_000)
    redis = command_client(stack.home_url(who.id))
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=90)
        ) as session:
            customer = MeteredCustomer(stack, redis, session, who, unit)
            await customer.set_quota(None)
            for _ in range(4):
                await customer.call()
            yield customer
    finally:
        await redis.aclose()


@asynccontextmanager
async def one_held(stack: Stack, customer: MeteredCustomer) -> AsyncIterator[tuple[int, int]]:
    """Pause the tier with one call of the customer in it. Yields the counter before that call, and what it reserves."""
    await sql(stack, "UPDATE tiers SET paused = true WHERE name = $1", TIER)
    before, calls = 0, list[asyncio.Task[None]]()

    async def is_held() -> bool:
        nonlocal before
        before = await customer.spent()
        calls.append(asyncio.create_task(customer.call()))
        return not (await asyncio.wait(calls[-1:], timeout=HELD_S))[0]

    try:
        await eventually(is_held, "the tier is paused", 30.0)
        yield before, await customer.spent() - before
    finally:
        await sql(stack, "UPDATE tiers SET paused = false WHERE name = $1", TIER)
        await asyncio.gather(*calls)


@pytest.mark.parametrize("unit", STEP)
async def test_a_thousand_calls_at_the_last_unit(two_gateways: Stack, unit: str) -> None:
    """Exactly one is admitted, and the counter is never above the quota. At the end it is what the audit sums up to."""
    stack = two_gateways
    prices = "INSERT INTO prices SELECT name, '2000-01-01', $1, $2 FROM models ON CONFLICT DO NOTHING"
    await sql(stack, prices, PRICE.usd_per_gpu_s, PRICE.usd_per_1000_tokens)
    async with metered_customer(stack, unit) as customer:
        async with one_held(stack, customer) as (before, estimate):
            quota = ceil((before + 2 * estimate) / STEP[unit]) * STEP[unit]
            await customer.set_quota(quota)
            sent = [asyncio.create_task(customer.call()) for _ in range(CALLS)]
            await eventually(lambda: customer.refused.total() >= CALLS - 1, "all but one are refused", 60.0)
            reserved = await customer.spent()
        await asyncio.gather(*sent)
        final, last_two = await customer.spent(), await customer.used(customer.completed[-2:])
        print(f"{unit}: quota {quota}, used {before}, one call reserves {estimate}; {CALLS} calls: 1 accepted,")
        print(f"  refused {dict(customer.refused)}; reserved {reserved}, settled {final}, last two {last_two}")

        assert (reserved, customer.refused) == (before + 2 * estimate, Counter(quota_exceeded=CALLS - 1))
        assert final - before == pytest.approx(sum(last_two), rel=1e-4)
        assert final - quota <= sum(max(0, used - estimate) for used in last_two)
