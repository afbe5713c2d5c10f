"""`GET /v1/me` over a real Redis: what is left without spending it, usage that cannot wear out what it is read from."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from gateway.api.account import AccountEndpoint, AccountParts
from gateway.auth.authenticator import Authenticator
from gateway.config import GatewayConfig
from gateway.http.errors import ErrorResponses
from gateway.http.router import DrainState, Router
from gateway.http.server import EdgeServer, serve
from gateway.inference.submission import build_submission
from gateway.limits.capacity import LiveLimits
from gateway.limits.customer_limits import CustomerLimits
from gateway.limits.demand import DemandMeter
from integration.gateway_fixtures import LiteralCatalog
from ledger.audit.queries import Usage
from pool import Pool
from ratelimit.limits import EffectiveLimits, RemainingLimits, effective
from scheduler.errors import RedisUnavailable
from scheduler.payload import Payload
from scheduler.protocol.limits import LimitState
from scheduler.redis_client.keys import Keys

USAGE = Usage(requests=12, completed=10, failed=2, tokens_used=345)
DAY = (("1day", 100),)


@dataclass
class Page:
    """A small gateway that has this page alone, and what it stands on."""

    url: str
    http: aiohttp.ClientSession
    catalog: LiteralCatalog
    limits: LiveLimits
    customer_limits: CustomerLimits
    me: AccountEndpoint
    asked: list[str] = field(default_factory=list)
    usage: Callable[[], Usage] = lambda: USAGE
    redis_away: bool = False

    async def get(self, method: str = "GET", **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, document and headers with lower-case names."""
        sent = {"Authorization": f"Bearer {self.catalog.keys['free'].text}", **headers}
        async with self.http.request(method, f"{self.url}/v1/me", headers=sent) as answer:
            document = await answer.json(content_type=None) if method == "GET" else {}
            return answer.status, document, {name.lower(): value for name, value in answer.headers.items()}


@contextlib.asynccontextmanager
async def serving(client: Redis) -> AsyncIterator[Page]:
    catalog, limits = LiteralCatalog(), LiveLimits("default")
    state = LimitState(client, Keys())
    customer_limits = CustomerLimits(limits, DemandMeter("g1", 0.0))

    async def read(customer_id: str, limits: EffectiveLimits, key_id: str) -> RemainingLimits:
        if page.redis_away:
            raise RedisUnavailable
        return await state.read(customer_id, limits, key_id)

    async def find_usage(customer_id: str) -> Usage:
        page.asked.append(customer_id)
        return page.usage()

    me = AccountEndpoint(
        AccountParts(
            authenticator=Authenticator(catalog),
            customer_limits=customer_limits,
            read_limits=read,
            find_usage=find_usage,
        )
    )
    routes = Router()
    for method in ("GET", "HEAD"):
        routes.add(method, "/v1/me", me)
    config = GatewayConfig(gateway_id="g1", redis_url="", service_token="", port=0, reuse_port=False)
    runner, port = await serve(EdgeServer(routes, ErrorResponses(lambda: 0.0), DrainState(), config), config)
    try:
        async with aiohttp.ClientSession() as http:
            page = Page(f"http://127.0.0.1:{port}", http, catalog, limits, customer_limits, me)
            yield page
    finally:
        await me.close()
        await runner.cleanup()


@pytest.fixture
async def page(client: Redis) -> AsyncIterator[Page]:
    """The page over an empty Redis."""
    async with serving(client) as running:
        yield running


async def spend(page: Page, client: Redis, count: int) -> None:
    """Let so many requests of the free customer in, through this gateway."""
    snapshot = page.catalog.snapshot
    assert snapshot is not None
    identity = snapshot.keys[page.catalog.keys["free"].id].identity
    pool = Pool(client, Keys())
    payload = Payload("tiny", "hell", {})
    limits = effective(identity)
    asked = [build_submission(pool.submission().id, identity, payload, limits, total_ms=4000) for _ in range(count)]
    verdicts = await pool.admit(asked)
    assert {verdict.outcome for verdict in verdicts} == {"accepted"}
    for submission, verdict in zip(asked, verdicts, strict=True):
        page.customer_limits.judged(identity, submission, verdict)


async def test_it_says_who_and_what_is_left(page: Page, client: Redis) -> None:
    """The customer, its limits, what Redis has left of them, usage; with the headers of every other answer."""
    page.catalog.set(
        key={
            "requests_per_second": 0.001,
            "burst": 40.0,
            "tokens_per_minute": 4000,
            "max_concurrency": 5,
            "quotas": DAY,
        }
    )
    await spend(page, client, 3)
    status, document, headers = await page.get()

    assert status == 200
    remaining = document.pop("remaining")
    assert document == {
        "customer": "free",
        "customer_id": "customer-free",
        "tier": "free",
        "key_id": page.catalog.keys["free"].id,
        "limits": {
            "base": (
                limits := {
                    "requests_per_second": 0.001,
                    "burst": 40.0,
                    "tokens_per_minute": 4000,
                    "max_concurrency": 5,
                }
            ),
            "effective": limits,
            "factor": 1.0,
        },
        "as_of": "now",
        "usage": {"requests": 12, "completed": 10, "failed": 2, "tokens_used": 345},
    }
    (quota,) = remaining.pop("quotas")
    assert (quota["quota"], quota["amount"], quota["remaining"], quota["reset_ms"] > 0) == ("day", 100, 97, True)
    assert (remaining["requests"], remaining["concurrency"]) == (7, 2)  # A lost bucket begins with a quarter.
    assert 949 <= remaining["tokens"] <= 1000
    assert headers["x-ratelimit-remaining-requests"] == "7"
    assert '"day";r=97;t=' in headers["ratelimit"]
    assert (headers["cache-control"], "x-request-id" in headers) == ("no-store", True)


async def test_asking_spends_nothing(page: Page, client: Redis) -> None:
    """However often, and by HEAD as well."""
    page.catalog.set(key={"requests_per_second": 0.001, "burst": 40.0, "quotas": DAY})
    await spend(page, client, 1)
    seen = {(await page.get())[1]["remaining"]["requests"] for _ in range(20)}
    status, _, headers = await page.get("HEAD")

    assert seen == {9}
    assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "9")


async def test_what_was_spent_since_a_look_is_told(page: Page, client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that is kept takes back nothing of what admission said after it, here and in other answers' headers."""
    page.catalog.set(key={"requests_per_second": 0.001, "burst": 40.0, "quotas": DAY})
    monkeypatch.setattr(page.me._looks, "_keep_s", 60.0)
    left = []
    for _ in range(3):
        await spend(page, client, 1)
        _, document, headers = await page.get()
        assert headers["x-ratelimit-remaining-requests"] == str(document["remaining"]["requests"])
        left.append((document["remaining"]["requests"], document["remaining"]["quotas"][0]["remaining"]))

    assert left == [(9, 99), (8, 98), (7, 97)]


async def test_lowered_limits_have_their_reason(page: Page) -> None:
    """What is in force, what was agreed, and why they differ."""
    page.limits.factor = lambda tier: 0.5  # type: ignore[method-assign]
    _, document, headers = await page.get()
    limits = document["limits"]

    assert (limits["base"]["burst"], limits["effective"]["burst"], limits["factor"]) == (1000.0, 500.0, 0.5)
    assert "50 %" in limits["reason"]
    assert headers["x-ratelimit-limit-requests"] == "500"


async def test_without_redis_it_is_what_was_last_known(page: Page) -> None:
    """The page answers, and says that it is an estimate."""
    page.redis_away = True
    status, document, headers = await page.get()

    assert (status, document["as_of"], document["remaining"]["requests"] >= 250) == (200, "estimate", True)
    assert "ratelimit" in headers


async def test_without_postgresql_usage_is_not_made_up(page: Page) -> None:
    """Null, and a sentence that says why; nothing of the fault itself."""

    def away() -> Usage:
        raise OSError("postgresql://user:secret@host")

    page.usage = away
    status, document, _ = await page.get()

    assert (status, document["usage"], document["usage_problem"]) == (200, None, "The audit cannot be read right now.")


async def test_a_hundred_askers_are_one_question_to_postgresql(page: Page) -> None:
    """Usage is read once in ten seconds for one customer."""
    answers = await asyncio.gather(*(page.get() for _ in range(100)))

    assert {answer[0] for answer in answers} == {200}
    assert page.asked == ["customer-free"]


async def test_it_asks_for_a_key(page: Page) -> None:
    """401 without one, in the form that is asked for."""
    status, document, headers = await page.get(Authorization="Bearer nonsense", Accept="application/problem+json")

    assert (status, document["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
