"""Requests in slots: each ends, returns, or is retried by itself."""

import pytest

import scheduler.protocol.batches
from contract.slots import (
    LOST,
    announce,
    claim_next,
    ended,
    ends,
    finish,
    ids_of,
    in_slots,
    stored_slots,
)
from pool import TIERS, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.batches import (
    HANDED_BACK,
    RETRY_BUDGET,
    WITHDRAWN,
    ClaimedBatch,
    OwnedBatch,
    lost,
)
from scheduler.protocol.pool_view import SlotView


async def ready(pool: Pool) -> list[str]:
    """The ready batches, the next one first."""
    return [batch_id.decode() for batch_id in await pool.client.lrange(pool.keys.batch_queue, 0, -1)]


async def queued(pool: Pool, tier: str = "free") -> list[str]:
    """The ids of a tier queue, the next one first."""
    return [each.decode() for each in reversed(await pool.client.lrange(pool.keys.queue(tier), 0, -1))]


async def is_closed(pool: Pool, batch: ClaimedBatch) -> bool:
    """Whether nothing is left of the batch."""
    key = pool.keys.batch(batch.batch_id)
    leased = await pool.client.zscore(pool.keys.leases, batch.batch_id)
    return not await pool.client.exists(key) and leased is None and not await pool.inflight()


# Ends


async def test_each_request_ends_by_itself(pool: Pool) -> None:
    """The others run on; the batch is closed with its last request."""
    batch = await in_slots(pool, 3)
    ids = ids_of(batch)

    assert await finish(pool, [ended(batch, 1)], 2) == 0
    assert await pool.states(ids) == ["processing", "completed", "processing"]
    assert await pool.inflight() == {"inflight:free:b1": [ids[0], ids[2]]}
    assert await pool.batches.renew("b1", "token", 3) == {ids[0], ids[2]}

    assert await finish(pool, [ended(batch, 2), ended(batch, 0, "invalid_output")]) == 0
    assert await pool.states(ids) == ["failed", "completed", "completed"]
    assert await is_closed(pool, batch)
    assert {each.error_code for each in (await ends(pool)).values()} == {"", "invalid_output"}


async def test_requests_of_several_batches_end_in_one_call(pool: Pool) -> None:
    """Only those whose batches this worker still owns."""
    first, second = await in_slots(pool, 2, token="one"), await in_slots(pool, 2, "paid", token="two")
    foreign = ClaimedBatch(second.batch_id, "guessed", second.requests)

    assert await finish(pool, [ended(first, 0), ended(foreign, 0), ended(second, 1), ended(first, 1)]) == 1

    assert await pool.states(ids_of(first) + ids_of(second)) == ["completed", "completed", "processing", "completed"]
    assert set(await pool.inflight()) == {"inflight:paid:b2"}


@pytest.mark.parametrize("code", ["", HANDED_BACK, WITHDRAWN, LOST, "invalid_output"])
async def test_an_end_that_is_sent_again_is_stale(pool: Pool, code: str) -> None:
    """Its reply was lost: nothing changes."""
    batch = await in_slots(pool, 2)
    again = [ended(batch, 0, code)]
    assert await finish(pool, again, 3) == 0
    rows = [await pool.client.hgetall(pool.keys.request(i)) for i in ids_of(batch)]
    lists = await queued(pool), await ready(pool), await pool.inflight()

    assert await finish(pool, again, 3) == 1

    assert [await pool.client.hgetall(pool.keys.request(i)) for i in ids_of(batch)] == rows
    assert (await queued(pool), await ready(pool), await pool.inflight()) == lists
    assert await stored_slots(pool) == {"w1": (3, 4)}


async def test_a_poisonous_request_ends_as_a_dead_letter(pool: Pool) -> None:
    """Alone: the others of its batch run on."""
    batch = await in_slots(pool, 2)

    await finish(pool, [ended(batch, 0, "poison_request")], 3)

    assert [letter.id for letter in await pool.letters()] == ids_of(batch)[:1]
    assert await pool.states(ids_of(batch)) == ["failed", "processing"]


async def test_large_outputs_end_in_several_calls(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own output, and the free slots after each call are those of the requests that have ended."""
    batch = await in_slots(pool, 3)
    monkeypatch.setattr(scheduler.protocol.batches, "MAX_CALL_BYTES", 2000)
    long = [
        end._replace(outcome=end.outcome._replace(output=letter * 1500))
        for letter, end in zip("abc", (ended(batch, at) for at in range(3)), strict=True)
    ]
    await pool.client.config_resetstat()

    assert await finish(pool, long) == 0

    assert (await pool.client.info("commandstats"))["cmdstat_evalsha"]["calls"] == 3
    assert [reply.output for reply in await pool.results.fetch(ids_of(batch)) if reply] == [x * 1500 for x in "abc"]
    assert await stored_slots(pool) == {"w1": (4, 4)}
    assert await is_closed(pool, batch)


@pytest.mark.parametrize(("free", "after"), [(3, (3, 4)), (None, (2, 4)), (-1, (-1, 4))])
async def test_the_free_slots_are_a_number_or_a_change(pool: Pool, free: int | None, after: tuple[int, int]) -> None:
    """While a claim is in progress, the worker knows only how many slots became free."""
    batch = await in_slots(pool, 3)
    assert await stored_slots(pool) == {"w1": (1, 4)}

    await finish(pool, [ended(batch, 0)], free)

    assert await stored_slots(pool) == {"w1": after}


async def test_nothing_ends_and_slots_are_reported(pool: Pool) -> None:
    """A call without outcomes."""
    await announce(pool, "w1", 1)

    assert await finish(pool, [], 3) == 0

    assert await stored_slots(pool) == {"w1": (3, 4)}


# Handed back, withdrawn


@pytest.mark.parametrize("code", [HANDED_BACK, WITHDRAWN])
async def test_requests_that_are_handed_back_are_next_in_order(pool: Pool, code: str) -> None:
    """First in their queues, without an attempt, even after their queue timeout; only a withdrawn one is marked."""
    batch = await in_slots(pool, 3)
    (newer,) = await pool.queue(1)
    ids = ids_of(batch)

    await finish(pool, [ended(batch, 0, code), ended(batch, 1), ended(batch, 2, code)])

    assert await queued(pool) == [ids[0], ids[2], newer]
    assert await is_closed(pool, batch)
    await pool.overdue([newer])
    await pool.form([("free", 3)])
    again = await claim_next(pool, token="again")
    assert [(r.id, r.attempt, r.was_withdrawn) for r in again.requests] == [
        (ids[0], 1, code == WITHDRAWN),
        (ids[2], 1, code == WITHDRAWN),
    ]


async def age_batches(pool: Pool) -> None:
    """Make all batches as old as the restart of a worker takes."""
    for batch_id in await pool.client.zrange(pool.keys.leases, 0, -1):
        await pool.client.hset(pool.keys.batch(batch_id.decode()), "at", str(await pool.now_ms() - 5000))


@pytest.mark.parametrize("codes", [[HANDED_BACK], [HANDED_BACK, HANDED_BACK], [LOST], [LOST, HANDED_BACK]])
async def test_a_request_without_a_worker_ends_by_its_queue_timeout(pool: Pool, codes: list[str]) -> None:
    """Its worker went away after these ends: it waits for another one as long as at first, not until its deadline."""
    await announce(pool)
    (request,) = await pool.queue(1, total_ms=600_000)
    for number, code in enumerate(codes):
        if number == 0 or (code == HANDED_BACK and codes[0] == HANDED_BACK):
            await pool.form([("free", 1)])
        batch = await claim_next(pool, token=str(number))
        await pool.age(request)
        before = await pool.now_ms()
        await finish(pool, [ended(batch, 0, code)])
        assert 2000 <= (await pool.times(request))["qdl"] - before < 12_000

    await pool.reaped()
    await pool.terminations.expire(TIERS)
    assert await pool.states([request]) == ["queued" if codes[0] == HANDED_BACK else "processing"]
    await pool.age(request)
    await age_batches(pool)
    await pool.reaped()
    await pool.terminations.expire(TIERS)

    assert {each.id: each.error_code for each in (await ends(pool)).values()} == {request: "queue_timeout"}


async def test_a_batch_that_no_worker_claims_ends_by_the_queue_timeout(pool: Pool) -> None:
    """It was formed for free slots of a worker that went away before its claim, and has waited for as long as a restart."""
    await announce(pool)
    (request,) = await pool.queue(1, total_ms=600_000)
    await pool.form([("free", 1)])
    await pool.reaped()
    assert await pool.states([request]) == ["processing"]
    await pool.age(request)
    await pool.reaped()
    assert await pool.states([request]) == ["processing"]
    await age_batches(pool)

    await pool.reaped()

    assert {each.id: each.error_code for each in (await ends(pool)).values()} == {request: "queue_timeout"}


@pytest.mark.parametrize("code", [HANDED_BACK, WITHDRAWN])
async def test_a_lost_request_stays_alone_when_it_is_handed_back(pool: Pool, code: str) -> None:
    """It is the next batch, with its number of attempts, and joins no new requests."""
    batch = await in_slots(pool, 1)
    await finish(pool, [ended(batch, 0, LOST)])
    again = await claim_next(pool, token="again")
    await pool.queue(2)

    await finish(pool, [ended(again, 0, code)])

    third = await claim_next(pool, "w2", "third")
    assert [(r.id, r.attempt) for r in third.requests] == [(ids_of(batch)[0], 2)]
    await finish(pool, [ended(third, 0)])
    assert (await ends(pool))[ids_of(batch)[0]].attempts == 2


# Lost runs


async def test_a_lost_run_is_retried_alone(pool: Pool) -> None:
    """First, in a batch of its own; the others of its batch are not touched."""
    batch = await in_slots(pool, 3)
    await pool.queue(2)
    await pool.form([("free", 1)])

    await finish(pool, [ended(batch, 1, LOST)], 2)

    assert await pool.states(ids_of(batch)) == ["processing"] * 3
    again = await claim_next(pool, "w2", "again")
    assert [(r.id, r.attempt) for r in again.requests] == [(ids_of(batch)[1], 2)]
    await finish(pool, [ended(again, 0)], worker="w2")
    assert await pool.batches.renew("b1", "token", 2) is True


async def test_too_many_losses_end_a_request(pool: Pool) -> None:
    """As a dead letter with the workers that lost it."""
    batch = await in_slots(pool, 1)
    (request_id,) = ids_of(batch)
    for attempt in range(RETRY_BUDGET):
        await finish(pool, [ended(batch, 0, LOST)])
        batch = await claim_next(pool, f"w{attempt + 2}", f"t{attempt}")

    await finish(pool, [ended(batch, 0, lost(ErrorCode.GPU_TIMEOUT))])

    (letter,) = await pool.letters()
    assert (letter.id, letter.error_code, letter.attempts) == (request_id, "gpu_timeout", RETRY_BUDGET + 1)
    assert list(letter.worker_ids) == ["w1", "w2", "w3"]
    assert await pool.states([request_id]) == ["failed"]
    assert await is_closed(pool, batch)


@pytest.mark.parametrize(
    ("cause", "code"), [(ErrorCode.WORKER_LOST, "deadline_exceeded"), (ErrorCode.GPU_TIMEOUT, "gpu_timeout")]
)
async def test_a_lost_run_without_time_left_ends(pool: Pool, cause: ErrorCode, code: str) -> None:
    """A retry needs a minimum."""
    batch = await in_slots(pool, 1)

    await finish(pool, [ended(batch, 0, lost(cause))], min_left_ms=10_000)

    assert (await ends(pool))[ids_of(batch)[0]].error_code == code
    assert await is_closed(pool, batch)


async def test_the_retry_budget_bounds_lost_runs(pool: Pool) -> None:
    """The rest ends as lost, in the order of the call."""
    batch = await in_slots(pool, 3)
    later_us = (await pool.now_ms() + 600_000) * 1000  # Nothing is deposited before that time.
    await pool.client.hset(pool.keys.retry_budget, mapping={"tokens": 2, "at": later_us})
    await pool.client.pexpire(pool.keys.retry_budget, 60_000)

    await finish(pool, [ended(batch, at, LOST) for at in range(3)])

    assert await pool.states(ids_of(batch)) == ["processing", "processing", "failed"]
    assert {i: e.error_code for i, e in (await ends(pool)).items()} == {ids_of(batch)[2]: "worker_lost"}
    assert len(await ready(pool)) == 2


async def test_the_requests_of_a_lost_worker_are_retried_one_by_one(pool: Pool) -> None:
    """In order; those that have ended are not."""
    batch = await in_slots(pool, 4)
    await finish(pool, [ended(batch, 1)], 1)

    await pool.reaped()

    found = []
    for n in range(3):
        again = await claim_next(pool, "w2", f"t{n}")
        found += [(r.id, r.attempt) for r in again.requests]
        assert len(again.requests) == 1
    ids = ids_of(batch)
    assert found == [(i, 2) for i in (ids[0], ids[2], ids[3])]
    assert await finish(pool, [ended(batch, 0)]) == 1


async def test_a_lost_process_can_report_all_its_runs_in_one_call(pool: Pool) -> None:
    """The retried ones take slots again as soon as they are ready."""
    batch = await in_slots(pool, 4)

    await finish(pool, [ended(batch, at, LOST) for at in range(4)], 4)

    slots = (await pool.batches.look(TIERS)).slots
    assert slots is not None
    assert (slots.free, slots.total, len(await ready(pool))) == (0, 4, 4)


async def test_a_released_batch_returns_its_requests(pool: Pool) -> None:
    """The reply of a claim was lost."""
    batch = await in_slots(pool, 2)

    assert await pool.batches.release(batch.batch_id, batch.token)

    assert await queued(pool) == ids_of(batch)


async def test_several_leases_are_renewed_in_one_call(pool: Pool) -> None:
    """Each has its own result."""
    first, second = await in_slots(pool, 2, token="one"), await in_slots(pool, 1, token="two")
    await finish(pool, [ended(first, 0)], 2)
    owned = [
        OwnedBatch(first.batch_id, "one", 2),
        OwnedBatch(first.batch_id, "one", 1),
        OwnedBatch(second.batch_id, "guessed", 1),
        OwnedBatch(second.batch_id, "two", 1),
        OwnedBatch("unknown", "two", 1),
    ]

    assert await pool.batches.renew_all(owned) == [{ids_of(first)[1]}, True, False, True, False]


@pytest.mark.parametrize("code", [LOST, HANDED_BACK])
async def test_the_batch_of_a_lost_request_outlives_it(pool: Pool, code: str) -> None:
    """Also if it is handed back after a loss."""
    await announce(pool, "w1", 4)
    await pool.queue(1, total_ms=600_000, queue_ms=600_000)
    await pool.form([("free", 1)])
    await finish(pool, [ended(await claim_next(pool), 0, LOST)])
    if code == HANDED_BACK:
        await finish(pool, [ended(await claim_next(pool, token="again"), 0, HANDED_BACK)])

    (batch_id,) = await ready(pool)
    for key in (pool.keys.batch(batch_id), *await pool.inflight()):
        assert await pool.client.pttl(key) > 600_000


# Damaged rows


@pytest.mark.parametrize("fields", [{"env": "x"}, {"who": "x"}])
async def test_a_damaged_row_ends_and_its_batch_is_closed(pool: Pool, fields: dict[str, str]) -> None:
    """The others of the call end normally."""
    batch = await in_slots(pool, 2)
    damaged, other = ids_of(batch)
    await pool.client.hset(pool.keys.request(damaged), mapping=fields)

    assert await finish(pool, [ended(batch, 0), ended(batch, 1)]) == 1

    assert await pool.states([damaged, other]) == ["failed", "completed"]
    assert await is_closed(pool, batch)


@pytest.mark.parametrize("field", ["left", "withdrawn", "losses", "wait"])
@pytest.mark.parametrize("code", ["cancelled", LOST, WITHDRAWN])
async def test_a_damaged_field_fails_nothing(pool: Pool, field: str, code: str) -> None:
    """The request ends once, at the latest at its deadline."""
    batch = await in_slots(pool, 1)
    await pool.client.hset(pool.keys.request(ids_of(batch)[0]), field, "some")

    await finish(pool, [ended(batch, 0, code)])
    await pool.overdue(ids_of(batch), "dl") if await pool.states(ids_of(batch)) != ["failed"] else None
    await pool.terminations.expire(TIERS)
    await pool.reaped()

    assert await pool.states(ids_of(batch)) == ["failed"]
    assert len(await ends(pool)) == 1


async def test_a_worker_with_slots_can_run_a_batch_of_a_pool_without(pool: Pool) -> None:
    """As after a loss of Redis, before its next heartbeat: its requests end one by one too."""
    await pool.queue(2)
    await pool.form([("free", 2)])
    batch = await claim_next(pool)

    assert await finish(pool, [ended(batch, 0, LOST), ended(batch, 1)]) == 0

    assert ids_of(await claim_next(pool, token="again")) == ids_of(batch)[:1]
    assert await stored_slots(pool) == {}


async def test_a_batch_with_slots_can_be_finished_as_a_whole(pool: Pool) -> None:
    """By a worker without slots, as while a pool is changed."""
    await announce(pool, "w1", 4)
    await pool.queue(2)
    await pool.form([("free", 2)])
    batch_id = await pool.pop()
    assert batch_id is not None
    batch = await pool.batches.claim(batch_id, "w9", "token")
    assert batch is not None

    assert await pool.batches.finish(batch_id, "token", [done(r.id) for r in batch.requests]) == 0

    assert (await pool.batches.look(TIERS)).slots == SlotView(4, 4, 4)
