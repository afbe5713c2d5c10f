"""`admit`: limits, queueing and the audit record happen together or not at all."""

from typing import Any

import pytest
from msgspec.structs import replace

from configs import REPLAYS
from contract.builders import everything, outcomes
from eventually import eventually
from pool import TIERS, WIDE, Pool, done
from scheduler.protocol.admission import Admissions, Submission, TierLimit, Verdict
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission


def free_tier(**fields: Any) -> list[TierLimit]:
    """Tier limits in which only `free` is limited."""
    open_tier = {"name": "free", "rate": 1e6, "burst": 1e6, "max_depth": 1000, "ahead": TIERS}
    return [*WIDE[:2], TierLimit(**open_tier | fields)]


async def test_an_accepted_request_is_stored_queued_and_recorded(pool: Pool) -> None:
    """Acceptance writes the row, the tier queue and the outbox, and wakes a scheduler."""
    submission = pool.submission("paid", trace_id="t1")

    (verdict,) = await pool.admit([submission])

    assert verdict.outcome is Admission.ACCEPTED
    assert await pool.client.lrange(pool.keys.queue("paid"), 0, -1) == [submission.id.encode()]
    row = await pool.client.hgetall(pool.keys.request(submission.id))
    assert (row[b"state"], row[b"body"]) == (b"queued", submission.body)
    accepted, ended = await pool.audit()
    records = [(a.id, a.customer_id, a.tier, a.gateway_id, a.trace_id) for a in accepted]
    assert (records, ended) == ([(submission.id, "customer", "paid", "g1", "t1")], [])
    assert await pool.client.llen(pool.keys.wake) == 1


async def test_requests_of_one_customer_keep_their_endpoints(pool: Pool) -> None:
    """In one call with equal keys. The limits are those of the customer, whatever the endpoint."""
    sent = [pool.submission(endpoint=endpoint, max_concurrency=3) for endpoint in ("/v1/inference", "/v1/messages") * 2]

    verdicts = await pool.admit(sent)

    assert outcomes(verdicts) == ["accepted"] * 3 + ["concurrency"]
    recorded = {a.id: a.endpoint for a in (await pool.audit())[0]}
    assert recorded == {s.id: s.endpoint for s in sent[:3]}


async def test_a_repeated_call_is_a_duplicate(pool: Pool) -> None:
    """A call whose reply was lost can be sent again: all outcomes are `duplicate`, and nothing changes."""
    submissions = [pool.submission() for _ in range(3)]
    await pool.admit(submissions)
    before = await everything(pool.client)

    assert outcomes(await pool.admit(submissions)) == ["duplicate"] * 3
    assert await everything(pool.client) == before


async def test_deadlines_count_from_the_time_of_the_call(pool: Pool) -> None:
    """A call that was buffered while Redis was suspended: an expired request changes nothing, another has the time left."""
    late, expired = (pool.submission(total_ms=ms, queue_ms=2000) for ms in (4000, 2900))
    sent = await pool.now_ms() - 3000
    before = await everything(pool.client, "epoch")

    assert outcomes(await pool.admit([expired], redis_ms=sent)) == ["too_late"]
    assert await everything(pool.client, "epoch") == before
    assert outcomes(await pool.admit([late], redis_ms=sent)) == ["accepted"]

    times = await pool.times(late.id)
    assert [times["dl"] - sent, times["qdl"] - sent] == [4000, 2000]


async def test_a_gateway_clock_ahead_of_redis_gives_no_more_time(pool: Pool) -> None:
    """The time of a request never begins in the future."""
    submission = pool.submission(total_ms=4000)

    await pool.admit([submission], redis_ms=await pool.now_ms() + 60_000)

    assert (await pool.times(submission.id))["dl"] <= await pool.now_ms() + 4000


async def test_a_rejection_changes_no_key(pool: Pool) -> None:
    """Every kind of rejection leaves Redis as it was."""
    await pool.queue(2)
    cases: dict[Admission, tuple[Submission, list[TierLimit]]] = {
        Admission.KEY_LIMIT: (pool.submission(key_rate=0.001, key_burst=1.0), WIDE),
        Admission.CUSTOMER_LIMIT: (pool.submission(customer_id="c1", rate=0.0, burst=0.0), WIDE),
        Admission.TOKEN_LIMIT: (pool.submission(customer_id="c2", tokens=100, tokens_per_minute=101), WIDE),
        Admission.CONCURRENCY: (pool.submission(max_concurrency=2), WIDE),
        Admission.QUOTA: (pool.submission(customer_id="c3", quotas=[("1day", 0)]), WIDE),
        Admission.TIER_LIMIT: (pool.submission(), free_tier(rate=0.0, burst=0.0)),
        Admission.SHED: (pool.submission(), free_tier(shed_depth=2)),
        Admission.QUEUE_FULL: (pool.submission(), free_tier(max_depth=2)),
    }
    before = await everything(pool.client)

    found = {expected: (await pool.admit([s], tiers))[0].outcome for expected, (s, tiers) in cases.items()}

    assert found == {expected: expected for expected in cases}
    assert await everything(pool.client) == before


async def test_a_full_redis_rejects_and_still_drains(pool: Pool) -> None:
    """At the memory limit admission returns `backpressure`, resubmissions included, while batches are formed and claimed."""
    (request_id,) = await pool.queue(1)
    await pool.client.config_set("maxmemory", 1)
    try:
        verdicts = [*await pool.admit([pool.submission()]), *await pool.admit([pool.submission(again=True)])]
        batch_id = await pool.form([("free", 1)])
        claimed = await pool.batches.claim(batch_id, "w1", "t")
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert outcomes(verdicts) == ["backpressure"] * 2
    assert claimed is not None
    assert [r.id for r in claimed.requests] == [request_id]


async def test_a_call_with_too_many_submissions_or_an_unknown_tier_is_rejected(pool: Pool) -> None:
    """The error is raised before anything is sent."""
    with pytest.raises(ValueError, match="at most 256"):
        await pool.admit([pool.submission()] * 257)
    with pytest.raises(ValueError, match="'gold'"):
        await pool.admit([pool.submission("gold")])


async def test_a_tier_has_one_bucket_per_pool(pool: Pool) -> None:
    """All keys of a tier take from its bucket (a fresh one is a quarter full); other tiers and pools are not affected."""
    narrow = free_tier(rate=0.001, burst=8.0)
    submissions = [*(pool.submission("free", api_key_id=key) for key in "abc"), pool.submission("enterprise")]
    second = Pool(pool.client, Keys("second"))

    assert outcomes(await pool.admit(submissions, narrow)) == ["accepted", "accepted", "tier_limit", "accepted"]
    assert outcomes(await second.admit([second.submission()], narrow)) == ["accepted"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"rate": 0.001, "burst": 8.0}, Admission.CUSTOMER_LIMIT),
        ({"max_concurrency": 2}, Admission.CONCURRENCY),
        ({"quotas": (("1year", 2),)}, Admission.QUOTA),
    ],
)
async def test_a_customer_has_one_set_of_limits_over_all_pools(
    pool: Pool, limits: dict[str, Any], expected: Admission
) -> None:
    """Requests of two pools count together, and the end of a request in one pool frees its concurrency for the other."""
    second = Pool(pool.client, Keys("second"))
    pools = (pool, second, pool, second)

    found = [(await each.admit([each.submission(**limits)]))[0].outcome for each in pools]
    await pool.form([("free", 1)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [done(batch.requests[0].id)])
    (after,) = await second.admit([second.submission(**limits)])

    assert found == [Admission.ACCEPTED, Admission.ACCEPTED, expected, expected]
    assert after.outcome is (Admission.ACCEPTED if expected is Admission.CONCURRENCY else expected)


@pytest.mark.parametrize(
    ("waiting", "limit", "capacity", "expected"),
    [
        ({"enterprise": 3}, {"shed_depth": 3}, 0.0, Admission.SHED),  # requests of a higher tier count
        ({"free": 1}, {"shed_depth": 3}, 0.0, Admission.ACCEPTED),
        ({"paid": 10}, {"shed_wait_ms": 100}, 100.0, Admission.SHED),  # 10 ahead at 100/s is 100 ms
        ({"paid": 5}, {"shed_wait_ms": 100}, 100.0, Admission.ACCEPTED),
        ({"free": 10}, {"shed_wait_ms": 200}, 100.0, Admission.ACCEPTED),
        ({"free": 10}, {"shed_wait_ms": 200, "rate": 50.0}, 100.0, Admission.SHED),  # others use half the capacity
        ({"free": 10}, {"shed_wait_ms": 420, "rate": 5.0, "share": 0.5}, 100.0, Admission.ACCEPTED),  # 50/s guaranteed
        ({"paid": 10}, {"shed_wait_ms": 100}, 0.0, Admission.ACCEPTED),  # capacity unknown: no prediction
        ({"paid": 10}, {}, 5.0, Admission.WAIT),  # 2 s predicted, 2 s allowed
    ],
)
async def test_shedding_by_depth_and_predicted_wait(
    pool: Pool, waiting: dict[str, int], limit: dict[str, Any], capacity: float, expected: Admission
) -> None:
    """A tier is shed by the depth, and by the predicted wait, of its own queue and those of the tiers above it."""
    for tier, count in waiting.items():
        await pool.queue(count, tier)

    (verdict,) = await pool.admit([pool.submission("free")], free_tier(**limit), capacity)

    assert verdict.outcome is expected


@pytest.mark.parametrize(
    ("since_ms", "pass_ms", "expected"),
    [
        (0, 100, Admission.SHED),
        (350, 100, Admission.ACCEPTED),
        (350, 1000, Admission.SHED),  # the interval of passes is longer
        (1500, 100, Admission.ACCEPTED),
        (5000, 100, Admission.SHED),  # the scheduler did not come back
        (None, 100, Admission.SHED),  # no scheduler has run yet
    ],
)
async def test_no_tier_is_shed_by_depth_while_no_scheduler_runs(
    pool: Pool, since_ms: int | None, pass_ms: int, expected: Admission
) -> None:
    """Requests that wait because no scheduler forms batches do not show busy GPUs; for two seconds none is shed."""
    await pool.queue(10)
    if since_ms is not None:
        await pool.client.set(pool.keys.reaped_at, await pool.now_ms() - since_ms, px=60_000)

    admissions = Admissions(pool.client, pool.keys, "g1", replays=REPLAYS, pass_ms=pass_ms)
    (verdict,) = await admissions.admit(free_tier(shed_depth=3), 0.0, [pool.submission("free")])

    assert verdict.outcome is expected


async def test_no_tier_is_shed_by_depth_for_a_second_after_a_pause(pool: Pool) -> None:
    """The first pass of a scheduler does not mean that the requests which waited for it have left the queue."""
    await pool.queue(10)
    await pool.client.set(pool.keys.reaped_at, await pool.now_ms() - 600, px=60_000)
    await pool.terminations.reap(0)
    assert 0 < await pool.client.pttl(pool.keys.resumed_at) <= 1000

    first = await pool.admit([pool.submission("free")], free_tier(shed_depth=3))
    await pool.client.delete(pool.keys.resumed_at)
    later = await pool.admit([pool.submission("free")], free_tier(shed_depth=3))

    assert outcomes(first + later) == ["accepted", "shed"]


async def test_the_guaranteed_share_is_not_shed_for_a_flood_of_higher_tiers(pool: Pool) -> None:
    """With a guaranteed tenth of the capacity, the queue of `free` counts at that rate, not the whole queue above it."""
    for _ in range(2):
        await pool.queue(200, "enterprise")
    tiers = free_tier(shed_depth=100, shed_wait_ms=1000, share=0.1)

    first = await pool.admit([pool.submission("free") for _ in range(4)], tiers, 1000.0)
    later = await pool.admit([pool.submission("free") for _ in range(20)], tiers, 1000.0)

    assert outcomes(first) == ["accepted"] * 4
    assert set(outcomes(later)) <= {"shed", "accepted"}
    assert outcomes(later).count("shed") >= 10
    assert await pool.depth("free") <= 10


async def test_the_probability_of_shedding_rises_smoothly(pool: Pool) -> None:
    """No request is shed at half of the limit, all at the limit, a share in between."""
    shed_at = {}
    for depth in (50, 60, 75, 90, 100):
        await pool.client.flushall()
        await pool.queue(depth, "paid")
        shed = []
        for draw in range(0, 65536, 512):
            submission = pool.submission("free", id=f"req_{'0' * 28}{draw:04x}")
            (verdict,) = await pool.admit([submission], free_tier(shed_depth=100))
            shed.append(verdict.outcome is Admission.SHED)
            await pool.client.delete(pool.keys.queue("free"), pool.keys.request(submission.id))
        shed_at[depth] = sum(shed) / len(shed)

    expected = {50: 0.0, 60: 0.04, 75: 0.25, 90: 0.64, 100: 1.0}
    assert shed_at == {depth: pytest.approx(share, abs=0.02) for depth, share in expected.items()}


@pytest.mark.parametrize(
    ("waiting", "run_ms", "expected"),
    [
        (35, 400, Admission.ACCEPTED),  # 3.5 s predicted of 4 s: there is time for the run
        (35, 600, Admission.WAIT),
        (0, 60_000, Admission.ACCEPTED),  # an idle pool accepts, otherwise no run would be measured again
    ],
)
async def test_a_request_needs_time_for_its_run(pool: Pool, waiting: int, run_ms: int, expected: Admission) -> None:
    """A request whose predicted wait leaves no time for a run is rejected, unless the pool is idle."""
    await pool.queue(waiting, "free")
    submission = pool.submission("free", total_ms=4000, queue_ms=4000)

    (verdict,) = await pool.admissions("g1").admit(WIDE, 10.0, [submission], 0, run_ms)

    assert verdict.outcome is expected


async def test_a_shadow_tier_reports_rejections_and_accepts(pool: Pool) -> None:
    """Nothing is charged for requests that would have been rejected; the maximum depth still applies."""
    shadow = [TierLimit("free", 1e6, 1e6, 6, ["free"], 3, shadow=True)]

    verdicts = await pool.admit([pool.submission(rate=1e-6, burst=8.0, max_concurrency=50) for _ in range(8)], shadow)

    assert outcomes(verdicts) == ["accepted"] * 6 + ["queue_full"] * 2
    assert [v.shadowed for v in verdicts[:2]] == ["", ""]
    assert {v.shadowed for v in verdicts[2:6]} <= {"customer_limit", "shed"}
    assert verdicts[5].shadowed
    assert float(await pool.client.hget("rl:customer:customer", "tokens")) >= 0
    assert await pool.client.zcard("rl:leases:customer") == 6


def together(pool: Pool, count: int, **changes: Any) -> list[Submission]:
    """Submissions that are admitted together or not at all."""
    return [pool.submission(**changes, together=0 if index else count) for index in range(count)]


@pytest.mark.parametrize(
    ("limits", "tier", "outcome"),
    [
        ({"rate": 1e-6, "burst": 12.0}, {}, "customer_limit"),
        ({"key_rate": 1e-6, "key_burst": 12.0}, {}, "key_limit"),
        ({"tokens": 10, "tokens_per_minute": 120}, {}, "token_limit"),
        ({"max_concurrency": 3}, {}, "concurrency"),
        ({"quotas": (("1day", 3),)}, {}, "quota"),
        ({}, {"rate": 1e-6, "burst": 12.0}, "tier_limit"),
        ({}, {"max_depth": 3}, "queue_full"),
    ],
)
async def test_a_group_is_admitted_completely_or_not_at_all(
    pool: Pool, limits: dict[str, Any], tier: dict[str, Any], outcome: str
) -> None:
    """With room for three (a fresh bucket is a quarter full), a group of four is rejected, then one of three is accepted."""
    tiers = free_tier(**tier)

    rejected = await pool.admit(together(pool, 4, **limits), tiers)
    left = await pool.depth("free"), await pool.client.llen(pool.keys.outbox)
    accepted = await pool.admit(together(pool, 3, **limits), tiers)
    after = await pool.admit([pool.submission(**limits)], tiers)

    assert (outcomes(rejected), left) == ([outcome] * 4, (0, 0))
    assert outcomes(accepted) == ["accepted"] * 3
    assert outcomes(after) == [outcome]
    assert await pool.depth("free") == 3


async def test_other_submissions_of_the_call_are_not_affected_by_a_rejected_group(pool: Pool) -> None:
    """Submissions before and after the group are evaluated by themselves."""
    limits = {"rate": 1e-6, "burst": 12.0}
    alone, late, group = pool.submission(**limits), pool.submission(**limits), together(pool, 5, **limits)

    verdicts = await pool.admit([alone, *group, late])

    assert outcomes(verdicts) == ["accepted", *["customer_limit"] * 5, "accepted"]


async def test_a_retried_group_with_idempotency_keys_is_replayed(pool: Pool) -> None:
    """Each member has its own key: `in_progress` while they run, then each gets its own stored reply."""

    def group() -> list[Submission]:
        members = together(pool, 2)
        return [
            replace(member, idempotency=f"customer:{place}", fingerprint="f") for place, member in enumerate(members)
        ]

    first = group()
    await pool.admit(first)
    running = await pool.admit(group())
    await pool.form([("free", 2)])
    batch = await pool.claim_next()
    await pool.batches.finish(batch.batch_id, batch.token, [done(member.id) for member in first])
    replayed = await pool.admit(group())

    assert outcomes(running) == ["in_progress"] * 2
    assert outcomes(replayed) == ["replayed"] * 2
    assert [verdict.stored_id for verdict in replayed] == [member.id for member in first]


async def test_the_retry_time_of_a_group_is_when_all_fit(pool: Pool) -> None:
    """Three of four tokens are there: the fourth takes a hundred seconds at one in that time."""
    verdicts = await pool.admit(together(pool, 4, rate=0.01, burst=12.0))

    assert [verdict.retry_after_ms for verdict in verdicts] == [pytest.approx(100_000, rel=0.05)] * 4


async def test_a_group_larger_than_the_tier_bucket_is_accepted_when_it_is_full(pool: Pool) -> None:
    """Otherwise a long list could never be accepted by a small pool. Its debt rejects later requests."""
    tiers, group = free_tier(rate=100.0, burst=4.0), together(pool, 40)

    async def accepted() -> bool:
        return outcomes(await pool.admit(group, tiers)) == ["accepted"] * 40

    await eventually(accepted, "the tier's bucket is full")
    after: Verdict = (await pool.admit([pool.submission()], tiers))[0]

    assert after.outcome is Admission.TIER_LIMIT
    assert 200 < after.retry_after_ms <= 370  # 36 and one of its own, at 100/s
