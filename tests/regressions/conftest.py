"""Fixtures of the regression tests: a line to Redis that can go bad."""

from collections.abc import AsyncIterator

import pytest

from regressions.bad_line import BadLine, bad_line
from tierlane.embedded.redis import EmbeddedRedis


@pytest.fixture
async def line(redis_server: EmbeddedRedis, redis_url: str) -> AsyncIterator[BadLine]:
    """A good line to the session's Redis, which the test may spoil."""
    del redis_url  # It is asked for so that Redis is empty.
    async with bad_line(redis_server.socket) as line:
        yield line
