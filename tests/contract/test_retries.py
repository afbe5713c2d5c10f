"""Lost and returned batches: `fail`, `reap`, `release`, `push_back`; the retry budget; dead letters."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from configs import LEASE_MS
from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, decode_payload, encode_payload
from scheduler.protocol.audit_records import DeadLetterRecord, EndedRecord, decode_entry
from scheduler.protocol.batches import BATCH_KEEP_MS, ClaimedBatch, Outcome
from scheduler.protocol.cancellation import Reaped
from scheduler.redis_client.scripts import inner

FULL = 100.0
"""The retry budget of a pool without losses."""


async def ready(pool: Pool) -> list[str]:
    """The ready batches, the next one first."""
    return [batch_id.decode() for batch_id in await pool.client.lrange(pool.keys.batch_queue, 0, -1)]


async def fail(pool: Pool, batch: ClaimedBatch) -> None:
    """Report a batch as lost by the supervisor of its worker."""
    assert await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)


def ids_of(batch: ClaimedBatch) -> list[str]:
    return [r.id for r in batch.requests]


async def test_a_failed_batch_is_retried_first(pool: Pool) -> None:
    """It is pushed to the head of the list, before other ready batches."""
    claimed = await pool.running(1)
    await pool.queue(1)
    await pool.form([("free", 1)])

    await fail(pool, claimed)

    again = await pool.claim_next("w2")
    assert [(r.id, r.attempt) for r in again.requests] == [(ids_of(claimed)[0], 2)]


@pytest.mark.parametrize("loss", ["fail", "reap"])
async def test_retries_are_exempt_from_the_queue_timeout(pool: Pool, loss: str) -> None:
    """A lost batch of a function enters no tier queue again, so only the deadline of its requests limits it."""
    claimed = await pool.running(2)
    ids = await pool.overdue(ids_of(claimed))

    if loss == "fail":
        await fail(pool, claimed)
    await pool.reaped()
    await pool.terminations.expire(("free",))

    assert (await pool.depth("free"), await pool.states(ids)) == (0, ["processing"] * 2)


@pytest.mark.parametrize(("size", "after"), [(1, ["b1"]), (2, ["b1.1", "b1.2"])])
async def test_a_retried_batch_is_ready_once(pool: Pool, size: int, after: list[str]) -> None:
    """The reaper pushed the batch again before its slow claim: `fail` removes that entry."""
    batch = await pool.running(size)
    await pool.client.rpush(pool.keys.batch_queue, "b1")

    await fail(pool, batch)

    assert await ready(pool) == after


@pytest.mark.parametrize(
    ("cause", "code"), [(ErrorCode.WORKER_LOST, "deadline_exceeded"), (ErrorCode.GPU_TIMEOUT, "gpu_timeout")]
)
async def test_without_time_for_a_retry_the_request_ends(pool: Pool, cause: ErrorCode, code: str) -> None:
    """A retry that could not finish is not started."""
    (request_id,) = ids_of(await pool.running(1))

    await pool.batches.fail("b1", "token", cause, 10_000)

    assert [r.error_code for r in await pool.results.fetch([request_id]) if r] == [code]
    assert await ready(pool) == []


async def test_a_reported_loss_halves_the_batch(pool: Pool) -> None:
    """The model process died: two batches are first in the list, the older members in the first, each under a lease."""
    paid, free = await pool.queue(3, "paid"), await pool.queue(3, "free")
    await pool.form([("paid", 3), ("free", 2)])
    batch = await pool.claim_next()
    other = await pool.form([("free", 1)])

    await fail(pool, batch)

    assert await ready(pool) == ["b1.1", "b1.2", other]
    lists = await pool.inflight()
    assert lists == {
        "inflight:paid:b1.1": paid[:2],
        "inflight:paid:b1.2": paid[2:],
        "inflight:free:b1.2": free[:2],
        f"inflight:free:{other}": free[2:],
    }
    assert sorted(await pool.client.zrange(pool.keys.leases, 0, -1)) == [b"b1.1", b"b1.2", other.encode()]
    for key in [*lists, pool.keys.batch("b1.1"), pool.keys.batch("b1.2")]:
        assert 0 < await pool.client.pttl(key) <= BATCH_KEEP_MS + 4000
    assert await pool.client.exists(pool.keys.batch("b1")) == 0


@pytest.mark.parametrize("second", ["fail", "reap"])
@pytest.mark.parametrize("first", ["fail", "reap"])
async def test_after_a_second_loss_each_request_is_alone(pool: Pool, first: str, second: str) -> None:
    """A first expired lease leaves the batch whole, since its host or network may be the cause."""
    batch = await pool.running(4)
    ids = ids_of(batch)

    async def lose(lost: ClaimedBatch, how: str) -> None:
        await (fail(pool, lost) if how == "fail" else pool.reaped())

    await lose(batch, first)
    parts = [await pool.claim_next() for _ in await ready(pool)]
    for part in parts if second == "fail" else parts[:1]:
        await lose(part, second)

    assert [ids_of(part) for part in parts] == ([ids[:2], ids[2:]] if first == "fail" else [ids])
    singles = [ids_of(await pool.claim_next()) for _ in await ready(pool)]
    assert sorted(singles) == sorted([i] for i in ids)


async def test_a_part_counts_no_attempt_before_its_claim(pool: Pool) -> None:
    """A part that is ready for longer than its lease is renewed; the attempt counts when a worker claims it."""
    await fail(pool, await pool.running(2))

    await pool.reaped()

    assert await ready(pool) == ["b1.1", "b1.2"]
    assert [r.attempt for r in (await pool.claim_next()).requests] == [2]


async def test_the_reply_names_the_part_that_ran(pool: Pool) -> None:
    """Audit and reply have the batch of the last run, and its size."""
    await fail(pool, await pool.running(3))
    await pool.claim_next()
    part = await pool.claim_next()

    await pool.batches.finish(part.batch_id, part.token, [done(i) for i in ids_of(part)])

    _, ended = await pool.audit()
    assert [(e.id, e.batch_id, e.batch_size, e.attempts) for e in ended] == [(i, "b1.2", 2, 2) for i in ids_of(part)]


async def test_a_lost_owner_is_rejected_by_every_script(pool: Pool) -> None:
    """A slow worker continues after its lease expired (Celery #5935): its calls are stale, and the retry's result counts."""
    slow = await pool.running(1, token="slow")
    (request_id,) = ids_of(slow)
    await pool.reaped()
    retry = await pool.claim_next("w2", "new")
    assert await pool.batches.claim(slow.batch_id, "w3", "other") is None

    assert not await pool.batches.renew(slow.batch_id, "slow")
    assert not await pool.batches.release(slow.batch_id, "slow")
    assert not await pool.batches.fail(slow.batch_id, "slow", ErrorCode.WORKER_LOST, 0)
    assert await pool.batches.finish(slow.batch_id, "slow", [done(request_id, "slow")]) == 1
    assert await pool.batches.renew(retry.batch_id, "new")
    assert await pool.batches.finish(retry.batch_id, "new", [done(request_id, "new")]) == 0
    assert await pool.batches.finish(retry.batch_id, "new", [done(request_id, "new")]) == 1

    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.output, reply.attempts) == ("new", 2)
    assert [record.id for record in (await pool.audit())[1]] == [request_id]


@pytest.mark.parametrize("how", ["reap", "fail", "release"])
async def test_concurrent_returns_of_a_batch_move_each_request_once(pool: Pool, how: str) -> None:
    """A pop and a push in two commands would lose what a crash leaves between them; here one script moves them."""
    claimed = await pool.running(3)
    await pool.expire_leases()
    await pool.client.delete(pool.keys.reaped_at)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "reap": lambda: pool.terminations.reap(0),
        "fail": lambda: pool.batches.fail(claimed.batch_id, claimed.token, ErrorCode.WORKER_LOST, 0),
        "release": lambda: pool.batches.release(claimed.batch_id, claimed.token),
    }

    await asyncio.gather(*[calls[how]() for _ in range(4)])

    queued = [i.decode() for i in reversed(await pool.client.lrange(pool.keys.queue("free"), 0, -1))]
    inflight = [i for members in (await pool.inflight()).values() for i in members]
    assert sorted(queued + inflight) == sorted(ids_of(claimed))
    assert bool(queued) is (how == "release")


async def test_after_a_suspension_running_batches_get_one_more_lease(pool: Pool) -> None:
    """While Redis was suspended no worker could renew: the first pass after it counts no loss."""
    await pool.terminations.reap(0)
    await pool.running(2)
    await pool.expire_leases()
    await pool.client.decrby(pool.keys.reaped_at, 700)

    assert await pool.terminations.reap(0) == Reaped(1, 0, 0, 0)

    await pool.expire_leases()
    assert await pool.terminations.reap(0) == Reaped(0, 0, 1, 0)


async def test_the_requests_of_an_unclaimed_batch_end_at_their_deadlines(pool: Pool) -> None:
    """All workers are lost: the reaper ends the members and deletes the batch."""
    ids = await pool.queue(2)
    await pool.form([("free", 2)])
    await pool.overdue(ids, "dl")
    await pool.expire_leases()

    await pool.terminations.reap(0)

    assert [r.error_code for r in await pool.results.fetch(ids) if r] == ["deadline_exceeded"] * 2
    assert await pool.inflight() == {}
    assert await pool.client.zcard(pool.keys.leases) == 0


async def test_a_lease_in_the_far_future_is_shortened(pool: Pool) -> None:
    """It was written before Redis TIME went back: from the next pass on it is a normal lease."""
    claimed = await pool.running(1)
    future_ms = await pool.now_ms() + 3_600_000
    await pool.client.zadd(pool.keys.leases, {claimed.batch_id: future_ms})
    await pool.client.set(pool.keys.reaped_at, future_ms)

    assert await pool.terminations.reap(0) == Reaped(0, 0, 0, 0)
    assert await pool.client.zscore(pool.keys.leases, claimed.batch_id) <= await pool.now_ms() + LEASE_MS

    await pool.reaped()
    assert (await pool.claim_next("w2")).requests[0].attempt == 2


async def test_a_release_returns_the_requests_in_order_without_an_attempt(pool: Pool) -> None:
    """A stopping worker returns its batch to the head of the tier queue; the queue timeout begins anew."""
    claimed = await pool.running(3)
    later, ids = await pool.queue(1), ids_of(claimed)
    for each in ids:
        await pool.age(each)

    assert await pool.batches.release("b1", "token") is True

    assert await pool.states(ids) == ["queued"] * 3
    assert [i.decode() for i in reversed(await pool.client.lrange(pool.keys.queue("free"), 0, -1))] == [*ids, *later]
    assert await pool.inflight() == {}
    await pool.form([("free", 3)])
    assert [(r.id, r.attempt) for r in (await pool.claim_next("w2", "t2")).requests] == [(i, 1) for i in ids]
    assert await pool.batches.release("b1", "token") is False


async def test_a_batch_with_losses_is_released_whole(pool: Pool) -> None:
    """Its requests may have caused the loss, so they do not join new ones; no attempt is counted."""
    await fail(pool, await pool.running(2))
    part = await pool.claim_next()
    await pool.queue(1)

    assert await pool.batches.release(part.batch_id, part.token) is True

    assert await ready(pool) == ["b1.1", "b1.2"]
    assert [(r.id, r.attempt) for r in (await pool.claim_next("w2", "t2")).requests] == [(i, 2) for i in ids_of(part)]
    assert await pool.batches.release(part.batch_id, part.token) is False


async def test_a_popped_batch_can_be_pushed_back(pool: Pool) -> None:
    """A stopping worker returns the id of its last blocking read; repeated and unknown ids change nothing."""
    await pool.queue(1)
    await pool.form([("free", 1)])
    await pool.pop()

    for batch_id in ("b1", "b1", "unknown"):
        await pool.batches.push_back(batch_id)

    assert await ready(pool) == ["b1"]


# Retry budget: a fifth of the recently accepted requests, plus ten per second


async def balance(pool: Pool) -> float:
    """The balance of the retry budget."""
    tokens = await pool.client.hget(pool.keys.retry_budget, "tokens")
    return float(tokens) if tokens else FULL


async def set_balance(pool: Pool, tokens: float, age_ms: int = 0) -> None:
    """Set the balance as of this long ago; a negative age: TIME went backwards since."""
    at = (await pool.now_ms() - age_ms) * 1000
    await pool.client.hset(pool.keys.retry_budget, mapping={"tokens": tokens, "at": at})
    await pool.client.pexpire(pool.keys.retry_budget, 60_000)


async def test_each_retried_request_withdraws_one_token(pool: Pool) -> None:
    """Three requests are retried: three tokens."""
    claimed = await pool.running(3)
    await set_balance(pool, 50.0)

    await fail(pool, claimed)

    assert await balance(pool) == pytest.approx(47.0, abs=0.6)
    assert 0 < await pool.client.pttl(pool.keys.retry_budget) <= 60_000


@pytest.mark.parametrize(
    ("count", "changes", "deposit"),
    [(10, {}, 2.0), (1, {"rate": 0.0, "burst": 0.0}, 0.0), (1, {"again": True}, 0.0)],
)
async def test_an_accepted_request_deposits_a_fifth(
    pool: Pool, count: int, changes: dict[str, Any], deposit: float
) -> None:
    """A rejected or resubmitted request deposits nothing."""
    await set_balance(pool, FULL)

    await pool.admit([pool.submission(**changes) for _ in range(count)])

    assert await balance(pool) == pytest.approx(FULL + deposit, abs=0.1)


@pytest.mark.parametrize(("tokens", "retried"), [(0.0, 0), (2.0, 2)])
async def test_without_budget_requests_end(pool: Pool, tokens: float, retried: int) -> None:
    """When many workers are lost, retries would double the load: the oldest are retried, others end, without dead letters."""
    claimed = await pool.running(4)
    await set_balance(pool, tokens)

    await pool.reaped()

    assert await pool.states(ids_of(claimed)) == ["processing"] * retried + ["failed"] * (4 - retried)
    replies = await pool.results.fetch(ids_of(claimed)[retried:])
    assert {r.error_code for r in replies if r} == {"worker_lost"}
    assert await pool.letters() == []
    assert await ready(pool) == ["b1"] * bool(retried)
    assert await pool.client.zcard(pool.keys.leases) == bool(retried)


@pytest.mark.parametrize("tokens", [0.0, 1000.0])
async def test_credit_and_debt_decay(pool: Pool, tokens: float) -> None:
    """After a minute the balance is at its floor; in ten seconds it goes most of the way."""
    await set_balance(pool, tokens, age_ms=60_000)
    await pool.queue(1)
    assert await balance(pool) == pytest.approx(FULL, abs=3)

    await set_balance(pool, tokens, age_ms=10_000)
    await pool.queue(1)
    assert await balance(pool) == pytest.approx(FULL + (tokens - FULL) * 0.37, abs=5)


async def test_a_clock_that_went_backwards_does_not_change_the_balance(pool: Pool) -> None:
    """The balance stays, and continues from the new time."""
    await set_balance(pool, 10.0, age_ms=-3_600_000)

    await pool.queue(5)

    assert await balance(pool) == pytest.approx(11.0)
    at_us = float(await pool.client.hget(pool.keys.retry_budget, "at"))
    assert at_us / 1000 == pytest.approx(await pool.now_ms(), abs=5000)


# Dead letters


async def lose(pool: Pool, times: int, **changes: Any) -> str:
    """A request that was lost this often, by workers w0, w1..."""
    (request_id,) = await pool.queue(1, "paid", **changes)
    await pool.form([("paid", 1)])
    for i in range(times):
        await pool.claim_next(f"w{i}")
        await pool.reaped()
    return request_id


async def test_a_third_loss_makes_a_dead_letter(pool: Pool) -> None:
    """It has the request, its customer, the error, the attempts, the workers, and the body for a requeue."""
    body = encode_payload(Payload("tiny", "grüße " * 20, {"n": 1}))

    request_id = await lose(pool, 3, body=body)

    (letter,) = await pool.letters()
    assert (letter.id, letter.customer_id, letter.tier) == (request_id, "customer", "paid")
    assert (letter.error_code, letter.attempts, letter.worker_ids) == ("worker_lost", 3, ["w0", "w1", "w2"])
    assert inner(bytes(letter.body)) == body
    assert decode_payload(inner(bytes(letter.body))).input.startswith("grüße")
    assert await pool.client.lrange(pool.keys.dlq, 0, -1) == [request_id.encode()]
    assert await pool.client.hget(pool.keys.request(request_id), "body") == b""


async def test_poison_requests_make_dead_letters(pool: Pool) -> None:
    """Each is an outbox entry of its own, since bodies may be large; other requests of the batch are not affected."""
    claimed = await pool.running(3)
    *bad, good = ids_of(claimed)
    await pool.client.delete(pool.keys.outbox)

    ends = [*(Outcome(i, "poison_request", 3.0, 0, "v1", "It broke.") for i in bad), done(good)]
    assert await pool.batches.finish("b1", "token", ends) == 0

    letters = await pool.letters()
    assert [(each.id, each.error_code, each.attempts, each.worker_ids) for each in letters] == [
        (i, "poison_request", 1, ["w1"]) for i in bad
    ]
    assert inner(bytes(letters[0].body)) == claimed.requests[0].body
    entries = await pool.client.lrange(pool.keys.outbox, 0, -1)
    kinds = [{type(record) for record in decode_entry(entry)[0]} for entry in reversed(entries)]
    assert kinds == [{EndedRecord}, {DeadLetterRecord}, {DeadLetterRecord}]
    replies = [(r.error_code, r.output) for r in await pool.results.fetch(ids_of(claimed)) if r]
    assert replies == [("poison_request", "It broke.")] * 2 + [("", "olleh")]


@pytest.mark.parametrize(
    ("code", "has_ended"),
    [
        (ErrorCode.DEADLINE_EXCEEDED, False),
        (ErrorCode.INVALID_OUTPUT, False),
        (ErrorCode.REQUEST_TOO_LARGE, False),
        (ErrorCode.POISON_REQUEST, True),  # the request ended before, so this outcome is stale
    ],
)
async def test_other_failures_make_no_dead_letter(pool: Pool, code: ErrorCode, *, has_ended: bool) -> None:
    """Only failures that another run would repeat, of requests that had not ended."""
    (request_id,) = ids_of(await pool.running(1))
    if has_ended:
        await pool.terminations.cancel([(request_id, ErrorCode.DEADLINE_EXCEEDED)])

    await pool.batches.finish("b1", "token", [Outcome(request_id, code, 3.0, 0, "v1", "")])

    assert await pool.letters() == []
    assert await pool.client.llen(pool.keys.dlq) == 0


async def test_the_list_of_dead_letters_is_bounded(pool: Pool) -> None:
    """The oldest ids are removed."""
    await pool.client.rpush(pool.keys.dlq, *range(10_000))

    request_id = await lose(pool, 3)

    assert await pool.client.llen(pool.keys.dlq) == 10_000
    assert await pool.client.lindex(pool.keys.dlq, 0) == request_id.encode()


async def test_a_dead_letter_without_a_body_can_be_read(pool: Pool) -> None:
    """The body was missing in the row."""
    (request_id,) = ids_of(await pool.running(1))
    await pool.client.hdel(pool.keys.request(request_id), "body")

    await pool.batches.finish("b1", "token", [Outcome(request_id, "poison_request", 3.0, 0, "v1", "")])

    (letter,) = await pool.letters()
    assert letter.body == msgspec.Raw(b"\xa0")
