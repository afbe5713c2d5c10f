"""`make pictures`: the pictures of the dashboard in docs/images, taken from the page of a real stack.

A stack with three workers has ordinary load, a flood of free requests, a lost worker, and no worker; dead letters are rows of
its database. With `--screens DIR` each state is taken at several widths in both themes as well, to be looked at.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from msgspec.structs import replace
from PIL import Image

from browser.test_dashboard import LEVEL, LOG_IN
from browser.test_dashboard_page import resize
from chromium import Tab, chromium
from configs import GONE_MS
from eventually import eventually
from integration.dead_letter_fixtures import letter
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all

TIERLANE = str(Path(sys.executable).with_name("tierlane"))
SCREENS = ((360, 740), (1024, 768), (1280, 720), (1600, 900))
ORDINARY_RPS, FLOOD_RPS = 45.0, 110.0
CALM_S, FLOOD_S, FAULT_S = 60.0, 30.0, 15.0
CUSTOMER = "Boolean(document.querySelector('#details-body h3'))"
NO_KEY = "The endpoint rejects the key: set TIERLANE_ENDPOINT_API_KEY."


@dataclass(frozen=True, slots=True)
class Scene:
    """The page of a stack, and the folders of the pictures."""

    tab: Tab
    stack: dict[str, Any]
    images: Path
    screens: Path | None

    async def take(self, name: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """A picture of the whole page in docs/images."""
        await resize(self.tab, width, height, dark=dark)
        await picture(self.tab, self.images / f"dashboard-{name}.png", width)

    async def look(self, name: str) -> None:
        """The state at all widths in both themes, if they are wanted."""
        for width, height in SCREENS if self.screens else ():
            for dark in (False, True):
                await resize(self.tab, width, height, dark=dark)
                assert self.screens is not None
                await picture(self.tab, self.screens / f"{name}-{width}{'-dark' * dark}.png", width)

    async def open(self, fragment: str) -> None:
        """One of the views, by the part of the address after #."""
        await self.tab.value(f"location.hash = {fragment!r}; true")

    def send(self, signum: signal.Signals, workers: Sequence[str]) -> None:
        """Stop or continue workers and their models, without ending them."""
        for each in self.stack["processes"]:
            if each["name"] in workers or each["name"].removesuffix("-model") in workers:
                os.kill(each["pid"], signum)


async def picture(tab: Tab, path: Path, width: int) -> None:
    """Write the page, also what is below the screen unless it was scrolled, with a palette of 256 colours."""
    await asyncio.sleep(1.5)  # Charts are drawn again after a change of the size, with the next state.
    options: dict[str, Any] = {}
    if not await tab.value("scrollY"):
        height = "Math.max(innerHeight, Math.ceil(document.documentElement.getBoundingClientRect().height))"
        clip = {"x": 0, "y": 0, "width": width, "height": await tab.value(height), "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip}
    shot = await tab.call("Page.captureScreenshot", format="png", **options)
    whole = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    image = whole.quantize(256, Image.Quantize.MAXCOVERAGE)
    image.save(path, optimize=True)
    print(path, image.size, flush=True)


@contextlib.asynccontextmanager
async def running(*words: str) -> AsyncIterator[None]:
    """A `tierlane` command in the background, ended with SIGTERM."""
    environment = os.environ | {"TIERLANE_INSTALLATION": "demo-eu"}
    with (Path(tempfile.gettempdir()) / f"pictures-{words[0]}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(TIERLANE, *words, stdout=log, stderr=log, env=environment)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def load(stack: Path, rate: float, mix: str) -> contextlib.AbstractAsyncContextManager[None]:
    """Requests of the tiers in `mix`, until the context ends."""
    options = {"stack": str(stack), "rate": str(rate), "mix": mix, "duration": "3600", "warmup": "0"}
    options |= {"echo": "off", "verify": "off", "audit-wait": "0", "connections": "256"}
    return running("bench", *(word for name, value in options.items() for word in (f"--{name}", value)))


@contextlib.asynccontextmanager
async def workers_without_key(redis_url: str, count: int) -> AsyncIterator[None]:
    """Heartbeats of workers whose endpoint rejects the key."""
    client = command_client(redis_url)
    presence = Presence(client, Keys(), gone_ms=GONE_MS)
    away = WorkerReport(
        "", "away", 0.0, 0, 0.0, 0.0, "openai:http://model:8000/v1", "", reason=NO_KEY, cause="key_rejected"
    )

    async def beat() -> None:
        while True:
            for number in range(1, count + 1):
                await presence.worker_beat(replace(away, id=f"gpu-{number}", host=f"node-{number}", pid=4000 + number))
            await asyncio.sleep(0.3)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        await end_all([task])
        for number in range(1, count + 1):
            await presence.worker_gone(f"gpu-{number}")
        await client.aclose()


async def take_all(scene: Scene, stack: Path) -> None:
    """All states, one after the other."""
    tab, processes = scene.tab, [f"worker-{number}" for number in (1, 2, 3)]
    await tab.until("!!document.getElementById('token')", "the login form", 30.0)
    await scene.take("login", width=900, height=600)
    await tab.value(LOG_IN.format(token=scene.stack["service_token"]))
    await tab.until(
        f"{LEVEL} === 'healthy' && document.querySelectorAll('.worker').length === 3", "a healthy page", 60.0
    )
    await tab.value("document.querySelector('[data-range=\"5\"]').click(); true")
    async with load(stack, ORDINARY_RPS, "enterprise=0.25,paid=0.45,free=0.3"):
        await asyncio.sleep(CALM_S)
        await tab.until(f"{LEVEL} === 'healthy'", "healthy under load", 60.0)
        await scene.take("healthy")
        await scene.take("dark", dark=True)
        await scene.take("phone", width=390, height=844)
        async with load(stack, FLOOD_RPS, "free=1"):
            await tab.until(f"{LEVEL} === 'degraded'", "the flood", 120.0)
            await asyncio.sleep(FLOOD_S)
            await scene.take("flood")
            await scene.open("customer=demo-free")
            await tab.until(CUSTOMER, "the customer", 30.0)
            await scene.take("customer")
            await scene.look("customer")
            await scene.open("")
            await tab.value("history.replaceState(null, '', '?wall'); location.reload(); true")
            await tab.until(f"document.body?.className === 'wall' && {LEVEL} === 'degraded'", "the wall", 60.0)
            await scene.take("wall", width=1920, height=1080)
            await tab.value("location.search = '?range=5'; true")
            await tab.until(f"document.body?.className === '' && {LEVEL} === 'degraded'", "the page", 60.0)
            if scene.screens:
                async with workers_without_key(scene.stack["redis_url"], 12):
                    await tab.until(
                        "document.getElementById('causes').textContent.includes('12 workers')", "the cause", 30.0
                    )
                    await scene.look("flood")
        scene.send(signal.SIGSTOP, processes[2:])
        await asyncio.sleep(FAULT_S)
        await scene.take("degraded")
        scene.send(signal.SIGSTOP, processes[:2])
        await tab.until(f"{LEVEL} === 'down'", "down", 120.0)
        await asyncio.sleep(5.0)
        await scene.take("down")
        await scene.look("down")
        scene.send(signal.SIGCONT, processes)
        await tab.until(f"{LEVEL} !== 'down'", "up again", 60.0)
    await dead_letters(scene)


async def dead_letters(scene: Scene) -> None:
    """Some of two causes."""
    db = await asyncpg.connect(scene.stack["database_url"].replace("+asyncpg", ""))
    try:
        model = await db.fetchval("SELECT name FROM models WHERE enabled ORDER BY name LIMIT 1")
        customer = await db.fetchval("SELECT id::text FROM customers WHERE name = 'demo-paid'")
        for number in range(7):
            code = "poison_request" if number < 2 else "worker_lost"
            await letter(db, age_s=60.0 * number, model=model, customer_id=customer, error_code=code)
    finally:
        await db.close()
    client = command_client(scene.stack["redis_url"])
    await client.lpush(Keys().dlq, *(f"req_{number}" for number in range(7)))  # type: ignore[misc]
    await client.aclose()
    await scene.tab.until("document.querySelectorAll('#dead-letters tbody tr').length > 1", "the groups", 60.0)
    await scene.tab.value("document.getElementById('dead-letters-section').scrollIntoView(); true")
    await scene.take("dead-letters")


async def main() -> None:
    """Start the stack and the browser, and take the pictures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("images", type=Path)
    options.add_argument("--screens", type=Path)
    options.add_argument("--port", default="0")
    given = options.parse_args()
    if given.screens:
        given.screens.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        stack = home / "stack" / "stack.json"
        words = [
            "--ephemeral",
            "--port",
            given.port,
            "--workers",
            "3",
            "--backend",
            "simulated:150",
            "--max-batch-size",
            "4",
        ]
        async with running("up", *words, "--data-dir", str(stack.parent)):
            await eventually(stack.exists, "the stack is ready", 120.0)
            found = json.loads(stack.read_text())
            async with chromium(home, f"{found['http_url']}/internal/dashboard") as tab:
                await take_all(Scene(tab, found, given.images, given.screens), stack)


if __name__ == "__main__":
    asyncio.run(main())
