"""A headless Chromium, controlled by its DevTools protocol without a driver or a further package."""

import asyncio
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from eventually import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIGN_IN = frozenset({"/internal/dashboard", "/internal/dashboard/session"})
"""The page and the address for signing in: a browser reports their 401 as a fault, some time later."""
MISSING = "No Chromium on PATH: install it (apt-get install chromium), or leave these tests out with -m 'not browser'."


class Tab:
    """One page. `faults` are errors in its console, exceptions, and resources that it could not load."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.faults: list[str] = []

    async def read(self) -> None:
        """Read messages of the browser until it closes the socket."""
        async for message in self._socket:
            event = json.loads(message.data)
            params = event.get("params", {})
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                text, url = params["entry"]["text"], params["entry"].get("url", "")
                if "401" not in text or urlsplit(url).path not in SIGN_IN:
                    self.faults.append(f"{text} {url}")
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
                self.faults.append(json.dumps(params["args"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol that must succeed."""
        response = await self._send(method, params)
        assert "error" not in response, response
        result: dict[str, Any] = response["result"]
        return result

    async def _send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(20):
            return await answer

    async def value(self, expression: str) -> Any:
        """The value of an expression in the page; None while the page is being loaded."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        response = await self._send("Runtime.evaluate", params)
        return response.get("result", {}).get("result", {}).get("value")

    async def until(self, expression: str, what: str, timeout_s: float = 10.0) -> Any:
        """The first truthy value of an expression."""
        return await eventually(lambda: self.value(expression), what, timeout_s)


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
    reading = asyncio.create_task(tab.read())
    try:
        yield tab
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _port(profile: Path) -> int | None:
    file = profile / "DevToolsActivePort"
    return int(file.read_text().split()[0]) if file.is_file() and file.read_text() else None
