"""`form_batch`: requests leave their tier queues for one leased batch in one step; requests that must not run end."""

from collections.abc import Sequence

import pytest

from pool import TIERS, Pool
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.admission import TierLimit

DEEP = [TierLimit(name, 1e6, 1e6, 1_000_000, TIERS[: i + 1]) for i, name in enumerate(TIERS)]


async def queue_many(pool: Pool, count: int) -> None:
    """`count` requests of `free` with a queue timeout of a minute."""
    for _ in range(count // 100):
        await pool.admit([pool.submission(total_ms=60_000, queue_ms=60_000) for _ in range(100)], DEEP)


async def start_workers(pool: Pool, workers: int, running: int) -> None:
    """Start healthy workers, of which `running` have a batch."""
    for number in range(workers):
        await pool.worker_beats(f"w{number}")
    await pool.presence.census()
    for _ in range(running):
        await pool.running(1)


async def test_requests_move_into_inflight_lists_under_a_lease(pool: Pool) -> None:
    """Members are processing, each in the inflight list of its tier; the batch is ready and leased, and the reply has the
    queues afterwards.
    """
    paid, free = await pool.queue(2, "paid"), await pool.queue(3, "free")

    formed = await pool.batches.form("b1", [("paid", 2), ("free", 2)], 1, TIERS)

    assert formed.size == 4
    assert await pool.inflight() == {"inflight:paid:b1": paid, "inflight:free:b1": free[:2]}
    assert await pool.states([*paid, *free]) == ["processing"] * 4 + ["queued"]
    assert await pool.client.zscore(pool.keys.leases, "b1") > formed.queues.now_ms
    assert await pool.pop() == "b1"
    assert {t.name: t.depth for t in formed.queues.tiers} == {"enterprise": 0, "paid": 0, "free": 1}
    assert (formed.queues.ready_batches, formed.queues.leased_batches) == (1, 1)


async def test_no_batch_is_formed_beyond_the_lookahead(pool: Pool) -> None:
    """Queued requests can still be overtaken; ready batches are claimed in the order in which they were formed."""
    await pool.queue(4)
    formed = [await pool.form([("free", 1)], lookahead=2) for _ in range(2)]

    assert (await pool.batches.form("b3", [("free", 2)], 2, TIERS)).size == 0
    assert await pool.depth("free") == 2
    assert [await pool.pop() for _ in range(2)] == formed


async def test_all_dispatchers_see_when_the_last_batch_was_formed(pool: Pool) -> None:
    """So several of them keep one distance between part batches. A call that forms none does not count; the key expires."""
    assert (await pool.batches.look(TIERS)).since_formed_ms == -1
    await pool.queue(1)
    assert (await pool.batches.form("b1", [("free", 1)], 1, TIERS)).queues.since_formed_ms == 0
    await pool.client.decrby(pool.keys.formed_at, 300)
    assert (await pool.batches.form("b2", [("free", 1)], 1, TIERS)).size == 0
    assert (await pool.batches.look(TIERS)).since_formed_ms >= 300
    assert 50_000 < await pool.client.pttl(pool.keys.formed_at) <= 60_000


async def test_overdue_requests_end(pool: Pool) -> None:
    """After the queue timeout or the deadline; the other requests join the batch."""
    (aged,) = await pool.overdue(await pool.queue(1))
    (late,) = await pool.overdue(await pool.queue(1), "dl")
    (live,) = await pool.queue(1)

    formed = await pool.batches.form("b1", [("free", 3)], 1, TIERS)

    assert (formed.size, formed.dropped) == (1, 2)
    replies = await pool.results.fetch([aged, late, live])
    assert [r.error_code if r else None for r in replies] == ["queue_timeout", "deadline_exceeded", None]
    _, ended = await pool.audit()
    assert {e.id: e.error_code for e in ended} == {aged: "queue_timeout", late: "deadline_exceeded"}


@pytest.mark.parametrize(("age_ms", "code"), [(2100, "gateway_lost"), (0, None)])
async def test_requests_of_a_lost_gateway_end(pool: Pool, age_ms: int, code: str | None) -> None:
    """A younger request shows that its gateway was alive, even if Redis lost the heartbeat."""
    (request_id,) = await pool.queue(1)
    await pool.aged([request_id], age_ms)
    await pool.client.delete(pool.keys.gateway("g1"))

    formed = await pool.batches.form("b1", [("free", 1)], 1, TIERS)

    assert (formed.size, formed.dropped) == ((0, 1) if code else (1, 0))
    assert [r.error_code if r else None for r in await pool.results.fetch([request_id])] == [code]


async def test_after_a_suspension_no_gateway_counts_as_lost(pool: Pool) -> None:
    """Heartbeats expired while Redis was suspended: gateways have a second to send them."""
    ids = await pool.queue(3)
    await pool.aged(ids, 2500)
    await pool.terminations.reap(0)
    await pool.client.decrby(pool.keys.reaped_at, 2400)
    await pool.client.delete(pool.keys.gateway("g1"))

    assert (await pool.batches.form("b1", [("free", 1)], 9, TIERS)).dropped == 0
    await pool.terminations.reap(0)
    assert (await pool.batches.form("b2", [("free", 1)], 9, TIERS)).dropped == 0
    await pool.client.delete(pool.keys.resumed_at)
    assert (await pool.batches.form("b3", [("free", 1)], 9, TIERS)).dropped == 1


async def test_dead_entries_are_skipped(pool: Pool) -> None:
    """Ids of cancelled requests take no place in a batch."""
    ids = await pool.queue(3)
    await pool.terminations.cancel([(ids[0], ErrorCode.CANCELLED)])

    await pool.form([("free", 2)])

    assert await pool.inflight() == {"inflight:free:b1": ids[1:]}


@pytest.mark.parametrize(
    ("workers", "running", "size", "joins"),
    [
        (2, 0, 40_000, False),
        (2, 0, 30_000, True),
        (1, 0, 40_000, True),  # no other worker could run it
        (2, 1, 40_000, True),
    ],
)
async def test_a_large_body_of_a_lower_tier_leaves_in_a_separate_batch(
    pool: Pool, workers: int, running: int, size: int, joins: bool
) -> None:
    """While another worker is idle: smaller requests behind it join the first batch, and it is first in the next one."""
    await start_workers(pool, workers, running)
    body = encode_payload(Payload("tiny", "x" * size, {}))
    enterprise = await pool.queue(1, "enterprise", body=body)
    (large,) = await pool.queue(1, "free", body=body)
    small = await pool.queue(2, "free")

    await pool.batches.form("first", [("enterprise", 1), ("free", 2)], 9, TIERS)
    first = await pool.inflight()
    await pool.batches.form("second", [("free", 2)], 9, TIERS)

    assert first["inflight:enterprise:first"] == enterprise
    assert first["inflight:free:first"] == ([large, small[0]] if joins else small)
    assert (await pool.inflight())["inflight:free:second"] == ([small[1]] if joins else [large])


async def test_the_cost_does_not_grow_with_the_queue(pool: Pool) -> None:
    """As many Redis commands with ten thousand queued requests as with a few hundred."""
    calls = []
    for depth in (300, 10_000):
        await queue_many(pool, depth)
        await pool.form([("free", 64)])
        await pool.client.config_resetstat()
        assert (await pool.batches.form(f"b{depth}", [("free", 64)], 9, TIERS)).size == 64
        stats = await pool.client.info("commandstats")
        names = ("hset", "hmget", "rpop", "lpush", "llen", "lindex")
        calls.append({name: stats[f"cmdstat_{name}"]["calls"] for name in names})

    assert calls[0] == calls[1]
    assert calls[0]["rpop"] == 2  # of the tier queue and of a backlog


@pytest.mark.parametrize(
    ("waiting", "fewest", "workers", "running", "members"),
    [
        (3, 1, 1, 0, 3),
        (3, 3, 2, 1, 3),
        (3, 4, 2, 0, 0),  # fewer than required
        (8, 3, 2, 0, 8),  # a full batch
        (9, 3, 2, 0, 0),  # more than one batch: the policy must choose
        (3, 1, 1, 1, 0),  # the worker is busy
        (3, 1, 0, 0, 0),  # there is no worker
        (0, 1, 1, 0, 0),
    ],
)
async def test_all_queued_requests_leave_or_none(
    pool: Pool, waiting: int, fewest: int, workers: int, running: int, members: int
) -> None:
    """A dispatcher that was woken at a depth reads the queues and forms the batch in one call, if there is no choice."""
    await start_workers(pool, workers, running)
    for number in range(waiting):
        await pool.queue(1, TIERS[number % 3])

    formed = await pool.batches.form("b", [(tier, 8) for tier in TIERS], 9, TIERS, fewest=fewest)

    assert formed.size == members
    assert formed.queues.depth == waiting - members


@pytest.mark.parametrize(
    ("waiting", "fewest", "pace_ms", "members"),
    [
        (1, 2, -1, 0),
        (1, 2, 60_000, 0),  # another batch was formed within this time
        (1, 2, 0, 1),
        (2, 2, 60_000, 2),  # enough requests
        (1, 0, 60_000, 0),
        (2, 0, 0, 2),
        (0, 0, 0, 0),
        (9, 0, 0, 0),  # more than one batch: the policy must choose
    ],
)
async def test_one_request_is_enough_when_no_batch_was_formed_for_a_time(
    pool: Pool, waiting: int, fewest: int, pace_ms: int, members: int
) -> None:
    """Of several dispatchers with the same timer only the first forms a batch."""
    await start_workers(pool, 2, 0)
    await pool.queue(1)
    await pool.form([("free", 1)])
    await pool.queue(waiting)

    formed = await pool.batches.form("b", [("free", 8)], 9, TIERS, fewest=fewest, pace_ms=pace_ms)

    assert formed.size == members


async def test_a_batch_is_due_when_the_clock_was_set_back(pool: Pool) -> None:
    """The last batch is then in the future; without one, any time has passed."""
    await start_workers(pool, 3, 0)
    for number, last in enumerate((await pool.now_ms() + 3_600_000, None)):
        await pool.queue(1)
        if last is None:
            await pool.client.delete(pool.keys.formed_at)
        else:
            await pool.client.set(pool.keys.formed_at, last, px=60_000)

        assert (await pool.batches.form(f"b{number}", [("free", 8)], 9, TIERS, pace_ms=60_000)).size == 1


# Batches with a token limit


async def queue_lengths(pool: Pool, lengths: Sequence[int], tier: str = "free") -> list[str]:
    """A request of each length, in tokens, oldest first."""
    return [(await pool.queue(1, tier, body=b"x" * 4 * length))[0] for length in lengths]


async def form(pool: Pool, picks: Sequence[tuple[str, int]], max_tokens: int = 100) -> list[str]:
    """The ids of the next batch, oldest first per tier."""
    batch_id = f"batch-{await pool.client.incr('test-batches')}"
    await pool.client.expire("test-batches", 60)
    await pool.batches.form(batch_id, picks, 100, TIERS, max_tokens=max_tokens, aged_ms=1000)
    lists = await pool.inflight()
    return [i for tier, _ in picks for i in lists.get(f"inflight:{tier}:{batch_id}", [])]


@pytest.mark.parametrize(
    ("lengths", "places", "max_tokens", "batches"),
    [
        ([30, 30, 30, 30], 8, 100, [[0, 1, 2], [3]]),  # three times 30 is within 100
        ([10, 10, 50, 10], 8, 100, [[0, 1, 3], [2]]),  # shorter ones are padded to 50
        ([500, 10, 10], 8, 100, [[0], [1, 2]]),  # a request over the limit runs alone
        ([10, 500, 10], 8, 100, [[0, 2], [1]]),
        ([25, 25, 25, 25], 8, 100, [[0, 1, 2, 3]]),
        ([100, 100], 8, 100, [[0], [1]]),
        ([10, 90, 10, 95, 10], 3, 100, [[0, 2, 4], [1], [3]]),  # requests that are left keep their places
        ([100, 10, 110, 12, 95, 11], 3, 10_000, [[0, 2, 4], [1, 3, 5]]),  # similar lengths together
        ([90, 5, 5, 5], 4, 100, [[0], [1, 2, 3]]),  # the oldest always leaves
        ([10, 90, 90, 90, 10], 2, 1000, [[0, 1], [2, 3], [4]]),  # only two candidates per place are read
    ],
)
async def test_a_batch_costs_its_size_times_its_longest_request(
    pool: Pool, lengths: list[int], places: int, max_tokens: int, batches: list[list[int]]
) -> None:
    """No batch exceeds the limit, except one of a single request."""
    ids = await queue_lengths(pool, lengths)

    formed = [await form(pool, [("free", places)], max_tokens) for _ in batches]

    assert formed == [[ids[i] for i in members] for members in batches]
    assert await pool.depth("free") == 0


async def test_a_request_that_waited_long_is_not_skipped_for_its_length(pool: Pool) -> None:
    """After that age only the limit counts."""
    ids = await queue_lengths(pool, [10, 80, 10, 10, 10])
    await pool.aged(ids[:2], 1500)

    assert await form(pool, [("free", 2)], 1000) == ids[:2]


@pytest.mark.parametrize("is_aged", [False, True])
async def test_a_higher_tier_leaves_first_unless_a_request_waited_long(pool: Pool, *, is_aged: bool) -> None:
    """A long request of a lower tier would never fit beside those of a higher tier: when it has waited long, it is first."""
    free = await queue_lengths(pool, [90])
    if is_aged:
        await pool.aged(free, 1500)
    paid = await queue_lengths(pool, [40, 40], "paid")

    batches = [await form(pool, [("paid", 2), ("free", 1)]) for _ in range(2)]

    assert batches == ([free, paid] if is_aged else [paid, free])
