"""The actions of the page for on-call on a whole stack, through two gateways: what one does, both show and the workers obey."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from eventually import eventually
from second_gateway import second_gateway
from stack import Stack

BASE = "/internal/dashboard"
WITHIN_S = 2.0


async def ask(stack: Stack, url: str, path: str, body: Any = None) -> tuple[int, Any]:
    """GET, or POST a body, with the service token; status and document."""
    headers = {"Authorization": f"Bearer {stack.read()['service_token']}"}
    method = "GET" if body is None else "POST"
    async with aiohttp.request(method, f"{url}{BASE}{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def shows(stack: Stack, url: str, *, cordoned: bool) -> bool:
    """Whether this gateway's page has worker-1 so."""
    _, state = await ask(stack, url, "/events")
    (worker,) = (each for each in state["workers"] if each["id"] == "worker-1")
    return worker["cordoned"] is cordoned and (worker["status"] == "cordoned") is cordoned


async def test_a_worker_is_cordoned_at_one_gateway_and_freed_at_another(simulated: Stack, tmp_path: Path) -> None:
    """Within two seconds on both pages, whichever was asked."""
    async with second_gateway(simulated, tmp_path) as (_, other):
        await eventually(lambda: shows(simulated, other, cordoned=False), "the second gateway knows the worker")
        for url, verb, more in ((simulated.url, "cordon", {"healthy_left": 3}), (other, "uncordon", {})):
            status, said = await ask(simulated, url, f"/workers/{verb}", {"worker": "worker-1", **more})
            acted = time.monotonic()
            assert (status, said["changed"]) == (200, True)
            for each in (simulated.url, other):
                await eventually(partial(shows, simulated, each, cordoned=verb == "cordon"), f"{verb} is shown")
            assert time.monotonic() - acted < WITHIN_S


async def test_more_than_there_are_are_not_purged(simulated: Stack) -> None:
    """The role's own connection to PostgreSQL counts them, and refuses what is not as it was confirmed."""
    status, said = await ask(simulated, simulated.url, "/dead-letters")
    more = {"count": said["count"] + 1, "up_to": said["up_to"]}
    refused, why = await ask(simulated, simulated.url, "/dead-letters/purge", more)

    assert (status, refused, why["error"]["code"]) == (200, 409, "changed_meanwhile")
