"""SIGTERM of each role, and of `tierlane up`, during streams: all of them end whole."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from endpoint_stand_in import MODEL, StandIn, serving
from eventually import eventually
from stack import Stack, start_stack
from streamed_answers import Streams

CHUNK_S = 0.12
LONGER_THAN_S = 3.5
"""How long each stream takes at least; workers once gave up after 3 s."""

STREAMS = 6
OPTIONS = ("--workers", "2", "--gateways", "2", "--schedulers", "2")
ENVIRONMENT = {"TIERLANE_DRAIN_MS": "60000"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two of each role before a server that writes slowly."""
    home = tmp_path_factory.mktemp("drain")
    with (
        serving(StandIn(chunk_s=CHUNK_S)) as endpoint,
        start_stack(home, "--backend", f"openai:{endpoint.url}#{MODEL}", *OPTIONS, environment=ENVIRONMENT) as running,
    ):
        yield running


async def begun(stack: Stack) -> Streams:
    """Streams that have all sent text."""
    streams = Streams(stack.url, stack.key("enterprise"), STREAMS)
    await eventually(streams.begun, "all streams have begun", 20.0)
    return streams


@pytest.mark.parametrize("role", ["worker", "gateway", "scheduler"])
async def test_streams_survive_a_stop_of_their_role(stack: Stack, role: str) -> None:
    """The process ends when its last stream has; until then a worker is `draining` with them in flight."""
    await stack.healthy(2)
    began = time.monotonic()
    streams = await begun(stack)
    name, pid = next(iter(stack.pids(role).items()))
    os.kill(pid, signal.SIGTERM)
    if role == "worker":
        await eventually(lambda: drains(stack, name), "health has the draining worker")

    assert streams.failed() == []
    assert time.monotonic() - began > LONGER_THAN_S
    await eventually(lambda: stack.pids(role).get(name) not in (None, pid), "it was started again", 20.0)


async def drains(stack: Stack, name: str) -> bool:
    checks = (await stack.health())["checks"].values()
    return any("worker_stopping" in str(check) and name in str(check) for each in checks for check in each)


async def test_streams_survive_the_stop_of_the_stack(tmp_path: Path) -> None:
    """Ctrl-C waits for them, and then stops everything."""
    with serving(StandIn(chunk_s=CHUNK_S)) as endpoint:
        backend = f"openai:{endpoint.url}#{MODEL}"
        with start_stack(tmp_path, "--backend", backend, environment=ENVIRONMENT) as stack:
            await stack.healthy(2)
            streams = await begun(stack)

        assert streams.failed() == []
