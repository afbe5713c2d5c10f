"""The page for admins in a real browser, served by a process of `tierlane admin`: each task of an admin, roles, accessibility."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from browser.test_dashboard_page import resize, violations
from chromium import Tab, chromium
from eventually import eventually
from gateway.admin_api.roles import ROLE_ACTIONS
from integration.admin_api_fixtures import AdminApi, add_requests
from integration.admin_fixtures import customer
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.admin.changes import changing
from ledger.admin.operators import create_operator
from load_balancers import answers
from stack import START_TIMEOUT_S, free_port

__all__ = ["database_url", "db", "postgres_server"]

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

Connection = Any
HOSTILE = "<img src=x onerror=alert(1)>"
OPEN = "document.getElementById('dialog').open"
DIALOG = f"{OPEN} && document.getElementById('dialog').innerText"
DONE = "!document.getElementById('done').hidden && document.getElementById('done').textContent"
PREVIEW = (
    "document.querySelector('#dialog h3')?.textContent === 'Preview' && document.getElementById('dialog').innerText"
)
FAULT = "document.getElementById('dialog-error').textContent"
VIEW = "document.getElementById('view-body').innerText"
FIELD = """
    (() => {{
      const label = [...document.querySelectorAll('#dialog label')].find((each) => each.textContent === {label!r});
      const field = document.getElementById(label.htmlFor);
      field.closest('details')?.setAttribute('open', '');
      field.value = {value!r};
      field.dispatchEvent(new Event('input', {{ bubbles: true }}));
      return true;
    }})()
"""
BUTTONS = (
    "[...document.querySelectorAll('#view button')].map(each => each.getAttribute('aria-label') ?? each.textContent)"
)
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}


class Page(NamedTuple):
    """The page in a browser, and a client of the same admin API."""

    tab: Tab
    api: AdminApi

    async def sign_in(self, role: str = "admin") -> None:
        await self.tab.until("!document.getElementById('sign-in')?.hidden", "the form")
        await self.tab.value(f"document.getElementById('token').value = {self.api.tokens[role]!r}; true")
        await self.tab.value("document.querySelector('#sign-in button').click(); true")
        await self.shows("Customers")
        self.tab.faults.clear()  # A browser counts every 401 as a fault; the first page was one.

    async def shows(self, title: str) -> None:
        """Wait for a view."""
        state = "[document.getElementById('view-title')?.textContent, document.getElementById('view-body')?.ariaBusy]"
        await self.tab.until(
            f"JSON.stringify({state}) === {json.dumps(json.dumps([title, None], separators=(',', ':')))}", title
        )

    async def go(self, place: str, title: str) -> None:
        await self.tab.value(f"location.hash = {place!r}; true")
        await self.shows(title)

    async def press(self, label: str) -> None:
        """Click the button of the view with this label."""
        found = f"[...document.querySelectorAll('#view button')][{BUTTONS}.indexOf({label!r})]"
        await self.tab.until(f"!!{found}", label)
        await self.tab.value(f"{found}.focus(); {found}.click(); true")

    async def dialog(self, label: str, **fields: str) -> None:
        """Open a dialog with a button of the view, and fill fields in."""
        await self.press(label)
        await self.tab.until(OPEN, "the dialog")
        await self.fill(**fields)

    async def fill(self, **fields: str) -> None:
        for name, value in fields.items():
            assert await self.tab.value(FIELD.format(label=name, value=value)), name

    async def carry_out(self) -> None:
        await self.tab.value("document.getElementById('dialog-do').click(); true")

    async def done(self, notice: str) -> None:
        """Carry out the action of the dialog, which must end with this notice."""
        await self.carry_out()
        await self.tab.until(f"!{OPEN} && ({DONE}) === {notice!r}", notice)

    async def key(self, name: str) -> None:
        code, text = KEYS[name]
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            key = {"type": kind, "key": name, "code": name, "windowsVirtualKeyCode": code}
            await self.tab.call("Input.dispatchKeyEvent", **key, **more)


@pytest.fixture
async def page(database_url: str, db: Connection, tmp_path: Path) -> AsyncIterator[Page]:
    """The page before the sign-in, of a process, with an operator for each role and the customer acme."""
    tokens = {}
    async with changing(db, "test", dry_run=False):
        for role in ROLE_ACTIONS:
            token, _ = await create_operator(db, role, role, None)
            tokens[role] = token.text
    await customer(db)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"TIERLANE_DATABASE_URL": database_url, "TIERLANE_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, "-P", "-m", "tierlane", "admin", "--admin-port", str(port)]
    with (tmp_path / "admin.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment)
    try:
        await eventually(lambda: answers(f"{url}/readyz"), "the admin API is ready", START_TIMEOUT_S)
        async with aiohttp.ClientSession() as http, chromium(tmp_path, f"{url}/admin/") as tab:
            await resize(tab, 1280, 900)
            yield Page(tab, AdminApi(url, tokens, http))
    finally:
        process.terminate()
        await process.wait()


async def test_a_customer_and_a_key_are_created_and_the_key_is_rotated(page: Page) -> None:
    """By keyboard where it is one key. A secret is shown once: with its dialog it leaves the page."""
    await page.sign_in()
    await page.dialog("Create customer", name="beta", tier="free")
    await page.key("Enter")
    await page.carry_out()
    await page.shows("Customer beta")
    assert (await page.api.done("GET", "/customers/beta"))["tier"] == "free"

    await page.dialog("Create key", name="ci", expires_in="90d")
    await page.carry_out()
    secret = await page.tab.until("document.getElementById('secret')?.value", "the secret")
    await page.tab.value("document.querySelector('#dialog-lines button').focus(); true")
    await page.key("Enter")
    await page.tab.until("document.getElementById('dialog-lines').textContent.includes('Copied.')", "the copy")
    await page.key("Escape")
    await page.tab.until(f"!{OPEN} && !document.documentElement.outerHTML.includes({secret!r})", "the secret has gone")
    assert not await page.tab.value("document.documentElement.outerHTML.includes('tl_')")
    await page.tab.until("document.activeElement.textContent === 'Create key'", "the focus is where it was")

    key_id = secret[3:15]
    await page.dialog(f"Rotate {key_id}", grace="2h")
    await page.carry_out()
    second = await page.tab.until("document.getElementById('secret')?.value", "the second secret")
    await page.key("Escape")
    await page.tab.until(f"!{OPEN} && {VIEW}.includes({second[3:15]!r})", "both keys")
    await page.dialog(f"Change or expire {second[3:15]}", expires_at="2126-01-01T00:00:00")
    await page.carry_out()
    await page.tab.until(PREVIEW, "the preview")
    await page.done(f"Key {second[3:15]} is changed.")
    await page.dialog(f"Revoke {key_id}")
    await page.done(f"Key {key_id} is revoked.")

    rows = {row["id"]: row for row in (await page.api.done("GET", "/keys?customer=beta"))["data"]}
    assert {name: row["state"] for name, row in rows.items()} == {key_id: "revoked", second[3:15]: "live"}
    assert rows[second[3:15]]["expires_at"].startswith("21")
    assert page.tab.faults == []
    assert await page.tab.value("document.cookie") == ""


async def test_a_budget_is_set_and_removed(page: Page, db: Connection) -> None:
    """A wrong one gets the sentence of the API at its field; then its bar has what was used."""
    acme = (await page.api.done("GET", "/customers/acme"))["id"]
    await add_requests(db, acme, 4)
    await db.execute("INSERT INTO prices (model, valid_from, usd_per_gpu_s) VALUES ('tiny', '2026-01-01', 2)")
    await page.sign_in()
    await page.go("customer?name=acme", "Customer acme")
    await page.dialog("Set quota or budget", quota="5 usd/moth")
    await page.carry_out()
    await page.tab.until(f"{FAULT}.startsWith('quota must be an amount')", "the sentence")
    assert await page.tab.value("document.activeElement.ariaInvalid") == "true"
    await page.fill(quota="5 usd/year")
    await page.done("The quota 5 usd/year of acme is set.")
    await page.tab.until(f"{VIEW}.includes('4.00 of 5.00 usd (80 %)')", "the bar")
    assert await page.tab.value("document.querySelector('.bar').className") == "bar near"
    await page.tab.until("document.querySelectorAll('canvas').length === 1", "the chart")
    await page.go("customers?search=ACM", "Customers")
    await page.tab.until(f"{VIEW}.includes('4.00 of 5.00 usd (80 %)')", "the bar in the list")
    await page.go("customer?name=acme", "Customer acme")
    await page.dialog("Remove 5 usd/year")
    await page.done("The quota 5 usd/year of acme is removed.")

    assert (await page.api.done("GET", "/quotas?customer=acme"))["data"] == []


async def test_a_failed_request_is_found_with_its_timeline(page: Page, db: Connection) -> None:
    """By customer, code and model, from the search or from the page of the customer."""
    acme = (await page.api.done("GET", "/customers/acme"))["id"]
    ids = await add_requests(db, acme, 4)
    await db.execute(
        "UPDATE requests SET queue_ms = 90, gpu_ms = 170, latency_ms = 300, completed_at = created_at + interval '300 ms'"
    )
    await page.sign_in()
    await page.go("requests", "Requests")
    await page.tab.until(f"{VIEW}.includes({ids[0]!r}) && {VIEW}.includes({ids[1]!r})", "all requests")
    filled = "document.querySelector('[name={}]').value = {!r};"
    values = {"customer": "acme", "error_code": "gpu_timeout", "model": "tiny", "from": "2026-01-01T00:00"}
    await page.tab.value("".join(filled.format(*each) for each in values.items()) + "true")
    await page.press("Search")
    await page.tab.until(f"{VIEW}.includes({ids[1]!r}) && !{VIEW}.includes({ids[0]!r})", "the failed ones")
    await page.tab.value("document.querySelector('td a').focus(); true")
    await page.key("Enter")
    await page.shows("Request")
    text = await page.tab.value(VIEW)

    assert "queue 90 ms · model 170 ms · other 40 ms" in text
    assert [line for line in ("accepted", "left the queue", "run ended", "failed") if line not in text] == []
    await page.go("customer?name=acme", "Customer acme")
    assert ids[1] in await page.tab.value(VIEW)
    await page.go("requests?customer=nobody", "Requests")
    assert await page.tab.value(VIEW) == "There is no customer named nobody."


async def test_a_worker_is_drained(page: Page, db: Connection) -> None:
    """It is in the list because of its requests, and stays there while it is cordoned."""
    acme = (await page.api.done("GET", "/customers/acme"))["id"]
    await add_requests(db, acme, 1)
    await db.execute("UPDATE requests SET worker_id = 'gpu-1'")
    await page.sign_in("operator")
    await page.go("workers", "Workers")
    await page.dialog("Cordon gpu-1")
    await page.tab.value("document.getElementById('dialog-reason').value = 'its fan is loud'; true")
    await page.done("gpu-1 is cordoned.")
    await page.tab.until(f"{VIEW}.includes('cordoned: its fan is loud')", "the state")
    rows = await db.fetch("SELECT worker, reason FROM cordons")
    await page.dialog("Uncordon gpu-1")
    await page.done("gpu-1 is uncordoned.")

    assert [tuple(row) for row in rows] == [("gpu-1", "its fan is loud")]
    assert await db.fetchval("SELECT count(*) FROM cordons") == 0
    assert page.tab.faults == []


async def test_of_two_operators_the_second_keeps_what_was_typed(page: Page) -> None:
    """The preview has the old and the new values. After a 412 the row is read again, and the other's change stays."""
    await page.sign_in()
    await page.go("customer?name=acme", "Customer acme")
    await page.dialog("Change tier, limits or models", tier="enterprise", burst="77")
    await page.carry_out()
    preview = await page.tab.until(PREVIEW, "the preview")
    assert "paid\tenterprise" in preview
    assert (await page.api.done("GET", "/customers/acme"))["tier"] == "paid"
    await page.api.done("PATCH", "/customers/acme", {"burst": 55, "max_concurrency": 9})

    await page.carry_out()
    await page.tab.until(f"{FAULT}.startsWith('Somebody else changed this')", "the 412")
    await page.carry_out()
    meanwhile = await page.tab.until(f"({DIALOG}).includes('Changed by somebody else') && ({DIALOG})", "the reload")
    assert ("burst\tnull\t55" in meanwhile, "max_concurrency\tnull\t9" in meanwhile) == (True, True)
    await page.carry_out()
    preview = await page.tab.until(PREVIEW, "the second preview")
    assert "burst\t55\t77" in preview
    await page.done("Customer acme is changed.")
    row = await page.api.done("GET", "/customers/acme")

    assert (row["tier"], row["burst"], row["max_concurrency"]) == ("enterprise", 77, 9)
    assert [fault for fault in page.tab.faults if "412" not in fault] == []


async def test_a_tier_is_changed_after_a_preview(page: Page) -> None:
    """A number that is none is marked before anything is sent."""
    await page.sign_in()
    await page.go("tier?name=free", "Tier free")
    before = await page.api.done("GET", "/tiers/free")
    await page.dialog("Change tier", burst="many")
    await page.carry_out()
    await page.tab.until(f"{FAULT} === 'burst must be a number.'", "the sentence")
    await page.fill(burst="123")
    await page.carry_out()
    await page.tab.until(f"({DIALOG}).includes('burst\\t{before['burst']:g}\\t123')", "the preview")
    await page.done("Tier free is changed.")

    assert await page.api.done("GET", "/tiers/free") == before | {"burst": 123}


async def test_what_the_role_does_not_allow_is_not_offered(page: Page) -> None:
    """With the role that it needs. A session that ends leads to the form; a wrong token is rejected."""
    await page.api.done("POST", "/keys", {"customer": "acme", "name": "ci"})
    await page.tab.until("!document.getElementById('sign-in')?.hidden", "the form")
    await page.tab.value(
        "document.getElementById('token').value = 'tlo_wrong'; document.querySelector('#sign-in button').click(); true"
    )
    await page.tab.until("document.getElementById('sign-in-fault').textContent.includes('not valid')", "the rejection")
    offered = {}
    for role in ROLE_ACTIONS:
        await page.sign_in(role)
        await page.go("customer?name=acme", "Customer acme")
        offered[role] = {each.partition(" ")[0] for each in await page.tab.value(BUTTONS)}
        if role == "viewer":
            assert "Your role viewer does not allow: Create key (needs admin)." in await page.tab.value(VIEW)
        await page.tab.value("location.hash = ''; document.getElementById('leave').click(); true")
    await page.sign_in("viewer")
    await page.api.done("DELETE", "/operators/viewer")
    await page.tab.value("location.hash = 'tiers'; true")
    await page.tab.until("document.getElementById('sign-in-fault').textContent.includes('sign in again')", "the end")

    assert offered["viewer"] == set()
    assert offered["operator"] == {"Suspend", "Revoke"}
    assert offered["admin"] == {"Change", "Suspend", "Set", "Create", "Rotate", "Revoke"}
    assert await page.tab.value(VIEW) == ""


async def test_no_state_violates_a_rule_of_axe(page: Page, db: Connection) -> None:
    """Each view in both schemes, at 1280 and 360 pixels, and dialogs; none is wider than its screen, and names are text."""
    hostile = await customer(db, HOSTILE)
    ids = await add_requests(db, hostile, 2)
    await page.api.done("POST", "/keys", {"customer": hostile, "name": HOSTILE})
    await page.api.done("POST", "/quotas", {"customer": hostile, "quota": "3/day"})
    found: dict[str, Any] = {}

    async def check(name: str) -> None:
        for width in (1280, 360):
            for dark in (False, True):
                await resize(page.tab, width, 800, dark=dark)
                fits = await page.tab.value("document.documentElement.scrollWidth <= innerWidth")
                found[f"{name} {width} {'dark' if dark else 'light'}"] = (await violations(page.tab), fits)

    await page.tab.until("!document.getElementById('sign-in')?.hidden", "the form")
    await check("sign-in")
    await page.sign_in()
    for place, title in (
        ("customers", "Customers"),
        (f"customer?name={hostile}", f"Customer {HOSTILE}"),
        ("requests", "Requests"),
        (f"request?id={ids[1]}", "Request"),
        ("tiers", "Tiers"),
        ("tier?name=paid", "Tier paid"),
        ("workers", "Workers"),
        ("customer?name=nobody", "Customer"),
    ):
        await page.go(place, title)
        await check(title)
    await page.go("tier?name=free", "Tier free")
    await page.dialog("Change tier", burst="12")
    await page.carry_out()
    await page.tab.until(PREVIEW, "the preview")
    await check("preview")

    assert {name: each for name, each in found.items() if each != ([], True)} == {}
    assert [fault for fault in page.tab.faults if "404" not in fault] == []
