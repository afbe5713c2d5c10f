"""A stack whose PostgreSQL stops: what health and metrics say, and what is served."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eventually import eventually
from integration.ledger_fixtures import own_server
from load import Answer, load
from recorded_alerts import STEP_S, Recording
from stack import Stack, start_stack
from tierlane_local.embedded.postgres import EmbeddedPostgres

__all__ = ["own_server"]

JOB = {"Prefer": "respond-async"}

BEFORE_S, AWAY_S, AFTER_S = 150.0, 1200.0, 600.0
"""The long outage: time with PostgreSQL, without, and with it again."""

KEYS_S = 900.0
"""How long known keys are accepted after PostgreSQL responded last, as docs/runbooks/TierlaneCatalogStale.md says."""

PAGE_S = 240.0
"""When that page comes."""

RATE = 20.0


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
        left = "Requests are served for at most "
        assert any(left in reason and " s ago; changes are not applied." in reason for reason in health["reasons"])
        await eventually(lambda: is_older(stack, 3.0), "the age of the catalog grows", 5.0)

        await own_server.start()
        await stack.healthy(1)
        assert await status_of(stack, **JOB) == 202
        assert await catalog_age(stack) < 2


@pytest.mark.surroundings
@pytest.mark.timeout(2700)
async def test_twenty_minutes_without_postgresql(own_server: EmbeddedPostgres, tmp_path: Path) -> None:
    """Keys are accepted for 15 minutes, the page comes after four, and every completed request has one row afterwards."""
    environment = {"TIERLANE_DATABASE_URL": own_server.dsn}
    with start_stack(tmp_path, "--backend", "simulated:5", "--workers", "1", environment=environment) as stack:
        await stack.healthy(1)
        recording, jobs = Recording(), list[tuple[float, int]]()
        began = asyncio.get_running_loop().time()
        loading = asyncio.create_task(load(stack, RATE, BEFORE_S + AWAY_S + AFTER_S, ("enterprise", "paid", "free")))
        recorder = asyncio.create_task(record(stack, recording, jobs))

        await asyncio.sleep(BEFORE_S)
        await own_server.stop()
        stopped_s = asyncio.get_running_loop().time() - began
        await asyncio.sleep(AWAY_S)
        await own_server.start()
        started_s = asyncio.get_running_loop().time() - began
        await stack.healthy(1, 10.0)
        answers = await loading
        recorder.cancel()

        spans = {
            "before": (0.0, stopped_s),
            "known": (stopped_s, stopped_s + KEYS_S - 5.0),
            "rejected": (stopped_s + KEYS_S + 5.0, started_s - 1.0),
            "after": (started_s + 10.0, started_s + AFTER_S),
        }
        outcomes = {name: outcomes_in(answers, span) for name, span in spans.items()}
        firing = recording.firing(tmp_path)
        print(outcomes, [(number * STEP_S - stopped_s, sorted(names)) for number, names in enumerate(firing) if names])
        assert {name: set(found) for name, found in outcomes.items()} == {
            "before": {(200, None)},
            "known": {(200, None)},
            "rejected": {(503, "catalog_unavailable")},
            "after": {(200, None)},
        }
        assert {status for at, status in jobs if stopped_s + 1.0 < at < started_s - 1.0} == {503}
        assert {status for at, status in jobs if not stopped_s - 1.0 < at < started_s + 10.0} == {202}
        done = [answer.request_id for answer in answers if answer.status == 200 and answer.request_id]
        assert {row["status"] for row in (await stack.audited(done)).values()} == {"completed"}
    paged = [number * STEP_S - stopped_s for number, names in enumerate(firing) if "TierlaneCatalogStale" in names]
    assert PAGE_S - STEP_S <= paged[0] <= PAGE_S + 2 * STEP_S
    assert started_s - stopped_s <= paged[-1] + STEP_S <= started_s - stopped_s + 4 * STEP_S
    assert firing[int(stopped_s) // STEP_S] == set()
    assert firing[-1] == set()


def outcomes_in(answers: list[Answer], span: tuple[float, float]) -> Counter[tuple[int, str | None]]:
    """Status and code of the requests that were sent in this span of seconds."""
    first, end = span
    return Counter((answer.status, answer.code) for n, answer in enumerate(answers) if first <= n / RATE < end)


async def record(stack: Stack, recording: Recording, jobs: list[tuple[float, int]]) -> None:
    """Record a page of metrics and the status of a job at each step."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with aiohttp.ClientSession(stack.url) as http:
        while True:
            async with http.get("/metrics") as response:
                recording.add(await response.read())
            jobs.append((loop.time() - began, await status_of(stack, **JOB)))
            await asyncio.sleep(max(0.0, began + len(recording) * STEP_S - loop.time()))


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
