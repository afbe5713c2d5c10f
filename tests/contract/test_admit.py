"""`admit`: limits, queueing and the audit note happen together or not at all."""

import pytest
from redis.asyncio import Redis

from pool import TIERS, WIDE, Pool
from scheduler.protocol.admission import MAX_SUBMISSIONS, Admissions, TierLimit
from scheduler.states import Admission


async def everything(client: Redis) -> dict[bytes, bytes]:
    """The whole content of Redis, in a comparable form."""
    return {key: await client.dump(key) async for key in client.scan_iter()}


async def test_an_accepted_request_is_stored_queued_and_noted(pool: Pool) -> None:
    """Acceptance writes the request hash, the tier queue and the outbox, and wakes a scheduler."""
    submission = pool.submission("paid", trace_id="t1")

    (verdict,) = await pool.admit([submission])

    assert verdict.outcome is Admission.ACCEPTED
    assert await pool.client.lrange(pool.keys.queue("paid"), 0, -1) == [submission.id.encode()]
    stored = await pool.client.hgetall(pool.keys.request(submission.id))
    assert stored[b"state"] == b"queued"
    assert stored[b"body"] == submission.body
    accepted, ended = await pool.audit()
    assert [(a.id, a.customer_id, a.tier, a.gateway_id, a.trace_id) for a in accepted] == [
        (submission.id, "customer", "paid", "g1", "t1")
    ]
    assert ended == []
    assert await pool.client.llen(pool.keys.wake) == 1


async def test_sent_twice_is_accepted_once(pool: Pool) -> None:
    """A call whose reply was lost may be sent again: the second time everything is a duplicate and nothing changes."""
    submissions = [pool.submission() for _ in range(3)]
    await pool.admit(submissions)
    before = await everything(pool.client)

    verdicts = await pool.admit(submissions)

    assert [v.outcome for v in verdicts] == [Admission.DUPLICATE] * 3
    assert await everything(pool.client) == before


async def test_a_call_that_lay_in_a_stopped_redis_counts_from_when_it_was_made(pool: Pool) -> None:
    """What is overdue by then changes nothing; what is late has only the time that is left."""
    submissions = [pool.submission(total_ms=4000, queue_ms=2000), pool.submission(total_ms=2900, queue_ms=2000)]
    made = await pool.now_ms() - 3000
    before = await everything(pool.client)

    (overdue,) = await pool.admit(submissions[1:], redis_ms=made)
    assert overdue.outcome is Admission.TOO_LATE
    assert set(await everything(pool.client)) - set(before) <= {b"epoch"}

    (late,) = await pool.admit(submissions[:1], redis_ms=made)
    assert late.outcome is Admission.ACCEPTED
    times = await pool.times(submissions[0].id)
    assert [times["dl"] - made, times["qdl"] - made] == [4000, 2000]


async def test_a_clock_ahead_of_redis_gives_nobody_more_time(pool: Pool) -> None:
    """The gateway's guess is the latest that it may be: the time of a request never begins after now."""
    submission = pool.submission(total_ms=4000)

    await pool.admit([submission], redis_ms=await pool.now_ms() + 60_000)

    assert (await pool.times(submission.id))["dl"] <= await pool.now_ms() + 4000


async def test_many_requests_keep_their_order(pool: Pool) -> None:
    """The oldest request of a call is the first that leaves the tier queue."""
    ids = await pool.queue(MAX_SUBMISSIONS)

    left = [(await pool.client.rpop(pool.keys.queue("free"))).decode() for _ in ids]

    assert left == ids


async def test_a_rejection_changes_no_key(pool: Pool) -> None:
    """Every kind of rejection leaves Redis exactly as it was."""
    await pool.queue(2)
    narrow = {
        Admission.KEY_LIMIT: (pool.submission(key_rate=0.001, key_burst=1.0), WIDE, 0.0),
        Admission.CUSTOMER_LIMIT: (pool.submission(customer_id="c1", rate=0.0, burst=0.0), WIDE, 0.0),
        Admission.TOKEN_LIMIT: (pool.submission(customer_id="c2", tokens=100, tokens_per_minute=101), WIDE, 0.0),
        Admission.CONCURRENCY: (pool.submission(max_concurrency=2), WIDE, 0.0),
        Admission.QUOTA: (pool.submission(customer_id="c3", quotas=[("1day", 0)]), WIDE, 0.0),
        Admission.TIER_LIMIT: (pool.submission(), [TierLimit("free", 0.0, 0.0, 1000, ["free"])], 0.0),
        Admission.SHED: (pool.submission(), [TierLimit("free", 1e6, 1e6, 1000, ["free"], 2)], 0.0),
        Admission.QUEUE_FULL: (pool.submission(), [TierLimit("free", 1e6, 1e6, 2, ["free"])], 0.0),
    }
    before = await everything(pool.client)

    outcomes = {}
    for expected, (submission, tiers, capacity) in narrow.items():
        (verdict,) = await pool.admit([submission], tiers, capacity)
        outcomes[expected] = verdict.outcome

    assert outcomes == {expected: expected for expected in narrow}
    assert await everything(pool.client) == before


async def test_a_customer_spends_its_burst_and_no_more(pool: Pool) -> None:
    """A fresh bucket is a quarter full; it is shared by all keys, and who comes too much is told when to come back."""
    slow = [pool.submission(rate=0.001, burst=20.0, api_key_id=f"key-{i}") for i in range(8)]

    verdicts = await pool.admit(slow)

    assert [v.outcome for v in verdicts] == [Admission.ACCEPTED] * 5 + [Admission.CUSTOMER_LIMIT] * 3
    assert [round(v.left.buckets[0].left) for v in verdicts[:5]] == [4, 3, 2, 1, 0]
    assert verdicts[5].retry_after_ms == pytest.approx(1_000_000, rel=0.01)
    assert await pool.depth("free") == 5


async def test_a_bucket_keeps_its_tokens_when_the_rate_changes(pool: Pool) -> None:
    """Lowering and raising a limit hands out no fresh budget."""
    await pool.admit([pool.submission(rate=0.001, burst=20.0) for _ in range(5)])

    lowered = await pool.admit([pool.submission(rate=0.0005, burst=20.0)])
    raised = await pool.admit([pool.submission(rate=0.002, burst=40.0)])

    assert [v.outcome for v in lowered + raised] == [Admission.CUSTOMER_LIMIT] * 2


async def test_a_lost_bucket_comes_back_a_quarter_full(pool: Pool) -> None:
    """Redis coming back empty does not hand everybody a full burst."""
    await pool.client.flushall()

    verdicts = await pool.admit([pool.submission(rate=0.001, burst=100.0) for _ in range(40)])

    assert [v.outcome for v in verdicts].count(Admission.ACCEPTED) == 25


async def test_a_tier_shares_one_bucket(pool: Pool) -> None:
    """Two keys of one tier draw from the same tier limit, and another tier is not touched by it."""
    tiers = [TierLimit("enterprise", 1e6, 1e6, 1000, ["enterprise"]), TierLimit("free", 0.001, 8.0, 1000, ["free"])]

    verdicts = await pool.admit(
        [
            pool.submission("free", api_key_id="a"),
            pool.submission("free", api_key_id="b"),
            pool.submission("free", api_key_id="c"),
            pool.submission("enterprise", api_key_id="d"),
        ],
        tiers,
    )

    assert [v.outcome for v in verdicts] == ["accepted", "accepted", "tier_limit", "accepted"]


@pytest.mark.parametrize(
    ("waiting", "limit", "capacity", "expected"),
    [
        ({"enterprise": 3}, {"shed_depth": 3}, 0.0, Admission.SHED),  # work of a higher tier counts
        ({"free": 1}, {"shed_depth": 3}, 0.0, Admission.ACCEPTED),
        ({"paid": 10}, {"shed_wait_ms": 100}, 100.0, Admission.SHED),  # 10 ahead at 100/s is 100 ms
        ({"paid": 5}, {"shed_wait_ms": 100}, 100.0, Admission.ACCEPTED),
        ({"free": 10}, {"shed_wait_ms": 200}, 100.0, Admission.ACCEPTED),
        (
            {"free": 10},
            {"shed_wait_ms": 200, "rate": 50.0},
            100.0,
            Admission.SHED,
        ),  # others ask for half of the capacity
        (
            {"free": 10},
            {"shed_wait_ms": 420, "rate": 5.0, "share": 0.5},
            100.0,
            Admission.ACCEPTED,
        ),  # 50/s are guaranteed
        ({"paid": 10}, {"shed_wait_ms": 100}, 0.0, Admission.ACCEPTED),  # capacity not known: nothing to predict from
        ({"paid": 10}, {}, 5.0, Admission.WAIT),  # 2 s predicted, 2 s allowed: it could not finish
    ],
)
async def test_shedding_by_what_waits_ahead(
    pool: Pool, waiting: dict[str, int], limit: dict[str, int], capacity: float, expected: Admission
) -> None:
    """A tier is shed by the depth, and by the predicted wait, of its own queue and those of the tiers above it."""
    for tier, count in waiting.items():
        await pool.queue(count, tier)
    tiers = [
        *WIDE[:2],
        TierLimit(**{"name": "free", "rate": 1e6, "burst": 1e6, "max_depth": 1000, "ahead": TIERS} | limit),
    ]

    (verdict,) = await pool.admit([pool.submission("free")], tiers, capacity)

    assert verdict.outcome is expected


@pytest.mark.parametrize(
    ("since_ms", "pass_ms", "expected"),
    [
        (0, 100, Admission.SHED),
        (350, 100, Admission.ACCEPTED),
        (350, 1000, Admission.SHED),  # the schedulers pass as rarely as they are set to
        (1500, 100, Admission.ACCEPTED),
        (5000, 100, Admission.SHED),  # nobody came back
        (None, 100, Admission.SHED),  # no scheduler has passed yet
    ],
)
async def test_no_tier_is_shed_by_depth_while_no_scheduler_passes(
    pool: Pool, since_ms: int | None, pass_ms: int, expected: Admission
) -> None:
    """What waits because nobody forms batches is no sign of busy GPUs; for two seconds it sheds nobody."""
    await pool.queue(10)
    if since_ms is not None:
        await pool.client.set(pool.keys.reaped_at, await pool.now_ms() - since_ms, px=60_000)
    tiers = [*WIDE[:2], TierLimit(name="free", rate=1e6, burst=1e6, max_depth=1000, ahead=TIERS, shed_depth=3)]

    (verdict,) = await Admissions(pool.client, pool.keys, "g1", pass_ms=pass_ms).admit(
        tiers, 0.0, [pool.submission("free")]
    )

    assert verdict.outcome is expected


async def test_a_full_redis_pushes_back_and_still_drains(pool: Pool) -> None:
    """At the memory limit admission says backpressure, while batches are formed, claimed and finished."""
    (request_id,) = await pool.queue(1)
    await pool.client.config_set("maxmemory", 1)
    try:
        (verdict,) = await pool.admit([pool.submission()])
        batch_id = await pool.form([("free", 1)])
        claimed = await pool.batches.claim(batch_id, "w1", "t")
    finally:
        await pool.client.config_set("maxmemory", 0)

    assert verdict.outcome is Admission.BACKPRESSURE
    assert claimed is not None
    assert [r.id for r in claimed.requests] == [request_id]


async def test_scripts_that_redis_forgot_are_sent_again(pool: Pool) -> None:
    """SCRIPT FLUSH costs nothing but the bytes."""
    await pool.queue(1)
    await pool.client.script_flush()

    await pool.queue(1)

    assert await pool.depth("free") == 2


async def test_a_call_with_too_many_or_unknown_tiers_is_refused(pool: Pool) -> None:
    """A caller's mistake is named before anything is sent."""
    with pytest.raises(ValueError, match="at most 256"):
        await pool.admit([pool.submission()] * 257)
    with pytest.raises(ValueError, match="'gold'"):
        await pool.admit([pool.submission("gold")])
