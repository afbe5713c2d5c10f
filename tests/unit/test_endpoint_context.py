"""The context length that an endpoint tells, in the forms of the servers."""

import json
from typing import Any

import pytest

from gpu_pool.backends.openai_endpoint.client import EndpointResponse, NoResponse
from gpu_pool.backends.openai_endpoint.context import listed_context, read_context


class Documents:
    """A server with these documents by path; another path gets 404, None breaks the connection off."""

    def __init__(self, **documents: Any) -> None:
        self._documents = {f"http://server/{name}": each for name, each in documents.items()}

    async def get(self, url: str, within_s: float) -> EndpointResponse:
        assert within_s > 0
        if url not in self._documents:
            return EndpointResponse(404, {}, b"")
        if self._documents[url] is None:
            raise NoResponse("The connection was closed.", sent=True)
        return EndpointResponse(200, {}, json.dumps(self._documents[url]).encode())


@pytest.mark.parametrize(
    ("entry", "tokens"),
    [
        ({"id": "m", "max_model_len": 4096}, 4096),
        ({"id": "m", "context_length": 32_768}, 32_768),
        ({"id": "m", "max_context_length": 8192.0}, 8192),
        ({"id": "m", "context_window": 131_072}, 131_072),
        ({"id": "m", "max_model_len": None, "context_length": 2048}, 2048),
        ({"id": "m"}, 0),
        ({"id": "m", "max_model_len": "4096"}, 0),
        ({"id": "m", "max_model_len": -1}, 0),
        ({"id": "m", "max_model_len": 1e300}, 0),
    ],
)
def test_the_list_of_models(entry: dict[str, Any], tokens: int) -> None:
    """Each server has a name of its own; what is no number of tokens counts as absent."""
    assert listed_context(entry) == tokens


@pytest.mark.parametrize(
    ("documents", "tokens"),
    [
        ({"props": {"default_generation_settings": {"n_ctx": 512}}}, 512),
        ({"info": {"max_total_tokens": 2048}}, 2048),
        ({"props": {"default_generation_settings": []}, "info": {"max_total_tokens": 2048}}, 2048),
        ({"props": None, "info": None}, 0),
        ({"props": [], "info": "text"}, 0),
        ({}, 0),
    ],
)
async def test_other_documents(documents: dict[str, Any], tokens: int) -> None:
    """llama.cpp and TGI; a server that has neither, or junk there, is not at fault."""
    assert await read_context(Documents(**documents), "http://server") == tokens
