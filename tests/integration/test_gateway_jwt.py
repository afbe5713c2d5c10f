"""JWTs over real HTTP: a provider that serves its key set, a door that asks who it is, and rotation, outages, attacks."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from eventually import eventually
from gateway.auth.authenticator import Authenticator
from gateway.auth.jwks import JwksSource
from gateway.auth.jwt_customers import JwtIdentities
from gateway.auth.throttle import AuthThrottle
from gateway.config import GatewayConfig
from gateway.http.errors import ErrorResponses
from gateway.http.response import HttpResponse
from gateway.http.router import DrainState, RoutedRequest, Router
from gateway.http.server import EdgeServer, serve
from jwt_issuer import LiteralCustomers, config, customer, jwk, jwks, token
from ledger.catalog.api_key import NewKey, mint, verify
from ledger.catalog.snapshot import Identity, Key, Snapshot
from scheduler.tasks import end_all

INFINITY = float("inf")


class CatalogOfBoth(LiteralCustomers):
    """The customers, and one API key of acme."""

    def __init__(self) -> None:
        super().__init__(customer())
        self.key: NewKey = mint()

    def identify(self, presented: str, wall_now: float) -> Identity:
        identity = Identity(self.key.id, "id-acme", "acme", "free", (1.0, 1.0, 1, None), 1000)
        rows = {self.key.id: Key(identity, self.key.secret_hash, INFINITY, revoked=False, suspended=False)}
        return verify(presented, Snapshot(1, (), {}, rows, {}, ()), wall_now)


@dataclass
class Provider:
    """An identity provider's HTTP server; it answers `/keys` with `document`, and other paths as they are named."""

    url: str = ""
    document: bytes = field(default_factory=jwks)
    status: int = 200
    asked: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        path = request.path
        if path == "/elsewhere":
            raise web.HTTPFound(self.url.replace("127.0.0.1", "localhost") + "/keys")
        if path == "/moved":
            raise web.HTTPPermanentRedirect("/keys?again=1")
        if path == "/round":
            raise web.HTTPFound("/round")
        if path == "/huge":
            return web.Response(body=b'{"keys": [' + b" " * 400_000)
        return web.Response(status=self.status, body=self.document)


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    """A provider on loopback."""
    made = Provider()
    app = web.Application()
    app.router.add_get("/{tail:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{site.port}"
    yield made
    await runner.cleanup()


@dataclass
class Door:
    """An HTTP server with one route, which says who is asking."""

    url: str
    http: aiohttp.ClientSession
    catalog: CatalogOfBoth
    tokens: JwtIdentities

    async def ask(self, presented: str) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, document and headers."""
        headers = {"Authorization": f"Bearer {presented}"}
        async with self.http.get(f"{self.url}/who", headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    async def status(self, presented: str) -> int:
        return (await self.ask(presented))[0]


@contextlib.asynccontextmanager
async def open_door(jwks_at: str, **changes: Any) -> AsyncIterator[Door]:
    """A door for the tokens of this key set, looked at as often as is allowed; `changes` go into the configuration."""
    catalog = CatalogOfBoth()
    settings = config(jwks=jwks_at, **{"refresh_s": 3600.0} | changes)
    tokens = JwtIdentities(catalog, settings, source=JwksSource(settings, least_gap_s=0.05, file_look_s=0.02))
    authenticator = Authenticator(catalog, tokens, AuthThrottle("200/minute"))

    async def who(call: RoutedRequest) -> HttpResponse:
        identity = authenticator.identify(call)
        return HttpResponse.of(200, {"customer": identity.customer_name, "key": identity.key_id, "tier": identity.tier})

    routes = Router()
    routes.add("GET", "/who", who)
    gateway = GatewayConfig(gateway_id="g1", redis_url="", service_token="", port=0, reuse_port=False)
    runner, port = await serve(EdgeServer(routes, ErrorResponses(lambda: 0.0), DrainState(), gateway), gateway)
    tasks = [asyncio.create_task(loop()) for loop in tokens.loops().values()]
    try:
        async with aiohttp.ClientSession() as http:
            yield Door(f"http://127.0.0.1:{port}", http, catalog, tokens)
    finally:
        await end_all(tasks)
        await runner.cleanup()


@pytest.fixture
async def door(provider: Provider) -> AsyncIterator[Door]:
    """A door that has the provider's keys."""
    async with open_door(f"{provider.url}/keys") as made:
        await eventually(lambda: made.tokens.problem is None, "the key set is read")
        yield made


def fresh(algorithm: str = "ES256", number: int = 0, **changes: Any) -> str:
    """A token that is good now."""
    return token(algorithm, number, now=time.time(), **changes)


async def test_a_token_opens_as_a_key_does(door: Door) -> None:
    """By each algorithm, beside the API key, and for the same customer."""
    for algorithm in ("RS256", "ES256", "EdDSA"):
        status, document, _ = await door.ask(fresh(algorithm))
        assert (status, document["customer"]) == (200, "acme")
        assert document["key"].startswith("jwt:")

    assert (await door.ask(door.catalog.key.text))[1]["key"] == door.catalog.key.id


async def test_the_longest_token_fits_through_the_http_parser(door: Door) -> None:
    """8000 bytes pass; a little more is refused by us, and not by the parser."""
    longest = next(text for size in range(5700, 6000) if len(text := fresh(filler="x" * size)) >= 7998)
    too_long = fresh(filler="x" * 5850)
    assert len(longest) <= 8000 < len(too_long)

    assert await door.status(longest) == 200
    status, document, _ = await door.ask(too_long)
    assert (status, document["error"]["code"]) == (401, "invalid_api_key")


async def test_a_rotated_key_is_refused_and_the_new_one_taken(provider: Provider, door: Door) -> None:
    """The first token of the new key is what makes us look; from then on the old key is unknown."""
    old, new = fresh(), fresh(number=1)
    assert await door.status(old) == 200
    provider.document = jwks(jwk("ES256", 1))
    assert await door.status(old) == 200

    assert await door.status(new) == 401
    await eventually(lambda: accepted(door, new), "the new key is known")

    assert await door.status(old) == 401
    assert await door.status(new) == 200


async def accepted(door: Door, presented: str) -> bool:
    return await door.status(presented) == 200


async def test_a_provider_that_is_away_stops_only_what_it_has_to(provider: Provider, door: Door) -> None:
    """Known keys go on, an unknown one gets 503, and all is well when it is back."""
    provider.status = 500
    assert await door.status(fresh(number=1)) == 401
    await eventually(lambda: door.tokens.problem, "the failure is noticed")

    assert door.tokens.problem == f"The JWKS at {provider.url}/keys responds with status 500."
    assert await door.status(fresh()) == 200
    status, document, _ = await door.ask(fresh(number=1))
    assert (status, document["error"]["code"]) == (503, "catalog_unavailable")

    provider.status, provider.document = 200, jwks(jwk("ES256"), jwk("ES256", 1))
    await eventually(lambda: accepted(door, fresh(number=1)), "the new key is known")
    assert door.tokens.problem is None


async def test_a_door_opens_without_its_provider() -> None:
    """Keys pass, tokens get 503 until there is a set; here nobody listens at all."""
    async with open_door("http://127.0.0.1:9/keys") as door:
        await eventually(lambda: "does not respond" in (door.tokens.problem or ""), "the failure is noticed")

        assert await door.status(door.catalog.key.text) == 200
        status, document, headers = await door.ask(fresh())

    assert (status, document["error"]["code"]) == (503, "catalog_unavailable")
    assert "Retry-After" in headers


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/elsewhere", "redirects to another host or to plain HTTP"),
        ("/round", "redirects more than 3 times"),
        ("/huge", "has more than 262144 bytes"),
    ],
)
async def test_a_provider_can_neither_send_us_elsewhere_nor_fill_our_memory(
    provider: Provider, path: str, words: str
) -> None:
    """Each is refused and told to health."""
    async with open_door(provider.url + path) as door:
        problem = f"The JWKS at {provider.url}{path} {words}."

        await eventually(lambda: door.tokens.problem == problem, problem)

        assert await door.status(fresh()) == 503


async def test_a_redirect_on_the_same_host_is_followed(provider: Provider) -> None:
    """Providers move their documents."""
    async with open_door(f"{provider.url}/moved") as door:
        await eventually(lambda: door.tokens.problem is None, "the key set is read")

        assert await door.status(fresh()) == 200
