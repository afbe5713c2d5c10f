"""A stack whose PostgreSQL stops: what health and metrics say, and what is served."""

from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from eventually import eventually
from integration.ledger_fixtures import own_server
from stack import Stack, start_stack
from tierlane.embedded.postgres import EmbeddedPostgres

__all__ = ["own_server"]

JOB = {"Prefer": "respond-async"}


async def test_postgresql_stops_and_starts(own_server: EmbeddedPostgres, tmp_path: Path) -> None:
    """Requests with known keys are served and jobs rejected; health is degraded at once, and the age of the catalog grows."""
    environment = {"TIERLANE_DATABASE_URL": own_server.dsn}
    with start_stack(tmp_path, "--backend", "simulated:5", "--workers", "1", environment=environment) as stack:
        await stack.healthy(1)
        assert await catalog_age(stack) < 2
        assert await status_of(stack) == 200
        assert await status_of(stack, **JOB) == 202

        await own_server.stop()
        await eventually(lambda: codes(stack, "catalog_stale", "jobs_not_stored"), "health says both", 3.0)
        assert await status_of(stack) == 200
        assert await status_of(stack, **JOB) == 503
        health = await stack.health()
        assert health["status"] == "degraded"
        left = "Serving continues with the catalog of "
        assert any(left in reason and " s at most; changes are not applied." in reason for reason in health["reasons"])
        await eventually(lambda: is_older(stack, 3.0), "the age of the catalog grows", 5.0)

        await own_server.start()
        await stack.healthy(1)
        assert await status_of(stack, **JOB) == 202
        assert await catalog_age(stack) < 2


async def codes(stack: Stack, *wanted: str) -> bool:
    checks: list[list[dict[str, Any]]] = list((await stack.health())["checks"].values())
    return set(wanted) <= {each.get("code") for parts in checks for each in parts}


async def status_of(stack: Stack, **headers: str) -> int:
    async with (
        aiohttp.ClientSession(stack.url, headers=stack.headers("free") | headers) as http,
        http.post("/v1/inference", json={"input": "hello"}) as response,
    ):
        return response.status


async def catalog_age(stack: Stack) -> float:
    async with aiohttp.ClientSession(stack.url) as http, http.get("/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    return float(families["tierlane_catalog_age_seconds"].samples[0].value)


async def is_older(stack: Stack, seconds: float) -> bool:
    return await catalog_age(stack) > seconds
