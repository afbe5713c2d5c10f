"""A worker in front of the stand-in endpoint, and requests whose responses are compared."""

from typing import Any

import aiohttp
import pytest

from endpoint_stand_in import StandIn
from eventually import eventually
from integration.gateway_fixtures import Stack
from integration.gpu_pool_fixtures import StartWorker
from scheduler.chat_events import joined


@pytest.fixture
async def served(stack: Stack, start_worker: StartWorker, stand_in: StandIn) -> StandIn:
    """A worker in front of the stand-in, and the gateway knows that the pool passes requests on."""
    stack.worker.backend = f"openai:{stand_in.url}"
    await (await start_worker(backend=f"openai:{stand_in.url}")).reaches("ready")
    await eventually(lambda: stack.gateway.heartbeat.passes_on, "the pool passes requests on")
    return stand_in


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """What must not differ: all but id, time, model and tier, and the usage."""
    return {
        name: value
        for name, value in document.items()
        if name not in ("id", "object", "created", "model", "service_tier", "usage", "system_fingerprint")
    }


async def whole(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], path: str = "chat/completions"
) -> dict[str, Any]:
    """The response to a request."""
    async with http.post(f"{url}/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        document: dict[str, Any] = await response.json()
        return document


async def streamed(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], path: str = "chat/completions"
) -> dict[str, Any]:
    """The joined chunks of a stream."""
    async with http.post(f"{url}/{path}", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return joined("\n".join(events[:-1]))
