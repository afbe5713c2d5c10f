"""Alerts at shares of a budget, with real servers: one event for each share and period, across SIGKILL of the sender."""

import asyncio
import base64
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from admin import NO_LIMITS, NewCustomer, add_customer, announced, sql
from eventually import eventually
from gateway.jobs.webhook_security import customer_key, installation_key, secret_bytes, signed
from stack import Stack, free_port, start_stack

pytestmark = pytest.mark.timeout(240)

BUDGET, CALLS = 100, 1000
SECRET = "whsec_" + base64.b64encode(b"a secret of thirty-two bytes 123").decode()
DEPLOYMENT = secret_bytes(SECRET)


@dataclass
class Receiver:
    """A server for alerts of a customer (/customer) and of the installation: it holds calls until the gate is open."""

    arrived: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.arrived.append((request.path, headers, await request.read()))
        await self.gate.wait()
        return web.Response(status=204)

    def ids(self, path: str) -> Counter[str]:
        """How often each event arrived."""
        return Counter(headers["webhook-id"] for at, headers, _ in self.arrived if at == path)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Stack]:
    """Two gateways that share a port, and may send alerts to the receiver."""
    environment = {
        "TIERLANE_CALLBACK_HOSTS": f"127.0.0.1:{port}",
        "TIERLANE_CALLBACK_SECRET": SECRET,
        "TIERLANE_CALLBACK_PRIVATE_ADDRESSES": "1",
        "TIERLANE_ALERT_URL": f"http://127.0.0.1:{port}/installation",
    }
    options = ("--backend", "simulated:1", "--gateways", "2", "--workers", "1")
    with start_stack(tmp_path_factory.mktemp("alerts"), *options, environment=environment) as running:
        yield running


@pytest.fixture
async def receiver(port: int) -> AsyncIterator[Receiver]:
    found = Receiver()
    app = web.Application()
    app.router.add_post("/{any:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield found
    found.gate.set()
    await runner.cleanup()


async def budgeted(stack: Stack, port: int) -> NewCustomer:
    """A customer with a budget that all gateways know."""
    url = f"http://127.0.0.1:{port}/customer"
    who = await add_customer(stack, "budgeted", "enterprise", **NO_LIMITS, max_queue_ms=60_000, alert_url=url)
    await sql(stack, "INSERT INTO quotas (customer_id, quota) VALUES ($1, $2)", who.id, f"{BUDGET}/month")
    seen = 0

    async def is_known() -> bool:
        nonlocal seen
        policy = (await announced(stack.url, who.headers)).get("RateLimit-Policy", "")
        seen = seen + 1 if f'"month";q={BUDGET};' in policy else 0
        return seen >= 20

    await eventually(is_known, "both gateways know the budget", 30.0)
    return who


async def call_all(stack: Stack, who: NewCustomer) -> Counter[str]:
    """The outcomes of concurrent calls, each on a connection of its own."""
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def call() -> str:
            body = {"input": "one two"}
            async with session.post(f"{stack.url}/v1/inference", json=body, headers=who.headers) as response:
                document = await response.json(content_type=None)
                return "completed" if response.status == 200 else str(document["error"]["code"])

        return Counter(await asyncio.gather(*(call() for _ in range(CALLS))))


async def alerts(stack: Stack, who: NewCustomer) -> list[dict[str, Any]]:
    rows = await sql(stack, "SELECT * FROM quota_alerts WHERE customer_id = $1 ORDER BY share", who.id)
    return [dict(row) for row in rows]


def kill_gateways(stack: Stack) -> None:
    for pid in stack.pids("gateway").values():
        os.kill(pid, signal.SIGKILL)


async def test_one_event_for_each_share_across_sigkill_of_the_sender(
    stack: Stack, receiver: Receiver, port: int
) -> None:
    """1,000 concurrent calls with a budget of 100: none too many is admitted. Both gateways are killed while alerts are being sent."""
    await stack.healthy(1)
    who = await budgeted(stack, port)

    outcomes = await call_all(stack, who)
    await eventually(lambda: len(receiver.arrived) > 0, "an alert is being sent", 20.0)
    interrupted = set(receiver.ids("/customer") + receiver.ids("/installation"))
    kill_gateways(stack)
    receiver.gate.set()

    async def all_sent() -> bool:
        found = await alerts(stack, who)
        return len(found) == 2 and all(row["due_at"] is None and row["pending"] == [] for row in found)

    await eventually(all_sent, "all alerts are sent", 90.0)
    rows = await alerts(stack, who)
    assert outcomes == {"completed": BUDGET, "quota_exceeded": CALLS - BUDGET}
    assert [(row["share"], row["quota"], row["amount"]) for row in rows] == [(0.8, "1month", 100), (1.0, "1month", 100)]
    assert all(row["used"] >= row["share"] * BUDGET for row in rows)
    ids = {row["id"] for row in rows}
    assert set(receiver.ids("/customer")) == set(receiver.ids("/installation")) == ids
    assert interrupted <= ids
    assert (
        max((receiver.ids("/customer") + receiver.ids("/installation")).values()) > 1
    )  # Sent again, with the same id.
    for path, headers, body in receiver.arrived:
        key = customer_key(DEPLOYMENT, who.id) if path == "/customer" else installation_key(DEPLOYMENT)
        assert headers.items() >= signed([key], headers["webhook-id"], int(headers["webhook-timestamp"]), body).items()
        document = json.loads(body)
        data = document["data"]
        assert (document["type"], data["customer"], data["quota"]) == ("quota.share_reached", "budgeted", "month")
        assert (data["unit"], data["amount"], data["share"] in (0.8, 1.0)) == ("requests", BUDGET, True)


async def test_reached_shares_are_shown_to_the_customer(stack: Stack) -> None:
    """GET /v1/me has the shares of the present period. Runs after the test above."""
    (row,) = await sql(stack, "SELECT id FROM customers WHERE name = 'budgeted'")
    (issued,) = await sql(stack, "SELECT issue_api_key('budgeted', 'second') AS key")
    who = NewCustomer(str(row["id"]), "budgeted", issued["key"])

    async def shown() -> Any:
        async with aiohttp.ClientSession(headers=who.headers) as session, session.get(f"{stack.url}/v1/me") as response:
            return (await response.json())["usage"] if response.status == 200 else None

    usage = await eventually(shown, "the account is shown", 20.0)
    assert [(alert["quota"], alert["share"]) for alert in usage["alerts"]] == [("month", 0.8), ("month", 1.0)]
