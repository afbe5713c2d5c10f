"""Actions in a real browser: a worker is cordoned on the page and obeys, dead letters are run again and purged, and a refusal is read."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from chromium import Tab, chromium
from integration.dashboard_bench import acting_stack, record
from integration.dlq_bench import customer, letter
from integration.gateway_fixtures import SERVICE_TOKEN, Stack
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.follower import Catalog
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import Cordons, CordonStatus, CordonSync, Presence
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all

__all__ = ["database_url", "db", "postgres_server"]

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

Connection = Any
TYPE = "document.getElementById('token').value = {token!r}; document.querySelector('#login button').click(); true"
TILE = "document.querySelector('[data-worker={name}]')"
ASKED = "document.getElementById('ask').open && document.getElementById('ask').textContent"
DONE = "!document.getElementById('done').hidden && document.getElementById('done').textContent"
FAULT = "document.getElementById('ask-fault').textContent"
SHOWN = "document.getElementById('source').textContent"
ROWS = "[...document.querySelectorAll('#letters tbody tr')].map(row => row.textContent)"


def click(selector: str) -> str:
    return f"document.querySelector({selector!r}).click(); true"


@asynccontextmanager
async def obedient_worker(client: Redis, name: str) -> AsyncIterator[None]:
    """One that beats as a real one does, and says what Redis told it: that it is cordoned."""
    presence = Presence(client, Keys())

    async def heartbeat() -> None:
        status = "ready"
        while True:
            said = await presence.worker_beat(WorkerReport(name, status, 0.5, 0, 100.0, 5.0, "simulated", "v1"))
            status = "cordoned" if said is CordonStatus.CORDONED else "ready"
            await asyncio.sleep(0.1)

    task = asyncio.create_task(heartbeat())
    try:
        yield
    finally:
        await end_all([task])


@pytest.fixture
async def stack(client: Redis, redis_url: str, database_url: str, db: Connection) -> AsyncIterator[Stack]:
    """A gateway that follows PostgreSQL, what a scheduler does for cordons, and two workers beside the one that answers."""
    await customer(db, "other")
    catalog: Any = Catalog(database_url)
    await catalog.start()
    supervisor = CordonSync(Cordons(client, Keys()), lambda: catalog.snapshot.cordoned, time.monotonic)
    telling = asyncio.create_task(supervisor.run())
    try:
        async with (
            obedient_worker(client, "gpu-1"),
            obedient_worker(client, "gpu-2"),
            acting_stack(client, redis_url, database_url, catalog=catalog) as running,
        ):
            yield running
    finally:
        await end_all([telling])
        await catalog.stop()


@asynccontextmanager
async def page(stack: Stack, home: Path) -> AsyncIterator[Tab]:
    """The page, logged in, with all three workers on it."""
    async with chromium(home, f"{stack.url}/internal/dashboard") as tab:
        await tab.until("document.readyState === 'complete' && !!document.getElementById('token')", "the form")
        await tab.value(TYPE.format(token=SERVICE_TOKEN))
        await tab.until("document.querySelectorAll('.worker button').length === 3", "three workers")
        tab.faults.clear()  # A browser counts every 401 as one; the first page was one, too.
        yield tab


async def test_a_worker_is_cordoned_by_the_page_and_obeys(stack: Stack, db: Connection, tmp_path: Path) -> None:
    """By keyboard: asked with what it means, done within two seconds, undone again; what is not confirmed is not done."""
    async with page(stack, tmp_path) as tab:
        tile = TILE.format(name="gpu-1")
        await tab.value(f"{tile}.querySelector('button').focus(); true")
        for _ in range(2):  # What the tiles say is written anew meanwhile.
            shown = await tab.value(SHOWN)
            await tab.until(f"{SHOWN} !== {shown!r}", "another picture")
        assert await tab.value("document.activeElement.getAttribute('aria-label')") == "Cordon gpu-1"
        await press(tab, "Enter")
        asked = await tab.until(ASKED, "it asks")
        assert "2 of 3 healthy GPUs would remain in pool default: capacity " in asked
        assert await tab.value("document.activeElement.id") == "ask-cancel"
        await press(tab, "Escape")
        await tab.until("!document.getElementById('ask').open", "it is closed")
        assert await db.fetchval("SELECT count(*) FROM cordons") == 0

        # Closed and asked again at once: the browser tells of the close only afterwards.
        again = f"{tile}.querySelector('button').click()"
        await tab.value(f"{again}; document.getElementById('ask-cancel').click(); {again}; true")
        await tab.until(ASKED, "it asks again")
        await tab.value("document.getElementById('ask-reason').value = 'its fan is loud'; true")
        began = time.monotonic()
        await tab.value(click("#ask-do"))
        await tab.until(
            f"{tile}.textContent.includes('cordoned') && {tile}.classList.contains('cordoned')", "obeyed", 3.0
        )
        took_s = time.monotonic() - began
        assert await tab.value(DONE) == "gpu-1 is cordoned."
        assert await tab.value(f"{tile}.querySelector('button').textContent") == "Uncordon"
        assert took_s < 2.0

        await tab.value(f"{tile}.querySelector('button').click(); true")
        await tab.until(ASKED, "it asks before it is undone")
        await tab.value(click("#ask-do"))
        await tab.until(
            f"{tile}.querySelector('button').textContent === 'Cordon' && {tile}.className === 'worker'", "serves"
        )
        assert tab.faults == []
    told = [(who, row, (old or new)["reason"], new is None) for who, row, old, new in await record(db, "cordons")]
    assert told == [("dashboard (127.0.0.1)", "gpu-1", "its fan is loud", undone) for undone in (False, True)]


async def test_dead_letters_are_run_again_and_purged(stack: Stack, db: Connection, tmp_path: Path) -> None:
    """With the count that is shown; a count that is not true any more is refused, in words, and nothing is lost."""
    acme = await customer(db)
    kept = [await letter(db, customer_id=acme) for _ in range(2)]
    await stack.redis.lpush(Keys().dlq, *kept)
    async with page(stack, tmp_path) as tab:
        await tab.until(f"{ROWS}.length === 1", "they are counted")
        assert await tab.value("document.getElementById('letters-said').textContent") == (
            "2 dead letters, 2 of which can run again."
        )
        await tab.value(click("#letters [aria-label^=Requeue]"))
        assert "2 dead letters of paid, tiny, worker_lost would run again now" in await tab.until(ASKED, "it asks")
        await tab.value(click("#ask-do"))
        assert await tab.until(DONE, "it is done") == "Requeued: 2 completed, 0 failed again."
        await tab.until(
            "document.querySelector('#letters [aria-label^=Requeue]').disabled", "nothing is left to requeue"
        )

        await tab.value(click("#letters [aria-label^=Purge]"))
        assert "2 dead letters of paid, tiny, worker_lost would be deleted" in await tab.until(ASKED, "it asks")
        await db.execute("DELETE FROM dead_letters WHERE request_id = $1", kept[0])
        tab.faults.clear()
        await tab.value(click("#ask-do"))
        assert await tab.until(FAULT, "it is refused") == (
            "2 dead letters were confirmed, but there are 1 now; none was deleted. Look again."
        )
        assert await tab.value("getComputedStyle(document.getElementById('ask-do')).display") == "none"
        assert [fault for fault in tab.faults if "409" not in fault] == []  # A browser counts a refusal as a fault.
        tab.faults.clear()
        await tab.value(click("#ask-cancel"))

        await letter(db, customer_id=acme, error_code="poison_request", id=-1)
        await stack.redis.lpush(Keys().dlq, "req_x")
        await tab.until(f"{ROWS}.length === 3", "a group more, and all together")
        await tab.value("document.querySelector('#letters tr:last-child [aria-label^=Purge]').click(); true")
        assert "2 dead letters of all kinds" in await tab.until(ASKED, "it asks")
        await tab.value(click("#ask-do"))
        await tab.until("document.getElementById('letters-said').textContent === 'None.'", "they are gone")
        assert tab.faults == []
    assert await db.fetchval("SELECT count(*) FROM dead_letters") == 0
    assert [row for _, row, _, _ in await record(db, "dead_letters")][1].startswith("all up to ")


async def press(tab: Tab, key: str) -> None:
    """One key, as the keyboard sends it."""
    codes = {"Enter": 13, "Escape": 27}
    text = {"text": "\r"} if key == "Enter" else {}
    await tab.call(
        "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=codes[key], **text
    )
    await tab.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])
