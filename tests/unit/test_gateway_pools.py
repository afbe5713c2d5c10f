"""Pools: which ones a gateway and a scheduler serve, so that accepted requests are completed whatever their row is now."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from configs import gateway_config
from eventually import eventually
from gateway.cells import Homes
from gateway.operations.actions import most_healthy
from gateway.operations.endpoints import Internal
from gateway.pool_lifecycle import PoolLifecycle
from gateway.pools import Pools
from gateway.served_models import ServedModels
from identities import identity
from ledger.catalog.snapshot import CellRow, Model, Snapshot
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.redis_client.keys import cell_of, place_name
from scheduler.tasks import TaskRegistry
from tierlane.roles.served_pools import wanted_pools

ROWS = {"tiny": ("default", True), "large": ("large", True), "old": ("old", False), "odd": ("{x}:", True)}
MODELS = {name: Model(name, pool, 32, None, 40, 1000.0, 0.8, 0, on) for name, (pool, on) in ROWS.items()}
URL = "redis://127.0.0.1:1/0"
CUSTOMER = identity(customer_id="c1")
WEST = CellRow("west", "redis://127.0.0.1:2/0", "open", 1.0)


def catalog(*cells: CellRow) -> Any:
    """A catalog with the models of ROWS."""
    return SimpleNamespace(snapshot=Snapshot(1, (), {}, {}, MODELS, (), cells=cells))


async def _heartbeat() -> None:
    """Succeeds."""


async def _nothing(*_: object) -> None:
    """Does nothing."""


def parts(pool: str, redis_url: str = URL, unfinished: Callable[[], Awaitable[set[str]]] | None = None) -> Any:
    """The parts of a pool that `Pools` uses."""
    cell = cell_of(redis_url)

    async def none() -> set[str]:
        return set()

    return SimpleNamespace(
        config=SimpleNamespace(pool=pool, redis_url=redis_url, cell=cell, place=place_name(pool, cell)),
        inference=SimpleNamespace(models=ServedModels(pool, None)),
        jobs=SimpleNamespace(serving=None),
        handover=SimpleNamespace(turn=_nothing),
        direct=SimpleNamespace(open=lambda: None),
        heartbeat=SimpleNamespace(heartbeat=_heartbeat, redis_problem=None),
        subscriber=SimpleNamespace(was_subscribed=pool != "old"),
        sweep=SimpleNamespace(end_all=_nothing),
        unfinished=unfinished or none,
        loops=dict,
        close=_nothing,
    )


def pools_of(found: Any, own: Any = None, *, only_own: bool = False) -> Pools:
    """The pools of a gateway with this catalog."""
    pools = Pools(found, Homes(found), gateway_config(redis_url=URL, only_own=only_own))
    pools.add(own or parts("default"))
    return pools


def lifecycle(found: Any, pools: Pools, make: Callable[[str, str], Any] = parts) -> PoolLifecycle:
    """What adds and removes the pools of this catalog."""
    return PoolLifecycle(found, pools, make, TaskRegistry())


@asynccontextmanager
async def running(*several: PoolLifecycle) -> AsyncIterator[None]:
    """Their loops."""
    tasks = [asyncio.create_task(each.run()) for each in several]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def places(pools: Pools) -> set[str]:
    """The pools and cells that are served."""
    return {each.config.place for each in pools.all}


async def test_disabled_models_and_pools_with_unfinished_requests_are_served() -> None:
    """Readiness and health consider pools of enabled models only. A failed look at Redis is repeated."""
    looks = iter([RedisUnavailable("away"), {"default", "left"}])

    async def unfinished() -> set[str]:
        found = next(looks, set())
        if isinstance(found, Exception):
            raise found
        return found

    found = catalog()
    pools = pools_of(found, parts("default", unfinished=unfinished))
    alone = pools_of(found, parts("default", unfinished=unfinished), only_own=True)
    async with running(lifecycle(found, alone), lifecycle(found, pools)):
        await eventually(lambda: places(pools) == {"default", "large", "old", "left"}, "all are served")

    assert [each.config.pool for each in pools.named] == ["default", "large"]
    assert (pools.subscribed, pools.place(CUSTOMER, "old") is pools.own.inference, len(alone.all)) == (True, True, 1)


def test_the_model_of_a_new_pool_is_503_until_it_is_served() -> None:
    """404 would make clients give up; models that no pool will serve are unknown."""
    own = parts("default")
    pools = pools_of(catalog(), own)

    with pytest.raises(RequestError) as error:
        pools.place(CUSTOMER, "large")

    assert error.value.code is ErrorCode.NO_CAPACITY
    assert [pools.place(CUSTOMER, model) for model in ("tiny", "old", "odd", "nobody")] == [own.inference] * 4
    alone = pools_of(catalog(), own, only_own=True)
    assert alone.place(CUSTOMER, "large") is own.inference


async def test_a_customer_is_served_in_its_cell_while_it_is_open() -> None:
    """A closed cell is left; a draining one is served, for the requests that it has."""
    found, own = catalog(WEST), parts("default")
    pools = pools_of(found, own)
    there = identity(customer_id="c1", cell="west")
    async with running(lifecycle(found, pools)):
        await eventually(lambda: {"default@west", "large@west"} <= places(pools), "the cell is served")
        (west,) = [each for each in pools.all if each.config.place == "default@west"]
        assert pools.place(there, UNSET) is pools.place(there, "tiny") is west.inference

        found.snapshot = catalog(msgspec.structs.replace(WEST, state="draining")).snapshot
        await eventually(lambda: pools.place(there, "tiny") is own.inference, "the customer has another cell")
        assert "default@west" in places(pools)

        found.snapshot = catalog(msgspec.structs.replace(WEST, state="closed")).snapshot
        await eventually(lambda: places(pools) == {"default", "large", "old"}, "the cell is left")


async def test_a_new_cell_is_used_once_it_is_served() -> None:
    """Its customers stay where they are meanwhile, and if it cannot be served here."""
    found, own, faults = catalog(), parts("default"), [OSError("no"), OSError("no")]

    def make(pool: str, url: str) -> Any:
        if faults and pool == "default":
            raise faults.pop()
        return parts(pool, url)

    pools = pools_of(found, own)
    there = identity(customer_id="c1", cell="west")
    async with running(lifecycle(found, pools, make)):
        await eventually(lambda: "large" in places(pools), "the pools are served")
        found.snapshot = catalog(WEST).snapshot
        assert pools.place(there, "tiny") is own.inference
        await eventually(lambda: len(faults) == 1, "the first attempt has failed")
        assert pools.place(there, "tiny") is own.inference
        await eventually(lambda: pools.place(there, "tiny") is not own.inference, "the cell is used")
        assert "default@west" in places(pools)


async def test_a_cell_without_redis_does_not_keep_a_gateway_from_being_ready() -> None:
    """Else no gateway could start while one cell is lost."""
    found = catalog(WEST)
    pools = pools_of(found)
    async with running(lifecycle(found, pools)):
        await eventually(lambda: len(places(pools)) == 6, "the cell is served")
        for each in pools.all:
            each.subscriber.was_subscribed = each.config.cell == "default"
        assert not pools.subscribed
        for each in pools.all:
            if each.config.cell == "west":
                each.heartbeat.redis_problem = "Redis did not respond."  # type: ignore[misc]
        assert pools.subscribed


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (None, "subscription"),
        (
            "Redis did not respond: ConnectionError: Error 111 connecting to redis.internal:6379.",
            "Redis did not respond",
        ),
        ("Redis rejected the login: correct the user and password in TIERLANE_REDIS_URL.", "Redis rejected the login"),
    ],
)
def test_a_gateway_that_has_not_reached_redis_says_why_it_is_not_ready(problem: str | None, reason: str) -> None:
    """Without addresses: the endpoint needs no token. After the first subscription Redis may be away."""
    found, own = catalog(), parts("default")
    pools = Pools(found, Homes(found), gateway_config(redis_url=URL, only_own=True))
    pools.add(own)
    state: Any = SimpleNamespace(drain_state=SimpleNamespace(leaving=False), catalog=found, pools=pools)
    own.subscriber.was_subscribed, own.heartbeat.redis_problem = False, problem
    assert Internal(state).not_ready() == reason
    own.subscriber.was_subscribed = True
    assert Internal(state).not_ready() is None


@pytest.mark.parametrize(("serve_pools", "pools"), [("all", {"default", "large", "old"}), ("own", {"default"})])
def test_a_scheduler_serves_the_pools_of_disabled_models(serve_pools: str, pools: set[str]) -> None:
    """Otherwise the audit of their last requests would not be written."""
    settings: Any = SimpleNamespace(pool="default", serve_pools=serve_pools)

    assert wanted_pools(settings, catalog()) == pools


async def test_a_spread_customer_uses_its_cells_in_turn() -> None:
    """One call for each request."""
    rows = catalog(WEST)
    pools = pools_of(rows)
    spread: Any = SimpleNamespace(customer_id="c1", key_id="k1", cell=None, spread=2)
    async with running(lifecycle(rows, pools)):
        await eventually(lambda: len(places(pools)) == 6, "the cells are served")
        found = [pools.place(spread, "tiny") for _ in range(4)]

    assert found[0] is not found[1]
    assert found[:2] == found[2:]


def test_dead_letters_run_again_in_the_cell_with_the_most_healthy_workers() -> None:
    """In the default one if none has more; a cell whose Redis does not respond has none."""

    def seen(place: Any, healthy: int, problem: str | None = None) -> Any:
        place.heartbeat = SimpleNamespace(observation=SimpleNamespace(healthy_gpus=healthy), redis_problem=problem)
        return place

    default, west, lost = (parts("default", url) for url in (URL, f"{URL}#west", f"{URL}#lost"))

    assert most_healthy([seen(default, 1), seen(west, 1)]) == {"default": default}
    assert most_healthy([seen(default, 1), seen(west, 2), seen(lost, 3, "away")]) == {"default": west}
