"""Webhooks from a gateway to a real receiver: delivery, signatures, retries, allowed hosts, and limits of calls."""

import asyncio
import base64
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from aiohttp import web

from eventually import eventually
from gateway.jobs import paused_hosts, webhooks
from gateway.jobs.webhook_security import customer_key, secret_bytes, secret_text, signed
from integration.jobs_fixtures import JobBench, StartJobs, customer_id, start_jobs
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server", "start_jobs"]

Db = asyncpg.Connection
SECRET = "whsec_" + base64.b64encode(b"a secret of thirty-two bytes 123").decode()
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "jobs.md").read_text("utf-8")


@dataclass
class Receiver:
    """A customer's server: it keeps the calls, and answers with each of `statuses` in turn, then with the last."""

    port: int = 0
    statuses: list[int] = field(default_factory=lambda: [204])
    calls: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # No call is answered before it is set.
    waiting: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        self.calls.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?a=b"

    @property
    def body(self) -> dict[str, Any]:
        """The body of a job that calls back here."""
        return {"input": "hello", "callback_url": self.url}

    @property
    def task_ids(self) -> list[str]:
        return [json.loads(body)["task_id"] for _, body in self.calls]

    def jobs(self, **changes: Any) -> dict[str, Any]:
        """The JobConfig that allows this receiver."""
        hosts = (f"127.0.0.1:{self.port}",)
        return {"callback_hosts": hosts, "callback_secret": secret_bytes(SECRET), "private_addresses": True} | changes


@contextlib.asynccontextmanager
async def receiving(addresses: int = 1) -> AsyncIterator[Receiver]:
    """A receiver on one port of 127.0.0.1 and of the addresses that follow it."""
    receiver = Receiver()
    receiver.gate.set()
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.port = runner.addresses[0][1]
    for number in range(2, addresses + 1):
        await web.TCPSite(runner, f"127.0.0.{number}", receiver.port).start()
    yield receiver
    receiver.gate.set()
    await runner.cleanup()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as running:
        yield running


@pytest.fixture
async def bench(start_jobs: StartJobs, receiver: Receiver) -> AsyncIterator[JobBench]:
    """A gateway that may call the receiver."""
    async with start_jobs(jobs=receiver.jobs()) as running:
        yield running


def secret_of(tier_name: str) -> str:
    """The webhook secret of this tier's customer."""
    return secret_text(customer_key(secret_bytes(SECRET), customer_id(tier_name)))


def is_genuine(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """The function of docs/jobs.md with which a receiver verifies a callback."""
    names: dict[str, Any] = {}
    exec(PAGE.split("```python\n")[1].split("```")[0], names)
    return bool(names["is_genuine"](secret, headers, body))


async def listed_callback(bench: JobBench, task_id: str) -> dict[str, Any] | None:
    """`callback` of a job in `GET /v1/jobs`."""
    async with bench.stack.http.get(f"{bench.stack.url}/v1/jobs", headers=bench.stack.key("free")) as response:
        (found,) = [item["callback"] for item in (await response.json())["data"] if item["id"] == task_id]
        return found  # type: ignore[no-any-return]


async def test_a_callback_is_sent_once_and_signed(bench: JobBench, receiver: Receiver) -> None:
    """It has the document of GET with the task id; the documented function accepts it with the customer's secret only."""
    task_id = await bench.accepted(receiver.body)
    await bench.until(task_id, lambda r: (r["callback_tries"], r["callback_at"]) == (1, None), "it is recorded")
    headers, body = receiver.calls[0]

    assert len(receiver.calls) == 1
    assert json.loads(body) == {
        "task_id": task_id,
        **(await bench.get(task_id))[1],
        "metadata": bench.metadata,
    }
    assert json.loads(body)["output"] == "olleh"
    assert (headers["webhook-id"], headers["content-type"]) == (task_id, "application/json")
    assert is_genuine(secret_of("free"), headers, body)
    assert not is_genuine(secret_of("paid"), headers, body)
    assert not is_genuine(SECRET, headers, body)
    assert not is_genuine(secret_of("free"), headers, body + b" ")
    old = signed([customer_key(secret_bytes(SECRET), customer_id("free"))], "m", int(time.time()) - 301, body)
    assert not is_genuine(secret_of("free"), old, body)


@pytest.mark.parametrize(
    ("statuses", "delays_s", "end"),
    [
        ([500, 302, 200], (0.01,) * 3, {"state": "delivered", "attempts": 3, "status": 200}),
        ([503, 503], (0.01,), {"state": "failed", "attempts": 2, "status": 503}),
    ],
    ids=["until it succeeds", "until the last delay"],
)
async def test_a_callback_is_retried(
    bench: JobBench,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    statuses: list[int],
    delays_s: tuple[float, ...],
    end: dict[str, Any],
) -> None:
    """An error and a redirect are retried with the same id; the list of jobs has the end; the result can be read in any case.

    The URL is part of the request that an Idempotency-Key selects.
    """
    tries = end["attempts"]
    monkeypatch.setattr(webhooks, "DELAYS_S", delays_s)
    receiver.statuses = statuses
    key = {"Idempotency-Key": "order-81"}
    task_id = await bench.accepted(receiver.body, **key)
    other = await bench.submit(receiver.body | {"callback_url": receiver.url + "2"}, **key)
    assert (other[0], other[1]["error"]["code"]) == (422, "idempotency_key_reused")

    await bench.until(task_id, lambda r: (r["callback_tries"], r["callback_at"]) == (tries, None), "no call is due")
    assert [headers["webhook-id"] for headers, _ in receiver.calls] == [task_id] * tries
    assert (await bench.get(task_id))[1]["status"] == "SUCCESS"
    assert await listed_callback(bench, task_id) == end


async def test_the_next_reconciler_sends_due_callbacks(bench: JobBench, receiver: Receiver, db: Db) -> None:
    """Due callbacks are stored in the rows, so they survive the active gateway."""
    callbacks = bench.serving.callbacks
    callbacks._pool = "none"  # It finds no callback.
    task_id = await bench.accepted(receiver.body)
    await bench.ended(task_id)
    assert (await bench.row(task_id))["callback_at"] is not None
    callbacks._pool = "default"
    await db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()"
    )

    await eventually(lambda: receiver.calls, "the receiver is called")


async def test_a_callback_url_that_is_not_allowed_is_rejected(bench: JobBench, receiver: Receiver) -> None:
    """Another host, and any URL of a synchronous request: a 400 names the field, and no job is stored."""
    other = await bench.submit({"input": "hello", "callback_url": "http://127.0.0.1:1/"})
    synchronous = await bench.stack.infer(receiver.body)

    for status, document, _ in (other, synchronous):
        assert (status, document["error"]["code"], document["error"]["param"]) == (
            400, "invalid_request", "callback_url",
        )  # fmt: skip
    assert not await bench.db.fetchval("SELECT count(*) FROM jobs")


async def test_private_addresses_are_not_called(start_jobs: StartJobs, receiver: Receiver) -> None:
    """A private address is rejected at submission, and an allowed name that resolves to one is not connected to."""
    hosts = (f"localhost:{receiver.port}", f"127.0.0.1:{receiver.port}")
    async with start_jobs(jobs=receiver.jobs(callback_hosts=hosts, private_addresses=False)) as bench:
        status, document, _ = await bench.submit(receiver.body)
        assert (status, document["error"]["param"]) == (400, "callback_url")
        task_id = await bench.accepted({"input": "hello", "callback_url": f"http://localhost:{receiver.port}/"})
        await bench.until(task_id, lambda row: row["callback_tries"] > 0, "the call was tried")
    assert receiver.calls == []


async def test_a_customer_can_have_its_own_hosts(
    bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A customer's list applies to new and to accepted jobs; other customers keep the list of the deployment."""
    monkeypatch.setattr(webhooks, "DELAYS_S", (0.01, 0.01))
    bench.stack.worker.hold = True
    before = await bench.accepted(receiver.body)
    bench.catalog.set_hosts("free", "hooks.example.com")
    status, document, _ = await bench.submit(receiver.body)
    assert (status, document["error"]["param"]) == (400, "callback_url")
    paid = await bench.accepted(receiver.body, "paid")
    bench.stack.worker.hold = False

    await bench.until(before, lambda row: row["callback_at"] is None and row["callback_tries"], "the calls have failed")
    await eventually(lambda: receiver.calls, "the other customer's callback is sent")
    assert receiver.task_ids == [paid]
    bench.catalog.set_hosts("free", f"127.0.0.1:{receiver.port}")
    await bench.accepted(receiver.body)


async def test_a_deployment_without_hosts_allows_those_of_customers(start_jobs: StartJobs, receiver: Receiver) -> None:
    """Customers without a list have no callbacks. With the shared signature each callback has two signatures."""
    async with start_jobs(jobs=receiver.jobs(callback_hosts=(), shared_signature=True)) as bench:
        bench.catalog.set_hosts("paid", f"127.0.0.1:{receiver.port}")
        assert (await bench.submit(receiver.body, "free"))[0] == 400
        await bench.accepted(receiver.body, "paid")
        await eventually(lambda: receiver.calls, "the receiver is called")

    secrets = (SECRET, secret_of("paid"), secret_of("free"))
    assert [is_genuine(secret, *receiver.calls[0]) for secret in secrets] == [True, True, False]


async def test_callbacks_are_signed_with_all_valid_secrets(bench: JobBench, receiver: Receiver, db: Db) -> None:
    """After a rotation with the new and the old one; once the grace time is over with the new one only."""
    await db.execute("UPDATE customers SET manages_keys = true")
    secrets = [(await bench.secret("GET"))[1]["secret"], (await bench.secret("POST", grace_s=3600))[1]["secret"]]
    await bench.accepted(receiver.body)
    await eventually(lambda: len(receiver.calls) == 1, "the receiver is called during the grace time")
    await db.execute("UPDATE customers SET webhook_secret_until = clock_timestamp()")
    await bench.accepted(receiver.body)
    await eventually(lambda: len(receiver.calls) == 2, "the receiver is called after the grace time")

    assert secrets[0] == secret_of("free")
    assert [[is_genuine(secret, *call) for secret in secrets] for call in receiver.calls] == [
        [True, True],
        [False, True],
    ]
    assert [len(headers["webhook-signature"].split()) for headers, _ in receiver.calls] == [2, 1]


async def test_a_webhook_secret_is_rotated(
    bench: JobBench, receiver: Receiver, db: Db, capfd: pytest.CaptureFixture[str]
) -> None:
    """By customers that manage their keys; a secret is not stored and not logged, and few are valid at a time."""
    forbidden = [await bench.secret("GET"), await bench.secret("POST")]
    await db.execute("UPDATE customers SET manages_keys = true")
    _, first = await bench.secret("GET")
    before = time.time()
    _, second = await bench.secret("POST")
    assert await bench.secret("GET") == (200, second)
    invalid = [await bench.secret("POST", **body) for body in ({"grace_s": 60}, {"grace_s": 604_801}, {"grace": 1})]
    later = await asyncio.gather(*(bench.secret("POST") for _ in range(4)))
    _, last = await bench.secret("GET")
    await db.execute("UPDATE customers SET webhook_secret_until = clock_timestamp()")
    _, alone = await bench.secret("GET")
    _, of_other = await bench.secret("GET", "paid")
    recorded = await db.fetch("SELECT changed_by, old, new FROM config_changes WHERE changed_by LIKE 'customer %'")

    assert [(status, document["error"]["code"]) for status, document in forbidden] == [(403, "permission_denied")] * 2
    assert (first["number"], first["earlier_valid_until"], second["number"]) == (1, None, 2)
    assert 86_390 < second["earlier_valid_until"] - before < 86_410
    assert {(status, document["error"]["code"]) for status, document in invalid} == {(400, "invalid_request")}
    assert sorted(status for status, _ in later) == [200, 200, 200, 429]
    assert {document["error"]["code"] for status, document in later if status == 429} == {"quota_exceeded"}
    assert alone == last | {"earlier_valid_until": None}
    assert (last["number"], of_other["number"], of_other["secret"]) == (5, 1, secret_of("paid"))
    secrets = {document["secret"] for document in (first, second, last)}
    assert len(secrets) == 3
    assert [row["changed_by"] for row in recorded] == ["customer free"] * 4
    assert not [secret for secret in secrets if secret in str(recorded) + "".join(capfd.readouterr())]


async def test_there_is_no_webhook_secret_without_that_of_the_deployment(
    start_jobs: StartJobs, receiver: Receiver, db: Db
) -> None:
    """404 with a sentence, and nothing is rotated."""
    async with start_jobs(jobs=receiver.jobs(callback_secret=b"")) as bench:
        await db.execute("UPDATE customers SET manages_keys = true")
        answers = [await bench.secret("GET"), await bench.secret("POST")]

    assert [(status, document["error"]["code"]) for status, document in answers] == [(404, "not_found")] * 2
    assert await db.fetchval("SELECT max(webhook_secret) FROM customers") == 1


async def test_without_a_secret_callbacks_are_refused(start_jobs: StartJobs, receiver: Receiver) -> None:
    """Also for a customer with hosts of its own."""
    async with start_jobs(jobs=receiver.jobs(callback_secret=b"")) as bench:
        bench.catalog.set_hosts("paid", f"127.0.0.1:{receiver.port}")
        answers = [await bench.submit(receiver.body, tier) for tier in ("free", "paid")]

    assert [(status, document["error"]["param"]) for status, document, _ in answers] == [(400, "callback_url")] * 2


async def test_a_host_that_does_not_respond_delays_no_other_host(
    start_jobs: StartJobs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent calls of a host are limited, and its many due callbacks do not hide others; all are sent in the end."""
    monkeypatch.setattr(webhooks, "QUERY_ROWS", 6)
    monkeypatch.setattr(webhooks, "MAX_CALLS_PER_HOST", 2)
    monkeypatch.setattr(paused_hosts, "MAX_CALLS_PER_HOST", 2)
    receiver.gate.clear()
    async with receiving() as other:
        jobs = receiver.jobs(callback_hosts=(f"127.0.0.1:{receiver.port}", f"localhost:{other.port}"))
        async with start_jobs(jobs=jobs) as bench:
            ids = []
            for n in range(8):  # The same host in other URLs.
                url = f"http://127.0.0.1:{receiver.port:0{5 + n}}?{n}"
                ids.append(await bench.accepted({"input": "a", "callback_url": url}))
                await bench.ended(ids[-1])
            await eventually(lambda: receiver.waiting == 2, "two calls wait")
            body = {"input": "b", "callback_url": f"http://localhost:{other.port}/"}
            task_id = await bench.accepted(body)
            await eventually(lambda: other.calls, "the other host is called", 3)
            assert (other.task_ids, receiver.waiting) == ([task_id], 2)
            receiver.gate.set()
            await eventually(lambda: len(receiver.calls) == 8, "all are sent")

    assert sorted(receiver.task_ids) == sorted(ids)


async def test_a_customer_whose_hosts_do_not_respond_delays_no_other_customer(
    start_jobs: StartJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent calls of a customer are limited over all of its hosts."""
    monkeypatch.setattr(webhooks, "QUERY_ROWS", 3)
    monkeypatch.setattr(webhooks, "MAX_CALLS_PER_CUSTOMER", 2)
    async with receiving(addresses=5) as silent, receiving() as other:
        silent.gate.clear()
        urls = [f"http://127.0.0.{n}:{silent.port}/" for n in range(1, 6)]
        hosts = (*(urlsplit(url).netloc for url in urls), f"127.0.0.1:{other.port}")
        async with start_jobs(jobs=silent.jobs(callback_hosts=hosts)) as bench:
            for url in urls:
                await bench.ended(await bench.accepted({"input": "a", "callback_url": url}, "free"))
            await eventually(lambda: silent.waiting == 2, "two calls wait")
            task_id = await bench.accepted(other.body, "paid")
            await eventually(lambda: other.calls, "the other customer's host is called", 3)
            assert (other.task_ids, silent.waiting) == ([task_id], 2)
            silent.gate.set()


async def test_a_paused_host_costs_no_attempt(bench: JobBench, receiver: Receiver) -> None:
    """Callbacks to a paused host of a customer stay due, and are sent after the pause."""
    paused = bench.serving.callbacks._paused
    name = f"{customer_id('free')} 127.0.0.1"
    paused.failed(name)
    paused._failed[name] = 1, math.inf
    task_id = await bench.accepted(receiver.body, "free")
    await bench.ended(task_id)
    other = await bench.accepted(receiver.body, "paid")
    await eventually(lambda: receiver.calls, "another customer's callback is sent")
    assert receiver.task_ids == [other]
    assert (await bench.row(task_id))["callback_tries"] == 0
    paused.responded(name)
    await eventually(lambda: len(receiver.calls) == 2, "its own is sent")


@pytest.mark.parametrize("url", ["http://[", "http://127.1/"])
async def test_a_stored_url_that_cannot_be_read_fails_alone(
    bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """A stored URL that cannot be parsed fails its own callback only."""
    monkeypatch.setattr(webhooks, "DELAYS_S", (0.01,))
    bench.stack.worker.hold = True
    bad = await bench.accepted(receiver.body)
    await bench.db.execute("UPDATE jobs SET callback_url = $2 WHERE id = $1", bad, url)
    bench.stack.worker.hold = False
    await bench.ended(bad)
    good = await bench.accepted(receiver.body)
    await eventually(lambda: receiver.calls, "the good callback is sent")

    await bench.until(bad, lambda row: row["callback_tries"] and row["callback_at"] is None, "the bad one has failed")
    assert receiver.task_ids == [good]


async def test_an_internal_fault_is_a_failed_attempt(
    bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted and retried."""
    monkeypatch.setattr(webhooks, "DELAYS_S", (0.01, 0.01))
    faults = [ZeroDivisionError(), ZeroDivisionError()]
    post = webhooks.Callbacks._post

    async def fails_twice(self: webhooks.Callbacks, *args: Any) -> int | None:
        if faults:
            raise faults.pop()
        return await post(self, *args)

    monkeypatch.setattr(webhooks.Callbacks, "_post", fails_twice)
    task_id = await bench.accepted(receiver.body)
    await eventually(lambda: receiver.calls, "the receiver is called")
    await bench.until(task_id, lambda row: row["callback_tries"] == 3, "all three attempts are counted")
