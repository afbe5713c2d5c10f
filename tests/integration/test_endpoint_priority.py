"""The tier's priority on its way to a server that orders what it holds, as vLLM can."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from endpoint_stand_in import StandIn, serving
from gpu_pool.backends.backend import ItemResult
from gpu_pool.backends.openai_endpoint.availability import ORDERS
from gpu_pool.backends.openai_endpoint.backend import Endpoint
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.config import Access
from integration.endpoint_scene import Reader, answers, chat, items

ENTERPRISE, FREE = 1, 3


@pytest.fixture
def server() -> Iterator[StandIn]:
    """One that orders by priority."""
    with serving(StandIn(owner=ORDERS, orders=True)) as stand_in:
        yield stand_in


async def test_a_server_that_takes_priorities_is_told_each_tier_s(server: StandIn) -> None:
    """After one token that shows it; texts of two tiers are two calls, each with its own."""
    few = [replace(item, priority=priority) for item, priority in zip(items("ab", "cd", "ef"), (1, 3, 1), strict=True)]
    found = (await answers(server, [*few, replace(chat("gh"), priority=FREE)]))[0]

    assert isinstance(found, list)
    assert [result.output for result in found] == ["ba", "dc", "fe", "hg"]
    probe, *asked = server.asked("completions")
    assert (probe["max_tokens"], probe["priority"]) == (1, 1)
    assert sorted((str(body["prompt"]), body["priority"]) for body in asked) == [("['ab', 'ef']", 1), ("cd", FREE)]
    assert [body["priority"] for body in server.asked("chat/completions")] == [FREE]


@pytest.mark.parametrize(("owner", "orders"), [(ORDERS, False), ("organization-owner", True)])
async def test_others_are_told_none(server: StandIn, owner: str, orders: bool) -> None:
    """One that refuses the probe, and one that is not known to read the field as it is meant, which is not asked."""
    server.owner, server.orders = owner, orders
    few = [replace(item, priority=priority) for item, priority in zip(items("ab", "cd"), (1, 3), strict=True)]
    await answers(server, few)

    asked = server.asked("completions")
    assert [body.get("priority") for body in asked if "max_tokens" in body] == ([1] if owner == ORDERS else [])
    assert [body for body in asked if "max_tokens" not in body] == [{"model": "stand-in-1", "prompt": ["ab", "cd"]}]


async def test_a_server_that_takes_them_no_more_costs_no_request(server: StandIn) -> None:
    """Started anew without that policy it refuses; what it refused is sent once more without, streams too."""
    endpoint = Endpoint(read_address(f"openai:{server.url}"), Access())
    await endpoint.load()
    server.orders = False
    reader = Reader()
    batch = [*items("ab", "cd"), replace(chat("ef"), priority=FREE), replace(chat("gh", reader), priority=ENTERPRISE)]
    batch[:2] = [replace(item, priority=ENTERPRISE, parameters={"seed": n}) for n, item in enumerate(batch[:2])]

    first = await endpoint.answer(batch, lambda: None)
    before = len(server.calls)
    second = await endpoint.answer(batch[:1], lambda: None)
    await endpoint.close()

    assert isinstance(first, list)
    assert isinstance(second, list)
    assert [result.output for result in [*first, *second]] == ["ba", "dc", "fe", "hg", "ba"]
    assert reader.heard == "hg"
    assert ["priority" in body for _, body in server.calls[before:]] == [False]


async def test_a_refusal_for_another_reason_is_no_second_call(server: StandIn) -> None:
    """What the caller did wrong is told at once."""
    endpoint = Endpoint(read_address(f"openai:{server.url}"), Access())
    await endpoint.load()
    before = len(server.calls)
    (found,) = await _list(endpoint)
    await endpoint.close()

    assert found.error_code == "invalid_request"
    assert len(server.calls) - before == 1


async def _list(endpoint: Endpoint) -> list[ItemResult]:
    found = await endpoint.answer([replace(items("an unfit one")[0], priority=FREE)], lambda: None)
    assert isinstance(found, list)
    return found
