"""What the bench asks health for: the padding of a run, and nothing where it is not told."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tierlane.bench.resources import read_padding

TOKEN = "a-token-of-16-characters"


@pytest.fixture
async def gateway() -> AsyncIterator[str]:
    """A gateway's health, and beside it one that speaks of other things; the URL."""

    async def health(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {}}, status=401)
        return web.json_response({"status": "down", "padding_waste": 0.25}, status=503)

    async def other(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.add_routes([web.get("/internal/health", health), web.get("/other/internal/health", other)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


async def test_padding_is_read_from_health_whatever_its_status(gateway: str) -> None:
    """A stack that a run has overloaded says so, and tells its figures all the same."""
    assert await read_padding(gateway, TOKEN) == 0.25


async def test_what_is_not_told_is_none(gateway: str) -> None:
    """Another token, another document, nobody there, no address at all."""
    assert await read_padding(gateway, "wrong") is None
    assert await read_padding(f"{gateway}/other", TOKEN) is None
    assert await read_padding("http://127.0.0.1:1", TOKEN) is None
    assert await read_padding("", TOKEN) is None
