"""A second gateway beside a running stack, for tests that kill it."""

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import aiohttp

from eventually import eventually
from stack import Stack
from tierlane_local.up.data_dir import held_port


def _start(stack: Stack, home: Path, port: int, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = stack.role_environment() | {
        "TIERLANE_PORT": str(port),
        "TIERLANE_DATA_DIR": str(home / "second"),
        **settings,
    }
    with (home / "second.log").open("wb") as output:
        command = [sys.executable, "-P", "-m", "tierlane", "gateway"]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


@asynccontextmanager
async def second_gateway(
    stack: Stack, home: Path, settings: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """A second gateway on the same Redis and PostgreSQL, with these settings: its process and its address."""
    with held_port("127.0.0.1", 0) as port:
        process = _start(stack, home, port, settings)
        url = f"http://127.0.0.1:{port}"
        try:
            await eventually(lambda: _ready(url), "the second gateway is ready", 30.0)
            yield process, url
        finally:
            process.kill()
            process.wait()


async def _ready(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
