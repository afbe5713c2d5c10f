"""Requests in slots whose clients leave, or whose deadlines pass while they run; and what they are charged."""

from typing import Any

import msgspec
import pytest

from contract.builders import CUSTOMER
from contract.coalescing import submit
from contract.slots import (
    LOST,
    announce,
    claim_next,
    ended,
    ends,
    finish,
    ids_of,
    in_slots,
    stop_signals,
    stored_slots,
)
from pool import Pool
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import HANDED_BACK, WITHDRAWN
from scheduler.protocol.cancellation import Cancellation
from scheduler.protocol.stop_signals import StopSignal, StopSignals
from scheduler.redis_client.connections import blocking_client


async def leave(pool: Pool, request_id: str, used: int = 0, **changes: Any) -> str | None:
    """The code with which the request ended at once, if it did."""
    cancellation = Cancellation(request_id, ErrorCode.CANCELLED, used=used, **changes)
    (reply,) = await pool.terminations.cancel([cancellation])
    return reply and reply.error_code


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_run_is_stopped_when_its_client_leaves(pool: Pool, redis_url: str, *, is_stream: bool) -> None:
    """The worker is told, and reports what it used: until then the request runs."""
    batch = await in_slots(pool, 2)
    gone = ids_of(batch)[0]

    assert await leave(pool, gone, running=is_stream) is None

    blocking = blocking_client(redis_url)
    assert await StopSignals(blocking, pool.keys, "w1", 1.0).pop() == StopSignal([gone])
    await blocking.aclose()
    assert await pool.states([gone]) == ["processing"]
    await finish(pool, [ended(batch, 0, "cancelled", tokens=7)], 3)
    assert (await ends(pool))[gone].error_code == "cancelled"
    assert await pool.states(ids_of(batch)) == ["failed", "processing"]


@pytest.mark.parametrize(("delivered", "used", "recorded"), [(9, 7, 7), (3, 7, 7), (0, 7, 7), (9, 0, 9)])
async def test_the_tokens_of_the_run_count(pool: Pool, delivered: int, used: int, recorded: int) -> None:
    """The engine may have counted them; without any, the gateway's estimate of what the client received."""
    batch = await in_slots(pool, 1)
    (request_id,) = ids_of(batch)
    await leave(pool, request_id, delivered, running=True)

    await finish(pool, [ended(batch, 0, "cancelled", tokens=used, cost_ms=20.0)])

    record = (await ends(pool))[request_id]
    assert (record.error_code, record.tokens_used, record.gpu_ms) == ("cancelled", recorded, 50.0)
    (reply,) = await pool.results.fetch([request_id])
    assert reply is not None
    assert (reply.error_code, reply.tokens_used) == ("cancelled", recorded)


async def test_a_run_that_ends_before_the_signal_is_completed(pool: Pool) -> None:
    """Its result is whole."""
    batch = await in_slots(pool, 1)
    await leave(pool, ids_of(batch)[0])

    await finish(pool, [ended(batch, 0)])

    assert await pool.states(ids_of(batch)) == ["completed"]


@pytest.mark.parametrize("how", [HANDED_BACK, WITHDRAWN, LOST, "reap", "fail", "release"])
async def test_a_request_without_a_client_does_not_run_again(pool: Pool, how: str) -> None:
    """However its run was lost: it ends as cancelled with the delivered tokens, and no loss is counted."""
    batch = await in_slots(pool, 2)
    gone, stays = ids_of(batch)
    await leave(pool, gone, 6, running=True)

    match how:
        case "reap":
            await pool.reaped()
        case "fail":
            await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)
        case "release":
            await pool.batches.release(batch.batch_id, batch.token)
        case _:
            await finish(pool, [ended(batch, 0, how, tokens=0), ended(batch, 1, how, tokens=0)])

    record = (await ends(pool))[gone]
    assert (record.error_code, record.tokens_used) == ("cancelled", 6)
    assert await pool.client.hget(pool.keys.request(gone), "losses") is None
    await pool.form([("free", 2)])
    assert ids_of(await claim_next(pool, "w2", "again")) == [stays]


async def test_a_client_that_leaves_before_the_claim_ends_its_request(pool: Pool) -> None:
    """Nothing runs for it; the worker is not told."""
    await announce(pool, "w1", 4)
    gone, stays = await pool.queue(2)
    await pool.form([("free", 2)])

    assert await leave(pool, gone) == "cancelled"

    assert ids_of(await claim_next(pool)) == [stays]
    assert await stop_signals(pool) == 0
    assert await stored_slots(pool) == {"w1": (3, 4)}


@pytest.mark.parametrize("running", [False, True])
async def test_a_request_with_an_idempotency_key_runs_on(pool: Pool, *, running: bool) -> None:
    """Its client may ask again; one that gives it up, as a stream, ends."""
    await announce(pool, "w1", 4)
    submission = pool.submission(idempotency="customer:k", fingerprint="f")
    await pool.admit([submission])
    await pool.form([("free", 1)])
    batch = await claim_next(pool)

    assert await leave(pool, submission.id, running=running) is None

    assert await stop_signals(pool) == int(running)
    await finish(pool, [ended(batch, 0, LOST)])
    assert await pool.states([submission.id]) == ["failed" if running else "processing"]


async def test_a_run_that_others_may_share_goes_on(pool: Pool) -> None:
    """The primary of equal requests is not stopped; its followers get the result."""
    await announce(pool, "w1", 4)
    primary, follower = await submit(pool, 2)
    await pool.form([("free", 2)])
    batch = await claim_next(pool)

    assert await leave(pool, primary.id) is None
    assert await stop_signals(pool) == 0

    await finish(pool, [ended(batch, 0)])
    assert await pool.states([primary.id, follower.id]) == ["completed"] * 2


async def test_a_follower_runs_if_its_primary_was_lost_for_good(pool: Pool) -> None:
    """With the losses of the primary, in a batch of its own."""
    await announce(pool, "w1", 4)
    primary, follower = await submit(pool, 2)
    await pool.form([("free", 2)])
    batch = await claim_next(pool)
    await finish(pool, [ended(batch, 0, LOST)])
    batch = await claim_next(pool, token="again")

    await pool.terminations.cancel([Cancellation(primary.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert await stop_signals(pool) == 1
    last = await claim_next(pool, "w2", "last")
    assert [(r.id, r.attempt) for r in last.requests] == [(follower.id, 2)]
    assert await finish(pool, [ended(last, 0)], worker="w2") == 0
    assert await pool.states([primary.id, follower.id]) == ["failed", "completed"]


async def test_a_deadline_ends_a_run_at_once(pool: Pool) -> None:
    """The worker is told; its own outcome is stale, and its slot is free afterwards."""
    batch = await in_slots(pool, 2)
    late, stays = ids_of(batch)

    (reply,) = await pool.terminations.cancel([Cancellation(late, ErrorCode.DEADLINE_EXCEEDED)])

    assert reply is not None
    assert reply.error_code == "deadline_exceeded"
    assert await stop_signals(pool) == 1
    assert await pool.batches.renew("b1", "token", 2) == {stays}
    assert await finish(pool, [ended(batch, 0, "cancelled")], None) == 1
    assert await stored_slots(pool) == {"w1": (3, 4)}


async def test_signals_expire_and_go_to_the_worker_of_the_run(pool: Pool) -> None:
    """A worker that reads none has none later."""
    first, second = await in_slots(pool, 2), await in_slots(pool, 1, worker="w2", token="two")

    await pool.terminations.cancel([(i, ErrorCode.CANCELLED) for i in ids_of(first) + ids_of(second)])

    assert [await stop_signals(pool, worker) for worker in ("w1", "w2", "w3")] == [1, 1, 0]
    assert 0 < await pool.client.pttl(pool.keys.stops("w1")) <= 10_000


async def test_a_signal_of_a_wrong_type_fails_no_cancellation(pool: Pool) -> None:
    """The requests are marked, and others of the call end."""
    batch = await in_slots(pool, 1)
    (waiting,) = await pool.queue(1)
    await pool.client.set(pool.keys.stops("w1"), "x", px=60_000)

    cancelled = [(i, ErrorCode.CANCELLED) for i in (*ids_of(batch), waiting)]
    assert [bool(reply) for reply in await pool.terminations.cancel(cancelled)] == [False, True]

    assert list(await ends(pool)) == [waiting]
    await finish(pool, [ended(batch, 0, LOST)])
    assert (await ends(pool))[ids_of(batch)[0]].error_code == "cancelled"


async def test_requests_of_batches_are_not_marked(pool: Pool) -> None:
    """A batch runs to its end, as before."""
    (member,) = (await pool.running(1)).requests

    assert await leave(pool, member.id) is None

    assert await stop_signals(pool) == 0
    assert await pool.client.hget(pool.keys.request(member.id), "left") is None


# Charges


async def tag(pool: Pool) -> float:
    """The GPU time that the default customer has received, in terms of its tier."""
    stored = await pool.client.zscore(pool.keys.backlogs("free"), "customer")
    row = await pool.client.hget(f"{pool.keys.prefix}flow:free:customer", "tag")
    return float(stored if stored is not None else row)


@pytest.mark.parametrize("code", ["", "cancelled", "poison_request"])
async def test_what_ran_is_charged_once(pool: Pool, code: str) -> None:
    """The measured cost replaces the estimate, of a run whose client has left too. A call that is sent again charges nothing."""
    pool.tiers = [msgspec.structs.replace(tier, places=1) for tier in pool.tiers]
    await announce(pool, "w1", 4)
    await pool.queue(4)  # The first has the place in the tier queue.
    await pool.form([("free", 4)])
    batch = await claim_next(pool)
    before = await tag(pool)
    if code == "cancelled":
        await leave(pool, ids_of(batch)[1])

    for _ in range(2):
        await finish(pool, [ended(batch, 1, code, cost_ms=100.0)], 1)

    assert await tag(pool) - before == pytest.approx(100.0 - 1.0)  # The estimate of a new tier is 1 ms.
    cost = (await ends(pool))[ids_of(batch)[1]].cost_ms
    assert cost == 100.0


async def test_a_retried_request_is_settled_after_others_of_its_batch(pool: Pool) -> None:
    """One of the same customer ended in the call that lost it."""
    pool.tiers = [msgspec.structs.replace(tier, places=1) for tier in pool.tiers]
    await announce(pool, "w1", 4)
    await pool.queue(4)
    await pool.form([("free", 4)])
    batch = await claim_next(pool)
    await finish(pool, [ended(batch, 1, cost_ms=1.0), ended(batch, 2, LOST)], 2)
    again, before = await claim_next(pool, token="again"), await tag(pool)

    await finish(pool, [ended(again, 0, cost_ms=100.0)], 3)

    assert await tag(pool) - before == pytest.approx(99.0, abs=0.1)


async def test_tokens_of_a_cancelled_run_are_charged_and_the_rest_is_refunded(pool: Pool) -> None:
    """Those that the run used, of the estimate."""
    await announce(pool, "w1", 4)
    submission = pool.submission(tokens=100, tokens_per_minute=60_000.0)
    await pool.admit([submission])
    before = float(await pool.client.hget(CUSTOMER, "budget"))
    await pool.form([("free", 1)])
    batch = await claim_next(pool)
    await leave(pool, submission.id)

    await finish(pool, [ended(batch, 0, "cancelled", tokens=40)])

    assert float(await pool.client.hget(CUSTOMER, "budget")) - before == pytest.approx(60.0)
