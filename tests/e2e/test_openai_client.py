"""The real `openai` client before a gateway that refuses: it waits as it is told, and does not repeat what cannot help.

Its own transport and its own retries, on our own route: what it asks for is beside the point, how it is refused is not.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import openai
import pytest

from admin import NewCustomer, add_customer, announced, sql
from eventually import eventually
from stack import Stack


class Refusal(NamedTuple):
    """A refusal as it came, and when (monotonic seconds)."""

    at: float
    status: int
    headers: Any


class Watched:
    """What the client sent and was told, in order."""

    def __init__(self) -> None:
        self.sent_at: list[float] = []
        self.tries: list[str] = []
        self.statuses: list[int] = []
        self.refusals: list[Refusal] = []

    async def sending(self, request: Any) -> None:
        self.sent_at.append(time.monotonic())
        self.tries.append(request.headers.get("x-stainless-retry-count", ""))

    async def received(self, response: Any) -> None:
        self.statuses.append(response.status_code)
        if response.status_code != 200:
            self.refusals.append(Refusal(time.monotonic(), response.status_code, response.headers))


@asynccontextmanager
async def client_of(stack: Stack, customer: NewCustomer) -> AsyncIterator[tuple[openai.AsyncOpenAI, Watched]]:
    """The client as it is shipped, two retries and all, and what it does."""
    watched = Watched()
    hooks = {"request": [watched.sending], "response": [watched.received]}
    http = openai.DefaultAsyncHttpxClient(event_hooks=hooks)
    async with openai.AsyncOpenAI(api_key=customer.key, base_url=f"{stack.url}/v1", http_client=http) as client:
        yield client, watched


async def ask(client: openai.AsyncOpenAI, text: str) -> dict[str, Any]:
    answer: Any = await client.post("/inference", cast_to=object, body={"input": text})
    return dict(answer)


async def has_quota(stack: Stack, customer: NewCustomer) -> bool:
    return '"day";q=1;' in (await announced(stack.url, customer.headers))["RateLimit-Policy"]


@pytest.mark.parametrize("rate", [1.0, 4.0])
async def test_it_waits_as_told_and_succeeds(simulated: Stack, rate: float) -> None:
    """Over its limit: refused once with the time that a token needs, and let in when it has waited for so long."""
    limits = {"requests_per_second": rate, "burst": 1}
    customer = await add_customer(simulated, f"openai-{rate:g}", "paid", **limits)
    async with client_of(simulated, customer) as (client, watched):
        await ask(client, "first")
        begun = len(watched.sent_at)  # The first may have to wait as well: a Redis that is new gives no full bucket.
        second = await ask(client, "second")

    assert second["output"] == "dnoces"
    assert watched.statuses[begun:] == [429, 200], [dict(refusal.headers) for refusal in watched.refusals]
    assert watched.tries[begun:] == ["0", "1"]
    refusal = watched.refusals[-1]
    told_s = float(refusal.headers["retry-after-ms"]) / 1000
    waited_s = watched.sent_at[-1] - refusal.at
    print(f"told to wait {told_s:.3f} s, waited {waited_s:.3f} s")
    assert told_s <= waited_s < told_s + 0.5
    assert 0 < told_s <= 2 / rate  # A token needs 1 / rate; the rest is so that not all come back at once.
    assert float(refusal.headers["retry-after"]) >= told_s  # In whole seconds, for clients that know no other.
    assert int(refusal.headers["x-ratelimit-remaining-requests"]) == 0


async def test_it_does_not_repeat_what_a_quota_refuses(simulated: Stack) -> None:
    """Tomorrow is too far away: `x-should-retry: false` ends it after one answer, and the error names the quota."""
    customer = await add_customer(simulated, "openai-quota", "paid")
    await sql(simulated, "INSERT INTO quotas (customer_id, quota) VALUES ($1, '1/day')", customer.id)
    await eventually(lambda: has_quota(simulated, customer), "the quota is known", 3.0)
    async with client_of(simulated, customer) as (client, watched):
        assert (await ask(client, "one"))["output"] == "eno"
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client, "two")

    assert watched.statuses == [200, 429]
    assert caught.value.code == "quota_exceeded"
    assert watched.refusals[0].headers["x-should-retry"] == "false"
