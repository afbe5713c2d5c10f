"""Quotas of GPU time, tokens and money: reserved at admission, settled with the measured values, never overrun by estimates."""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from contract.builders import CUSTOMER, admit, outcomes
from pool import Pool, done
from ratelimit.quotas import Meter
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Submission
from scheduler.protocol.batches import ClaimedBatch
from scheduler.states import Admission

GPU, TOKENS, USD = "1day:gpu", "1day:tokens", "1month:usd"
METER = Meter(20_000, 0.5, 0.002)
"""20 ms of GPU time at 0.5 USD a second, and 0.002 USD for 1,000 tokens."""

ALL = ((GPU, 10**9), (TOKENS, 10**9), (USD, 10**12), ("1day", 1000))
ESTIMATE = {GPU: 20_000, TOKENS: 100, USD: 20_000 * 500 + 100 * 2000, "1day": 1}
"""What one request of 100 tokens reserves of each quota: µs, tokens, 1e-9 USD, requests."""


async def spent(pool: Pool) -> dict[str, int]:
    """What the default customer has used of its quotas, reservations included."""
    fields = await pool.client.hgetall(CUSTOMER)
    return {
        name.decode().removeprefix("q:"): int(value.split()[1])
        for name, value in fields.items()
        if name.startswith(b"q:")
    }


async def running(pool: Pool, count: int = 1, **changes: Any) -> ClaimedBatch:
    """A claimed batch of requests that are charged to all kinds of quotas."""
    await pool.queue(count, **{"quotas": ALL, "meter": METER, "tokens": 100, **changes})
    await pool.form([("free", count)])
    return await pool.claim_next()


async def finished(pool: Pool, cost_ms: Sequence[float], tokens: int = 60, code: str = "", **changes: Any) -> None:
    """Run a batch whose requests cost so much."""
    batch = await running(pool, len(cost_ms), **changes)
    ended = [
        done(request.id)._replace(cost_ms=cost, tokens_used=tokens, error_code=code)
        for request, cost in zip(batch.requests, cost_ms, strict=True)
    ]
    assert await pool.batches.finish(batch.batch_id, "token", ended) == 0


async def test_a_request_is_refused_if_its_estimate_does_not_fit(pool: Pool) -> None:
    """The quotas without room are named; a refusal reserves nothing."""
    quotas = (("1day", 1000), (GPU, 100_000), (USD, 10**12))
    verdicts = await pool.admit([pool.submission(quotas=quotas, meter=METER) for _ in range(7)])

    assert outcomes(verdicts) == ["accepted"] * 5 + ["quota"] * 2
    assert {verdict.quotas for verdict in verdicts[5:]} == {(GPU,)}
    assert [left for left, _ in verdicts[6].left.quotas] == [995, 0, 10**12 - 5 * 10**7]
    assert await spent(pool) == {"1day": 5, GPU: 100_000, USD: 5 * 10**7}


async def test_the_measured_values_replace_the_estimate(pool: Pool) -> None:
    """Of a completed request. The next estimate of GPU time is the mean of the customer's costs."""
    await finished(pool, [5.0, 7.0])
    assert await spent(pool) == {GPU: 12_000, TOKENS: 120, USD: 12_000 * 500 + 120 * 2000, "1day": 2}

    assert await admit(pool, 3, quotas=((GPU, 12_000 + 12_000),), meter=METER) == ["accepted", "accepted", "quota"]


async def test_a_mean_is_forgotten_after_an_hour(pool: Pool) -> None:
    """Else one expensive request would keep a customer out whose quota is smaller than its cost, since no other could run."""
    await finished(pool, [45.0], quotas=((GPU, 30_000),))
    await pool.client.hset(CUSTOMER, f"q:{GPU}", "0 0")  # The next window.
    assert await admit(pool, quotas=((GPU, 30_000),), meter=METER) == ["quota"]

    (field,) = [name for name in await pool.client.hkeys(CUSTOMER) if name.startswith(b"cost:")]
    await pool.client.hset(CUSTOMER, field, f"45000 {await pool.now_ms() - 3_600_001}")
    assert await admit(pool, quotas=((GPU, 30_000),), meter=METER) == ["accepted"]


async def test_a_cost_above_the_estimate_is_charged(pool: Pool) -> None:
    """The difference is the only possible overshoot; the next request is refused."""
    await finished(pool, [45.0], tokens=100_000, quotas=((GPU, 30_000), (TOKENS, 10**9)))
    assert await spent(pool) == {GPU: 45_000, TOKENS: 100_000}
    assert await admit(pool, quotas=((GPU, 30_000),), meter=METER) == ["quota"]


NOTHING: dict[str, int] = {GPU: 0, TOKENS: 0, USD: 0}


@pytest.mark.parametrize(
    ("code", "started", "left"),
    [
        (ErrorCode.CANCELLED, False, {**NOTHING, "1day": 1}),  # A quota of requests counts cancelled ones.
        (ErrorCode.CANCELLED, True, {**NOTHING, "1day": 1}),
        (ErrorCode.QUEUE_TIMEOUT, False, {**NOTHING, "1day": 0}),
        (ErrorCode.DEADLINE_EXCEEDED, True, {**NOTHING, "1day": 0}),
        (ErrorCode.WORKER_LOST, True, {**NOTHING, "1day": 0}),
    ],
)
async def test_what_does_not_run_or_fails_by_the_service_is_released(
    pool: Pool, code: ErrorCode, started: bool, left: dict[str, int]
) -> None:
    """Completely: nothing was delivered, nor measured."""
    if started:
        (request,) = (await running(pool)).requests
        request_id = request.id
    else:
        (request_id,) = await pool.queue(1, quotas=ALL, meter=METER, tokens=100)
    assert await spent(pool) == ESTIMATE

    await pool.terminations.cancel([(request_id, code, True)])

    assert await spent(pool) == left


async def test_a_stream_that_was_delivered_in_part_pays_for_its_tokens(pool: Pool) -> None:
    """Its GPU time was not measured: neither quota nor audit has it."""
    (request,) = (await running(pool)).requests
    await pool.terminations.cancel([(request.id, ErrorCode.DEADLINE_EXCEEDED, True, True, 30)])
    assert await spent(pool) == {GPU: 0, TOKENS: 30, USD: 30 * 2000, "1day": 1}


@pytest.mark.parametrize("code", ["worker_lost", "gpu_timeout"])
async def test_a_stream_that_broke_pays_for_what_was_delivered(pool: Pool, code: str) -> None:
    """With the GPU time of its run, which the audit has, too."""
    await finished(pool, [6.0], code=code, tokens=30)
    assert await spent(pool) == {GPU: 6000, TOKENS: 30, USD: 6000 * 500 + 30 * 2000, "1day": 1}
    (end,) = (await pool.audit())[1]
    assert (end.tokens_used, end.cost_ms) == (30, 6.0)


@pytest.mark.parametrize(
    ("code", "left"),
    [
        ("poison_request", {GPU: 6000, TOKENS: 0, USD: 6000 * 500, "1day": 1}),
        ("invalid_request", {GPU: 6000, TOKENS: 0, USD: 6000 * 500, "1day": 1}),
        ("internal_error", {**NOTHING, "1day": 0}),
    ],
)
async def test_a_bad_input_pays_for_its_run(pool: Pool, code: str, left: dict[str, int]) -> None:
    """It is charged the measured GPU time; a failure of the service is not."""
    await finished(pool, [6.0], tokens=0, code=code)
    assert await spent(pool) == left


async def test_a_result_that_the_client_did_not_get_is_released(pool: Pool) -> None:
    """The request completed in Redis while its client got a 504: the settled amounts are given back, once."""
    batch = await running(pool)
    (request,) = batch.requests
    await pool.batches.finish(batch.batch_id, "token", [done(request.id)._replace(cost_ms=5.0)])
    for _ in range(2):
        await pool.terminations.cancel([(request.id, ErrorCode.DEADLINE_EXCEEDED, True, True)])
        assert await spent(pool) == {**NOTHING, "1day": 0}


async def test_a_list_is_reserved_as_a_whole(pool: Pool) -> None:
    """It is refused if the estimates of all members do not fit."""

    async def listed(count: int) -> list[str]:
        members: list[Submission] = [
            pool.submission(quotas=((GPU, 100_000),), meter=METER, together=count if n == 0 else 0)
            for n in range(count)
        ]
        return outcomes(await pool.admit(members))

    assert await listed(6) == ["quota"] * 6
    assert await listed(5) == ["accepted"] * 5
    assert await spent(pool) == {GPU: 100_000}


async def test_a_shared_result_costs_its_tokens_only(pool: Pool) -> None:
    """A request that waited for the run of an equal one, and one with a cached result, use no GPU time."""
    changes = {"same": "hash", "keep_answer_ms": 60_000, "model_version": "v1"}
    batch = await running(pool, **changes)
    assert await admit(pool, quotas=ALL, meter=METER, tokens=100, **changes) == ["accepted"]
    (request,) = batch.requests
    await pool.batches.finish(batch.batch_id, "token", [done(request.id)._replace(cost_ms=5.0, tokens_used=60)])
    assert await spent(pool) == {GPU: 5000, TOKENS: 120, USD: 5000 * 500 + 120 * 2000, "1day": 2}

    (cached,) = await pool.admit([pool.submission(quotas=ALL, meter=METER, tokens=100, **changes)])

    assert cached.reply
    assert await spent(pool) == {GPU: 5000, TOKENS: 180, USD: 5000 * 500 + 180 * 2000, "1day": 3}


async def test_a_thousand_concurrent_calls_do_not_pass_the_last_unit(pool: Pool) -> None:
    """Of four gateways, while others end: what is used and reserved is never above the amount, and at the end just it."""
    amount, cost = 250 * 20_000, 20.0
    quotas, accepted = ((GPU, amount), (USD, 10**12)), Counter[str]()
    most = 0
    for number in range(4):
        await pool.gateway_stays(f"g{number}")

    async def call(number: int) -> None:
        nonlocal most
        submission = pool.submission(quotas=quotas, meter=METER, total_ms=600_000, queue_ms=600_000)
        (verdict,) = await pool.admit([submission], gateway=f"g{number % 4}")
        accepted[verdict.outcome.value] += 1
        most = max(most, (await spent(pool))[GPU])

    async def work() -> None:
        while accepted.total() < 1000:
            await pool.form([("free", 16)])
            if (batch_id := await pool.pop()) and (claimed := await pool.batches.claim(batch_id, "w1", "token")):
                ended = [done(request.id)._replace(cost_ms=cost) for request in claimed.requests]
                await pool.batches.finish(batch_id, "token", ended)
            await asyncio.sleep(0)

    await asyncio.gather(*map(call, range(1000)), work())

    assert accepted == {Admission.ACCEPTED.value: 250, Admission.QUOTA.value: 750}
    assert (most, (await spent(pool))[GPU]) == (amount, amount)


async def test_rows_and_hashes_are_readable_by_older_versions(pool: Pool) -> None:
    """Their scripts find only the buckets in `charged`, and the quotas of requests in `who`; so they settle those."""
    (request_id,) = await pool.queue(1, quotas=ALL, meter=METER, tokens=100, tokens_per_minute=1000.0)
    who, charged = await pool.client.hmget(pool.keys.request(request_id), "who", "charged")

    assert re.findall(r"(\S+) (\S+) (\d+) ([01])", charged.decode()) == [("budget", "pace", "100", "1")]
    assert re.fullmatch(r"g1 customer free listed - 1day \d+", who.decode())


async def test_without_metered_quotas_nothing_more_is_stored(pool: Pool) -> None:
    """A quota of requests leaves the row and the customer's hash as they were."""
    await finished(pool, [5.0], quotas=(("1day", 10),), meter=None)

    assert set(await pool.client.hkeys(CUSTOMER)) == {b"at", b"tokens", b"rate", b"q:1day"}
