"""Idempotency keys in `admit`: one reply for one key and body, from every gateway, for a day."""

from typing import Any

import pytest

from configs import PASS_MS, REPLAYS
from contract.builders import DAY_MS, everything, spent
from pool import WIDE, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Admissions, Submission, Verdict
from scheduler.protocol.batches import Outcome
from scheduler.protocol.cancellation import STORED_KEEP_MS, Cancellation
from scheduler.states import Admission


def keyed(pool: Pool, value: str = "customer:k1", fingerprint: str = "f1", **changes: Any) -> Submission:
    """A submission with an Idempotency-Key."""
    return pool.submission(idempotency=value, fingerprint=fingerprint, **changes)


async def admit(pool: Pool, submission: Submission) -> Verdict:
    (verdict,) = await pool.admit([submission])
    return verdict


async def end(pool: Pool, submission: Submission, code: str = "", output: str = "text") -> None:
    """Run the queued request, with this outcome."""
    await pool.form([(submission.tier, 1)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [Outcome(submission.id, code, 3.0, 0, "v1", output)])


async def complete(pool: Pool, admissions: Admissions, submission: Submission, output: str = "text") -> None:
    """Admit a request and run it."""
    (verdict,) = await admissions.admit(WIDE, 0.0, [submission])
    assert verdict.outcome is Admission.ACCEPTED
    await end(pool, submission, output=output)


async def test_a_stored_reply_has_the_end_of_its_request(pool: Pool) -> None:
    """For the audit record of the gateway that replays it."""
    first = keyed(pool)
    await admit(pool, first)
    assert await pool.results.stored(first.id) is None
    before_ms = await pool.now_ms()
    await end(pool, first)

    stored = await pool.results.stored(first.id)
    assert stored is not None
    assert stored.reply.output == "text"
    assert before_ms <= (stored.ended_ms or 0) <= await pool.now_ms()


async def test_the_first_request_claims_the_key(pool: Pool) -> None:
    """Key and row live for a day."""
    first = keyed(pool)

    assert (await admit(pool, first)).outcome is Admission.ACCEPTED

    name = pool.keys.idempotency("customer:k1")
    assert await pool.client.hgetall(name) == {b"id": first.id.encode(), b"fp": b"f1"}
    for key in (name, pool.keys.request(first.id)):
        assert DAY_MS - 5000 < await pool.client.pttl(key) <= DAY_MS


async def test_no_step_shortens_the_life_of_the_row(pool: Pool) -> None:
    """Claim, loss, retry, finish and cancel keep it."""
    first = keyed(pool)
    await admit(pool, first)
    await pool.form([("free", 1)])
    batch = await pool.claim_next()
    await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)
    batch = await pool.claim_next()
    await pool.batches.renew(batch.batch_id, batch.token)
    await pool.batches.finish(batch.batch_id, batch.token, [done(first.id)])
    await pool.terminations.cancel([(first.id, ErrorCode.DEADLINE_EXCEEDED)])

    assert await pool.client.pttl(pool.keys.request(first.id)) > DAY_MS - 5000
    assert await pool.client.hget(pool.keys.request(first.id), "idem") == b"customer:k1"


async def test_a_replayed_reply_is_not_revoked(pool: Pool) -> None:
    """Regression: a gateway was suspended, its client received the reply from another one, and then it reported a timeout."""
    first = keyed(pool)
    await admit(pool, first)
    await end(pool, first, "")
    assert (await admit(pool, keyed(pool))).outcome is Admission.REPLAYED

    await pool.terminations.cancel([Cancellation(first.id, ErrorCode.DEADLINE_EXCEEDED, delivered=True)])

    assert await pool.states([first.id]) == ["completed"]
    (reply,) = await pool.results.fetch([first.id])
    assert reply is not None
    assert (reply.state, reply.output) == ("completed", "text")


@pytest.mark.parametrize("code", ["", ErrorCode.POISON_REQUEST, ErrorCode.INVALID_REQUEST])
async def test_a_final_reply_is_replayed(pool: Pool, code: str) -> None:
    """A completed request, or a failure that another run would repeat. The replay is not stored, queued, recorded or charged,
    so no limit rejects it. It counts as a stored reply.
    """
    first = keyed(pool)
    await admit(pool, first)
    await end(pool, first, code)
    before = await everything(pool.client)

    verdict = await admit(pool, keyed(pool, rate=0.0, burst=0.0))

    assert (verdict.outcome, verdict.stored_id) == (Admission.REPLAYED, first.id)
    assert await pool.client.hdel(pool.keys.request(first.id), "replayed") == 1  # The only thing that it writes.
    assert await everything(pool.client) == before
    (reply,) = await pool.results.fetch([verdict.stored_id])
    assert reply is not None
    assert (reply.error_code, reply.output) == (code, "text")
    assert await stored(pool) == [first.id]
    assert await pool.client.pttl(pool.keys.request(first.id)) > DAY_MS - 5000


@pytest.mark.parametrize("code", [ErrorCode.WORKER_LOST, ErrorCode.GPU_TIMEOUT, ErrorCode.GATEWAY_LOST])
async def test_after_another_failure_the_next_request_claims_the_key(pool: Pool, code: ErrorCode) -> None:
    """The failed row and its key expire like rows without a key, and its charge is refunded."""
    first, second = keyed(pool, quotas=[("1day", 10)]), keyed(pool)
    await admit(pool, first)
    await end(pool, first, code)
    for key in (pool.keys.request(first.id), pool.keys.idempotency("customer:k1")):
        assert 25_000 < await pool.client.pttl(key) <= 34_000
    assert await stored(pool) == []
    assert await spent(pool, "1day") == b"0"

    assert (await admit(pool, second)).outcome is Admission.ACCEPTED

    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == second.id.encode()
    assert (await admit(pool, keyed(pool))).outcome is Admission.IN_PROGRESS


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_request_in_progress_rejects_the_next_one(pool: Pool, *, is_running: bool) -> None:
    """Queued or running; nothing changes. The same id sent again is a duplicate, not a second request."""
    first = keyed(pool)
    await admit(pool, first)
    if is_running:
        await pool.form([("free", 1)])
        await pool.claim_next()
    before = await everything(pool.client)

    verdict = await admit(pool, keyed(pool))

    assert (verdict.outcome, verdict.stored_id) == (Admission.IN_PROGRESS, first.id)
    assert (await admit(pool, first)).outcome is Admission.DUPLICATE
    assert await everything(pool.client) == before


async def test_two_requests_of_one_call_share_the_key(pool: Pool) -> None:
    """The second one is in progress; other keys, and the same key of another customer, are separate."""
    values = ("customer:k1", "customer:k1", "customer:k2", "other:k1")
    verdicts = await pool.admit([keyed(pool, value) for value in values])

    assert [v.outcome for v in verdicts] == ["accepted", "in_progress", "accepted", "accepted"]
    assert await pool.depth("free") == 3


@pytest.mark.parametrize("code", ["", ErrorCode.WORKER_LOST, None])
async def test_another_body_is_rejected(pool: Pool, code: str | None) -> None:
    """Whether the request of the key completed, failed, or is queued (None)."""
    first = keyed(pool)
    await admit(pool, first)
    if code is not None:
        await end(pool, first, code)
    before = await everything(pool.client)

    assert (await admit(pool, keyed(pool, fingerprint="f2"))).outcome is Admission.REUSED
    assert await everything(pool.client) == before


async def test_a_rejected_request_does_not_claim_the_key(pool: Pool) -> None:
    """The retry of its client is accepted."""
    before = await everything(pool.client)
    assert (await admit(pool, keyed(pool, rate=0.0, burst=0.0))).outcome is Admission.CUSTOMER_LIMIT
    assert await everything(pool.client) == before

    assert (await admit(pool, keyed(pool))).outcome is Admission.ACCEPTED


async def test_the_key_of_a_lost_request_is_free(pool: Pool) -> None:
    """Redis lost the row but not the key."""
    first, second = keyed(pool), keyed(pool)
    await admit(pool, first)
    await pool.client.delete(pool.keys.request(first.id))

    assert (await admit(pool, second)).outcome is Admission.ACCEPTED
    assert await pool.client.hget(pool.keys.idempotency("customer:k1"), "id") == second.id.encode()


async def test_the_key_of_a_lost_gateway(pool: Pool) -> None:
    """A retry through another gateway is rejected until the loss is noticed, then it is accepted."""
    first = keyed(pool)
    await admit(pool, first)
    assert (await pool.admit([keyed(pool)], WIDE, gateway="g2"))[0].outcome is Admission.IN_PROGRESS
    await pool.aged([first.id], 2100)
    await pool.presence.gateway_gone("g1")
    await pool.form([("free", 1)])

    assert (await pool.admit([keyed(pool)], WIDE, gateway="g2"))[0].outcome is Admission.ACCEPTED


# Limits of stored replies


async def stored(pool: Pool, customer: str = "customer") -> list[str]:
    """The requests whose replies are stored for a customer, oldest first."""
    entries = await pool.client.lrange(pool.keys.replays(customer), 0, -1)
    return [entry.split()[4].decode() for entry in entries]


def limited(pool: Pool, **limits: int) -> Admissions:
    """Admission with these limits of stored replies."""
    return Admissions(pool.client, pool.keys, "g1", replays=REPLAYS._replace(**limits), pass_ms=PASS_MS)


async def expire_normal_lives(pool: Pool) -> None:
    """Make all stored replies as old as a row without a key lives."""
    key = pool.keys.replays("customer")
    for place, entry in enumerate(await pool.client.lrange(key, 0, -1)):
        total, cost, expiry, _, *names = entry.split()
        await pool.client.lset(key, place, b" ".join([total, cost, expiry, b"1", *names]))


async def test_the_number_of_stored_replies_is_limited_per_customer(pool: Pool) -> None:
    """The oldest are evicted with their keys, and a retry runs again; replies of other customers stay."""
    admissions = limited(pool, max_answers=3)
    other = keyed(pool, "other:k", customer_id="other")
    await complete(pool, admissions, other)
    requests = [keyed(pool, f"customer:k{i}") for i in range(5)]
    for each in requests:
        await expire_normal_lives(pool)
        await complete(pool, admissions, each)

    assert await stored(pool) == [each.id for each in requests[1:]]  # one more, until the next key is stored
    assert await stored(pool, "other") == [other.id]
    assert await pool.client.exists(pool.keys.request(requests[0].id), pool.keys.idempotency("customer:k0")) == 0
    for value, customer, outcome in (
        ("customer:k4", "customer", Admission.REPLAYED),
        ("other:k", "other", Admission.REPLAYED),
        ("customer:k0", "customer", Admission.ACCEPTED),
    ):
        assert (await admit(pool, keyed(pool, value, customer_id=customer))).outcome is outcome


async def test_the_size_of_stored_replies_is_limited(pool: Pool) -> None:
    """One large reply takes the place of many small ones."""
    admissions = limited(pool, max_bytes=100_000)
    for i in range(10):
        await complete(pool, admissions, keyed(pool, f"customer:k{i}"))
    large, last = keyed(pool, "customer:large"), keyed(pool, "customer:last")
    await complete(pool, admissions, large, "x" * 78_000)
    await complete(pool, admissions, last)

    assert await stored(pool) == [large.id, last.id]


async def test_an_evicted_row_lives_as_long_as_a_row_without_a_key(pool: Pool) -> None:
    """A gateway that missed the message still finds the reply."""
    admissions = limited(pool, max_answers=1)
    requests = [keyed(pool, f"customer:k{i}") for i in range(3)]
    for each in requests:
        await complete(pool, admissions, each)

    assert await stored(pool) == [each.id for each in requests[1:]]
    assert 25_000 < await pool.client.pttl(pool.keys.request(requests[0].id)) <= 34_000


async def test_an_evicted_job_expires_once_its_result_is_in_postgresql(pool: Pool) -> None:
    """The row of a job outlives an outage of PostgreSQL; a row that is stored there need not be kept after its eviction."""
    admissions = Admissions(
        pool.client, pool.keys, "jobs", 600_000, replays=REPLAYS._replace(max_answers=1), pass_ms=PASS_MS
    )
    jobs = [keyed(pool, f"customer:k{i}", total_ms=600_000) for i in range(4)]
    for each in jobs[:2]:
        await complete(pool, admissions, each)

    assert await pool.terminations.stored([jobs[0].id]) == 1
    assert await pool.client.pttl(pool.keys.request(jobs[0].id)) > DAY_MS - 60_000  # still replayed
    for each in jobs[2:]:
        await complete(pool, admissions, each)

    assert await stored(pool) == [each.id for each in jobs[2:]]
    for name in (pool.keys.request(jobs[0].id), pool.keys.idempotency("customer:k0")):
        assert 0 < await pool.client.pttl(name) <= STORED_KEEP_MS
    assert await pool.client.pttl(pool.keys.request(jobs[1].id)) > 600_000


async def test_a_running_request_is_never_evicted(pool: Pool) -> None:
    """Only requests that have ended count."""
    admissions = limited(pool, max_answers=1)
    running = [keyed(pool, f"customer:r{i}") for i in range(3)]
    await admissions.admit(WIDE, 0.0, running)
    await pool.form([("free", 3)])
    batch = await pool.claim_next()
    for i in range(3):
        await expire_normal_lives(pool)
        await complete(pool, admissions, keyed(pool, f"customer:k{i}"))

    assert await pool.states([each.id for each in running]) == ["processing"] * 3
    assert await pool.batches.finish(batch.batch_id, batch.token, [done(each.id) for each in running]) == 0


async def test_lowered_limits_apply_after_some_calls(pool: Pool) -> None:
    """The evictions of one call are bounded."""
    wide, narrow = limited(pool, max_answers=1000), limited(pool, max_answers=10)
    for start in range(0, 400, 100):
        requests = [keyed(pool, f"customer:k{start + i}") for i in range(100)]
        await wide.admit(WIDE, 0.0, requests)
        await pool.form([("free", 100)])
        batch = await pool.claim_next()
        await pool.batches.finish(batch.batch_id, batch.token, [done(each.id) for each in requests])
    await expire_normal_lives(pool)

    await complete(pool, narrow, keyed(pool, "customer:a"))
    assert len(await stored(pool)) == 400 - 66 + 1
    for name in "bcdefg":
        await complete(pool, narrow, keyed(pool, f"customer:{name}"))
    assert len(await stored(pool)) <= 11


@pytest.mark.parametrize(("keep_ms", "least", "most"), [(3_600_000, 3_595_000, 3_600_000), (1000, 29_000, 34_000)])
async def test_the_time_for_which_a_reply_is_stored(pool: Pool, keep_ms: int, least: int, most: int) -> None:
    """A setting, but no row lives for less than without a key."""
    request = keyed(pool)

    await complete(pool, limited(pool, keep_ms=keep_ms), request)

    assert least < await pool.client.pttl(pool.keys.request(request.id)) <= most


async def test_a_request_that_was_answered_from_the_cache_counts_too(pool: Pool) -> None:
    """It has ended when it is admitted."""
    equal = {"same": "s", "keep_answer_ms": 60_000, "model_version": "v1"}
    await complete(pool, limited(pool), pool.submission(**equal))

    hit = keyed(pool, **equal)
    assert (await admit(pool, hit)).reply != b""
    assert await stored(pool) == [hit.id]


@pytest.mark.parametrize("length", [10, 1000, 5000])
async def test_the_cost_of_a_stored_reply_is_its_memory(pool: Pool, length: int) -> None:
    """No reply takes more memory than is counted, nor much less."""
    names = {"customer_id": "0192f0c1-7a3b-7000-8000-000000000001", "api_key_id": "4tq8Zr1mXw"}
    value = "0192f0c1-7a3b-7000-8000-000000000001:" + 28 * "a"

    async def used_after(start: int, count: int) -> int:
        for at in range(start, start + count, 100):
            requests = [keyed(pool, f"{value}{at + i:04}", 32 * "f", **names) for i in range(100)]
            await pool.admit(requests)
            await pool.form([("free", 100)])
            batch = await pool.claim_next()
            await pool.batches.finish(batch.batch_id, batch.token, [done(each.id, "x" * length) for each in requests])
            await pool.client.delete(pool.keys.outbox)
        return int((await pool.client.info("memory"))["used_memory"])

    before = await used_after(0, 100)
    used = (await used_after(100, 2000) - before) / 2000
    entries = await pool.client.lrange(pool.keys.replays(names["customer_id"]), -2000, -1)
    counted = sum(int(entry.split()[1]) for entry in entries) / 2000

    assert 0.5 * counted < used <= counted
