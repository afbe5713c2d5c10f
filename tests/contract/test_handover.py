"""Limits that move from one cell to another, on two Redis servers: no fresh burst, and no customer in two cells."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from conftest import PATIENCE_S
from customer_limits import in_force
from key_leaks import leaked_keys
from pool import Pool, done
from ratelimit.limits import REQUEST_BUCKET, Bucket
from scheduler.protocol.admission import Residence
from scheduler.protocol.handover import ArrivingLimits, Left, LimitsHandover, Wanted
from scheduler.protocol.limits import REMOVED, Allotments, Grant, Parts, PartsOrder
from scheduler.redis_client import scripts
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission
from tierlane_local.embedded.redis import EmbeddedRedis

CLOCK = "local now_us = time[1] * 1000000 + time[2]"
DAY = "1day"
SLOW = {"rate": 1e-6, "burst": 8.0}
"""A limit that is not refilled during a test."""


class Cell:
    """One cell: its admission, and the moves of limits from and to it."""

    def __init__(self, name: str, client: Redis, keys: Keys) -> None:
        self.name = name
        self.pool = Pool(client, keys)
        self.handover = LimitsHandover(client, keys)

    async def admit(self, count: int = 1, home: Residence = Residence.HERE, **changes: Any) -> list[str]:
        """The outcomes of so many requests of the customer."""
        submissions = [self.pool.submission(home=home, **SLOW | changes) for _ in range(count)]
        return [verdict.outcome.value for verdict in await self.pool.admit(submissions)]

    async def leave(self, version: int, keys: Sequence[str] = (), idempotency: Sequence[str] = ()) -> Left:
        """The customer leaves."""
        return (await self.handover.leave(version, {"customer": Wanted(keys, idempotency)}))["customer"]

    async def arrive(
        self, version: int, left: dict[str, Left], key: dict[str, float] | None = None, **limits: Any
    ) -> bool:
        """The customer arrives with what other cells had left; `is_empty` is one of the options."""
        is_empty = limits.pop("is_empty", False)
        own = in_force(**SLOW | limits | (key or {}))
        keys = {"key": own.key} if own.key else {}
        return not (await self.handover.arrive(version, [ArrivingLimits("customer", own, keys, left, is_empty)]))[0]

    async def settle(self, version: int, *others: "Cell", key: dict[str, float] | None = None, **limits: Any) -> bool:
        """What a gateway does for a customer whose home is this cell."""
        left = {each.name: await each.leave(version, ["key"] if key else ()) for each in others}
        if any(each.newer for each in left.values()):
            return False
        return await self.arrive(version, left, key, **limits)

    async def opened_long_ago(self) -> None:
        """A bucket that is not stored counts as full."""
        await self.pool.client.set(self.pool.keys.epoch, 1)


@pytest.fixture(scope="module")
def west_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The Redis of the second cell."""
    home = tmp_path_factory.mktemp("west")
    server = EmbeddedRedis(home, home / "socket", ephemeral=True)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
async def east(client: Redis) -> Cell:
    """The default cell."""
    cell = Cell("default", client, Keys())
    await cell.opened_long_ago()
    return cell


@pytest.fixture
async def west_client(west_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A client of the second cell, which is empty."""
    client = command_client(f"{west_server.url}#west", PATIENCE_S)
    await client.flushall()
    yield client
    leaks = await leaked_keys(client)
    await client.aclose()
    assert leaks == []


@pytest.fixture
async def west(west_client: Redis) -> Cell:
    """The second cell."""
    return Cell("west", west_client, Keys.at("redis://west#west"))


async def test_a_customer_continues_with_what_it_had_left(east: Cell, west: Cell) -> None:
    """Three of eight requests are spent in the old home; before its limits have arrived, the new one accepts nothing."""
    assert await east.admit(3, Residence.ONLY) == ["accepted"] * 3
    assert await west.admit() == ["elsewhere"]

    assert await west.settle(1, east)

    assert await west.admit(6) == ["accepted"] * 5 + ["customer_limit"]


async def test_the_audit_has_requests_of_each_home(east: Cell, west: Cell) -> None:
    """Regression: a group with a home could not be read by the auditor."""
    assert await west.settle(1, east)
    homes = (Residence.HERE, Residence.SPREAD)
    for home in homes:
        assert await west.admit(1, home) == ["accepted"]

    accepted, _ = await west.pool.audit()

    assert [record.gateway_id for record in accepted] == ["g1"] * len(homes)


async def test_the_old_home_accepts_nothing_after_the_move(east: Cell, west: Cell) -> None:
    """However old the catalog of a gateway is. A request that was accepted before the move is known, and not lost."""
    known = east.pool.submission(**SLOW)
    assert [v.outcome for v in await east.pool.admit([known])] == [Admission.ACCEPTED]
    assert await west.settle(1, east)

    assert await east.admit(1, Residence.ONLY) == await east.admit(1, Residence.HERE) == ["elsewhere"]
    again = east.pool.submission(again=True, **SLOW)
    assert [v.outcome for v in await east.pool.admit([known, again])] == [Admission.DUPLICATE, Admission.ACCEPTED]


async def test_a_second_gateway_changes_nothing(east: Cell, west: Cell) -> None:
    """It gets the same from the old home, and what was spent in the new one stays spent."""
    assert await east.admit(3, Residence.ONLY) == ["accepted"] * 3
    first = await east.leave(1)
    second = await east.leave(1)
    assert await west.arrive(1, {"default": first})
    assert await west.admit(5) == ["accepted"] * 5

    assert await west.arrive(1, {"default": second})

    assert await west.admit(1) == ["customer_limit"]


async def test_a_gateway_that_failed_between_both_steps_loses_nothing(east: Cell, west: Cell) -> None:
    """Another one finds what is left, in a cell that has just been opened."""
    await west.pool.gateway_lives("g1")
    assert await east.admit(1, Residence.ONLY) == ["accepted"]
    await east.leave(1)

    assert await west.settle(2, east)

    assert await west.admit(8) == ["accepted"] * 7 + ["customer_limit"]


async def test_an_older_catalog_cannot_take_a_customer_back(east: Cell, west: Cell) -> None:
    """A newer one can, when the old home is opened again; the last levels count."""
    assert await east.admit(3, Residence.ONLY) == ["accepted"] * 3
    assert await west.settle(5, east)
    assert await west.admit(2) == ["accepted"] * 2

    refused = await west.leave(4)
    assert (refused.newer, refused.is_home) == (5, True)
    assert not await east.settle(4, west)
    assert not await east.arrive(4, {})
    assert await east.admit() == ["elsewhere"]

    assert await east.settle(6, west)
    assert await west.admit() == ["elsewhere"]
    assert await east.admit(4) == ["accepted"] * 3 + ["customer_limit"]
    assert (await east.leave(5)).newer == 6


async def test_buckets_are_refilled_by_durations_whatever_the_clocks_show(
    east: Cell, west_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the new home is an hour ahead: the bucket of the old one was refilled for the two seconds since it was written."""
    source = scripts.source
    ahead = f"{CLOCK} + 3600000000"
    monkeypatch.setattr(scripts, "source", lambda name: source(name).replace(CLOCK, ahead))
    assert ahead in scripts.source("limits_arrive")
    west = Cell("west", west_client, Keys.at("redis://west#west"))
    limits = {"rate": 1.0, "burst": 8.0}
    assert await east.admit(8, Residence.ONLY, **limits) == ["accepted"] * 8
    await east.pool.client.hincrby("rl:customer:customer", "at", -2_000_000)

    assert await west.settle(1, east, **limits)

    assert (await west.admit(8, **limits | {"rate": 1e-6})).count("accepted") == 2


async def test_quotas_and_tokens_move(east: Cell, west: Cell) -> None:
    """A quota that was restored to a lower count in the new home is raised, never lowered."""
    limits = {"quotas": [(DAY, 10)], "tokens_per_minute": 100.0, "burst": 1e6}
    assert await east.admit(4, Residence.ONLY, tokens=20, **limits) == ["accepted"] * 4
    number = (await east.pool.client.hget("rl:customer:customer", f"q:{DAY}")).split()[0].decode()
    await west.pool.client.hset("{cell:west}:rl:customer:customer", f"q:{DAY}", f"{number} 2")

    assert await west.settle(1, east, **limits)

    assert await west.admit(2, tokens=20, **limits) == ["accepted", "token_limit"]
    assert await west.admit(7, **limits | {"tokens_per_minute": 0.0}) == ["accepted"] * 5 + ["quota"] * 2


async def test_open_requests_of_the_old_home_count_in_the_new_one(east: Cell, west: Cell) -> None:
    """Until they have ended there; those that have ended count no more when the customer returns."""
    limits = {"max_concurrency": 3}
    (first,) = await east.pool.queue(1, **SLOW | limits)
    assert await east.admit(1, Residence.ONLY, **limits) == ["accepted"]
    assert await west.settle(1, east, **limits)
    assert await west.admit(2, **limits) == ["accepted", "concurrency"]

    await east.pool.form([("free", 2)])
    batch = await east.pool.claim_next()
    await east.pool.batches.finish(batch.batch_id, batch.token, [done(each.id) for each in batch.requests])
    assert first in {each.id for each in batch.requests}
    assert await east.settle(2, west, **limits)

    assert await east.admit(3, **limits) == ["accepted"] * 2 + ["concurrency"]


async def test_the_bucket_of_a_key_moves_with_its_first_request(east: Cell, west: Cell) -> None:
    """A key whose limit has not arrived is not accepted, although its customer has."""
    own = {"key_rate": 1e-6, "key_burst": 4.0}
    assert await east.admit(3, Residence.ONLY, **own) == ["accepted"] * 3
    assert await west.settle(1, east)
    assert await west.admit(1, **own) == ["elsewhere"]

    assert await west.settle(1, east, key=own)
    assert await west.admit(2, **own) == ["accepted", "key_limit"]
    assert await west.settle(1, east, key=own)
    assert await west.admit(1, **own) == ["key_limit"]

    assert await east.settle(2, west, key=own)
    assert await east.admit(1, **own) == ["key_limit"]


async def test_a_customer_whose_old_home_is_lost_starts_empty(east: Cell, west: Cell) -> None:
    """Its buckets are refilled at their rate; so is that of its key. What is known of another cell is not raised."""
    own = {"key_rate": 1e-6, "key_burst": 4.0}
    await west.opened_long_ago()

    assert await west.settle(1, east, key=own, is_empty=True)

    assert await west.admit(1) == ["customer_limit"]
    assert await west.admit(1, **own) == ["key_limit"]


async def test_a_new_customer_has_what_a_new_customer_has(east: Cell, west: Cell) -> None:
    """Full buckets; in a cell that was opened or lost a moment ago a quarter."""
    await west.pool.gateway_lives("g1")
    assert await west.settle(1, east)
    assert (await west.admit(9)).count("accepted") == 2

    await east.pool.client.flushall()
    await east.opened_long_ago()
    await west.pool.client.flushall()
    assert await east.settle(1, west)
    assert (await east.admit(9)).count("accepted") == 8


async def test_a_home_that_lost_its_data_gives_no_full_bucket(east: Cell, west: Cell) -> None:
    """What a former home had left long ago does not count as what the customer had."""
    assert await east.admit(1, Residence.ONLY) == ["accepted"]
    assert await west.settle(1, east)
    assert await west.admit(7) == ["accepted"] * 7
    await west.pool.client.flushall()
    left = (await east.pool.client.hget("rl:customer:customer", "home")).split()
    await east.pool.client.hset("rl:customer:customer", "home", b"left %s %d" % (left[1], int(left[2]) - 60_000))

    assert await west.settle(1, east)

    assert (await west.admit(9)).count("accepted") <= 2


async def test_a_customer_of_several_cells_is_not_checked(east: Cell, west: Cell) -> None:
    """Its limits are shared in another way."""
    assert await west.settle(1, east)

    assert await east.admit(1, Residence.SPREAD) == await west.admit(1, Residence.SPREAD) == ["accepted"]


class SharedQuota:
    """A quota of ten of a customer of several cells: what each cell may spend of it."""

    LIMITS: Mapping[str, Any] = {"rate": 1e6, "burst": 1e6, "quotas": [(DAY, 10)]}

    def __init__(self) -> None:
        self._calls = 0

    async def grant(self, cell: Cell, part: int, amount: int, *, then_removed: bool = False) -> None:
        """Set the parts of a cell; with `then_removed` it has parts no more."""
        bucket = Bucket(REQUEST_BUCKET, 1e6, 1e6)
        for parts in (None, Parts(part, part, part), *([REMOVED] if then_removed else [])):
            self._calls += 1
            ends_ms = await cell.pool.now_ms() + 3000
            order = PartsOrder("customer", [bucket], parts, [Grant(DAY, 10, await self._window(cell), amount, True)])
            reply = await Allotments(cell.pool.client, cell.pool.keys).allot("one", 1, self._calls, ends_ms, [order])
            assert reply.accepted

    async def spend(self, cell: Cell, count: int) -> None:
        """So many requests are accepted."""
        assert await cell.admit(count, Residence.SPREAD, spread=2, **self.LIMITS) == ["accepted"] * count

    async def _window(self, cell: Cell) -> int:
        return await cell.pool.now_ms() // 86_400_000


@pytest.mark.parametrize("then_removed", [False, True])
async def test_what_several_cells_have_spent_of_a_quota_is_added(east: Cell, west: Cell, then_removed: bool) -> None:
    """When their customer uses one other cell again, before or after the allotter has removed the parts."""
    north, quota = Cell("north", west.pool.client, Keys.at("redis://west#north")), SharedQuota()
    for cell, spent in ((east, 4), (west, 3)):
        await quota.grant(cell, 5000, 5)
        await quota.spend(cell, spent)
        await quota.grant(cell, 0, spent, then_removed=then_removed)

    assert await north.settle(1, east, west, **quota.LIMITS)

    assert await north.admit(4, **quota.LIMITS) == ["accepted"] * 3 + ["quota"]


@pytest.mark.parametrize("is_early", [False, True])
async def test_what_a_cell_was_not_granted_of_a_quota_is_not_spent(east: Cell, west: Cell, is_early: bool) -> None:
    """When the customer uses one of its cells again, that has the rest, whether its first request comes early or late."""
    quota = SharedQuota()
    for cell, spent in ((east, 3), (west, 4)):
        await quota.grant(cell, 5000, 5)
        await quota.spend(cell, spent)
    assert not is_early or await east.settle(1, west, **quota.LIMITS)
    await quota.grant(west, 0, 4, then_removed=True)
    await quota.grant(east, 10_000, 6, then_removed=True)

    assert is_early or await east.settle(1, west, **quota.LIMITS)
    assert await east.admit(4, **quota.LIMITS) == ["accepted"] * 3 + ["quota"]
    assert await west.settle(2, east, **quota.LIMITS)
    assert await west.admit(1, **quota.LIMITS) == ["quota"]


async def test_the_old_home_is_asked_for_idempotency_keys(east: Cell, west: Cell) -> None:
    """Its request, or the reply, is known only there. After that the key is claimed in the new home."""
    keyed = {"fingerprint": "f", "max_concurrency": 0}
    assert await east.admit(1, Residence.ONLY, idempotency="done", **keyed) == ["accepted"]
    await east.pool.form([("free", 1)])
    batch = await east.pool.claim_next()
    await east.pool.batches.finish(batch.batch_id, batch.token, [done(batch.requests[0].id)])
    assert await east.admit(1, Residence.ONLY, idempotency="runs", **keyed) == ["accepted"]
    assert await west.settle(1, east)

    assert await west.admit(1, idempotency="new", **keyed) == ["elsewhere"]
    assert (await east.leave(1, (), ["runs", "done", "new"])).known == {"runs", "done"}
    assert await east.admit(1, idempotency="runs", **keyed) == ["in_progress"]
    assert await east.admit(1, idempotency="done", **keyed) == ["replayed"]
    assert await west.admit(1, Residence.ASKED, idempotency="new", **keyed) == ["accepted"]
    assert await west.admit(1, idempotency="new", **keyed) == ["in_progress"]
    assert await west.pool.client.pttl("{cell:west}:rl:customer:customer") > 23 * 3_600_000


async def test_a_customer_that_no_other_cell_knows_has_no_other_keys(east: Cell, west: Cell) -> None:
    """No cell is asked for them."""
    await west.opened_long_ago()
    assert await west.settle(1, east)

    assert await west.admit(1, idempotency="new", fingerprint="f") == ["accepted"]
