"""The page for on-call over HTTP: who gets in, what the pages may load, and the stream, with many and with slow readers."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.operations import snapshots
from gateway.operations.dashboard import ASSETS
from gateway.operations.session import COOKIE, LASTS_S, issue
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, running_stack

BASE = "/internal/dashboard"
BROWSER = {"Accept": "text/html,application/xhtml+xml"}
STREAM = {"Accept": "text/event-stream"}
BEARER = {"Authorization": f"Bearer {SERVICE_TOKEN}"}


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it, which looks closely at who fails to log in."""
    async with running_stack(client, redis_url, auth_failures="5/minute", write_timeout_s=1.0) as running:
        yield running


async def ask(stack: Stack, path: str = "", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers in lower case, text; without cookies."""
    async with aiohttp.request(method, stack.url + BASE + path, headers=headers) as answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.text()


async def cookie(stack: Stack) -> str:
    """What a browser sends after logging in."""
    status, headers, _ = await ask(stack, "/session", "POST", **BEARER)
    assert status == 200
    return headers["set-cookie"].partition(";")[0]


async def test_who_has_not_logged_in_sees_the_form_alone(stack: Stack) -> None:
    """Opening the page is no failed attempt; asking for what it shows without a token is 401."""
    for _ in range(8):
        status, headers, text = await ask(stack, **BROWSER)
        assert (status, "login.js" in text, "dashboard.js" in text) == (401, True, False)
    status, _, text = await ask(stack, "/events", **STREAM)

    assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert (await ask(stack))[0] == 401
    assert (await ask(stack, "/session", "DELETE"))[0] == 401


async def test_the_token_is_changed_for_a_cookie(stack: Stack) -> None:
    """It opens the page and what it shows, is not the token, and nothing else inside takes it; logging out takes it away."""
    status, headers, text = await ask(stack, "/session", "POST", **BEARER, **{"X-Forwarded-Proto": "https"})
    given = headers["set-cookie"]
    pair = given.partition(";")[0]

    assert (status, json.loads(text)) == (200, {"lasts_s": 43200})
    assert re.fullmatch(r"tierlane_session=\d+\.[0-9a-f]{64}; Path=/internal/dashboard; Max-Age=43200; HttpOnly; "
                        r"SameSite=Strict; Secure", given)  # fmt: skip
    status, _, text = await ask(stack, Cookie=pair, **BROWSER)
    assert (status, "dashboard.js" in text) == (200, True)
    status, _, text = await ask(stack, "/events", Cookie=pair)
    assert (status, json.loads(text)["gateway"]) == (200, "g1")
    async with aiohttp.request("GET", f"{stack.url}/internal/health", headers={"Cookie": pair}) as answer:
        assert answer.status == 401
    status, headers, _ = await ask(stack, "/session", "DELETE", Cookie=pair)
    assert (status, headers["set-cookie"].split("; ")[:3]) == (
        200, ["tierlane_session=", "Path=/internal/dashboard", "Max-Age=0"],
    )  # fmt: skip


async def test_wrong_tokens_have_to_wait(stack: Stack) -> None:
    """As at every other door; a forged cookie is a wrong token, too; the right one still opens."""
    codes = []
    for attempt in range(8):
        wrong = {"Authorization": "Bearer wrong"} if attempt % 2 else {"Cookie": "tierlane_session=1.x"}
        codes.append(
            (await ask(stack, "/session" if attempt % 2 else "/events", "POST" if attempt % 2 else "GET", **wrong))[0]
        )

    assert codes == [401] * 5 + [429] * 3
    assert (await ask(stack, "/session", "POST", **BEARER))[0] == 200


async def test_no_page_has_a_secret_or_loads_from_elsewhere(stack: Stack) -> None:
    """A strict policy, nothing inline, every file that is named is there, and nowhere a token, a key or an address."""
    pair = await cookie(stack)
    secrets = [SERVICE_TOKEN, stack.gateway.config.redis_url, pair, *(key.text for key in stack.catalog.keys.values())]
    for given in (BROWSER, BROWSER | {"Cookie": pair}):
        _, headers, text = await ask(stack, **given)
        assert headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<style|style=|<script>|\son\w+=|javascript:", text)
        named = re.findall(r'(?:src|href)="([^"]+)"', text)
        assert {name.rpartition("/")[0] for name in named} == {f"{BASE}/assets"}
        assert {name.rpartition("/")[2] for name in named} <= set(ASSETS)
        assert [secret for secret in secrets if secret in text] == []
    for name in ASSETS:
        status, headers, text = await ask(stack, f"/assets/{name}")
        assert (status, headers["content-type"]) == (200, ASSETS[name])
        assert [secret for secret in secrets if secret in text] == []
    assert (await ask(stack, "/assets/page.html"))[0] == 404


class Reader:
    """Who watches: events as they come."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self, kind: str, timeout_s: float = 5.0) -> Any:
        """The data of the next event of this kind."""
        async with asyncio.timeout(timeout_s):
            while True:
                line = (await self.answer.content.readline()).decode().strip()
                assert not self.answer.content.at_eof(), "the stream has ended"
                if line == f"event: {kind}":
                    return json.loads((await self.answer.content.readline()).removeprefix(b"data: "))


async def test_all_readers_are_told_the_same_once_a_second(stack: Stack) -> None:
    """History first, then documents; a worker that falls silent is there within two seconds, with its event."""
    await stack.worker.heartbeat("worker-2")
    pair = await cookie(stack)
    url = f"{stack.url}{BASE}/events"
    async with aiohttp.ClientSession(headers=STREAM | {"Cookie": pair}) as http:
        readers = [Reader(await http.get(url)) for _ in range(5)]
        assert readers[0].answer.headers["Content-Type"] == "text/event-stream"
        for reader in readers:
            assert isinstance(await reader.next("history"), list)
            await reader.next("state")
        told = [await reader.next("state") for reader in readers]
        assert len({json.dumps(each) for each in told}) == 1

        ill: dict[str, Any] = {}
        while not ill:
            seen = await readers[0].next("state")
            ill = {each["id"]: each for each in seen["workers"] if not each["healthy"]}
        assert ill["worker-2"]["age_ms"] < 2000
        assert "worker-2 was lost: this was its last heartbeat." in [text for _, _, text in seen["events"]]
        assert seen["status"] == "degraded"
        for reader in readers:
            reader.answer.close()
    await eventually(lambda: not len(stack.gateway.snapshots.subscribers), "readers that left are forgotten")


async def test_there_is_room_for_so_many_readers(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told to come back later, and comes in when another leaves."""
    monkeypatch.setattr(snapshots, "MAX_SUBSCRIBERS", 2)
    url = f"{stack.url}{BASE}/events"
    async with aiohttp.ClientSession(headers=STREAM | BEARER) as http:
        first, second = await http.get(url), await http.get(url)
        await eventually(lambda: len(stack.gateway.snapshots.subscribers) == 2, "two are in")
        async with http.get(url) as third:
            assert (third.status, (await third.json())["error"]["code"]) == (503, "no_capacity")
        first.close()
        await eventually(lambda: len(stack.gateway.snapshots.subscribers) == 1, "one has left")
        async with http.get(url) as fourth:
            assert fourth.status == 200
        second.close()


async def test_a_reader_that_does_not_read_is_dropped_and_holds_up_nobody(stack: Stack) -> None:
    """What it does not read is not kept for it; its connection ends, others hear on."""
    readers = stack.gateway.snapshots.subscribers
    sleeper = socket.socket()
    sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sleeper.connect(("127.0.0.1", stack.gateway.port))
    head = f"GET {BASE}/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nAuthorization: Bearer {SERVICE_TOKEN}\r\n\r\n"
    sleeper.sendall(head.encode())
    await eventually(lambda: len(readers) == 1, "the sleeper is in")
    async with aiohttp.ClientSession(headers=STREAM | BEARER) as http, http.get(f"{stack.url}{BASE}/events") as answer:
        await eventually(lambda: len(readers) == 2, "the other one, too")
        drain = asyncio.create_task(answer.content.read())
        large = b"event: state\ndata: " + b"x" * 100_000 + b"\n\n"

        def stuffed() -> bool:
            readers.publish(large)
            return readers.missed > 0

        await eventually(stuffed, "the sleeper misses one")
        await eventually(lambda: len(readers) == 1, "the sleeper is dropped", 5.0)
        drain.cancel()
    sleeper.close()


async def test_health_is_answered_from_the_same_picture(stack: Stack) -> None:
    """At most a second old, and it says how old; the page's document says the same."""
    _, health = await stack.internal("/internal/health")
    _, again = await stack.internal("/internal/health")
    _, _, text = await ask(stack, "/events", **BEARER)
    shown = json.loads(text)

    assert 0 <= health.pop("age_s") <= again.pop("age_s") <= 1.25
    assert (shown["status"], shown["healthy_gpus"]) == (health["status"], health["healthy_gpus"])
    assert {tier["name"] for tier in shown["tiers"]} == set(health["tiers"])


async def test_a_gateway_that_leaves_ends_its_streams(stack: Stack) -> None:
    """Whole, so that a page goes to another gateway at once; nobody waits for them."""
    async with aiohttp.ClientSession(headers=STREAM | BEARER) as http, http.get(f"{stack.url}{BASE}/events") as answer:
        await Reader(answer).next("state")
        async with asyncio.timeout(3):
            await stack.gateway.drain()
            await answer.content.read()  # Raises where the last chunk is missing.

    assert answer.content.at_eof()
    assert len(stack.gateway.snapshots.subscribers) == 0


async def test_a_stream_ends_with_its_session(stack: Stack) -> None:
    """Whoever stays logged in comes again; whoever does not sees the form."""
    value = issue(SERVICE_TOKEN, time.time() - LASTS_S + 2)
    given = STREAM | {"Cookie": f"{COOKIE}={value}"}
    async with aiohttp.ClientSession(headers=given) as http, http.get(f"{stack.url}{BASE}/events") as answer:
        await Reader(answer).next("state")
        async with asyncio.timeout(5):
            await answer.content.read()
        async with http.get(f"{stack.url}{BASE}/events") as again:
            assert again.status == 401
