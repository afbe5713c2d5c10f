"""Stacks for end-to-end tests: `tierlane up` on a free port, stopped at the end."""

from collections.abc import AsyncIterator, Iterator

import pytest

from key_leaks import leaked_keys
from scheduler.redis_client.connections import command_client
from stack import Stack, start_stack


@pytest.fixture(scope="session")
def simulated_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Four simulated GPUs of 50 ms a batch."""
    with start_stack(tmp_path_factory.mktemp("simulated"), "--backend", "simulated:50", "--workers", "4") as stack:
        yield stack


@pytest.fixture(scope="session")
def tiny_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The language model that ships with the project, on one worker."""
    with start_stack(tmp_path_factory.mktemp("tiny"), "--backend", "tiny", "--workers", "1") as stack:
        yield stack


@pytest.fixture
async def simulated(simulated_stack: Stack) -> AsyncIterator[Stack]:
    """The simulated stack; after the test it is healthy and has no leaked key."""
    yield simulated_stack
    await simulated_stack.healthy(4)
    for url in simulated_stack.cells.values():
        client = command_client(url)
        leaks = await leaked_keys(client)
        await client.aclose()
        assert leaks == []
