"""Pages of other origins call the API: preflights, answers on every way, errors; nothing of it where it is not asked for."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from integration.gateway_fixtures import SERVICE_TOKEN, Stack, reverse_or_vector, running_stack
from integration.test_gateway_fast_lane import handled

PAGE = "https://app.example.com"
ASKING = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway that lets the page call it."""
    async with running_stack(client, redis_url, cors_origins=(PAGE,)) as running:
        running.worker.answerer = reverse_or_vector
        yield running


async def called(stack: Stack, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers, with lower-case names."""
    async with stack.http.request(method, stack.url + path, headers=headers) as answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}


async def test_a_preflight_needs_no_key(stack: Stack) -> None:
    """Browsers send it without one; the methods are those of the address."""
    for path, methods in (
        ("/v1/inference", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/result/x", "DELETE, GET, HEAD"),
    ):
        status, headers = await called(stack, "OPTIONS", path, **ASKING)
        assert (status, headers["access-control-allow-origin"]) == (204, PAGE)
        assert headers["access-control-allow-methods"] == methods
        assert "x-stainless-lang" in headers["access-control-allow-headers"]
        assert (headers["vary"], int(headers["access-control-max-age"]) > 0) == ("Origin", True)


async def test_answers_on_the_fast_lane_may_be_read_by_the_page(stack: Stack) -> None:
    """Parsed or known, successes and errors; each with one header."""
    for _ in range(3):
        status, _, headers = await stack.infer(Origin=PAGE)
        assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, PAGE, "Origin")
    status, _, headers = await stack.infer({"input": 1}, Origin=PAGE)
    assert (status, headers["access-control-allow-origin"]) == (400, PAGE)
    assert "x-request-id" in headers["access-control-expose-headers"]
    assert handled(stack.gateway) == 0
    status, _, headers = await stack.infer(Origin="https://evil.example")
    assert (status, headers.get("access-control-allow-origin"), headers["vary"]) == (200, None, "Origin")


async def test_answers_of_the_handlers_may_be_read_by_the_page(stack: Stack) -> None:
    """Other addresses, errors before and after it is known who asks, and streams."""
    key = stack.key()
    for method, path, more, expected in [
        ("GET", "/v1/models", key, 200),
        ("GET", "/v1/models", {}, 401),
        ("GET", "/v1/nowhere", key, 404),
        ("GET", "/v1/inference", key, 405),
        ("POST", "/v1/embeddings", key, 415),
    ]:
        status, headers = await called(stack, method, path, Origin=PAGE, **more)
        assert (status, headers["access-control-allow-origin"]) == (expected, PAGE), path
    body = {"model": "tiny", "prompt": "a", "stream": True}
    async with stack.http.post(stack.url + "/v1/completions", json=body, headers={"Origin": PAGE, **key}) as answer:
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, PAGE)
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_operators_addresses_are_for_no_page(stack: Stack) -> None:
    """Neither preflights nor answers."""
    token = {"Authorization": f"Bearer {SERVICE_TOKEN}"}
    for path in ("/internal/health", "/internal/dashboard/dead-letters/purge", "/livez", "/metrics", "/"):
        status, headers = await called(stack, "OPTIONS", path, **ASKING)
        assert (status, [name for name in headers if name.startswith("access-control")]) == (405, [])
        _, headers = await called(stack, "GET", path, Origin=PAGE, **token)
        assert not [name for name in headers if name.startswith("access-control") or name == "vary"]


async def test_it_is_off_unless_asked_for(client: Redis, redis_url: str) -> None:
    """No header, and a preflight is a method that is not allowed."""
    async with running_stack(client, redis_url) as off:
        assert (await called(off, "OPTIONS", "/v1/inference", **ASKING))[0] == 405
        status, _, headers = await off.infer(Origin=PAGE)
    assert (status, [name for name in headers if name.startswith(("access-control", "vary"))]) == (200, [])
