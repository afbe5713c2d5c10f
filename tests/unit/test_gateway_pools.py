"""Which pools a gateway and a scheduler serve: what was accepted in one must come to its end, whatever its row says now."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eventually import eventually
from gateway.pools import Pools
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from tierlane.roles.scheduler import wanted_pools


def row(pool: str, *, enabled: bool = True) -> SimpleNamespace:
    return SimpleNamespace(pool=pool, enabled=enabled)


MODELS = {"tiny": row("default"), "large": row("large"), "old": row("old", enabled=False), "odd": row("{x}:")}
CATALOG: Any = SimpleNamespace(snapshot=SimpleNamespace(models=MODELS))


async def _beaten() -> None:
    """A heartbeat that has arrived."""


def parts(pool: str) -> Any:
    """What a pool looks like to those that count pools."""
    return SimpleNamespace(
        config=SimpleNamespace(pool=pool),
        inference=SimpleNamespace(elsewhere=None),
        jobs=SimpleNamespace(result=SimpleNamespace(elsewhere=None), serving=None),
        direct=SimpleNamespace(open=lambda: None),
        heartbeat=SimpleNamespace(heartbeat=_beaten),
        subscriber=SimpleNamespace(was_subscribed=pool != "old"),
        loops=dict,
    )


async def test_the_pool_of_a_model_that_is_switched_off_is_served_and_nothing_is_expected_of_it() -> None:
    """A gateway that starts later keeps its jobs; health and readiness look at the others alone."""
    pools = Pools(CATALOG, parts("default"), parts)
    running = asyncio.create_task(pools.run())
    try:
        await eventually(lambda: [p.config.pool for p in pools.all] == ["default", "large", "old"], "all are served")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert [each.config.pool for each in pools.named] == ["default", "large"]
    assert pools.subscribed
    assert pools.serving("old") is None


async def test_a_pool_in_which_something_is_unfinished_is_served() -> None:
    """Though no row names it; with one pool of its own a gateway looks at no other. Redis may be away when it is asked."""
    told = iter([RedisUnavailable("away"), {"default", "left"}])

    async def unfinished() -> set[str]:
        found = next(told, set())
        if isinstance(found, Exception):
            raise found
        return found

    pools = Pools(CATALOG, parts("default"), parts, unfinished=unfinished)
    alone = Pools(CATALOG, parts("default"), parts, unfinished=unfinished, only_own=True)
    running = [asyncio.create_task(each.run()) for each in (alone, pools)]
    try:
        await eventually(lambda: "left" in {p.config.pool for p in pools.all}, "it is served")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    assert [each.config.pool for each in pools.named] == ["default", "large"]
    assert len(alone.all) == 1


def test_a_model_whose_pool_was_just_named_is_not_unknown() -> None:
    """It may have moved there: 404 would tell its callers to give up. What nobody will serve is unknown."""
    pools = Pools(CATALOG, parts("default"), parts)

    with pytest.raises(RequestError) as caught:
        pools.serving("large")

    assert caught.value.code is ErrorCode.NO_CAPACITY
    assert [pools.serving(model) for model in ("tiny", "old", "odd", "nobody")] == [None] * 4
    assert Pools(CATALOG, parts("default"), parts, only_own=True).serving("large") is None


def test_a_scheduler_serves_the_pool_of_a_model_that_is_switched_off() -> None:
    """Else nobody would write the audit of what ended there; with `own` it has but one."""
    assert wanted_pools(cast("Any", SimpleNamespace(pool="default", serve_pools="all")), CATALOG) == {
        "default",
        "large",
        "old",
    }
    assert wanted_pools(cast("Any", SimpleNamespace(pool="default", serve_pools="own")), CATALOG) == {"default"}
