"""Pools: which ones a gateway and a scheduler serve, so that accepted requests are completed whatever their row is now."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import eventually
from gateway.pools import Pools
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from tierlane.roles.scheduler import wanted_pools

ROWS = {"tiny": ("default", True), "large": ("large", True), "old": ("old", False), "odd": ("{x}:", True)}
MODELS = {name: SimpleNamespace(pool=pool, enabled=enabled) for name, (pool, enabled) in ROWS.items()}
CATALOG: Any = SimpleNamespace(snapshot=SimpleNamespace(models=MODELS))


async def _heartbeat() -> None:
    """Succeeds."""


def parts(pool: str) -> Any:
    """The parts of a pool that `Pools` uses."""
    return SimpleNamespace(
        config=SimpleNamespace(pool=pool),
        inference=SimpleNamespace(elsewhere=None),
        jobs=SimpleNamespace(result=SimpleNamespace(elsewhere=None), serving=None),
        direct=SimpleNamespace(open=lambda: None),
        heartbeat=SimpleNamespace(heartbeat=_heartbeat),
        subscriber=SimpleNamespace(was_subscribed=pool != "old"),
        loops=dict,
    )


async def test_disabled_models_and_pools_with_unfinished_requests_are_served() -> None:
    """Readiness and health consider pools of enabled models only. A failed look at Redis is repeated."""
    looks = iter([RedisUnavailable("away"), {"default", "left"}])

    async def unfinished() -> set[str]:
        found = next(looks, set())
        if isinstance(found, Exception):
            raise found
        return found

    pools = Pools(CATALOG, parts("default"), parts, unfinished=unfinished)
    alone = Pools(CATALOG, parts("default"), parts, unfinished=unfinished, only_own=True)
    running = [asyncio.create_task(each.run()) for each in (alone, pools)]
    expected = {"default", "large", "old", "left"}
    try:
        await eventually(lambda: {each.config.pool for each in pools.all} == expected, "all are served")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    assert [each.config.pool for each in pools.named] == ["default", "large"]
    assert (pools.subscribed, pools.serving("old"), len(alone.all)) == (True, None, 1)


def test_the_model_of_a_new_pool_is_503_until_it_is_served() -> None:
    """404 would make clients give up; models that no pool will serve are unknown."""
    pools = Pools(CATALOG, parts("default"), parts)

    with pytest.raises(RequestError) as error:
        pools.serving("large")

    assert error.value.code is ErrorCode.NO_CAPACITY
    assert [pools.serving(model) for model in ("tiny", "old", "odd", "nobody")] == [None] * 4
    assert Pools(CATALOG, parts("default"), parts, only_own=True).serving("large") is None


@pytest.mark.parametrize(("serve_pools", "pools"), [("all", {"default", "large", "old"}), ("own", {"default"})])
def test_a_scheduler_serves_the_pools_of_disabled_models(serve_pools: str, pools: set[str]) -> None:
    """Otherwise the audit of their last requests would not be written."""
    settings: Any = SimpleNamespace(pool="default", serve_pools=serve_pools)

    assert wanted_pools(settings, CATALOG) == pools
