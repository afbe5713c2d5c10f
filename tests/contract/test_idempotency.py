"""Idempotency keys in `admit`: one answer for one key and body, whichever gateway is asked, for a day."""

from typing import Any

import pytest
from redis.asyncio import Redis

from pool import WIDE, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Admissions, ReplayLimits, Submission, Verdict
from scheduler.protocol.batches import Outcome
from scheduler.protocol.cancellation import STORED_KEEP_MS
from scheduler.states import Admission

DAY_MS = 86_400_000


def keyed(pool: Pool, value: str = "customer:k1", fingerprint: str = "f1", **changes: Any) -> Submission:
    """A submission whose client sent an Idempotency-Key."""
    return pool.submission(idempotency=value, fingerprint=fingerprint, **changes)


async def told(pool: Pool, submission: Submission) -> Verdict:
    (verdict,) = await pool.admit([submission])
    return verdict


async def ended(pool: Pool, submission: Submission, code: str) -> None:
    """Let it run to its end."""
    await pool.form([(submission.tier, 1)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(submission.id, code, 3.0, 0, "v1", "text")])


async def everything(client: Redis) -> dict[bytes, bytes]:
    return {key: await client.dump(key) async for key in client.scan_iter()}


async def test_the_first_one_takes_the_key(pool: Pool) -> None:
    """It is admitted as any other; key and request are kept for a day, to be replayed."""
    first = keyed(pool)

    assert (await told(pool, first)).outcome is Admission.ACCEPTED

    name = pool.keys.idempotency("customer:k1")
    assert await pool.client.hgetall(name) == {b"id": first.id.encode(), b"fp": b"f1"}
    for key in (name, pool.keys.request(first.id)):
        assert DAY_MS - 5000 < await pool.client.pttl(key) <= DAY_MS


async def test_nothing_shortens_the_life_of_the_answer(pool: Pool) -> None:
    """Through claim, loss, retry and finish the request is kept for its day, with its key."""
    first = keyed(pool)
    await told(pool, first)
    await pool.form([("free", 1)])
    batch = await pool.claim_next()
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)
    batch = await pool.claim_next()
    await pool.batches.renew(batch.batch_id, batch.token)
    await pool.batches.finish(batch.batch_id, batch.token, [done(first.id)])
    await pool.terminations.cancel([(first.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert await pool.client.pttl(pool.keys.request(first.id)) > DAY_MS - 5000
    assert await pool.client.hget(pool.keys.request(first.id), "idem") == b"customer:k1"


async def test_a_completed_one_is_replayed(pool: Pool) -> None:
    """The second is told whose answer to give; it is neither stored, nor queued, nor noted, nor paid for."""
    first = keyed(pool)
    await told(pool, first)
    await ended(pool, first, "")
    before = await everything(pool.client)

    verdict = await told(pool, keyed(pool))

    assert (verdict.outcome, verdict.stored_id) == (Admission.REPLAYED, first.id)
    assert await everything(pool.client) == before
    (reply,) = await pool.results.fetch([verdict.stored_id])
    assert reply is not None
    assert reply.output == "text"


@pytest.mark.parametrize("code", [ErrorCode.POISON_REQUEST, ErrorCode.INVALID_REQUEST])
async def test_a_failure_that_would_come_again_is_replayed(pool: Pool, code: ErrorCode) -> None:
    """The input is at fault: another run would cost a worker and end the same."""
    first = keyed(pool)
    await told(pool, first)
    await ended(pool, first, code)

    verdict = await told(pool, keyed(pool))

    assert (verdict.outcome, verdict.stored_id) == (Admission.REPLAYED, first.id)


@pytest.mark.parametrize("code", [ErrorCode.WORKER_LOST, ErrorCode.GPU_TIMEOUT, ErrorCode.GATEWAY_LOST])
async def test_after_any_other_failure_the_next_one_takes_over(pool: Pool, code: ErrorCode) -> None:
    """The client does right to try again: it runs, and from now on the key is its own."""
    first, second = keyed(pool), keyed(pool)
    await told(pool, first)
    await ended(pool, first, code)

    assert (await told(pool, second)).outcome is Admission.ACCEPTED

    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == second.id.encode()
    assert (await told(pool, keyed(pool))).outcome is Admission.IN_PROGRESS


@pytest.mark.parametrize("running", [False, True])
async def test_one_under_way_is_told_so(pool: Pool, *, running: bool) -> None:
    """Queued or in a worker's hands: the second client waits with its retry, and nothing changes."""
    first = keyed(pool)
    await told(pool, first)
    if running:
        await pool.form([("free", 1)])
        await pool.claim_next()
    before = await everything(pool.client)

    verdict = await told(pool, keyed(pool))

    assert (verdict.outcome, verdict.stored_id) == (Admission.IN_PROGRESS, first.id)
    assert await everything(pool.client) == before


async def test_two_in_one_call_are_one_request(pool: Pool) -> None:
    """Two connections sent the same at the same moment, and shared a flush."""
    verdicts = await pool.admit([keyed(pool), keyed(pool), keyed(pool, "customer:k2")])

    assert [v.outcome for v in verdicts] == [Admission.ACCEPTED, Admission.IN_PROGRESS, Admission.ACCEPTED]
    assert await pool.depth("free") == 2


@pytest.mark.parametrize("code", ["", ErrorCode.WORKER_LOST, None])
async def test_another_body_is_refused(pool: Pool, code: str | None) -> None:
    """A key stands for one body, whether its request completed, failed, or waits (None)."""
    first = keyed(pool)
    await told(pool, first)
    if code is not None:
        await ended(pool, first, code)
    before = await everything(pool.client)

    assert (await told(pool, keyed(pool, fingerprint="f2"))).outcome is Admission.REUSED
    assert await everything(pool.client) == before


async def test_customers_do_not_share_keys(pool: Pool) -> None:
    """The value names the customer too, so the same key of another one is another key."""
    await told(pool, keyed(pool))

    assert (await told(pool, keyed(pool, "other:k1"))).outcome is Admission.ACCEPTED


async def test_a_call_sent_again_is_a_duplicate_not_a_replay(pool: Pool) -> None:
    """The reply of admit was lost: the same id is told `duplicate`, or its gateway would refuse its own request."""
    first = keyed(pool)
    await told(pool, first)
    assert (await told(pool, first)).outcome is Admission.DUPLICATE
    await ended(pool, first, "")
    assert (await told(pool, first)).outcome is Admission.DUPLICATE


async def test_a_rejected_one_leaves_the_key_free(pool: Pool) -> None:
    """It changed no key, so the retry that the client was told to make is admitted."""
    before = await everything(pool.client)
    assert (await told(pool, keyed(pool, rate=0.0, burst=0.0))).outcome is Admission.CUSTOMER_LIMIT
    assert await everything(pool.client) == before

    assert (await told(pool, keyed(pool))).outcome is Admission.ACCEPTED


async def test_a_limit_does_not_hide_an_answer(pool: Pool) -> None:
    """What is replayed asks for no capacity, so an empty bucket or a full queue is no reason to refuse it."""
    first = keyed(pool)
    await told(pool, first)
    await ended(pool, first, "")

    assert (await told(pool, keyed(pool, rate=0.0, burst=0.0))).outcome is Admission.REPLAYED


async def test_a_forgotten_request_frees_its_key(pool: Pool) -> None:
    """Redis lost the request but not the key: nobody could ever answer for it."""
    first, second = keyed(pool), keyed(pool)
    await told(pool, first)
    await pool.client.delete(pool.keys.request(first.id))

    assert (await told(pool, second)).outcome is Admission.ACCEPTED
    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == second.id.encode()


async def test_the_key_of_a_request_whose_gateway_died(pool: Pool) -> None:
    """The client comes back by another gateway: in progress until the pool has noticed, then it runs."""
    first = keyed(pool)
    await told(pool, first)
    assert (await told(pool, keyed(pool))).outcome is Admission.IN_PROGRESS
    await pool.aged([first.id], 2100)
    await pool.presence.gateway_gone("g1")
    await pool.form([("free", 1)])

    assert (await pool.admit([keyed(pool)], WIDE, gateway="g2"))[0].outcome is Admission.ACCEPTED


async def kept(pool: Pool, customer: str = "customer") -> list[str]:
    """The ids of the answers that are kept for a customer, oldest first."""
    entries = await pool.client.lrange(pool.keys.replays(customer), 0, -1)
    return [entry.split()[4].decode() for entry in entries]


def small(pool: Pool, **limits: int) -> Admissions:
    """Admission with a budget for answers."""
    return Admissions(pool.client, pool.keys, "g1", replays=ReplayLimits(**limits))


async def answered(pool: Pool, admissions: Admissions, submission: Submission, output: str = "text") -> None:
    """Let it in and run it to its end."""
    (verdict,) = await admissions.admit(WIDE, 0.0, [submission])
    assert verdict.outcome is Admission.ACCEPTED
    await pool.form([(submission.tier, 1)])
    batch = await pool.claim_next()
    outcome = Outcome(submission.id, "", 3.0, 0, "v1", output)
    await pool.batches.finish(batch.batch_id, batch.token, [outcome])


async def as_if_past(pool: Pool) -> None:
    """As if the life that every row has were over for all that are kept."""
    key = pool.keys.replays("customer")
    for place, entry in enumerate(await pool.client.lrange(key, 0, -1)):
        total, cost, over, _, *names = entry.split()
        await pool.client.lset(key, place, b" ".join([total, cost, over, b"1", *names]))


async def test_a_customer_has_room_for_so_many_answers(pool: Pool) -> None:
    """The oldest leave first, with their keys, and a replay of theirs runs anew; another customer's stay."""
    admissions = small(pool, rows=3)
    others = keyed(pool, "other:k", customer_id="other")
    await answered(pool, admissions, others)
    asked = [keyed(pool, f"customer:k{i}") for i in range(5)]
    for each in asked:
        await as_if_past(pool)
        await answered(pool, admissions, each)

    assert await kept(pool) == [each.id for each in asked[1:]]  # One more, until the next key is stored.
    assert await kept(pool, "other") == [others.id]
    assert await pool.client.exists(pool.keys.request(asked[0].id), pool.keys.idempotency("customer:k0")) == 0
    assert (await told(pool, keyed(pool, "customer:k4"))).outcome is Admission.REPLAYED
    assert (await told(pool, keyed(pool, "other:k", customer_id="other"))).outcome is Admission.REPLAYED
    assert (await told(pool, keyed(pool, "customer:k0"))).outcome is Admission.ACCEPTED


async def test_a_customer_has_room_for_so_many_bytes(pool: Pool) -> None:
    """One large answer takes the place of many small ones."""
    admissions = small(pool, size=100_000)
    for i in range(10):
        await answered(pool, admissions, keyed(pool, f"customer:k{i}"))
    large = keyed(pool, "customer:large")
    await answered(pool, admissions, large, "x" * 78_000)
    await answered(pool, admissions, last := keyed(pool, "customer:last"))

    assert await kept(pool) == [large.id, last.id]


async def test_what_every_row_has_is_not_taken_by_the_budget(pool: Pool) -> None:
    """A gateway that missed the message still finds the answer in the row, for as long as without a key."""
    admissions = small(pool, rows=1)
    asked = [keyed(pool, f"customer:k{i}") for i in range(3)]
    for each in asked:
        await answered(pool, admissions, each)

    assert await kept(pool) == [each.id for each in asked[1:]]
    assert 25_000 < await pool.client.pttl(pool.keys.request(asked[0].id)) <= 34_000


async def test_an_evicted_job_goes_once_its_end_is_stored(pool: Pool) -> None:
    """A job's row lives for an outage of PostgreSQL; when its end is there, an answer that is evicted need not."""
    admissions = Admissions(pool.client, pool.keys, "jobs", 600_000, replays=ReplayLimits(rows=1))
    asked = [keyed(pool, f"customer:k{i}", total_ms=600_000) for i in range(4)]
    for each in asked[:2]:
        await answered(pool, admissions, each)

    assert await pool.terminations.stored([asked[0].id]) == 1
    assert await pool.client.pttl(pool.keys.request(asked[0].id)) > DAY_MS - 60_000  # It answers its key still.
    for each in asked[2:]:
        await answered(pool, admissions, each)

    assert await kept(pool) == [each.id for each in asked[2:]]
    for name in (pool.keys.request(asked[0].id), pool.keys.idempotency("customer:k0")):
        assert 0 < await pool.client.pttl(name) <= STORED_KEEP_MS
    assert await pool.client.pttl(pool.keys.request(asked[1].id)) > 600_000  # PostgreSQL does not have it yet.


async def test_one_under_way_is_never_evicted(pool: Pool) -> None:
    """Its row is the request itself: only what has ended counts."""
    admissions = small(pool, rows=1)
    running = [keyed(pool, f"customer:r{i}") for i in range(3)]
    await admissions.admit(WIDE, 0.0, running)
    await pool.form([("free", 3)])
    batch = await pool.claim_next()
    for i in range(3):
        await as_if_past(pool)
        await answered(pool, admissions, keyed(pool, f"customer:k{i}"))

    assert await pool.states([each.id for each in running]) == ["processing"] * 3
    assert await pool.batches.finish(batch.batch_id, batch.token, [done(each.id) for each in running]) == 0


async def test_lowered_limits_hold_after_some_calls(pool: Pool) -> None:
    """No call evicts more than some, however many there are."""
    wide, narrow = small(pool, rows=1000), small(pool, rows=10)
    for start in range(0, 400, 100):
        asked = [keyed(pool, f"customer:k{start + i}") for i in range(100)]
        await wide.admit(WIDE, 0.0, asked)
        await pool.form([("free", 100)])
        batch = await pool.claim_next()
        await pool.batches.finish(batch.batch_id, batch.token, [done(each.id) for each in asked])
    await as_if_past(pool)

    await answered(pool, narrow, keyed(pool, "customer:a"))
    assert len(await kept(pool)) == 400 - 66 + 1
    for name in "bcdefg":
        await answered(pool, narrow, keyed(pool, f"customer:{name}"))
    assert len(await kept(pool)) <= 11


@pytest.mark.parametrize("code", [ErrorCode.WORKER_LOST, ErrorCode.GPU_TIMEOUT])
async def test_a_failure_of_ours_is_kept_no_longer_than_without_a_key(pool: Pool, code: ErrorCode) -> None:
    """It is never replayed: row and key go half a minute after the deadline, and count for nothing."""
    first = keyed(pool)
    await told(pool, first)
    await ended(pool, first, code)

    for key in (pool.keys.request(first.id), pool.keys.idempotency("customer:k1")):
        assert 25_000 < await pool.client.pttl(key) <= 34_000
    assert await kept(pool) == []


async def test_a_failure_that_is_replayed_counts_as_an_answer(pool: Pool) -> None:
    """As long as it is kept, it is in the budget."""
    first = keyed(pool)
    await told(pool, first)
    await ended(pool, first, ErrorCode.INVALID_REQUEST)

    assert await kept(pool) == [first.id]
    assert await pool.client.pttl(pool.keys.request(first.id)) > DAY_MS - 5000


async def test_the_time_that_an_answer_is_kept(pool: Pool) -> None:
    """It is a setting; no row lives for less than it would without a key."""
    for keep_ms, least, most in ((3_600_000, 3_595_000, 3_600_000), (1000, 29_000, 34_000)):
        admissions = small(pool, keep_ms=keep_ms)
        asked = keyed(pool, f"customer:{keep_ms}")
        await answered(pool, admissions, asked)
        assert least < await pool.client.pttl(pool.keys.request(asked.id)) <= most


async def test_what_is_charged_is_not_touched_by_a_key(pool: Pool) -> None:
    """The row tells of the key behind the windows of the quotas, which are given back at a failure as ever."""
    first = keyed(pool, quotas=[("1day", 10)])
    await told(pool, first)
    await ended(pool, first, ErrorCode.WORKER_LOST)

    assert (await pool.client.hget("rl:customer:customer", "q:1day")).split()[1] == b"0"


async def test_a_row_that_was_answered_from_the_cache_counts_as_well(pool: Pool) -> None:
    """It has ended as it came."""
    shared = {"same": "s", "keep_answer_ms": 60_000, "model_version": "v1"}
    await answered(pool, small(pool), pool.submission(**shared))

    hit = keyed(pool, **shared)
    assert (await told(pool, hit)).reply != b""
    assert await kept(pool) == [hit.id]


@pytest.mark.parametrize("length", [10, 1000, 5000])
async def test_the_cost_of_an_answer_is_what_it_takes(pool: Pool, length: int) -> None:
    """The budget in bytes is one of Redis' memory: nothing takes more than it is counted for, nor much less."""
    names = {"customer_id": "0192f0c1-7a3b-7000-8000-000000000001", "api_key_id": "4tq8Zr1mXw"}
    value = "0192f0c1-7a3b-7000-8000-000000000001:" + 28 * "a"

    async def many(start: int, count: int) -> None:
        for at in range(start, start + count, 100):
            asked = [keyed(pool, f"{value}{at + i:04}", 32 * "f", **names) for i in range(100)]
            await pool.admit(asked)
            await pool.form([("free", 100)])
            batch = await pool.claim_next()
            outcomes = [done(each.id, "x" * length) for each in asked]
            await pool.batches.finish(batch.batch_id, batch.token, outcomes)
            await pool.client.delete(pool.keys.outbox)

    await many(0, 100)
    before = int((await pool.client.info("memory"))["used_memory"])
    await many(100, 2000)
    taken = (int((await pool.client.info("memory"))["used_memory"]) - before) / 2000
    entries = await pool.client.lrange(pool.keys.replays(names["customer_id"]), -2000, -1)
    counted = sum(int(entry.split()[1]) for entry in entries) / 2000

    assert 0.5 * counted < taken <= counted
