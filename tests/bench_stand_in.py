"""A fake gateway for tests of the load generators: it answers as a test defines, and counts requests."""

import io
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from tierlane_local.stack_file import read_stack
from tierlane_tools.bench.plan.plan import read_address, read_plan
from tierlane_tools.bench.report.document import Document, document
from tierlane_tools.bench.runner import ProgressDisplay, measure

KEYS = {"enterprise": "tl_e_x", "paid": "tl_p_x", "free": "tl_f_x"}
Behaviour = Callable[[int, str, web.Request], Awaitable[web.Response]]


def reversed_answer(text: str) -> web.Response:
    body = {"request_id": f"req_{uuid.uuid4().hex}", "output": text[::-1], "metadata": {}}
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def error_answer(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"message": "No.", "code": code}}, status=status)


async def correct(number: int, text: str, request: web.Request) -> web.Response:
    return reversed_answer(text)


class StandIn:
    """Answers each request by `behaviour(number, input, request)`, number from 1 in order of arrival."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = correct
        self.number = 0
        self.keys: list[str] = []
        self.connections: set[object] = set()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = (await request.json())["input"]
        self.number += 1
        self.keys.append(request.headers["Authorization"].removeprefix("Bearer "))
        self.connections.add(request.transport)
        return await self.behaviour(self.number, text, request)


@asynccontextmanager
async def started_stand_in() -> AsyncIterator[StandIn]:
    """A running fake gateway on a free port."""
    server = StandIn()
    app = web.Application()
    app.router.add_post("/v1/inference", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def stand_in() -> AsyncIterator[StandIn]:
    """A fake gateway."""
    async with started_stand_in() as server:
        yield server


@pytest.fixture
def stack_file(tmp_path: Path) -> Path:
    """A stack file with keys alone."""
    return write_stack(tmp_path / "stack.json")


def write_stack(path: Path, **more: object) -> Path:
    path.write_bytes(msgspec.json.encode({"keys": KEYS, **more}))
    return path


async def bench(stand_in: StandIn, stack_file: Path, **options: str) -> Document:
    """A run of 100 requests in half a second, unless the options differ."""
    defaults = {"rate": "200", "duration": "0.5", "warmup": "0", "arrivals": "constant", "timeout": "5", "seed": "1"}
    plan = read_plan({"stack": str(stack_file), **defaults, **options})
    stack = read_stack(stack_file)
    progress = ProgressDisplay(Console(file=io.StringIO()), 1.0)
    found = await measure(plan, read_address(stand_in.url), stack, progress)
    return document(plan, stand_in.url, found)


def read_document(path: Path) -> Document:
    return msgspec.json.decode(path.read_bytes(), type=dict)
