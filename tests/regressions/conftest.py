"""Fixtures of the regression tests."""

from collections.abc import AsyncIterator

import pytest

from regressions.bad_line import BadLine, bad_line
from tierlane_local.embedded.redis import EmbeddedRedis


@pytest.fixture
async def line(redis_server: EmbeddedRedis, redis_url: str) -> AsyncIterator[BadLine]:
    """A proxy in front of the session's Redis."""
    del redis_url  # Requested so that Redis is empty.
    async with bad_line(redis_server.socket) as line:
        yield line
