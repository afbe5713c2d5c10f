"""What an endpoint's answers say of the endpoint itself, whatever callers send along and however its looks go."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from endpoint_stand_in import StandIn, serving
from eventually import eventually
from gpu_pool.backends.backend import Item
from gpu_pool.backends.openai_endpoint.availability import EndpointAvailability
from gpu_pool.backends.openai_endpoint.backend import Endpoint
from gpu_pool.backends.openai_endpoint.requests import HandBack
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.config import Access


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A server without faults, for a test to spoil."""
    with serving(StandIn()) as server:
        yield server


@asynccontextmanager
async def loaded(server: StandIn) -> AsyncIterator[tuple[Endpoint, list[str]]]:
    """The endpoint, and what its door tells."""
    endpoint, told = Endpoint(read_address(f"openai:{server.url}"), Access(connect_ms=200)), []
    endpoint.door.tell = lambda wanted, why, brief: told.append("open" if wanted else why)
    await endpoint.load()
    try:
        yield endpoint, told
    finally:
        await endpoint.close()


def item(text: str, seconds: float = 10.0, **parameters: object) -> Item:
    return Item(text, dict(parameters), until=time.monotonic() + seconds)


async def test_a_look_for_a_false_alarm_ends_with_its_batch(stand_in: StandIn) -> None:
    """It may hang where the call did not; beyond the batch's time the watchdog would end the process and all its batches."""
    async with loaded(stand_in) as (endpoint, told):
        stand_in.fault = lambda route, body: "403" if body else "silence"
        steps: list[float] = []
        began = time.monotonic()

        found = await endpoint.answer([item("ab", seconds=0.6)], lambda: steps.append(time.monotonic()))

        assert isinstance(found, HandBack)
        assert (found.counted, told) == (False, ["The endpoint answers 403."])
        assert time.monotonic() - began < 0.6
        assert steps[-1] - began > 0.4  # The watchdog sees progress until the end.


async def test_what_is_refused_unasked_is_no_sign_of_life() -> None:
    """An unknown parameter in each batch does not keep the door open before a server that is away."""
    server = StandIn()
    with ExitStack() as up:
        up.enter_context(serving(server))
        async with loaded(server) as (endpoint, told):
            up.close()
            for _ in range(3):
                assert told == []
                found = await endpoint.answer([item("ab"), item("cd", logit_bias=1)], lambda: None)
                assert isinstance(found, HandBack)
            assert told == ["The endpoint cannot be reached: ClientConnectorError."]


async def test_a_model_that_is_no_longer_first_is_kept(stand_in: StandIn) -> None:
    """Servers of several models list them in no lasting order; to load anew would end all batches under way."""
    stand_in.models = ["a", "b"]
    async with loaded(stand_in) as (endpoint, _):
        replaced: list[str] = []
        endpoint.replaced = lambda: replaced.append(endpoint.model)
        stand_in.models = ["b", "a"]
        assert await endpoint.look_again() == ""
        assert (endpoint.model, replaced) == ("a", [])
        stand_in.models = ["b"]
        assert await endpoint.look_again() == ""
        assert replaced == ["b"]


async def test_a_look_that_raises_does_not_leave_the_door_shut() -> None:
    """The next one may go well."""
    looks: Iterator[Exception | str] = iter([ValueError("a bug"), ""])

    async def look() -> str:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    told: list[bool] = []
    door = EndpointAvailability(look)
    door.tell = lambda wanted, why, brief: told.append(wanted)
    door.broken("away")
    await eventually(lambda: told == [False, True], "the door is open")
    await door.close()
