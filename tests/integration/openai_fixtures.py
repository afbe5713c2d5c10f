"""OpenAI's client before a gateway with a worker behind it."""

from collections.abc import AsyncIterator

import openai
import pytest
from redis.asyncio import Redis

from integration.gateway_fixtures import Stack, openai_client, running_stack


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, without retries of its own."""
    async with openai_client(stack) as made:
        yield made
