"""Fixtures for every kind of test: one embedded Redis a session, empty for each test, checked for leaked keys after it."""

import asyncio
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from redis.asyncio import Redis

from key_leaks import leaked_keys
from pool import Pool
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from socket_origins import name_origins
from stack import EVERY_STACK
from tierlane_local.embedded.binaries import find_redis
from tierlane_local.embedded.redis import EmbeddedRedis

PATIENCE_S = (
    10.0  # Of scripts in tests that are not about time: the machine may stand still for longer than the 0.25 s.
)

# Speed is measured in benches: an example that a busy machine delayed is not a failure.
settings.register_profile("tierlane", deadline=None)
settings.load_profile("tierlane")

name_origins()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make floor` names the oldest server that is supported."""
    parser.addoption("--redis-server", help="the server to test with, by path or name; else the one of the wheel")
    parser.addoption(
        "--stack", default="", help="options for every `tierlane up`, such as '--cells 4' or '--cluster 3'"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Every stack has the options of `--stack`."""
    EVERY_STACK[:] = shlex.split(config.getoption("--stack"))


@pytest.fixture(scope="session")
def redis_binary(request: pytest.FixtureRequest) -> Path:
    """The server that tests of the protocol run on."""
    named = request.config.getoption("--redis-server")
    if named is None:
        return find_redis()
    found = shutil.which(named)
    assert found is not None, f"{named} is not installed (on Debian: apt-get install redis-server)"
    return Path(found)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path) -> Iterator[EmbeddedRedis]:
    """A Redis-compatible server of the tests' own, on a Unix socket."""
    home: Path = tmp_path_factory.mktemp("redis")
    server = EmbeddedRedis(home, home / "socket", ephemeral=True, binary=redis_binary)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
async def redis_url(redis_server: EmbeddedRedis) -> AsyncIterator[str]:
    """The URL of an empty Redis; the test fails where it leaves a key that would live for ever."""
    client = command_client(redis_server.url, PATIENCE_S)
    await client.flushall()
    yield redis_server.url
    leaks = await leaked_keys(client)
    await client.aclose()
    assert leaks == []


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    """A command client on the empty Redis."""
    client = command_client(redis_url, PATIENCE_S)
    yield client
    await client.aclose()


@pytest.fixture
async def pool(client: Redis) -> Pool:
    """Every verb of the protocol on the default pool, with a living gateway `g1`."""
    pool = Pool(client, Keys())
    await pool.gateway_stays("g1")
    return pool
