"""JWTs end to end: key sets over HTTP, tokens over HTTP, and the real catalog."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web

from configs import gateway_config
from eventually import eventually
from gateway.auth.authenticator import Authenticator
from gateway.auth.jwks import JwksSource
from gateway.auth.jwt_customers import JwtIdentities
from gateway.auth.throttle import AuthThrottle
from gateway.http.error_responses import ErrorResponses
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState, RoutedRequest, Router
from gateway.http.server import EdgeServer, serve
from integration.ledger_fixtures import database_url, db, postgres_server
from jwt_issuer import LiteralCustomers, LiteralSource, config, customer, jwk, jwks, token
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from scheduler.tasks import end_all

__all__ = ["database_url", "db", "postgres_server"]


@dataclass
class Provider:
    """An identity provider; `/keys` returns `document`, and other paths misbehave as they are named."""

    url: str = ""
    document: bytes = field(default_factory=jwks)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        redirects = {
            "/elsewhere": web.HTTPFound(self.url.replace("127.0.0.1", "localhost") + "/keys"),
            "/moved": web.HTTPPermanentRedirect("/keys?again=1"),
            "/round": web.HTTPFound("/round"),
        }
        if request.path in redirects:
            raise redirects[request.path]
        if request.path == "/huge":
            return web.Response(body=b'{"keys": [' + b" " * 400_000)
        return web.Response(status=500 if request.path == "/broken" else 200, body=self.document)


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    """A provider on loopback."""
    made = Provider()
    app = web.Application()
    app.router.add_get("/{tail:.*}", made.respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{site.port}"
    yield made
    await runner.cleanup()


def new_source(url: str) -> JwksSource:
    return JwksSource(config(jwks=url, refresh_s=3600.0), least_gap_s=0.05)


def fresh(algorithm: str = "ES256", number: int = 0, **changes: Any) -> str:
    """A token that is valid now."""
    return token(algorithm, number, now=time.time(), **changes)


@contextlib.asynccontextmanager
async def serving(tokens: JwtIdentities) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, str]]]]:
    """An HTTP server with one route; the function returns status, and customer or error code, for a bearer token."""
    authenticator = Authenticator(cast("Any", None), tokens, AuthThrottle("200/minute"))

    async def handler(call: RoutedRequest) -> HttpResponse:
        return HttpResponse.of(200, {"customer": authenticator.identify(call).customer_name})

    routes = Router()
    routes.add("GET", "/identity", handler)
    gateway = gateway_config()
    server = EdgeServer(routes, ErrorResponses(lambda: 0.0), DrainState(), gateway)
    port = await serve(server, gateway)
    tasks = [asyncio.create_task(loop()) for loop in tokens.loops().values()]
    async with aiohttp.ClientSession() as http:

        async def identify(presented: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {presented}"}
            async with http.get(f"http://127.0.0.1:{port.number}/identity", headers=headers) as response:
                document = await response.json()
                return response.status, document.get("customer") or document["error"]["code"]

        try:
            yield identify
        finally:
            await end_all(tasks)
            port.abort()
            await server.shutdown(0.5)


async def test_tokens_and_key_rotation(provider: Provider) -> None:
    """Tokens of each algorithm identify the customer. The first token of a new key causes a fetch of the key set.

    A token of 8000 bytes passes the HTTP parser; a longer one is 401.
    """
    accepted, invalid = (200, "acme"), (401, "invalid_api_key")
    longest = next(text for size in range(5700, 6000) if len(text := fresh(filler="x" * size)) >= 7998)
    too_long = fresh(filler="x" * 5850)
    assert len(longest) <= 8000 < len(too_long)
    old, new = fresh(), fresh(number=1)
    source = new_source(f"{provider.url}/keys")
    tokens = JwtIdentities(LiteralCustomers(customer()), config(), source=source)
    async with serving(tokens) as identify:
        await eventually(lambda: source.problem is None, "the key set is read")
        assert {await identify(text) for text in (fresh("RS256"), old, fresh("EdDSA"), longest)} == {accepted}
        assert await identify(too_long) == invalid

        provider.document = jwks(jwk("ES256", 1))
        assert [await identify(old), await identify(new)] == [accepted, invalid]

        async def rotated() -> bool:
            return await identify(new) == accepted

        await eventually(rotated, "the new key is known")
        assert await identify(old) == invalid


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/keys", None),
        ("/moved", None),
        ("/elsewhere", "redirects to another host or to plain HTTP"),
        ("/round", "redirects more than 3 times"),
        ("/huge", "has more than 262144 bytes"),
        ("/broken", "responds with status 500"),
    ],
)
async def test_the_key_set_is_fetched_safely(provider: Provider, path: str, reason: str | None) -> None:
    """Redirects on the same host are followed. A provider can neither redirect elsewhere nor fill the memory."""
    source = new_source(provider.url + path)
    await source.refresh()

    assert source.problem == (reason and f"The JWKS at {provider.url}{path} {reason}.")
    assert (source.keys is None) is (reason is not None)


async def test_an_unreachable_provider_is_reported() -> None:
    """No server listens on the port."""
    source = new_source("http://127.0.0.1:9/keys")
    await source.refresh()

    assert "does not respond" in (source.problem or "")


async def test_limits_come_from_the_real_catalog(database_url: str, db: Any) -> None:
    """Within a second, whether the token has the customer's name or id. The audit accepts the key id of a token."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    catalog = Catalog(database_url)
    await catalog.start()
    tokens = JwtIdentities(catalog, config(), source=cast("JwksSource", LiteralSource()))

    def identity(**changes: Any) -> Identity:
        return tokens.identify(fresh(**changes), time.time())

    await db.execute("INSERT INTO quotas (customer_id, quota) SELECT id, '1000/day' FROM customers WHERE name = 'acme'")
    await eventually(lambda: identity().quotas == (("1day", 1000),), "the quota is there", 2.0)
    customer_id = await db.fetchval("SELECT id::text FROM customers WHERE name = 'acme'")
    rules = await db.fetch(
        "SELECT pg_get_constraintdef(oid) AS rule FROM pg_constraint WHERE contype IN ('c', 'f')"
        " AND conrelid IN ('requests'::regclass, 'jobs'::regclass)"
    )
    found, by_id = identity(), identity(sub=customer_id)
    await catalog.stop()

    assert (found.customer_id, found.customer_name, found.tier) == (customer_id, "acme", "paid")
    assert (found.key_rate, found.key_burst, found.key_id[:4]) == (0.0, 0.0, "jwt:")
    assert msgspec.structs.replace(by_id, key_id=found.key_id) == found
    assert not [row["rule"] for row in rules if "api_key_id" in row["rule"]]
