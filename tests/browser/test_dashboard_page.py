"""The page for on-call in a real browser: it loads without a fault, shows a lost worker in time, and bears lost Redis."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from chromium import Tab, chromium
from eventually import eventually
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, running_stack
from integration.ledger_fixtures import database_url, postgres_server
from scheduler.redis_client.connections import command_client
from tierlane.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "postgres_server"]

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

TYPE = "document.getElementById('token').value = {token!r}; document.querySelector('#login button').click(); true"
LEVEL = "document.getElementById('level')?.textContent"
AWAY = "document.getElementById('outage')?.textContent.startsWith('Redis does not answer')"
FIRST_ROW = "document.querySelector('#tiers tbody tr').textContent"
KPIS = "document.getElementById('kpis').textContent"
ILL = "[...document.querySelectorAll('.worker.ill')].map(tile => tile.dataset.worker).join()"


@pytest.fixture
async def stack(client: Redis, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url, database_url=database_url) as running:
        yield running


async def log_in(tab: Tab, token: str = SERVICE_TOKEN) -> None:
    await tab.until("document.readyState === 'complete' && !!document.getElementById('token')", "the form to log in")
    await tab.value(TYPE.format(token=token))


async def test_from_the_form_to_a_lost_worker(stack: Stack, tmp_path: Path) -> None:
    """Wrong token, right token, a picture without a fault, charts drawn, a silent worker in red within three seconds."""
    await stack.worker.heartbeat("worker-2")
    async with chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab:
        await log_in(tab, "wrong")
        await tab.until("document.getElementById('fault').textContent", "the fault is told")
        tab.faults.clear()  # A browser counts every 401 as one; the first page was one, too.
        await log_in(tab)
        await tab.until(f"{LEVEL} === 'healthy' || {LEVEL} === 'degraded'", "a first picture")
        await stack.worker.heartbeat("worker-2")
        await tab.until(
            f"{ILL} === '' && document.querySelectorAll('.worker').length === 2", "two workers, both well", 3.0
        )
        await tab.until(f"{ILL} === 'worker-2'", "the silent worker is red", 3.0)
        await tab.until("document.getElementById('events').textContent.includes('worker-2 was lost')", "its event", 3.0)

        assert await tab.value("document.querySelectorAll('canvas').length") == 4
        assert await tab.value(LEVEL) == "degraded"
        assert await tab.value("document.cookie") == ""
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
        assert tab.faults == []
        await tab.value("document.getElementById('leave').click(); true")
        await tab.until("!!document.getElementById('token')", "logged out")


async def test_who_asks_most_and_what_was_kept(stack: Stack, tmp_path: Path) -> None:
    """Customers by name with their rate, how full batches are, and the share of calls that was answered in time."""
    async with chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab:
        await log_in(tab)
        await tab.until("document.getElementById('customers')?.textContent === 'Nobody asks.'", "nobody asks yet")

        async def shown() -> bool:
            """More requests come, so that the page has something to show whenever the next picture is taken."""
            for tier in ("enterprise", "free"):
                assert (await stack.infer(tier_name=tier))[0] == 200
            return bool(await tab.value(f"{FIRST_ROW}.includes('100.00 %') && /batch fill\\d+ %/.test({KPIS})"))

        await eventually(shown, "what was kept and how full batches are", 8.0)
        customers = await tab.value("document.getElementById('customers').textContent")

        assert re.fullmatch(r"(enterprise|free) \1 · [\d.]+/s(enterprise|free) \2 · [\d.]+/s", customers)
        assert tab.faults == [] or all("401" in fault for fault in tab.faults)


async def test_with_redis_away_the_last_picture_stays_and_says_its_age(tmp_path: Path) -> None:
    """Within three seconds in red; a page that is opened only then shows it as well, with what was drawn before."""
    server = EmbeddedRedis(tmp_path / "redis", tmp_path / "redis.sock", ephemeral=True)
    await server.start()
    client = command_client(server.url)
    try:
        async with running_stack(client, server.url, worker=False) as stack:
            await stack.worker.heartbeat()
            async with chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab:
                await log_in(tab)
                await tab.until("document.querySelectorAll('.worker').length === 1", "the worker")
                await eventually(lambda: stack.gateway.snapshots.history.all, "a first point")
                await server.stop()
                await tab.until(AWAY, "the outage is told", 3.0)
                await tab.value("window.before = true; location.reload(); true")
                await tab.until(
                    f"!window.before && document.readyState === 'complete' && !!{AWAY}", "the same after a reload"
                )

                assert "these figures are" in await tab.value("document.getElementById('outage').textContent")
                assert await tab.value("document.querySelectorAll('.worker').length") == 1
                assert await tab.value("document.querySelector('main').classList.contains('old')")
    finally:
        await client.aclose()
        await server.stop()
