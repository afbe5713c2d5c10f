"""The dashboard in a real browser: login, a lost worker, lost Redis, cordons, and dead letters."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from chromium import Tab, chromium
from configs import GONE_MS
from eventually import eventually
from integration.dashboard_fixtures import acting_stack, record
from integration.dead_letter_fixtures import customer, letter
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, running_stack
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.follower import Catalog
from scheduler.protocol.cordons import Cordons, CordonSync
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import Presence
from scheduler.protocol.worker_heartbeat import CordonStatus
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "postgres_server"]

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

Connection = Any
LOG_IN = "document.getElementById('token').value = {token!r}; document.querySelector('#login button').click(); true"
LEVEL = "document.getElementById('level')?.textContent"
WORKERS = "document.querySelectorAll('.worker').length"
ILL = "[...document.querySelectorAll('.worker.ill')].map(tile => tile.dataset.worker).join()"
OUTAGE = "document.getElementById('outage')?.textContent.startsWith('Redis is not responding')"
TILE = "document.querySelector('[data-worker=gpu-1]')"
DIALOG = "document.getElementById('dialog').open && document.getElementById('dialog').textContent"
DONE = "!document.getElementById('done').hidden && document.getElementById('done').textContent"
ROWS = "[...document.querySelectorAll('#dead-letters tbody tr')].map(row => row.textContent)"


async def log_in(tab: Tab, token: str = SERVICE_TOKEN) -> None:
    await tab.until("document.readyState === 'complete' && !!document.getElementById('token')", "the login form")
    await tab.value(LOG_IN.format(token=token))


async def click(tab: Tab, selector: str) -> None:
    await tab.value(f"document.querySelector({selector!r}).click(); true")


async def test_a_lost_worker_is_shown_within_three_seconds(
    client: Redis, redis_url: str, database_url: str, tmp_path: Path
) -> None:
    """A wrong token is rejected. The page has no fault, draws its charts, and shows the worker, its event, and customers."""
    async with (
        running_stack(client, redis_url, database_url=database_url) as stack,
        chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab,
    ):
        await log_in(tab, "wrong")
        await tab.until("document.getElementById('fault').textContent", "the rejection")
        await log_in(tab)
        await tab.until(f"{LEVEL} === 'healthy' || {LEVEL} === 'degraded'", "the first state")
        await stack.worker.heartbeat("worker-2")
        await tab.until(f"{ILL} === '' && {WORKERS} === 2", "two healthy workers", 3.0)
        await tab.until(f"{ILL} === 'worker-2'", "the silent worker is marked", 3.0)
        await tab.until("document.getElementById('events').textContent.includes('worker-2 was lost')", "its event", 3.0)

        async def served() -> bool:
            """More requests are sent, so that the next state of the page contains some."""
            assert [(await stack.infer(tier_name=tier))[0] for tier in ("enterprise", "free")] == [200, 200]
            return bool(await tab.value("document.querySelector('#tiers tbody tr').textContent.includes('100.00 %')"))

        await eventually(served, "the share of successful requests", 8.0)
        customers = await tab.value("document.getElementById('customers').textContent")
        assert re.fullmatch(
            r"(enterprise|free) \1 · [\d.]+/s( · \d+ % of its GPU time)?(enterprise|free) \3 · [\d.]+/s( · \d+ % of its GPU time)?",
            customers,
        )
        assert await tab.value("document.querySelectorAll('canvas').length") == 6
        assert await tab.value("document.cookie") == ""
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
        assert tab.faults == []
        await click(tab, "#leave")
        await tab.until("!!document.getElementById('token')", "logged out")


async def test_without_redis_the_last_state_stays_with_its_age(tmp_path: Path) -> None:
    """Within three seconds; also after a reload."""
    server = EmbeddedRedis(tmp_path / "redis", tmp_path / "redis.sock", ephemeral=True)
    await server.start()
    client = command_client(server.url)
    try:
        async with running_stack(client, server.url, worker=False) as stack:
            await stack.worker.heartbeat()
            async with chromium(tmp_path, f"{stack.url}/internal/dashboard") as tab:
                await log_in(tab)
                await tab.until(f"{WORKERS} === 1", "the worker")
                await eventually(lambda: stack.gateway.snapshots.history.all, "the first point of the history")
                await server.stop()
                await tab.until(OUTAGE, "the outage", 3.0)
                await tab.value("window.before = true; location.reload(); true")
                await tab.until(f"!window.before && document.readyState === 'complete' && !!{OUTAGE}", "the reload")

                assert "these figures are" in await tab.value("document.getElementById('outage').textContent")
                assert await tab.value(WORKERS) == 1
                assert await tab.value("document.querySelector('main').classList.contains('old')")
    finally:
        await client.aclose()
        await server.stop()


@asynccontextmanager
async def heartbeats(client: Redis, name: str) -> AsyncIterator[None]:
    """A worker that obeys a cordon."""
    presence = Presence(client, Keys(), gone_ms=GONE_MS)

    async def beat() -> None:
        status = "ready"
        while True:
            report = WorkerReport(name, status, 0.5, 0, 100.0, 5.0, "simulated", "v1")
            cordoned = (await presence.worker_beat(report)).cordon is CordonStatus.CORDONED
            status = "cordoned" if cordoned else "ready"
            await asyncio.sleep(0.1)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        await end_all([task])


@pytest.fixture
async def tab(client: Redis, redis_url: str, database_url: str, db: Connection, tmp_path: Path) -> AsyncIterator[Tab]:
    """The page after the login, with three workers and a scheduler that applies cordons."""
    await customer(db, "other")
    catalog: Any = Catalog(database_url)
    await catalog.start()
    sync = CordonSync(Cordons(client, Keys()), lambda: catalog.snapshot.cordoned, time.monotonic)
    task = asyncio.create_task(sync.run())
    try:
        async with AsyncExitStack() as contexts:
            for name in ("gpu-1", "gpu-2"):
                await contexts.enter_async_context(heartbeats(client, name))
            stack: Stack = await contexts.enter_async_context(
                acting_stack(client, redis_url, database_url, catalog=catalog)
            )
            page = await contexts.enter_async_context(chromium(tmp_path, f"{stack.url}/internal/dashboard"))
            await log_in(page)
            await page.until("document.querySelectorAll('.worker button').length === 3", "three workers")
            page.faults.clear()
            yield page
    finally:
        await end_all([task])
        await catalog.stop()


async def test_a_worker_is_cordoned_and_uncordoned(tab: Tab, db: Connection) -> None:
    """By keyboard; the dialog has the effect, Escape changes nothing, and the worker obeys within two seconds."""
    await tab.value(f"{TILE}.querySelector('button').focus(); true")
    await press(tab, "Enter")
    assert "2 of 3 healthy GPUs would remain in pool default: capacity " in await tab.until(DIALOG, "the dialog")
    assert await tab.value("document.activeElement.id") == "dialog-cancel"
    await press(tab, "Escape")
    await tab.until("!document.getElementById('dialog').open", "it is closed")
    assert await db.fetchval("SELECT count(*) FROM cordons") == 0

    await tab.value(f"{TILE}.querySelector('button').click(); true")
    await tab.until(DIALOG, "the dialog")
    await tab.value("document.getElementById('dialog-reason').value = 'its fan is loud'; true")
    began = time.monotonic()
    await click(tab, "#dialog-do")
    await tab.until(
        f"{TILE}.textContent.includes('cordoned') && {TILE}.classList.contains('cordoned')", "cordoned", 3.0
    )
    assert time.monotonic() - began < 2.0
    assert await tab.value(DONE) == "gpu-1 is cordoned."

    await tab.value(f"{TILE}.querySelector('button').click(); true")
    await tab.until(DIALOG, "the dialog")
    await click(tab, "#dialog-do")
    await tab.until(
        f"{TILE}.querySelector('button').textContent === 'Cordon' && {TILE}.className === 'worker'", "serves"
    )
    assert tab.faults == []
    changes = [
        (actor, row, (old or new)["reason"], new is None) for actor, row, old, new in await record(db, "cordons")
    ]
    assert changes == [("dashboard (127.0.0.1)", "gpu-1", "its fan is loud", undone) for undone in (False, True)]


async def test_dead_letters_are_requeued_and_purged(tab: Tab, db: Connection, client: Redis) -> None:
    """With the number that is shown; another number is rejected, and nothing is deleted."""
    acme = await customer(db)
    ids = [await letter(db, customer_id=acme) for _ in range(2)]
    await client.lpush(Keys().dlq, *ids)  # type: ignore[misc]
    await tab.until(f"{ROWS}.length === 1", "one group")
    await click(tab, "#dead-letters [aria-label^=Requeue]")
    assert "2 dead letters of paid, tiny, worker_lost would run again now" in await tab.until(DIALOG, "the dialog")
    await click(tab, "#dialog-do")
    assert await tab.until(DONE, "the result") == "Requeued: 2 completed, 0 failed again."

    await tab.until(
        "document.querySelector('#dead-letters [aria-label^=Requeue]').disabled", "nothing is left to requeue"
    )
    await click(tab, "#dead-letters [aria-label^=Purge]")
    assert "2 dead letters of paid, tiny, worker_lost would be deleted permanently" in await tab.until(
        DIALOG, "the dialog"
    )
    await db.execute("DELETE FROM dead_letters WHERE request_id = $1", ids[0])
    await click(tab, "#dialog-do")
    rejection = await tab.until("document.getElementById('dialog-error').textContent", "the rejection")
    assert rejection.startswith("2 dead letters were confirmed, but there are 1 now")
    assert [fault for fault in tab.faults if "409" not in fault] == []
    await click(tab, "#dialog-cancel")

    await letter(db, customer_id=acme, error_code="poison_request", id=-1)
    await client.lpush(Keys().dlq, "req_x")  # type: ignore[misc]
    await tab.until(f"{ROWS}.length === 3", "another group, and the row of all")
    await click(tab, "#dead-letters tr:last-child [aria-label^=Purge]")
    assert "2 dead letters of all kinds" in await tab.until(DIALOG, "the dialog")
    await click(tab, "#dialog-do")
    await tab.until("document.getElementById('dead-letters-summary').textContent === 'None.'", "none is left")
    assert await db.fetchval("SELECT count(*) FROM dead_letters") == 0


async def press(tab: Tab, key: str) -> None:
    codes = {"Enter": 13, "Escape": 27}
    text = {"text": "\r"} if key == "Enter" else {}
    for kind, more in (("keyDown", text), ("keyUp", {})):
        await tab.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)
