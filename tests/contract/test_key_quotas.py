"""Quotas of API keys: counted beside those of their customer, each for the requests of one key."""

import asyncio
from typing import Any

from contract.builders import CUSTOMER, outcomes
from customer_limits import in_force
from pool import Pool, done
from ratelimit.quotas import Meter
from scheduler.protocol.admission import Submission
from scheduler.protocol.limits import LimitState

WHOLE = (("1day", 6),)
A, B = (*WHOLE, ("1day@aaa", 2)), (*WHOLE, ("1day@bbb", 3), ("1day:usd@bbb", 10**9))
METER = Meter(20_000, 0.5, 0.002)


def of(pool: Pool, key: str, quotas: Any) -> Submission:
    return pool.submission(api_key_id=key, quotas=quotas, meter=METER)


async def spent(pool: Pool) -> dict[str, int]:
    fields = await pool.client.hgetall(CUSTOMER)
    return {k.decode()[2:]: int(v.split()[1]) for k, v in fields.items() if k.startswith(b"q:")}


async def test_each_key_has_its_quota_and_all_share_that_of_the_customer(pool: Pool) -> None:
    """In any order within one call. A rejection names the quotas without room, and what is left is that of the key."""
    calls = [("aaa", A), ("ccc", WHOLE), ("aaa", A), ("bbb", B), ("aaa", A), ("bbb", B), ("ccc", WHOLE), ("bbb", B)]
    verdicts = await pool.admit([of(pool, *call) for call in calls])

    assert outcomes(verdicts) == ["accepted"] * 4 + ["quota"] + ["accepted"] * 2 + ["quota"]
    assert [verdicts[i].quotas for i in (4, 7)] == [("1day@aaa",), ("1day",)]
    assert [left for left, _ in verdicts[4].left.quotas] == [0, 0]
    assert [left for left, _ in verdicts[7].left.quotas] == [0, 1, 10**9 - 2 * 10**7]
    assert await spent(pool) == {"1day": 6, "1day@aaa": 2, "1day@bbb": 2, "1day:usd@bbb": 2 * 10**7}


async def test_a_request_that_fails_is_refunded_to_both(pool: Pool) -> None:
    """A failure of the service costs nothing; a completed request costs what was measured."""
    for key, quotas in (("aaa", A), ("bbb", B), ("bbb", B)):
        assert outcomes(await pool.admit([of(pool, key, quotas)])) == ["accepted"]
    await pool.form([("free", 3)])
    batch = await pool.claim_next()
    codes = ["internal_error", "internal_error", ""]
    ended = [
        done(request.id)._replace(cost_ms=4.0, tokens_used=0 if code else 10, error_code=code)
        for request, code in zip(batch.requests, codes, strict=True)
    ]
    await pool.batches.finish(batch.batch_id, "token", ended)

    assert await spent(pool) == {
        "1day": 1,
        "1day@aaa": 0,
        "1day@bbb": 1,
        "1day:usd@bbb": 4_000 * 500 + 10 * 2_000,
    }


async def test_a_look_shows_the_quotas_of_one_key(pool: Pool) -> None:
    """Those of the customer first. Concurrent calls of several gateways never exceed a quota."""
    verdicts = await asyncio.gather(*(pool.admit([of(pool, "aaa", A)], gateway=f"g{n}") for n in range(8)))
    assert sum(outcomes(each) == ["accepted"] for each in verdicts) == 2

    left = await LimitState(pool.client, pool.keys).read("customer", in_force(quotas=A))
    assert [amount for amount, _ in left.quotas] == [4, 0]
    left = await LimitState(pool.client, pool.keys).read("customer", in_force(quotas=B))
    assert [amount for amount, _ in left.quotas] == [4, 3, 10**9]
