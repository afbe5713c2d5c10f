"""What a probe says about a server behind `openai:URL`, from its responses: one reason for each state."""

import json
import socket
from typing import Any, cast

import pytest

from configs import endpoint_access
from gpu_pool.backends.openai_endpoint.client import EndpointResponse, NoResponse, Transport
from gpu_pool.backends.openai_endpoint.errors import LOADING, NO_KEY
from gpu_pool.backends.openai_endpoint.faults import FaultCause, cause_of
from gpu_pool.backends.openai_endpoint.probe import ProbeResult, probe
from gpu_pool.backends.openai_endpoint.settings import read_address

PAGE = b"<!doctype html><title>Sign in</title>"
UNREADABLE = "The endpoint's list of models cannot be read; is its URL that of an OpenAI-compatible API?"
NO_MODEL = "The endpoint has no model yet."


class Canned:
    """A server with these responses: (status, body) by the end of the path, else 404. Its routes refuse a body without an input."""

    def __init__(self, responses: dict[str, tuple[int, Any]]) -> None:
        self._responses = {path: (status, _raw(body)) for path, (status, body) in responses.items()}

    async def get(self, url: str, within_s: float) -> EndpointResponse:
        return self._response(url)

    async def post(self, route: str, body: Any, within_s: float) -> EndpointResponse:
        return self._response(route)

    def _response(self, url: str) -> EndpointResponse:
        path = next((each for each in self._responses if each != "*" and url.endswith(each)), "*")
        status, body = self._responses.get(path, (404, b""))
        return EndpointResponse(status, {}, body)


def _raw(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def models(*names: str, **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, **more} for name in names]}


async def probed(
    responses: dict[str, tuple[int, Any]], fragment: str = "", before: str = ""
) -> tuple[ProbeResult, str]:
    """The result of a probe, and its model or fault."""
    server = cast("Transport", Canned({"completions": (400, {}), "embeddings": (404, {})} | responses))
    found = await probe(server, read_address(f"openai:http://127.0.0.1:1/v1{fragment}"), before)
    return found, found.fault or found.model


def redirected(status: int, path: str = "/models") -> str:
    return f"The endpoint redirects GET {path} ({status}): its URL must be the one that it redirects to."


@pytest.mark.parametrize(
    ("responses", "fragment", "before", "says"),
    [
        ({"/models": (200, models("a", "b"))}, "", "", "a"),
        ({"/models": (200, models("a", "b"))}, "", "b", "b"),
        ({"/models": (200, models("a", "b"))}, "", "c", "a"),
        (
            {"/models": (200, models("alias", root="meta/x"))},
            "#meta/x",
            "",
            "The endpoint has no model 'meta/x'; it has alias.",
        ),
        ({"/models": (200, models("alias", root="meta/x"))}, "#alias", "", "alias"),
        ({"/models": (200, [{"id": "a"}])}, "", "", "a"),  # The list alone.
        ({"/models": (200, [])}, "", "", NO_MODEL),
        ({"/models": (200, models())}, "", "", NO_MODEL),
        ({"/models": (200, {"data": None})}, "", "", UNREADABLE),
        ({"/models": (200, {"error": "no"})}, "", "", UNREADABLE),
        ({"/models": (200, {"data": [{"name": "a"}]})}, "", "", UNREADABLE),
        ({"*": (200, PAGE)}, "", "", UNREADABLE),
        ({"*": (200, PAGE)}, "#a", "", UNREADABLE),
        ({"*": (200, b"\xff\xfe")}, "", "", UNREADABLE),
        ({"*": (301, PAGE)}, "", "", redirected(301)),
        ({"*": (308, PAGE)}, "#a", "", redirected(308)),
        ({"/models": (404, b""), "/health": (302, PAGE)}, "", "", redirected(302, "/health")),
        ({"*": (407, PAGE)}, "", "", NO_KEY),
        ({"/models": (200, models("a")), "completions": (401, {})}, "", "", NO_KEY),
        ({"*": (502, PAGE)}, "", "", "The endpoint answers 502 to GET /models."),
        ({"*": (502, PAGE)}, "#a", "", "The endpoint answers 502 to GET /health."),
        ({"*": (503, {"error": {"message": "Loading model"}})}, "#a", "", LOADING),
        ({"/models": (404, b""), "/health": (200, b"")}, "", "", "default"),
    ],
)
async def test_each_state_has_its_reason(
    responses: dict[str, tuple[int, Any]], fragment: str, before: str, says: str
) -> None:
    """The model that is used, or one sentence about the server or its URL."""
    found, said = await probed(responses, fragment, before)

    assert said == says
    assert found.ours == (says == NO_KEY or "has no model 'meta/x'" in says)


@pytest.mark.parametrize(
    ("responses", "fragment", "cause"),
    [
        ({"*": (401, PAGE)}, "", FaultCause.KEY_REJECTED),
        ({"/models": (200, models("a"))}, "#b", FaultCause.MODEL_MISSING),
        ({"/models": (200, models())}, "", FaultCause.MODEL_MISSING),
        ({"/models": (503, {"error": {"message": "Loading model"}})}, "", FaultCause.LOADING),
        ({"*": (502, PAGE)}, "", FaultCause.STATUS),
        ({"*": (301, PAGE)}, "", FaultCause.WRONG_SERVER),
        ({"*": (200, PAGE)}, "", FaultCause.WRONG_SERVER),
        ({"*": (404, b"")}, "", FaultCause.WRONG_SERVER),
        ({"/models": (200, models("a")), "completions": (404, b"")}, "", FaultCause.WRONG_SERVER),
        ({"/models": (200, models("a"))}, "", ""),
    ],
)
async def test_each_fault_has_a_cause(responses: dict[str, tuple[int, Any]], fragment: str, cause: str) -> None:
    """One of the fixed list, by which workers are grouped; none if the server can be used."""
    found, _ = await probed(responses, fragment)

    assert cause_of(found.fault) == cause


async def test_an_unknown_host_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request was not sent."""

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    transport = Transport(read_address("openai:http://engine.example:8000/v1"), endpoint_access())
    await transport.open()
    with pytest.raises(NoResponse) as caught:
        await transport.get("http://engine.example:8000/v1/models", 5.0)
    await transport.close()

    assert str(caught.value) == "The endpoint cannot be reached: its host name is not known."
    assert not caught.value.sent
    assert caught.value.cause == FaultCause.HOST_UNKNOWN
