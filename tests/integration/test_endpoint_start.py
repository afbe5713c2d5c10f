"""`openai:URL` at its start: which server is one, which model is meant, and who is waited for."""

import pytest

from endpoint_stand_in import StandIn
from gpu_pool.backends.openai_endpoint.backend import Endpoint, EndpointAway
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.config import Access
from integration.endpoint_scene import answers, items, outputs, stand_in
from scheduler.errors import StartError

__all__ = ["stand_in"]


async def test_the_key_is_sent_and_its_lack_refuses_the_start(stand_in: StandIn) -> None:
    """Only another setting helps, so the worker is to end."""
    stand_in.api_key = "right"

    assert outputs((await answers(stand_in, items("ab"), access=Access("right")))[0]) == ["ba"]
    with pytest.raises(StartError, match="TIERLANE_ENDPOINT_API_KEY"):
        await answers(stand_in)


@pytest.mark.parametrize(
    ("models", "fragment", "fault"),
    [
        (["a", "b"], "", None),
        (["a", "b"], "#b", None),
        ([], "#b", None),
        (["a", "b"], "#c", "has no model 'c', but a, b"),
    ],
)
async def test_the_model_is_the_named_or_the_first(
    stand_in: StandIn, models: list[str], fragment: str, fault: str | None
) -> None:
    """A name that the server does not have refuses the start; one that lists nothing may load what it is asked for."""
    stand_in.models = models
    endpoint = Endpoint(read_address(f"openai:{stand_in.url}{fragment}"), Access())
    try:
        if fault is None:
            await endpoint.load()
            assert endpoint.model == (fragment[1:] or "a")
        else:
            with pytest.raises(StartError, match=fault):
                await endpoint.load()
    finally:
        await endpoint.close()


@pytest.mark.parametrize(
    ("absent", "fault"),
    [
        ({"models"}, None),
        ({"completions", "chat/completions", "embeddings"}, "neither completes nor chats nor embeds"),
    ],
)
async def test_what_is_no_such_server_refuses_the_start(stand_in: StandIn, absent: set[str], fault: str | None) -> None:
    """A server that lists no models is one all the same while its health is good."""
    stand_in.absent = frozenset(absent)
    if fault is None:
        assert outputs((await answers(stand_in, items("ab")))[0]) == ["ba"]
        return
    with pytest.raises(StartError, match=fault):
        await answers(stand_in)


async def test_a_server_that_is_still_loading_is_waited_for(stand_in: StandIn) -> None:
    """Not for ever: the worker's supervisor tries again later."""
    stand_in.fault = lambda route, body: "503" if stand_in.looks < 3 else ""
    assert outputs((await answers(stand_in, items("ab")))[0]) == ["ba"]

    stand_in.fault = lambda route, body: "503"
    endpoint = Endpoint(read_address(f"openai:{stand_in.url}"), Access())
    with pytest.raises(EndpointAway, match="503"):
        await endpoint.load(within_s=0.1)
    await endpoint.close()


async def test_a_server_that_cannot_list_is_asked_for_the_named_model(stand_in: StandIn) -> None:
    """`transformers serve` fails to list while its cache is missing, and serves what is named all the same."""
    stand_in.fault = lambda route, body: "" if body else "500"
    endpoint = Endpoint(read_address(f"openai:{stand_in.url}#named"), Access())

    await endpoint.load(within_s=0.1)

    assert outputs(await endpoint.answer(items("ab"), lambda: None)) == ["ba"]
    await endpoint.close()
