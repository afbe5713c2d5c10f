"""The page of a customer in a real browser: sign-in, limits, usage, keys, jobs, a request to try, and sign-out."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from browser.test_dashboard import click
from browser.test_dashboard_page import resize, violations
from chromium import Tab, chromium
from configs import job_config
from eventually import eventually
from integration.gateway_fixtures import Stack, running_stack
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.catalog.follower import Catalog

__all__ = ["database_url", "db", "postgres_server"]

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

Connection = Any
SIGNED_IN = "!document.getElementById('account').hidden"
FAULT = "document.getElementById('sign-in-fault').textContent"
STATUS = "document.getElementById('try-status').textContent"
ANSWER = "document.getElementById('answer').textContent"
HOSTILE = "<img src=x onerror=alert(1)>"
ADD_REQUEST = (
    "INSERT INTO requests (id, created_at, customer_id, api_key_id, tier, model, status, tokens_used, cost_ms) "
    "SELECT $1, now(), id, 'key-1', 'paid', 'tiny', 'completed', 1000, 250 FROM customers WHERE name = 'acme'"
)


def text(place: str) -> str:
    """The expression for the text of an element."""
    return f"document.getElementById({place!r}).textContent"


class CustomerPage:
    """The page in a browser, and the keys of its customers. acme manages its keys and has quotas; plain has not."""

    def __init__(self, tab: Tab, stack: Stack, keys: dict[str, str]) -> None:
        self.tab = tab
        self.stack = stack
        self.keys = keys

    async def sign_in(self, key: str) -> None:
        await self.tab.until("document.readyState === 'complete' && !!document.getElementById('key')", "the form")
        await self.tab.value(f"document.getElementById('key').value = {key!r}; true")
        await click(self.tab, "#sign-in-form button")

    async def opened(self, customer: str) -> None:
        await self.sign_in(self.keys[customer])
        await self.tab.until(f"{SIGNED_IN} && {text('who')}.startsWith('{customer} ')", "the account")
        await self.tab.until(f"{text('keys')} && {text('jobs')} && {text('usage')} && {text('curl')}", "its parts")


@asynccontextmanager
async def customer_page(client: Redis, redis_url: str, database_url: str, db: Connection, home: Path) -> Any:
    await db.execute("INSERT INTO models (name) VALUES ('tiny')")
    await db.execute("INSERT INTO prices VALUES ('tiny', '2020-01-01', 2, 0.5)")
    await db.execute(
        "INSERT INTO customers (name, tier, manages_keys, max_queue_ms) VALUES "
        "('acme', 'paid', true, 2500), ('plain', 'free', false, null)"
    )
    await db.execute(
        "INSERT INTO quotas (customer_id, quota) SELECT id, quota FROM customers, unnest(ARRAY['4/day', '100 usd/month']) AS q (quota) "
        "WHERE name = 'acme'"
    )
    await db.execute(ADD_REQUEST, f"req_{1:032x}")
    keys = {name: await db.fetchval("SELECT issue_api_key($1, 'first')", name) for name in ("acme", "plain")}
    catalog: Any = Catalog(database_url)
    await catalog.start()
    try:
        async with (
            running_stack(client, redis_url, catalog=catalog, jobs=job_config(database_url)) as stack,
            chromium(home, f"{stack.url}/") as tab,
        ):
            yield CustomerPage(tab, stack, keys)
    finally:
        await catalog.stop()


@pytest.fixture
async def page(
    client: Redis, redis_url: str, database_url: str, db: Connection, tmp_path: Path
) -> AsyncIterator[CustomerPage]:
    async with customer_page(client, redis_url, database_url, db, tmp_path) as found:
        yield found


async def test_a_customer_signs_in_and_out(page: CustomerPage) -> None:
    """Wrong keys are rejected with a sentence. After the sign-out neither the page nor its storage has the key or its data.
    The examples have the address of the page.
    """
    tab, key = page.tab, page.keys["acme"]
    for wrong, sentence in (("tl_wrong", "The API key is not valid"), ("no key", "This is not an API key")):
        await page.sign_in(wrong)
        await tab.until(f"{FAULT}.startsWith('{sentence}')", "the rejection")
        assert await tab.value(f"{SIGNED_IN} || sessionStorage.length > 0") is False
    tab.faults.clear()  # A browser counts every 401 as a fault.
    await page.opened("acme")
    await tab.value("window.before = true; location.reload(); true")
    await tab.until(f"!window.before && document.readyState === 'complete' && {SIGNED_IN}", "the reload")
    assert await tab.value("[document.cookie, location.href, localStorage.length].join()") == f",{page.stack.url}/,0"
    examples = await tab.value("[...document.querySelectorAll('#examples-title ~ pre')].map(each => each.textContent)")
    assert [example.count(page.stack.url) for example in examples] == [1, 1]
    assert await tab.value(f"document.documentElement.outerHTML.includes({key!r})") is False

    await tab.until(text("keys"), "the keys")
    await click(tab, "#sign-out")
    assert await tab.value(f"{SIGNED_IN} || sessionStorage.length > 0") is False
    places = ("limits", "keys", "jobs", "who", "curl", "model")
    assert await tab.value(f"{json.dumps(places)}.map(id => document.getElementById(id).textContent).join('')") == ""
    assert await tab.value("document.querySelectorAll('#usage table').length") == 0
    await tab.value("window.before = true; location.reload(); true")
    await tab.until("!window.before && document.readyState === 'complete' && !!window.uPlot", "the reload")
    assert await tab.value(SIGNED_IN) is False
    assert tab.faults == []


async def test_a_key_with_a_low_rate_sees_all(page: CustomerPage, db: Connection) -> None:
    """What its limit rejects for a short time is read again."""
    await db.execute("UPDATE customers SET requests_per_second = 1, burst = 2 WHERE name = 'acme'")
    await eventually(lambda: _has_rate(page.stack, 1.0), "the limit is in force")
    await page.opened("acme")

    await page.tab.until(
        f"document.querySelectorAll('#model option').length && {text('keys')}.includes('first')", "all parts"
    )
    assert "is reached" not in await page.tab.value("document.body.innerText")


def _has_rate(stack: Stack, rate: float) -> bool:
    customers: Any = stack.catalog.snapshot.customers.values()
    return any(customer.name == "acme" and customer.limits[0] == rate for customer in customers)


async def test_limits_and_usage_are_shown(page: CustomerPage, db: Connection) -> None:
    """Each limit with what is used and when it resets; requests, tokens and cost by day, model and key; jobs."""
    await page.opened("acme")
    tab = page.tab
    limits = await tab.until(text("limits"), "the limits")
    for part in ("Request rate", "per second.", "Concurrent requests", "A request waits in the queue at most 2.5 s."):
        assert part in limits
    assert "Quota per day0 of 4 requests used" in limits
    assert "Budget per month0.00 of 100.00 USD used" in limits
    assert limits.count("Resets in ") == 2
    assert await tab.value("document.querySelectorAll('#limits progress').length") >= 4
    await tab.until("document.querySelectorAll('#usage canvas').length === 1", "the chart")
    tables = await tab.value("[...document.querySelectorAll('#usage .tables tbody tr')].map(each => each.innerText)")
    assert [row.split("\t")[0] for row in tables[:2]] == ["tiny", "key-1"]
    assert {tuple(row.split("\t")[1:4]) for row in tables} == {("1", "1,000", "0.3")}
    assert "no price" not in str(tables)
    assert "None." in await tab.value(text("jobs"))
    assert tab.faults == []


async def test_a_model_is_tried(page: CustomerPage) -> None:
    """Streamed and whole; with the time, the id, and a command without the key; a rejection is shown with its code."""
    await page.opened("acme")
    tab = page.tab
    await tab.value("document.getElementById('prompt').value = \"The sea's\"; true")
    await click(tab, "#send")
    streamed = await tab.until(f"{STATUS}.startsWith('Complete') && {STATUS}", "the stream")
    assert await tab.value(ANSWER) == "The sea's"[::-1]
    assert "first text after" in streamed
    assert "Request req_" in streamed
    await click(tab, "#stream")
    command = await tab.value(text("curl"))
    assert "Bearer $TIERLANE_API_KEY" in command
    assert """"prompt":"The sea'\\''s","max_tokens":64}'""" in command
    await click(tab, "#send")
    whole = await tab.until(f"{STATUS}.startsWith('Complete') && !{STATUS}.includes('first text') && {STATUS}", "whole")
    assert await tab.value(ANSWER) == "The sea's"[::-1]
    assert whole != streamed
    await tab.until(f"{text('limits')}.includes('2 of 4 requests used')", "the quota is refreshed")
    assert tab.faults == []

    async def rejected() -> Any:
        await click(tab, "#send")
        return await tab.until(f"!document.getElementById('send').disabled && ({text('try-fault')} || 'served')", "end")

    fault = await eventually(lambda: _unless_served(rejected), "the quota is used up")
    assert "(quota_exceeded)" in fault
    assert "Request req_" in await tab.value(STATUS)
    await tab.until("document.querySelector('.limit.full .used').textContent === '4 of 4 requests used'", "the bar")


async def _unless_served(rejected: Any) -> Any:
    found = await rejected()
    return None if found == "served" else found


async def test_a_key_is_created_shown_once_and_revoked(page: CustomerPage) -> None:
    """Its name is text, the secret leaves the page with Close, and the dialog of the revocation names it."""
    await page.opened("acme")
    tab = page.tab
    for field, value in (("key-name", HOSTILE), ("key-rate", "2"), ("key-quotas", "9/day, 7 tokens/week")):
        await tab.value(f"document.getElementById({field!r}).value = {value!r}; true")
    await click(tab, "#new-key button")
    key = await tab.until("document.querySelector('#key-shown code')?.textContent", "the key")
    await tab.until(f"{text('keys')}.includes({HOSTILE!r})", "it is listed")
    row = await tab.value("[...document.querySelector('#keys tbody tr').cells].map(each => each.textContent)")
    assert row[3:5] == ["2", "9/day, 7 tokens/week"]
    async with page.stack.http.get(f"{page.stack.url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as sent:
        assert sent.status in (200, 401)  # The catalog is followed within a second.
    await click(tab, "#key-shown button:last-of-type")
    assert await tab.value(f"document.documentElement.outerHTML.includes({key!r})") is False

    await click(tab, "#keys tbody tr button")
    dialog = await tab.until(
        "document.getElementById('dialog').open && document.getElementById('dialog').textContent", "?"
    )
    assert f"Revoke {HOSTILE}?" in dialog
    assert key[3:15] in dialog
    await click(tab, "#dialog-do")
    await tab.until(
        f"!document.getElementById('done').hidden && {text('done')}.endsWith('is revoked.')", "it is revoked"
    )
    assert "revoked" in await tab.value("document.querySelector('#keys tbody tr').textContent")
    assert tab.faults == []


async def test_a_revoked_key_is_signed_out(page: CustomerPage, db: Connection) -> None:
    """Once the gateway follows, the next request ends the session with the reason."""
    await page.opened("acme")
    await db.execute("UPDATE api_keys SET revoked_at = now() WHERE id = $1", page.keys["acme"][3:15])

    async def ended() -> bool:
        await click(page.tab, "#send")
        return bool(await page.tab.value(f"document.getElementById('account').hidden && {FAULT}"))

    await eventually(ended, "signed out")
    assert await page.tab.value("sessionStorage.length") == 0


async def test_no_state_of_the_page_violates_a_rule_of_axe(page: CustomerPage) -> None:
    """Signed out, wrong key, account in light, dark and on a phone, without the right to manage keys, and a dialog."""
    tab = page.tab
    await tab.until("document.readyState === 'complete' && !!document.getElementById('key')", "the form")
    found = {"signed out": await violations(tab)}
    await page.sign_in("tl_wrong")
    await tab.until(FAULT, "the rejection")
    found["wrong key"] = await violations(tab)
    await page.opened("plain")
    found["plain"] = await violations(tab)
    assert "This account does not manage its own keys" in await tab.value(text("keys"))
    assert await tab.value("document.getElementById('new-key').hidden")
    await click(tab, "#sign-out")
    await page.opened("acme")
    await click(tab, "#send")
    await tab.until(f"{STATUS}.startsWith('Complete')", "the answer")
    for name, (width, dark) in {"light": (1280, False), "dark": (1280, True), "phone": (360, True)}.items():
        await resize(tab, width, 800, dark=dark)
        found[name] = await violations(tab)
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth"), name
    await click(tab, "#keys tbody button")
    await tab.until("document.getElementById('dialog').open", "the dialog")
    found["dialog"] = await violations(tab)

    assert {name: rules for name, rules in found.items() if rules} == {}
