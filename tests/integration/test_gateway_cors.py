"""CORS: pages of allowed origins may call the customers' API, and read its responses and errors."""

from redis.asyncio import Redis

from integration.gateway_fixtures import SERVICE_TOKEN, Stack, lower, running_stack

PAGE = "https://app.example.com"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def send(stack: Stack, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    async with stack.http.request(method, stack.url + path, headers=headers) as response:
        return response.status, lower(response.headers)


def cors_headers(headers: dict[str, str]) -> list[str]:
    return [name for name in headers if name.startswith(("access-control", "vary"))]


async def test_an_allowed_origin(client: Redis, redis_url: str) -> None:
    """Preflights need no key. Responses and errors of the fast path, of handlers and of streams carry the headers; those
    to other origins do not.
    """
    async with running_stack(client, redis_url, cors_origins=(PAGE,)) as stack:
        for path, methods in (
            ("/v1/inference", "POST"),
            ("/v1/models", "GET, HEAD"),
            ("/v1/result/x", "DELETE, GET, HEAD"),
        ):
            status, headers = await send(stack, "OPTIONS", path, **PREFLIGHT)
            assert (status, headers["access-control-allow-origin"]) == (204, PAGE)
            assert headers["access-control-allow-methods"] == methods
            assert "x-stainless-lang" in headers["access-control-allow-headers"]
            assert (headers["vary"], int(headers["access-control-max-age"]) > 0) == ("Origin", True)
        for body, expected in ((None, 200), (None, 200), ({"input": 1}, 400)):
            status, _, headers = await stack.infer(body, Origin=PAGE)
            assert (status, headers["access-control-allow-origin"], headers["vary"]) == (expected, PAGE, "Origin")
        assert "x-request-id" in headers["access-control-expose-headers"]
        status, _, headers = await stack.infer(Origin="https://evil.example")
        assert (status, headers.get("access-control-allow-origin"), headers["vary"]) == (200, None, "Origin")
        for method, path, key, expected in (
            ("GET", "/v1/models", stack.key(), 200),
            ("GET", "/v1/models", {}, 401),
            ("GET", "/v1/nowhere", stack.key(), 404),
            ("GET", "/v1/inference", stack.key(), 405),
            ("POST", "/v1/embeddings", stack.key(), 415),
        ):
            status, headers = await send(stack, method, path, Origin=PAGE, **key)
            assert (status, headers["access-control-allow-origin"]) == (expected, PAGE), path
        body = {"model": "tiny", "prompt": "a", "stream": True}
        sent = {"Origin": PAGE, **stack.key()}
        async with stack.http.post(stack.url + "/v1/completions", json=body, headers=sent) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (200, PAGE)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        for path in ("/internal/health", "/internal/dashboard/dead-letters/purge", "/livez", "/metrics", "/"):
            status, headers = await send(stack, "OPTIONS", path, **PREFLIGHT)
            assert (status, cors_headers(headers)) == (405, [])
            _, headers = await send(stack, "GET", path, Origin=PAGE, Authorization=f"Bearer {SERVICE_TOKEN}")
            assert cors_headers(headers) == []


async def test_it_is_off_by_default(client: Redis, redis_url: str) -> None:
    """Without configured origins a preflight gets 405, and no response has the headers."""
    async with running_stack(client, redis_url) as stack:
        assert (await send(stack, "OPTIONS", "/v1/inference", **PREFLIGHT))[0] == 405
        status, _, headers = await stack.infer(Origin=PAGE)
    assert (status, cors_headers(headers)) == (200, [])
