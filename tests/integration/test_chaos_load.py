"""The load of a chaos run against fake gateways: how each response, and none, is recorded in the history."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from bench_stand_in import StandIn, error_answer, reversed_answer, started_stand_in
from eventually import eventually
from tierlane.chaos import load, scenario
from tierlane.chaos.history import Answered, History, Invoked, LoadCustomer, Target, Unanswered
from tierlane.chaos.load import ChaosLoad

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
    monkeypatch.setattr(scenario, "ROUND_S", 0.2)

    async def reject_at_first(number: int, text: str, request: web.Request) -> web.Response:
        return reversed_answer(text) if number > 5 else error_answer(503, "no_capacity")

    gateways[0].behaviour = reject_at_first
    history = History()
    await scenario.final_load(target(gateways), 1, history)
    assert [event.status for event in of(history, Answered)].count(503) == 5
    assert gateways[0].number > 5

    monkeypatch.setattr(scenario, "FINAL_LOAD_PATIENCE_S", 0.5)
    gateways[0].url = "http://127.0.0.1:1"
    await scenario.final_load(target(gateways), 1, history)
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
