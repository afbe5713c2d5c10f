"""The load of chaos against a stand-in for gateways: what each kind of answer, and none, becomes in the history."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from bench_stand_in import StandIn, error_answer, reversed_answer
from eventually import eventually
from tierlane.chaos import load, scenario
from tierlane.chaos.history import Answered, History, Invoked, LoadCustomer, Stray, Target, Unanswered
from tierlane.chaos.load import ChaosLoad

CUSTOMERS = tuple(
    LoadCustomer(tier=tier, id=f"{tier}-{number}", name=f"{tier}-{number}", key=f"tl_{tier}{number}_x")
    for tier in ("enterprise", "free")
    for number in range(2)
)


@pytest.fixture
async def gateways() -> AsyncIterator[list[StandIn]]:
    """Two of them."""
    runners, several = [], []
    for _ in range(2):
        stand_in = StandIn()
        application = web.Application()
        application.router.add_post("/v1/inference", stand_in.handle)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stand_in.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
        several.append(stand_in)
    yield several
    for runner in runners:
        await runner.cleanup()


async def loaded(gateways: list[StandIn], rate: float = 200.0, seconds: float = 0.5, seed: int = 1) -> History:
    history = History()
    await ChaosLoad(Target(tuple(g.url for g in gateways), CUSTOMERS), rate, seconds, seed, history).run()
    return history


def of(history: History, kind: type) -> list:
    return [event for event in history.events if isinstance(event, kind)]


async def test_every_request_is_noted_with_its_answer(gateways: list[StandIn]) -> None:
    """Sent over both gateways, all tiers and customers; a fifth with a key; each output is its own."""
    history = await loaded(gateways, rate=400.0)
    sent, answers = of(history, Invoked), of(history, Answered)

    assert len(sent) == len(answers) == sum(g.number for g in gateways) > 100
    assert {event.gateway for event in sent} == {"gateway-1", "gateway-2"}
    assert {event.customer for event in sent} == {customer.id for customer in CUSTOMERS}
    assert 0.05 < sum(bool(event.key) for event in sent) / len(sent) < 0.4
    assert len({event.nonce for event in sent}) == len({event.trace for event in sent}) == len(sent)
    assert all(event.owner == event.nonce and event.status == 200 for event in answers)


async def test_customers_use_the_same_keys_for_different_requests(gateways: list[StandIn]) -> None:
    """So that an answer that is kept under the key alone would reach another customer; no customer uses one twice."""
    sent = [event for event in of(await loaded(gateways, rate=800.0), Invoked) if event.key]
    users = {key: [event.customer for event in sent if event.key == key] for key in {event.key for event in sent}}

    assert sum(len(several) > 1 for several in users.values()) > 5
    assert all(len(several) == len(set(several)) for several in users.values())


async def test_the_same_seed_sends_the_same(gateways: list[StandIn]) -> None:
    """Customers, gateways and keys are drawn from the seed; the secrets are not."""
    first, again, other = [of(await loaded(gateways, seed=seed), Invoked) for seed in (7, 7, 8)]

    def drawn(events: list[Invoked]) -> list[tuple[str, str, bool]]:
        # Sorted, because each is sent when there is a connection for it.
        return sorted((event.customer, event.gateway, bool(event.key)) for event in events)

    assert drawn(first) == drawn(again) != drawn(other)
    assert not {event.nonce for event in first} & {event.nonce for event in again}


async def test_only_requests_with_a_key_are_tried_again(
    gateways: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset is indeterminate: with a key the client asks the other gateway, with the same body; else it gives up."""
    monkeypatch.setattr(load, "RETRY_AFTER_S", 0.02)
    bodies: dict[tuple[str, str], set[str]] = {}

    async def reset(number: int, text: str, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return error_answer(500, "")

    async def answer(number: int, text: str, request: web.Request) -> web.Response:
        whose = request.headers["Authorization"], request.headers.get("Idempotency-Key", "")
        bodies.setdefault(whose, set()).add(text)
        return reversed_answer(text)

    gateways[0].behaviour, gateways[1].behaviour = reset, answer
    history = await loaded(gateways)
    keyed = {event.nonce for event in of(history, Invoked) if event.key}
    silent = of(history, Unanswered)

    assert {event.kind for event in silent} == {"reset"}
    assert {event.gateway for event in silent} == {"gateway-1"}
    answered = {event.nonce for event in of(history, Answered)}
    assert keyed <= answered
    assert {event.nonce for event in silent} - keyed == {e.nonce for e in of(history, Invoked)} - answered
    again = [event for event in of(history, Invoked) if event.turn]
    assert again
    assert all(event.gateway == "gateway-2" and event.key for event in again)
    assert all(len(texts) == 1 for (_, key), texts in bodies.items() if key)


async def test_a_client_that_is_told_to_wait_asks_again(
    gateways: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """409: the first try is still running; until its patience is over the client comes back."""
    monkeypatch.setattr(load, "RETRY_AFTER_S", 0.02)
    told: set[str] = set()

    async def running_first(number: int, text: str, request: web.Request) -> web.Response:
        key = request.headers.get("Idempotency-Key", "")
        if key and key not in told:
            told.add(key)
            return error_answer(409, "idempotency_in_progress")
        answer = reversed_answer(text)
        answer.headers["Idempotent-Replayed"] = "true"
        return answer

    for gateway in gateways:
        gateway.behaviour = running_first
    answers = of(await loaded(gateways), Answered)

    assert told
    assert sum(event.status == 409 for event in answers) == len(told)
    assert all(event.status == 200 and event.replayed for event in answers if event.turn == 1)


async def test_no_answer_and_no_gateway(gateways: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is told with the time that was waited; what could not be sent is told as refused."""
    monkeypatch.setattr(load, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(load, "PATIENCE_S", 0.1)

    async def hang(number: int, text: str, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return reversed_answer(text)

    gateways[0].behaviour = hang
    gateways[1].url = "http://127.0.0.1:1"
    history = await loaded(gateways)
    sent = {event.nonce: event for event in of(history, Invoked)}

    assert {event.gateway for event in sent.values()} == {"gateway-1"}
    kinds = {event.gateway: event.kind for event in of(history, Unanswered)}
    assert kinds == {"gateway-1": "timeout", "gateway-2": "refused"}
    waited = [event.at - sent[event.nonce].at for event in of(history, Unanswered) if event.kind == "timeout"]
    assert 0.3 <= min(waited) <= max(waited) < 1.0


async def test_foreign_and_broken_outputs(gateways: list[StandIn]) -> None:
    """The nonce of another request is noted; a text that is mixed of two is nobody's; what is no HTTP is a stray."""
    others: list[str] = []

    async def crossed(number: int, text: str, request: web.Request) -> web.Response:
        others.append(text)
        if number == 1:
            return reversed_answer(text)
        if number == 2:
            return reversed_answer(others[0])
        if number == 3:
            return reversed_answer(text + "!")
        assert request.transport is not None
        request.transport.write(b"nonsense\r\n\r\n")
        return reversed_answer(text)

    gateways[0].behaviour = crossed
    history = await loaded(gateways[:1], rate=20.0)
    answers = of(history, Answered)

    assert answers[0].owner == answers[0].nonce
    assert answers[1].owner == others[0].partition(":")[0] != answers[1].nonce
    assert answers[2].owner == "?"
    strays = of(history, Stray)
    assert strays
    assert {event.nonce for event in of(history, Unanswered)} >= {event.nonce for event in strays}


async def test_an_encore_lasts_until_every_gateway_serves(
    gateways: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that refuses is asked again and again, until it serves or patience is over."""
    monkeypatch.setattr(scenario, "ROUND_S", 0.2)

    async def refuse_at_first(number: int, text: str, request: web.Request) -> web.Response:
        return reversed_answer(text) if number > 5 else error_answer(503, "no_capacity")

    gateways[0].behaviour = refuse_at_first
    history = History()
    await scenario.encore(Target(tuple(g.url for g in gateways), CUSTOMERS), 1, history)
    assert [event.status for event in of(history, Answered)].count(503) == 5
    assert gateways[0].number > 5

    monkeypatch.setattr(scenario, "FINAL_LOAD_PATIENCE_S", 0.5)
    gateways[0].url = "http://127.0.0.1:1"
    await scenario.encore(Target(tuple(g.url for g in gateways), CUSTOMERS), 1, history)
    assert {event.gateway for event in of(history, Unanswered)} == {"gateway-1"}


async def test_stopped_early(gateways: list[StandIn]) -> None:
    """What is under way when the run is interrupted is neither answered nor not."""

    async def hang(number: int, text: str, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return reversed_answer(text)

    gateways[0].behaviour = hang
    history = History()
    load = ChaosLoad(Target((gateways[0].url,), CUSTOMERS), 100.0, 60.0, 1, history)
    running = asyncio.create_task(load.run())
    await eventually(lambda: gateways[0].number, "a request is under way")
    load.stop()
    await running

    assert {event.kind for event in of(history, Unanswered)} == {"stopped"}
    assert load.counts["stopped"] == load.sent
