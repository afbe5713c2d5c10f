"""Fair queueing of the customers of a tier: backlogs, their order by GPU time and weight, settlement, and shedding."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from pool import TIERS, Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Submission, TierLimit
from scheduler.protocol.wake_condition import WakeCondition
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission

PLACES = 4
WIDE = [TierLimit("free", 1e6, 1e6, 100_000, TIERS, places=PLACES)]


def requests_of(pool: Pool, customer: str, count: int, weight: float = 1.0, **key: Any) -> list[Submission]:
    fields = {"customer_id": customer, "total_ms": 60_000, "queue_ms": 60_000, "weight": weight} | key
    return [pool.submission(**fields) for _ in range(count)]


async def wait_in_line(pool: Pool, customer: str, count: int, weight: float = 1.0) -> list[str]:
    """Admit requests of a customer; their ids, oldest first."""
    found = requests_of(pool, customer, count, weight)
    for start in range(0, count, 200):
        verdicts = await pool.admit(found[start : start + 200], WIDE)
        assert {v.outcome for v in verdicts} == {Admission.ACCEPTED}
    return [s.id for s in found]


async def run_batch(pool: Pool, size: int, owner: Mapping[str, str], cost: Mapping[str, float]) -> Counter[str]:
    """Form, claim and finish one batch of `free`. The GPU time by customer."""
    await pool.form([("free", size)])
    batch = await pool.claim_next()
    spent: Counter[str] = Counter()
    outcomes = []
    for request in batch.requests:
        customer = owner[request.id]
        outcomes.append(done(request.id)._replace(cost_ms=cost[customer]))
        spent[customer] += cost[customer]
    assert await pool.batches.finish(batch.batch_id, batch.token, outcomes) == 0
    return spent


async def serve(pool: Pool, loads: Mapping[str, tuple[int, float, float]], batches: int, size: int) -> Counter[str]:
    """Run batches while customers have `count` requests each, of `weight` and cost; the GPU time of each customer."""
    owner: dict[str, str] = {}
    for customer, (count, weight, _) in loads.items():
        owner |= dict.fromkeys(await wait_in_line(pool, customer, count, weight), customer)
    await pool.gateway_stays("g1")
    spent: Counter[str] = Counter()
    for _ in range(batches):
        spent += await run_batch(pool, size, owner, {name: load[2] for name, load in loads.items()})
    return spent


async def test_ids_beyond_the_places_wait_in_the_backlog_of_their_customer(pool: Pool) -> None:
    """The tier queue has the oldest; `depth` counts both."""
    ids = await wait_in_line(pool, "a", PLACES + 3)

    assert [i.decode() for i in await pool.client.lrange(pool.keys.queue("free"), 0, -1)] == ids[PLACES - 1 :: -1]
    assert [i.decode() for i in await pool.client.lrange(pool.keys.backlog("free", "a"), 0, -1)] == ids[
        : PLACES - 1 : -1
    ]
    (row,) = [t for t in (await pool.batches.look(TIERS)).tiers if t.name == "free"]
    assert row.depth == len(ids)


async def test_a_quiet_customer_leaves_before_a_backlog(pool: Pool) -> None:
    """One request of another customer is the first of the next batch."""
    await wait_in_line(pool, "flood", 100)
    await pool.form([("free", PLACES + 1)])
    (quiet,) = await wait_in_line(pool, "quiet", 1)

    batch = await pool.form([("free", PLACES + 1)])

    assert (await pool.inflight())[f"inflight:free:{batch}"][0] == quiet


async def test_requests_of_quiet_customers_form_a_batch_of_their_own(pool: Pool) -> None:
    """It leaves before the ready one, and admission wakes the dispatcher for it."""
    await wait_in_line(pool, "flood", 100)
    ready = await pool.form([("free", 8)])
    await pool.batches.look(TIERS, "dispatcher", WakeCondition(0, 0), 60_000)
    quiet = await wait_in_line(pool, "quiet", 1)
    assert await pool.client.llen("wake") == 1
    assert (await pool.batches.look(TIERS)).quiet == ["free"]

    batch = await pool.form([("free", 8)])

    assert (await pool.inflight())[f"inflight:free:{batch}"] == quiet
    assert [await pool.pop(), await pool.pop()] == [batch, ready]
    assert (await pool.batches.look(TIERS)).quiet == []
    await pool.form([("free", 8)])
    assert len((await pool.inflight())["inflight:free:b3"]) == 8


@pytest.mark.parametrize(("later", "with_others"), [(1, True), (7, False)])
async def test_without_gpu_time_for_empty_places_quiet_customers_wait_for_one_batch(
    pool: Pool, later: int, *, with_others: bool
) -> None:
    """Then theirs leaves first, alone if it is full, and with other requests if not."""
    await wait_in_line(pool, "flood", 100)
    ready = await pool.form([("free", 8)])
    await pool.client.hset("fair:free", "apart", 0)
    await pool.batches.look(TIERS, "dispatcher", WakeCondition(0, 0), 60_000)
    quiet = await wait_in_line(pool, "quiet-0", 1)
    assert await pool.client.llen("wake") == 1

    others = await pool.form([("free", 8)])
    for number in range(later):
        quiet += await wait_in_line(pool, f"quiet-{number + 1}", 1)
    batch = await pool.form([("free", 8)])

    batches = await pool.inflight()
    assert not set(batches[f"inflight:free:{others}"]) & set(quiet)
    assert len(batches[f"inflight:free:{batch}"]) == 8
    assert set(batches[f"inflight:free:{batch}"]) >= set(quiet)
    assert (set(batches[f"inflight:free:{batch}"]) > set(quiet)) == with_others
    assert [await pool.pop() for _ in range(3)] == [batch, ready, others]


async def test_a_batch_of_ended_requests_of_quiet_customers_takes_others(pool: Pool) -> None:
    """A call that finds only ended ones still forms a batch."""
    await wait_in_line(pool, "flood", 100)
    await pool.form([("free", 8)])
    quiet = await wait_in_line(pool, "quiet", 2)
    await pool.overdue(quiet)

    formed = await pool.batches.form("next", [("free", 8)], 100, TIERS)

    assert (formed.size, formed.dropped) == (8, 2)


async def test_customers_with_a_backlog_form_no_batch_of_their_own(pool: Pool) -> None:
    """Neither while they always have one, nor when they send more."""
    await wait_in_line(pool, "a", 50)
    await wait_in_line(pool, "b", 50)
    for _ in range(8):
        batch = await pool.form([("free", 8)])
        assert len((await pool.inflight())[f"inflight:free:{batch}"]) == 8
        await wait_in_line(pool, "a", 1)
        await wait_in_line(pool, "b", 1)
        assert (await pool.batches.look(TIERS)).quiet == []


async def test_empty_places_of_quiet_batches_take_a_fiftieth_of_the_gpu_time(pool: Pool) -> None:
    """Each ms of GPU time allows 0.02 ms; a batch of quiet customers takes its time in proportion to its empty places."""
    await pool.gateway_stays("g1")
    owner = dict.fromkeys(await wait_in_line(pool, "flood", 100), "flood")
    cost = {"flood": 10.0, "quiet": 8.0}
    await pool.client.hset("fair:free", "apart", 1.0)
    await run_batch(pool, 8, owner, cost)
    before = float(await pool.client.hget("fair:free", "apart"))
    await run_batch(pool, 8, owner, cost)
    assert float(await pool.client.hget("fair:free", "apart")) == pytest.approx(before + 0.02 * 80)

    before += 0.02 * 80
    owner |= dict.fromkeys(await wait_in_line(pool, "quiet", 2), "quiet")
    assert await run_batch(pool, 8, owner, cost) == {"quiet": 16.0}
    assert float(await pool.client.hget("fair:free", "apart")) == pytest.approx(before + (0.02 - 6 / 8) * 16)


async def test_a_batch_may_be_larger_than_a_call_of_lua_can_move(pool: Pool) -> None:
    """4,096 requests, twice as many candidates: more values than Lua's `unpack` returns."""
    await pool.gateway_stays("g1")
    await wait_in_line(pool, "a", 8200)

    formed = await pool.batches.form("b1", [("free", 4096)], 1, TIERS, max_tokens=1_000_000_000)

    assert formed.size == 4096
    assert await pool.depth("free") == 8200 - 4096


@pytest.mark.parametrize("count", [1, 3, 8])
async def test_the_number_of_waiting_requests_is_exact(pool: Pool, count: int) -> None:
    """Regression: with many customers of few requests, forming batches lost the number, and requests waited for its repair."""
    await pool.gateway_stays("g1")
    waiting = 0
    for turn in range(16):
        many = [r for number in range(turn % 7 * 6) for r in requests_of(pool, f"c{number}", 1 + number % 2)]
        await pool.admit(many, WIDE)
        await pool.form([("free", count * (1 + turn % 3))])
        keys = [key async for key in pool.client.scan_iter("backlog:*")]
        waiting = sum([await pool.client.llen(key) for key in keys])
        assert int(await pool.client.get("waiting:free") or 0) == waiting
    depth = await pool.depth("free")
    while depth:
        formed = await pool.batches.form(f"last-{depth}", [("free", count)], 1000, TIERS)
        assert formed.size == min(count, depth)
        depth -= formed.size
    assert [key async for key in pool.client.scan_iter("backlog*")] == []


async def test_requests_of_a_customer_keep_their_order(pool: Pool) -> None:
    """Oldest first, through the backlog too."""
    ids = await wait_in_line(pool, "a", 12)
    await wait_in_line(pool, "b", 12)

    for _ in range(3):
        await pool.form([("free", 8)])

    batches = await pool.inflight()
    assert [i for name in sorted(batches) for i in batches[name] if i in ids] == ids


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    loads=st.lists(
        st.tuples(st.sampled_from((0.5, 1.0, 2.0, 4.0)), st.sampled_from((1.0, 3.0, 10.0))), min_size=2, max_size=4
    ),
    size=st.integers(4, 16),
)
async def test_gpu_time_is_divided_by_weight(client: Redis, loads: Sequence[tuple[float, float]], size: int) -> None:
    """Whatever each request costs: between customers with a backlog, it differs from the fair share by at most two quanta, where
    a quantum is a batch of the most expensive requests.
    """
    await client.flushall()
    pool = Pool(client, Keys())
    customers = {f"c{n}": (400, weight, cost) for n, (weight, cost) in enumerate(loads)}

    spent = await serve(pool, customers, 400 // size, size)

    quantum = size * max(cost for _, cost in loads)
    shares = {name: spent[name] / weight for name, (_, weight, _) in customers.items()}
    fair = sum(spent.values()) / sum(weight for _, weight, _ in customers.values())
    for name, (_, weight, _) in customers.items():
        assert abs(shares[name] - fair) * weight <= 2 * quantum, (shares, fair, quantum)


async def test_keys_with_a_weight_divide_the_part_of_their_customer(pool: Pool) -> None:
    """Weights 3 and 1, and 1 for all other keys together: 60, 20 and 20 % of half of the tier; nothing is left at the end."""
    await pool.gateway_stays("g1")
    owner, cost = dict.fromkeys(await wait_in_line(pool, "other", 400), "other"), {"other": 5.0, "acme": 5.0}
    of_key: dict[str, str] = {}
    for key, weight in (("heavy", 3.0), ("light", 1.0), ("plain", 0.0), ("bare", 0.0)):
        some = requests_of(pool, "acme", 150, api_key_id=key, key_weight=weight)
        assert {v.outcome for v in await pool.admit(some, WIDE)} == {Admission.ACCEPTED}
        of_key |= {s.id: key for s in some}
    owner |= dict.fromkeys(of_key, "acme")
    assert await pool.depth("free") == 1000

    spent: Counter[str] = Counter()
    keys: Counter[str] = Counter()
    for number in range(30):
        await pool.form([("free", 10)])
        batch = await pool.claim_next()
        outcomes = [done(r.id)._replace(cost_ms=cost[owner[r.id]]) for r in batch.requests]
        await pool.batches.finish(batch.batch_id, batch.token, outcomes)
        if number > 0:  # The first ids were in the tier queue before there was a backlog.
            spent += Counter(owner[r.id] for r in batch.requests)
            keys += Counter(of_key[r.id] for r in batch.requests if r.id in of_key)

    assert abs(spent["acme"] - spent["other"]) <= 20
    part = spent["acme"] / 5
    assert abs(keys["heavy"] - 3 * part) <= 10
    assert abs(keys["light"] - part) <= 10
    assert abs(keys["plain"] + keys["bare"] - part) <= 10
    await pool.overdue([i for i, key in of_key.items() if key == "heavy"])
    while await pool.depth("free"):
        await pool.gateway_stays("g1")
        await pool.form([("free", 64)])
        await pool.terminations.expire(["free"])
    left = [
        k
        for k in ("waiting:free", "waiting:free:acme", "backlogs:free:acme", "backlogs:free")
        if await pool.client.exists(k)
    ]
    assert left == [], [await pool.client.zrange(k, 0, -1) for k in left if k.startswith("backlogs")]


async def test_time_without_demand_is_not_saved(pool: Pool) -> None:
    """A customer that comes later gets its share from then on, and no more."""
    owner = dict.fromkeys(await wait_in_line(pool, "early", 400), "early")
    await pool.gateway_stays("g1")
    cost = {"early": 5.0, "late": 5.0}
    for _ in range(20):
        await run_batch(pool, 8, owner, cost)
    owner |= dict.fromkeys(await wait_in_line(pool, "late", 200), "late")

    spent: Counter[str] = Counter()
    for _ in range(20):
        spent += await run_batch(pool, 8, owner, cost)

    assert abs(spent["late"] - spent["early"]) <= 2 * 8 * 5.0


async def take_alone(pool: Pool, count: int) -> list[tuple[str, str, list[str]]]:
    """Form and claim batches of one request each: id, token and members."""
    taken = []
    for _ in range(count):
        await pool.form([("free", 1)])
        batch = await pool.claim_next()
        taken.append((batch.batch_id, batch.token, [request.id for request in batch.requests]))
    return taken


async def finish_each(pool: Pool, taken: Sequence[tuple[str, str, list[str]]], cost_ms: float) -> None:
    for batch_id, token, members in taken:
        outcomes = [done(each)._replace(cost_ms=cost_ms) for each in members]
        assert await pool.batches.finish(batch_id, token, outcomes) == 0


async def mean_cost(pool: Pool, customer: str) -> float:
    return float(await pool.client.hget(pool.keys.flow("free", customer), "cost"))


async def test_the_mean_cost_of_a_customer_follows_requests_that_were_charged_before(pool: Pool) -> None:
    """In slots, many requests leave before the first of them ends; each that ends counts, not only those that left after it."""
    await wait_in_line(pool, "a", 100)
    await pool.gateway_stays("g1")
    await finish_each(pool, await take_alone(pool, 40), 200.0)
    expensive = await mean_cost(pool, "a")
    await finish_each(pool, await take_alone(pool, 32), 20.0)

    assert expensive > 150
    assert await mean_cost(pool, "a") < 50


async def test_means_are_those_of_full_gpus(pool: Pool) -> None:
    """What ends when no request waits any more had more of the GPU's time, and changes no mean."""
    await wait_in_line(pool, "a", 40)
    await pool.gateway_stays("g1")
    await finish_each(pool, await take_alone(pool, 30), 20.0)
    full = await mean_cost(pool, "a")
    await finish_each(pool, await take_alone(pool, 10), 500.0)

    assert await pool.depth("free") == 0
    assert await mean_cost(pool, "a") == full < 40


async def test_estimates_that_were_too_high_do_not_hold_up_a_customer_that_arrives(pool: Pool) -> None:
    """32 requests that were charged ten times their cost put the virtual time ahead by more than 200 others. The correction is bounded, to 64
    requests of the mean cost of that time, which is still twice the true one.
    """
    await wait_in_line(pool, "flood", 600)
    await pool.gateway_stays("g1")
    await finish_each(pool, await take_alone(pool, 40), 200.0)
    await finish_each(pool, await take_alone(pool, 32), 20.0)
    (quiet,) = await wait_in_line(pool, "quiet", 1)
    before = 0
    while (taken := await take_alone(pool, 1))[0][2] != [quiet]:
        before += 1
        await finish_each(pool, taken, 20.0)

    assert before <= 140


@pytest.mark.parametrize("how", ["cancelled while it waits", "cancelled while it runs", "lost with its worker"])
async def test_work_without_a_result_costs_nothing(pool: Pool, how: str) -> None:
    """A customer whose requests are cancelled, or failed by the service, is charged for the others only."""
    await pool.gateway_stays("g1")
    owner = dict.fromkeys(await wait_in_line(pool, "a", 300), "a")
    lost = await wait_in_line(pool, "b", 100)
    owner |= dict.fromkeys(lost, "b")
    cost = {"a": 10.0, "b": 10.0}
    for _ in range(4):
        await run_batch(pool, 8, owner, cost)
    before = await _tags(pool)
    if how == "cancelled while it waits":
        await pool.terminations.cancel([(i, ErrorCode.CANCELLED) for i in lost])
    await pool.form([("free", 8)])
    batch = await pool.claim_next()
    mine = [request.id for request in batch.requests if owner[request.id] == "b"]
    assert bool(mine) == (how != "cancelled while it waits")
    if how == "cancelled while it runs":
        await pool.terminations.cancel([(i, ErrorCode.NO_CAPACITY) for i in mine])
    if how == "lost with its worker":
        for i in batch.requests:
            await pool.client.hset(pool.keys.request(i.id), "losses", 5)
        assert await pool.batches.fail(batch.batch_id, batch.token, ErrorCode.WORKER_LOST, 0)

    after = await _tags(pool)
    assert after.get("b", before["b"]) == pytest.approx(before["b"])


async def _tags(pool: Pool) -> dict[str, float]:
    return {name.decode(): tag for name, tag in await pool.client.zrange("backlogs:free", 0, -1, withscores=True)}


async def test_overdue_requests_in_a_backlog_end(pool: Pool) -> None:
    """Also those of customers behind others; a backlog without ids leaves the index."""
    await wait_in_line(pool, "a", PLACES)
    late = [(await wait_in_line(pool, f"c{n}", 1))[0] for n in range(40)]
    await pool.overdue(late)

    for _ in range(3):
        await pool.terminations.expire(["free"])

    assert set(await pool.states(late)) == {"failed"}
    assert await pool.depth("free") == PLACES
    assert await pool.client.exists("backlogs:free") == 0


async def test_overdue_requests_end_beside_a_customer_whose_last_one_has_left(pool: Pool) -> None:
    """Its backlog is empty, but still in the index: the ends of the others are recorded."""
    await wait_in_line(pool, "a", PLACES)
    await wait_in_line(pool, "b", 1)
    late = await wait_in_line(pool, "c", 5)
    await pool.form([("free", PLACES + 1)])
    assert list(await _tags(pool)) == ["c", "b"]
    assert await pool.client.llen(pool.keys.backlog("free", "b")) == 0
    await pool.overdue(late)

    await pool.terminations.expire(["free"])

    assert sorted(end.id for end in (await pool.audit())[1]) == sorted(late)
    assert await pool.depth("free") == 0
    assert await _tags(pool) == {}


async def test_only_the_customer_with_the_large_backlog_is_shed(pool: Pool) -> None:
    """100 waiting requests of one customer shed and refuse its own next ones, and none of ten others."""
    limits = [TierLimit("free", 1e6, 1e6, 110, ["free"], 100, places=PLACES)]
    for _ in range(10):
        await pool.admit(requests_of(pool, "flood", 20), limits)
    depth = await pool.depth("free")
    (flood,) = await pool.admit(requests_of(pool, "flood", 1), limits)

    others = [(await pool.admit(requests_of(pool, f"c{n}", 2), limits)) for n in range(10)]

    assert depth >= 80
    assert {v.outcome for verdicts in others for v in verdicts} == {Admission.ACCEPTED}
    assert flood.outcome in {Admission.SHED, Admission.ACCEPTED}
    refused = [v.outcome for v in await pool.admit(requests_of(pool, "flood", 50), limits)]
    assert Admission.ACCEPTED not in refused


async def test_an_empty_bucket_of_the_tier_rejects_only_customers_over_their_share(pool: Pool) -> None:
    """With backlogs, a customer has its share if it has no more of them than the others, by weight. The bucket may go into debt by
    its size; then all are rejected.
    """
    await wait_in_line(pool, "flood", 20)
    await wait_in_line(pool, "other", 10)
    limits = [TierLimit("free", 1e-6, 20.0, 1000, ["free"], places=PLACES)]
    await pool.client.hset("rl:tier:free", mapping={"tokens": 0, "rate": 1e-6})

    async def outcomes(customer: str, count: int, weight: float = 1.0) -> Counter[str]:
        verdicts = [(await pool.admit(requests_of(pool, customer, 1, weight), limits))[0] for _ in range(count)]
        return Counter(v.outcome for v in verdicts)

    assert await outcomes("flood", 3) == {Admission.TIER_LIMIT: 3}
    assert await outcomes("quiet", 2) == {Admission.ACCEPTED: 2}
    assert await outcomes("heavy", 10, 4.0) == {Admission.ACCEPTED: 10}
    assert await outcomes("other", 4) == {Admission.TIER_LIMIT: 4}
    late = [await outcomes(f"late-{number}", 1) for number in range(10)]
    assert sum(late, Counter()) == {Admission.ACCEPTED: 8, Admission.TIER_LIMIT: 2}


async def test_background_requests_take_nothing_from_the_bucket_of_interactive_ones(pool: Pool) -> None:
    """They have a bucket of the same rate and size."""
    limits = [TierLimit("free", 1e-6, 4.0, 1000, ["free"], places=PLACES)]
    jobs = [pool.submission(customer_id="a", background=True) for _ in range(6)]

    assert Counter(v.outcome for v in await pool.admit(jobs, limits)) == {
        Admission.ACCEPTED: 1,
        Admission.TIER_LIMIT: 5,
    }
    interactive = [pool.submission(customer_id=f"c{n}") for n in range(6)]
    assert Counter(v.outcome for v in await pool.admit(interactive, limits)) == {
        Admission.ACCEPTED: 1,
        Admission.TIER_LIMIT: 5,
    }


async def test_the_calls_of_admission_and_forming_do_not_grow_with_the_customers(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 20,000 customers that have a backlog, no command runs more often than with 10."""
    monkeypatch.setattr(
        "scheduler.protocol.batches.GATEWAY_GONE_MS", 600_000
    )  # Else `form` looks for the gateway of requests of a second ago.
    counts = []
    for customers in (10, 20_000):
        await pool.client.flushall()
        many = [requests_of(pool, f"c{n % customers}", 1)[0] for n in range(max(200, customers))]
        for start in range(0, len(many), 200):
            await pool.admit(many[start : start + 200], WIDE)
        await pool.gateway_stays("g1")
        await pool.form([])  # The script is loaded.
        await pool.client.hset("fair:free", "quiet", 0)
        calls = []
        for call in (lambda: pool.admit(requests_of(pool, "late", 8), WIDE), lambda: pool.form([("free", 8)])):
            await pool.client.config_resetstat()
            await call()
            stats = await pool.client.info("commandstats")
            others = {"cmdstat_info", "cmdstat_config|resetstat"}
            calls.append(Counter({name: row["calls"] for name, row in stats.items() if name not in others}))
        counts.append(calls)

    assert [many - few for few, many in zip(*counts, strict=True)] == [Counter(), Counter()]
