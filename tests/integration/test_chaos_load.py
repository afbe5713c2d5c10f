"""The load of a chaos run against fake gateways: how each response, and none, is recorded in the history."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from aiohttp import web

from bench_stand_in import StandIn, error_answer, reversed_answer, started_stand_in
from eventually import eventually
from tierlane_tools.chaos.echo import SLOW_S, seconds_of
from tierlane_tools.chaos.history import (
    Answered,
    BatchCreated,
    BatchEnded,
    BatchFault,
    History,
    Invoked,
    LoadCustomer,
    Target,
    Unanswered,
)
from tierlane_tools.chaos.load import batches, final
from tierlane_tools.chaos.load import requests as load
from tierlane_tools.chaos.load.batches import BatchLoad
from tierlane_tools.chaos.load.requests import ChaosLoad
from tierlane_tools.chaos.load.saturation import SaturatingLoad

CUSTOMERS = tuple(
    LoadCustomer(tier=tier, id=f"{tier}-{number}", name=f"{tier}-{number}", key=f"tl_{tier}{number}_x")
    for tier in ("enterprise", "free")
    for number in range(2)
)


@pytest.fixture
async def gateways() -> AsyncIterator[list[StandIn]]:
    """Two fake gateways."""
    async with started_stand_in() as first, started_stand_in() as second:
        yield [first, second]


def target(gateways: list[StandIn]) -> Target:
    return Target(tuple(gateway.url for gateway in gateways), CUSTOMERS)


async def loaded(gateways: list[StandIn], rate: float = 200.0) -> History:
    history = History()
    await ChaosLoad(target(gateways), rate, 0.5, 1, history).run()
    return history


def of(history: History, kind: type) -> list:
    return [event for event in history.events if isinstance(event, kind)]


async def hang(number: int, text: str, request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return reversed_answer(text)


async def test_every_request_is_recorded(gateways: list[StandIn]) -> None:
    """Requests go to both gateways and come from all customers; customers share keys, but none uses a key twice."""
    history = await loaded(gateways, rate=800.0)
    sent, answers = of(history, Invoked), of(history, Answered)

    assert len(sent) == len(answers) == sum(gateway.number for gateway in gateways) > 100
    assert {event.gateway for event in sent} == {"gateway-1", "gateway-2"}
    assert {event.customer for event in sent} == {customer.id for customer in CUSTOMERS}
    assert len({event.nonce for event in sent}) == len({event.trace for event in sent}) == len(sent)
    assert all(event.owner == event.nonce and event.status == 200 for event in answers)
    keyed = [event for event in sent if event.key]
    users = {key: [event.customer for event in keyed if event.key == key] for key in {event.key for event in keyed}}
    assert 0.05 < len(keyed) / len(sent) < 0.4
    assert sum(len(several) > 1 for several in users.values()) > 5
    assert all(len(several) == len(set(several)) for several in users.values())


async def test_only_requests_with_a_key_are_retried(gateways: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset they are sent to the other gateway, with the same body; the others are not repeated."""
    monkeypatch.setattr(load, "RETRY_AFTER_S", 0.02)
    bodies: dict[tuple[str, str], set[str]] = {}

    async def reset(number: int, text: str, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return error_answer(500, "")

    async def answer(number: int, text: str, request: web.Request) -> web.Response:
        key = request.headers["Authorization"], request.headers.get("Idempotency-Key", "")
        bodies.setdefault(key, set()).add(text)
        return reversed_answer(text)

    gateways[0].behaviour, gateways[1].behaviour = reset, answer
    history = await loaded(gateways)
    keyed = {event.nonce for event in of(history, Invoked) if event.key}
    failed = of(history, Unanswered)
    answered = {event.nonce for event in of(history, Answered)}
    retries = [event for event in of(history, Invoked) if event.turn]

    assert {(event.kind, event.gateway) for event in failed} == {("reset", "gateway-1")}
    assert keyed <= answered
    assert {event.nonce for event in failed} - keyed == {event.nonce for event in of(history, Invoked)} - answered
    assert retries
    assert all(event.gateway == "gateway-2" and event.key for event in retries)
    assert all(len(texts) == 1 for (_, key), texts in bodies.items() if key)


async def test_timeouts_and_refused_connections(gateways: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is recorded with its wait; a request that could not be sent is recorded as refused."""
    monkeypatch.setattr(load, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(load, "PATIENCE_S", 0.1)
    gateways[0].behaviour = hang
    gateways[1].url = "http://127.0.0.1:1"
    history = await loaded(gateways)
    sent = {event.nonce: event for event in of(history, Invoked)}

    assert {event.gateway for event in sent.values()} == {"gateway-1"}
    kinds = {event.gateway: event.kind for event in of(history, Unanswered)}
    assert kinds == {"gateway-1": "timeout", "gateway-2": "refused"}
    waited = [event.at - sent[event.nonce].at for event in of(history, Unanswered) if event.kind == "timeout"]
    assert 0.3 <= min(waited) <= max(waited) < 1.0


async def test_the_final_load_ends_when_every_gateway_serves(
    gateways: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent again until then, or until its time is over."""
    monkeypatch.setattr(final, "ROUND_S", 0.2)

    async def reject_at_first(number: int, text: str, request: web.Request) -> web.Response:
        return reversed_answer(text) if number > 5 else error_answer(503, "no_capacity")

    gateways[0].behaviour = reject_at_first
    history = History()
    await final.final_load(target(gateways), 1, history)
    assert [event.status for event in of(history, Answered)].count(503) == 5
    assert gateways[0].number > 5

    monkeypatch.setattr(final, "FINAL_LOAD_PATIENCE_S", 0.5)
    gateways[0].url = "http://127.0.0.1:1"
    await final.final_load(target(gateways), 1, history)
    assert {event.gateway for event in of(history, Unanswered)} == {"gateway-1"}


async def test_an_interrupted_load_records_open_requests_as_stopped(gateways: list[StandIn]) -> None:
    """They are neither answered nor unanswered."""
    gateways[0].behaviour = hang
    history = History()
    load = ChaosLoad(target(gateways[:1]), 100.0, 60.0, 1, history)
    running = asyncio.create_task(load.run())
    await eventually(lambda: gateways[0].number, "a request is open")
    load.stop()
    await running

    assert {event.kind for event in of(history, Unanswered)} == {"stopped"}
    assert {event.nonce for event in of(history, Unanswered)} >= {event.nonce for event in of(history, Invoked)}


async def test_one_customer_sends_more_than_the_others(gateways: list[StandIn]) -> None:
    """In proportion to its part of the requests."""
    customers = (replace(CUSTOMERS[0], part=9.0), CUSTOMERS[1])
    history = History()
    await ChaosLoad(Target(target(gateways).http_urls, customers), 800.0, 0.5, 1, history).run()
    sent = Counter(event.customer for event in of(history, Invoked))

    assert sent[customers[0].id] > 4 * sent[customers[1].id] > 0


async def test_the_saturating_load_keeps_requests_open(gateways: list[StandIn]) -> None:
    """A customer has its number of requests open; rejected ones are sent again later; all runs are slow."""
    rejected, served = replace(CUSTOMERS[0], in_flight=3), replace(CUSTOMERS[1], in_flight=8)

    async def answer(number: int, text: str, request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        is_rejected = request.headers["Authorization"].endswith(rejected.key)
        return error_answer(503, "shed_for_priority") if is_rejected else reversed_answer(text)

    gateways[0].behaviour = gateways[1].behaviour = answer
    history = History()
    customers = (rejected, served, CUSTOMERS[2])
    await SaturatingLoad(Target(target(gateways).http_urls, customers), 1, history, seconds=1.5).run()
    sent = of(history, Invoked)
    own = {event.nonce for event in sent if event.customer == served.id}
    tries = [event for event in history.events if isinstance(event, Invoked | Answered) and event.nonce in own]
    steps = [1 if isinstance(event, Invoked) else -1 for event in tries]

    assert max(accumulate(steps)) == 8
    assert {event.customer for event in sent} == {rejected.id, served.id}
    assert 3 <= len(sent) - len(own) <= 12
    assert len(sent) == len(of(history, Answered))
    assert {seconds_of([f"{event.nonce}:1.0:"]) for event in sent} == {SLOW_S}


class FakeBatches:
    """The batch API of a fake gateway. `statuses`: of the next responses, 200 without one; `status`: of each batch."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.status = "completed"
        self.created: dict[str, dict[str, Any]] = {}

    async def handle(self, request: web.Request) -> web.Response:
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return error_answer(status, "no")
        if request.path == "/v1/files":
            return web.json_response({"id": "file-1", "form": (await request.post())["purpose"]})
        if request.method == "POST":
            new = {"id": f"batch_{len(self.created)}", "status": "in_progress", "request_counts": COUNTS}
            return web.json_response(self.created.setdefault(request.headers["Idempotency-Key"], new))
        if request.path == "/v1/batches":
            return web.json_response({"data": list(self.created.values()), "has_more": False})
        return web.json_response({"id": request.path.split("/")[-1], "status": self.status, "request_counts": COUNTS})


COUNTS = {"total": 150, "completed": 147, "failed": 3}
BATCHES = Target((), (), (CUSTOMERS[0],), "echo")


@pytest.fixture
async def fake_batches(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeBatches, Target]]:
    """A fake gateway, and a target with it and one that refuses connections."""
    monkeypatch.setattr(batches, "POLL_S", 0.01)
    fake, app = FakeBatches(), web.Application()
    app.router.add_route("*", "/{tail:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield fake, replace(BATCHES, http_urls=(f"http://127.0.0.1:{runner.addresses[0][1]}", "http://127.0.0.1:1"))
    finally:
        await runner.cleanup()


async def batch_events(target: Target, kind: type) -> list:
    """The events of the batches that are created until the first event of this kind."""
    history = History()
    load = BatchLoad(target, 1, history)
    running = asyncio.create_task(load.run())
    await eventually(lambda: of(history, kind), "a batch has this event")
    load.stop()
    await running
    return history.events


async def test_calls_of_batches_are_repeated(fake_batches: tuple[FakeBatches, Target]) -> None:
    """After 429, 503, 504 and refused connections; each batch is created once and ends with its counts."""
    fake, target = fake_batches
    fake.statuses = [503, 200, 504, 429, 200, 503]
    events = await batch_events(target, BatchEnded)
    created = [event for event in events if isinstance(event, BatchCreated)]
    ended = [event for event in events if isinstance(event, BatchEnded)]

    assert [event.batch for event in created] == [event.batch for event in ended]
    assert len(created) == len(fake.created) >= 1
    assert len(created[0].valid) + len(created[0].invalid) == batches.LINES
    assert (ended[0].status, ended[0].total, ended[0].completed, ended[0].failed) == ("completed", 150, 147, 3)
    assert not [event for event in events if isinstance(event, BatchFault)]


async def test_batches_that_get_no_service_are_faults(
    fake_batches: tuple[FakeBatches, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is not found, one that does not end in time after `stop`, and one that is not listed."""
    fake, target = fake_batches
    fake.statuses = [200, 200, 200, 404]
    events = await batch_events(target, BatchFault)
    assert [event.detail for event in events if isinstance(event, BatchFault)] == [
        'enterprise-0: GET /v1/batches/batch_0 got 404 {"error": {"message": "No.", "code": "no"}}.'
    ]

    monkeypatch.setattr(batches, "PATIENCE_S", 0.3)
    fake.status = "in_progress"
    events = await batch_events(target, BatchCreated)
    assert [type(event) for event in events] == [BatchCreated, BatchFault]
    assert "is still in_progress" in events[-1].detail

    fake.status = "completed"
    events = await batch_events(target, BatchEnded)
    assert events[-1].detail.endswith("are listed.")  # Those of the loads before are unknown to this one.
