"""Callbacks through a real gateway to a real receiver: delivery, signatures, retries, allowed hosts."""

import asyncio
import base64
import contextlib
import json
import math
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from redis.asyncio import Redis

from eventually import eventually
from gateway.jobs import webhooks
from gateway.jobs.webhook_security import customer_key, secret_bytes, secret_text, signed
from integration.jobs_bench import JobBench, JobCatalog, customer_id, running_jobs
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Db = asyncpg.Connection
SECRET = "whsec_" + base64.b64encode(b"a secret of thirty-two bytes 123").decode()


@dataclass
class Receiver:
    """A customer's server: keeps what it is sent, and answers `statuses` in turn, the last for ever."""

    port: int = 0
    statuses: list[int] = field(default_factory=lambda: [204])
    calls: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # Nobody is answered before it is open.
    inside: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.inside += 1
        await self.gate.wait()
        self.inside -= 1
        self.calls.append((dict(request.headers), await request.read()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?a=b"


@contextlib.asynccontextmanager
async def receiving(addresses: int = 1) -> AsyncIterator[Receiver]:
    """At 127.0.0.1 and so many addresses that follow it, one port."""
    receiver = Receiver()
    receiver.gate.set()
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.port = runner.addresses[0][1]
    for number in range(2, addresses + 1):
        await web.TCPSite(runner, f"127.0.0.{number}", receiver.port).start()
    yield receiver
    await runner.cleanup()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A server that is called back."""
    async with receiving() as running:
        yield running


def told_to(receiver: Receiver, **changes: Any) -> dict[str, Any]:
    """The configuration under which this receiver is called."""
    hosts = (f"127.0.0.1:{receiver.port}",)
    return {"callback_hosts": hosts, "callback_secret": secret_bytes(SECRET), "private_addresses": True} | changes


@pytest.fixture
async def bench(
    client: Redis, redis_url: str, database_url: str, db: Db, receiver: Receiver
) -> AsyncIterator[JobBench]:
    """A gateway that may call the receiver."""
    async with running_jobs(client, redis_url, database_url, db, jobs=told_to(receiver)) as running:
        yield running


def secret_of(tier_name: str) -> str:
    """What the receiver of this tier's customer is given."""
    return secret_text(customer_key(secret_bytes(SECRET), customer_id(tier_name)))


def signed_by(headers: dict[str, str], body: bytes) -> set[str]:
    """Whose secrets signed it, as the specification has a receiver find out, with another library's HMAC."""
    content = headers["webhook-id"].encode() + b"." + headers["webhook-timestamp"].encode() + b"." + body
    found = set()
    for name, secret in {"deployment": SECRET, "free": secret_of("free"), "paid": secret_of("paid")}.items():
        mac = HMAC(base64.b64decode(secret.removeprefix("whsec_")), SHA256())
        mac.update(content)
        if f"v1,{base64.b64encode(mac.finalize()).decode()}" in headers["webhook-signature"].split(" "):
            found.add(name)
    return found


async def test_an_end_is_told_and_signed(bench: JobBench, receiver: Receiver) -> None:
    """A callback has the document of GET with the task id, is signed as in Standard Webhooks, and is sent once."""
    task_id = await bench.accepted({"input": "hello", "callback_url": receiver.url})
    await eventually(lambda: receiver.calls, "the receiver is called")
    headers, body = receiver.calls[0]
    lower = {name.lower(): value for name, value in headers.items()}

    assert json.loads(body) == {"task_id": task_id, **(await bench.get(task_id))[1]}
    assert json.loads(body)["output"] == "olleh"
    assert (lower["webhook-id"], lower["content-type"]) == (task_id, "application/json")
    assert signed_by(lower, body) == {"free"}

    async def done() -> bool:
        row = await bench.row(task_id)
        return row["callback_at"] is None and row["callback_tries"] == 1

    await eventually(done, "it is noted")
    assert len(receiver.calls) == 1


async def test_it_is_tried_again(bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback is retried after an error and after a redirect, with the same id."""
    monkeypatch.setattr(webhooks, "DELAYS_S", (0.01, 0.01, 0.01))
    receiver.statuses = [500, 302, 200]
    task_id = await bench.accepted({"input": "hello", "callback_url": receiver.url})

    async def told() -> bool:
        return (await bench.row(task_id))["callback_tries"] == 3

    await eventually(told, "it was tried three times")
    assert [headers["webhook-id"] for headers, _ in receiver.calls] == [task_id] * 3
    assert (await bench.row(task_id))["callback_at"] is None


async def test_it_is_given_up(bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no attempt after the last delay; the result can be read."""
    monkeypatch.setattr(webhooks, "DELAYS_S", (0.01,))
    receiver.statuses = [503]
    task_id = await bench.accepted({"input": "hello", "callback_url": receiver.url})

    async def given_up() -> bool:
        row = await bench.row(task_id)
        return row["callback_tries"] == 2 and row["callback_at"] is None

    await eventually(given_up, "it is given up")
    assert len(receiver.calls) == 2
    assert (await bench.get(task_id))[1]["status"] == "SUCCESS"


async def test_a_keeper_that_dies_leaves_it_to_the_next(bench: JobBench, receiver: Receiver, db: Db) -> None:
    """Due callbacks are in the rows, so the next active gateway sends them."""
    callbacks = bench.serving.callbacks
    callbacks._pool = "none"  # It finds nothing to tell.
    task_id = await bench.accepted({"input": "hello", "callback_url": receiver.url})
    await bench.ended(task_id)
    assert (await bench.row(task_id))["callback_at"] is not None
    callbacks._pool = "default"
    await db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()"
    )

    await eventually(lambda: receiver.calls, "the receiver is called")


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/", 7],
)
async def test_where_callbacks_do_not_go(bench: JobBench, url: object) -> None:
    """A URL that is not allowed gets a 400 that names the field, and no job is stored."""
    status, document, _ = await bench.submit({"input": "hello", "callback_url": url})

    assert (status, document["error"]["code"], document["error"]["param"]) == (400, "invalid_request", "callback_url")
    assert not await bench.db.fetchval("SELECT count(*) FROM jobs")


async def test_only_jobs_have_callbacks(bench: JobBench, receiver: Receiver) -> None:
    """A synchronous request with `callback_url` gets a 400."""
    status, document, _ = await bench.stack.infer({"input": "hello", "callback_url": receiver.url})

    assert (status, document["error"]["param"]) == (400, "callback_url")


async def test_another_url_is_another_body(bench: JobBench, receiver: Receiver) -> None:
    """The same Idempotency-Key with another URL gets a 422."""
    key = {"Idempotency-Key": "order-81"}
    body = {"input": "hello", "callback_url": receiver.url}
    first = await bench.submit(body, **key)
    again = await bench.submit(body, **key)
    other = await bench.submit(body | {"callback_url": receiver.url + "2"}, **key)

    assert (again[0], again[1]) == (202, first[1])
    assert (other[0], other[1]["error"]["code"]) == (422, "idempotency_key_reused")


async def test_private_addresses_are_not_called(
    client: Redis, redis_url: str, database_url: str, db: Db, receiver: Receiver
) -> None:
    """A private address is rejected at submission, and a name that resolves to one is not connected to."""
    hosts = (f"localhost:{receiver.port}", f"127.0.0.1:{receiver.port}")
    jobs = told_to(receiver, callback_hosts=hosts, private_addresses=False)
    async with running_jobs(client, redis_url, database_url, db, jobs=jobs) as bench:
        status, document, _ = await bench.submit({"input": "hello", "callback_url": receiver.url})
        assert (status, document["error"]["param"]) == (400, "callback_url")
        assert "not public" in document["error"]["message"]
        task_id = await bench.accepted({"input": "hello", "callback_url": f"http://localhost:{receiver.port}/"})

        async def tried() -> bool:
            return bool((await bench.row(task_id))["callback_tries"])

        await eventually(tried, "it was tried")
    assert receiver.calls == []


async def test_a_customer_has_hosts_of_its_own(
    bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A customer's list applies to the next request and to accepted jobs; other customers keep the list of the deployment."""
    monkeypatch.setattr(webhooks, "DELAYS_S", (0.01, 0.01))
    catalog = bench.stack.catalog
    assert isinstance(catalog, JobCatalog)
    bench.stack.worker.hold = True
    body = {"input": "hello", "callback_url": receiver.url}
    before = await bench.accepted(body)
    catalog.give_hosts("free", "hooks.example.com")
    status, document, _ = await bench.submit(body)
    assert (status, document["error"]["param"]) == (400, "callback_url")
    paid = await bench.accepted(body, "paid")
    bench.stack.worker.hold = False
    await bench.ended(before)

    async def given_up() -> bool:
        return (await bench.row(before))["callback_at"] is None

    await eventually(given_up, "the job of before is not told")
    await eventually(lambda: receiver.calls, "the other customer's is")
    assert [json.loads(told)["task_id"] for _, told in receiver.calls] == [paid]
    catalog.give_hosts("free", f"127.0.0.1:{receiver.port}")
    await bench.accepted(body)


async def test_customers_have_hosts_where_the_deployment_has_none(
    client: Redis, redis_url: str, database_url: str, db: Db, receiver: Receiver
) -> None:
    """Without a list of the deployment only customers with a list have callbacks."""
    jobs = told_to(receiver, callback_hosts=())
    async with running_jobs(client, redis_url, database_url, db, jobs=jobs) as bench:
        catalog = bench.stack.catalog
        assert isinstance(catalog, JobCatalog)
        catalog.give_hosts("paid", f"127.0.0.1:{receiver.port}")
        body = {"input": "hello", "callback_url": receiver.url}
        assert (await bench.submit(body, "free"))[0] == 400
        await bench.accepted(body, "paid")
        await eventually(lambda: receiver.calls, "the receiver is called")

    headers, told = receiver.calls[0]
    assert signed_by({name.lower(): value for name, value in headers.items()}, told) == {"paid"}


async def test_the_deployments_secret_can_sign_as_well(
    client: Redis, redis_url: str, database_url: str, db: Db, receiver: Receiver
) -> None:
    """With the shared signature each callback has both signatures."""
    jobs = told_to(receiver, shared_signature=True)
    async with running_jobs(client, redis_url, database_url, db, jobs=jobs) as bench:
        await bench.accepted({"input": "hello", "callback_url": receiver.url})
        await eventually(lambda: receiver.calls, "the receiver is called")

    headers, told = receiver.calls[0]
    assert signed_by({name.lower(): value for name, value in headers.items()}, told) == {"free", "deployment"}


async def test_one_that_does_not_answer_leaves_room(
    bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of concurrent calls to a host is limited, and all callbacks are delivered."""
    monkeypatch.setattr(webhooks, "MAX_CALLS_PER_HOST", 2)
    receiver.gate.clear()
    ids = [await bench.accepted({"input": f"n {n}", "callback_url": receiver.url}) for n in range(6)]
    for task_id in ids:
        await bench.ended(task_id)
    await eventually(lambda: receiver.inside == 2, "two are inside")
    bench.serving.callbacks.wake()
    assert len(bench.serving.callbacks._calls) == 2
    receiver.gate.set()
    await eventually(lambda: len(receiver.calls) == 6, "all are told")

    assert sorted(json.loads(body)["task_id"] for _, body in receiver.calls) == sorted(ids)


async def test_a_customer_whose_hosts_do_not_answer_leaves_room(
    client: Redis, redis_url: str, database_url: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of concurrent calls of a customer is limited over all of its hosts, and other customers are not delayed."""
    monkeypatch.setattr(webhooks, "QUERY_ROWS", 3)
    monkeypatch.setattr(webhooks, "MAX_CALLS_PER_CUSTOMER", 2)
    async with receiving(addresses=5) as silent, receiving() as other:
        silent.gate.clear()
        urls = [f"http://127.0.0.{n}:{silent.port}/" for n in range(1, 6)]
        hosts = (*(urlsplit(url).netloc for url in urls), f"127.0.0.1:{other.port}")
        jobs = told_to(silent, callback_hosts=hosts)
        async with running_jobs(client, redis_url, database_url, db, jobs=jobs) as bench:
            for url in urls:
                await bench.ended(await bench.accepted({"input": "a", "callback_url": url}, "free"))
            await eventually(lambda: silent.inside == 2, "two are inside")
            task_id = await bench.accepted({"input": "b", "callback_url": other.url}, "paid")
            try:
                await eventually(lambda: other.calls, "the other is called", 3)
                assert silent.inside == 2
            finally:
                silent.gate.set()

    assert json.loads(other.calls[0][1])["task_id"] == task_id


async def test_one_that_does_not_answer_hides_nobody(
    client: Redis, redis_url: str, database_url: str, db: Db, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many due callbacks of one host do not hide those of another."""
    monkeypatch.setattr(webhooks, "QUERY_ROWS", 6)
    monkeypatch.setattr(webhooks, "MAX_CALLS_PER_HOST", 2)
    receiver.gate.clear()
    async with receiving() as other:
        jobs = told_to(receiver, callback_hosts=(f"127.0.0.1:{receiver.port}", f"localhost:{other.port}"))
        async with running_jobs(client, redis_url, database_url, db, jobs=jobs) as bench:
            for n in range(8):  # One host, whatever follows its name.
                url = f"http://127.0.0.1:{receiver.port:0{5 + n}}?{n}"
                await bench.ended(await bench.accepted({"input": "a", "callback_url": url}))
            await eventually(lambda: receiver.inside == 2, "two are inside")
            task_id = await bench.accepted({"input": "b", "callback_url": f"http://localhost:{other.port}/"})
            try:
                await eventually(lambda: other.calls, "the other is called", 3)
            finally:
                receiver.gate.set()

    assert json.loads(other.calls[0][1])["task_id"] == task_id


async def test_a_paused_host_costs_no_try(bench: JobBench, receiver: Receiver) -> None:
    """Callbacks to a paused host stay due without an attempt, and are sent after the pause."""
    paused = bench.serving.callbacks._paused
    name = f"{customer_id('free')} 127.0.0.1"
    paused.failed(name)
    paused._failed[name] = 1, math.inf
    task_id = await bench.accepted({"input": "a", "callback_url": receiver.url}, "free")
    await bench.ended(task_id)
    other = await bench.accepted({"input": "b", "callback_url": receiver.url}, "paid")
    await eventually(lambda: receiver.calls, "another customer's end is told")
    assert [json.loads(body)["task_id"] for _, body in receiver.calls] == [other]
    assert (await bench.row(task_id))["callback_tries"] == 0
    paused.responded(name)
    await eventually(lambda: len(receiver.calls) == 2, "its own is told")


@pytest.mark.parametrize("url", ["http://[", "http://127.1/"])
async def test_a_stored_url_that_cannot_be_read_ends_nobodys_callbacks(
    bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """A stored URL that cannot be parsed fails its own callback only."""
    monkeypatch.setattr(webhooks, "DELAYS_S", (0.01,))
    bench.stack.worker.hold = True
    bad = await bench.accepted({"input": "bad", "callback_url": receiver.url})
    await bench.db.execute("UPDATE jobs SET callback_url = $2 WHERE id = $1", bad, url)
    bench.stack.worker.hold = False
    await bench.ended(bad)
    good = await bench.accepted({"input": "good", "callback_url": receiver.url})
    await eventually(lambda: receiver.calls, "the good one is told")

    async def given_up() -> bool:
        return (await bench.row(bad))["callback_at"] is None

    await eventually(given_up, "the bad one is given up")
    assert [json.loads(body)["task_id"] for _, body in receiver.calls] == [good]


async def test_callbacks_that_end_are_started_again_and_health_says_so(
    bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the task ends, health names it within two seconds, and callbacks are still delivered."""
    look, broken = webhooks.Callbacks._start_due, [True]

    async def looking(self: webhooks.Callbacks, client: Any) -> None:
        if broken.pop() if broken else False:
            raise ZeroDivisionError
        await look(self, client)

    monkeypatch.setattr(webhooks.Callbacks, "_start_due", looking)
    bench.serving.callbacks.wake()
    task_id = await bench.accepted({"input": "hello", "callback_url": receiver.url})

    async def told() -> bool:
        _, document = await bench.stack.internal("/internal/health")
        return any("the task 'callbacks' ended with ZeroDivisionError" in reason for reason in document["reasons"])

    await eventually(told, "health names the task", 2.0)
    await eventually(lambda: receiver.calls, "the receiver is called")
    assert json.loads(receiver.calls[0][1])["task_id"] == task_id


async def test_a_fault_of_ours_in_telling_is_tried_again_later(
    bench: JobBench, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal fault counts as a failed attempt, which is retried."""
    monkeypatch.setattr(webhooks, "DELAYS_S", (0.01, 0.01))
    faults = [ZeroDivisionError(), ZeroDivisionError()]
    post = webhooks.Callbacks._post

    async def posting(self: webhooks.Callbacks, *args: Any) -> int | None:
        if faults:
            raise faults.pop()
        return await post(self, *args)

    monkeypatch.setattr(webhooks.Callbacks, "_post", posting)
    task_id = await bench.accepted({"input": "hello", "callback_url": receiver.url})
    await eventually(lambda: receiver.calls, "the receiver is called")

    async def noted() -> bool:
        return (await bench.row(task_id))["callback_tries"] == 3

    await eventually(noted, "all three tries are counted")


def page() -> str:
    """The page about jobs."""
    return (Path(__file__).resolve().parents[2] / "docs" / "jobs.md").read_text(encoding="utf-8")


async def test_the_page_says_how_a_receiver_verifies(bench: JobBench, receiver: Receiver) -> None:
    """The function in docs/jobs.md accepts a genuine callback, and rejects another secret, another body and an old one."""
    names: dict[str, Any] = {}
    exec(page().split("```python\n")[1].split("```")[0], names)
    is_genuine = names["is_genuine"]
    await bench.accepted({"input": "hello", "callback_url": receiver.url})
    await eventually(lambda: receiver.calls, "the receiver is called")
    headers, body = receiver.calls[0]
    lower = {name.lower(): value for name, value in headers.items()}

    assert is_genuine(secret_of("free"), lower, body)
    assert not is_genuine(secret_of("paid"), lower, body)
    assert not is_genuine(secret_of("free"), lower, body + b" ")
    old = signed([customer_key(secret_bytes(SECRET), customer_id("free"))], "m", int(time.time()) - 301, body)
    assert not is_genuine(secret_of("free"), old, body)


async def test_every_call_of_the_page_works_as_printed(bench: JobBench) -> None:
    """Each command of docs/jobs.md works in a shell with URL, KEY and TASK."""
    calls = [line.strip() for line in page().splitlines() if line.startswith("    curl ")]
    catalog = bench.stack.catalog
    assert isinstance(catalog, JobCatalog)
    catalog.give_hosts("free", "hooks.example.com")
    task_id = await bench.accepted({"input": "hello"})
    await bench.ended(task_id)
    shell = os.environ | {"URL": bench.stack.url, "KEY": catalog.keys["free"].text, "TASK": task_id}
    answers = []
    for call in calls:
        process = await asyncio.create_subprocess_shell(call, env=shell, stdout=asyncio.subprocess.PIPE)
        answers.append((await process.communicate())[0].decode())

    assert len(answers) == 4
    assert answers[0].startswith("HTTP/1.1 202 Accepted\r\n")
    assert [json.loads(answer)["status"] for answer in answers[1:]] == ["SUCCESS", "SUCCESS", "PENDING"]
