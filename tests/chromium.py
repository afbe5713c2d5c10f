"""A headless Chromium in a test's hands, spoken to by its own DevTools protocol: no driver, no further package."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from eventually import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "No Chromium on PATH: install it (apt-get install chromium), or leave these tests out with -m 'not browser'."


class Tab:
    """One page. `faults` are errors in its console, exceptions, and what it could not load or was not allowed to."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.faults: list[str] = []

    async def hear(self) -> None:
        """Read what the browser says, until it goes."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.faults.append(told["params"]["entry"]["text"] + " " + told["params"]["entry"].get("url", ""))
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] == "error":
                self.faults.append(json.dumps(told["params"]["args"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol that must succeed."""
        told = await self._told(method, params)
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    async def _told(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(20):
            return await answer

    async def value(self, expression: str) -> Any:
        """What an expression is in the page; None while the page is being loaded."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        told = await self._told("Runtime.evaluate", params)
        return told.get("result", {}).get("result", {}).get("value")

    async def until(self, expression: str, what: str, timeout_s: float = 10.0) -> Any:
        """The first truthy value of an expression."""
        return await eventually(lambda: self.value(expression), what, timeout_s)

    async def picture(self, width: int = 1280, height: int = 1500) -> bytes:
        """A screenshot, as PNG."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await asyncio.sleep(0.5)  # It has to be laid out anew; this is for people to look at, no test waits for it.
        told = await self.call("Page.captureScreenshot", captureBeyondViewport=False)
        return base64.b64decode(told["data"])


@contextlib.asynccontextmanager
async def chromium(home: Path, url: str) -> AsyncIterator[Tab]:
    """A tab that shows `url`; its profile is in `home`. Fails where there is no Chromium."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program is not None, MISSING
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-extensions", "--disable-background-networking", "--remote-debugging-port=0"]
    with (home / "chromium.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program, *options, f"--user-data-dir={home / 'profile'}", "about:blank", stdout=log, stderr=log
        )
    try:
        port = await eventually(lambda: _port(home / "profile"), "Chromium listens", 30.0)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [each for each in await answer.json(content_type=None) if each["type"] == "page"]
            async with http.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket, _tab(socket) as tab:
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=url)
                yield tab
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def _tab(socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Tab]:
    tab = Tab(socket)
    hearing = asyncio.create_task(tab.hear())
    try:
        yield tab
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


def _port(profile: Path) -> int | None:
    file = profile / "DevToolsActivePort"
    return int(file.read_text().split()[0]) if file.is_file() and file.read_text() else None
