"""`Idempotency-Key` on `POST /v1/inference`, against a real Redis: replays, conflicts, and who may have a key again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import Stack, running_stack
from scheduler.protocol.audit_outbox import AcceptedRecord, decode_entry
from scheduler.protocol.batches import Outcome
from scheduler.redis_client.keys import Keys
from tierlane.embedded.redis import EmbeddedRedis

KEY = {"Idempotency-Key": '"order-77"'}
BODY = {"input": "hello", "parameters": {"seed": 1, "top": 2}}


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


async def accepted(stack: Stack) -> list[str]:
    """The ids that have an audit row."""
    entries = await stack.redis.lrange(Keys().outbox, 0, -1)
    records = [record for entry in reversed(entries) for record in decode_entry(entry)[0]]
    return [record.id for record in records if isinstance(record, AcceptedRecord)]


def code_of(document: dict[str, Any]) -> str:
    return str(document["error"]["code"])


async def test_the_same_key_and_body_replay_the_answer(stack: Stack) -> None:
    """One run and one audit row, whose id both answers name; the bare form and another layout are the same."""
    first = await stack.infer(BODY, **KEY)
    again = await stack.infer(
        b'{ "parameters": {"top": 2, "seed": 1}, "input": "hello" }', **{"Idempotency-Key": "order-77"}
    )

    assert (first[0], again[0]) == (200, 200)
    assert again[1]["output"] == first[1]["output"] == "olleh"
    assert again[1]["request_id"] == again[2]["x-request-id"] == first[1]["request_id"]
    assert (again[2]["idempotent-replayed"], "idempotent-replayed" in first[2]) == ("true", False)
    assert "x-ratelimit-remaining-requests" in again[2]
    assert again[1]["metadata"]["attempts"] == 1
    assert len(stack.worker.seen) == 1
    assert await accepted(stack) == [first[1]["request_id"]]


async def test_another_body_under_the_key_is_refused(stack: Stack) -> None:
    """422 that is not worth repeating; the first answer stays."""
    first = await stack.infer(BODY, **KEY)
    status, document, headers = await stack.infer({"input": "other"}, **KEY)

    assert (status, code_of(document), headers["x-should-retry"]) == (422, "idempotency_key_reused", "false")
    assert (await stack.infer(BODY, **KEY))[1]["request_id"] == first[1]["request_id"]


async def test_while_the_first_runs_the_second_has_to_wait(stack: Stack) -> None:
    """409 with Retry-After, and the answer once it is there."""
    stack.worker.hold = True
    asking = asyncio.create_task(stack.infer(BODY, **KEY))
    await eventually(lambda: any(w.accepted for w in stack.gateway.pending_requests.all()), "the first is accepted")
    status, document, headers = await stack.infer(BODY, **KEY)
    assert (status, code_of(document)) == (409, "idempotency_in_progress")
    assert int(headers["retry-after-ms"]) >= 500
    assert (headers["retry-after"], headers["x-should-retry"]) == ("1", "true")
    stack.worker.hold = False
    first = await asking

    again = await stack.infer(BODY, **KEY)
    assert (again[0], again[1]["request_id"]) == (200, first[1]["request_id"])


async def test_a_storm_of_one_key_is_one_run(stack: Stack) -> None:
    """Fifty at once: every one is the run, its replay, or told to wait."""
    answers = await asyncio.gather(*(stack.infer(BODY, **KEY) for _ in range(50)))

    assert {status for status, _, _ in answers} <= {200, 409}
    assert len({document["request_id"] for status, document, _ in answers if status == 200}) == 1
    assert len(stack.worker.seen) == 1


async def test_keys_are_each_customers_own(stack: Stack) -> None:
    """Another customer with the same key and body has a run of its own."""
    mine = await stack.infer(BODY, "free", **KEY)
    theirs = await stack.infer(BODY, "paid", **KEY)

    assert "idempotent-replayed" not in theirs[2]
    assert mine[1]["request_id"] != theirs[1]["request_id"]


@pytest.mark.parametrize(("code", "status"), [("poison_request", 422), ("invalid_request", 400)])
async def test_failures_that_say_something_of_the_input_are_replayed(stack: Stack, code: str, status: int) -> None:
    """Another run would only fail again: the same error, the same request id, and the word for it."""
    stack.worker.answerer = lambda member: Outcome(member.id, code, 1.0, 0, "v1", "`seed` is wrong.")
    first = await stack.infer(BODY, **KEY)
    again = await stack.infer(BODY, **KEY)

    assert (first[0], again[0], code_of(again[1])) == (status, status, code)
    assert again[1] == first[1]
    assert again[2]["x-request-id"] == first[2]["x-request-id"] == first[1]["error"]["request_id"]
    assert again[2]["idempotent-replayed"] == "true"
    assert len(stack.worker.seen) == 1


async def test_after_another_failure_the_key_is_free(stack: Stack) -> None:
    """A lost worker says nothing of the input: the repetition is a run of its own."""
    good = stack.worker.answerer
    stack.worker.answerer = lambda member: Outcome(member.id, "worker_lost", 1.0, 0, "v1", "")
    assert (await stack.infer(BODY, **KEY))[0] == 503
    stack.worker.answerer = good
    status, _, headers = await stack.infer(BODY, **KEY)

    assert (status, "idempotent-replayed" in headers) == (200, False)


@pytest.mark.parametrize("value", ["", "a b", "x" * 256, '"open'])
async def test_a_header_that_is_no_key_is_named(stack: Stack, value: str) -> None:
    """400 before anything is asked, with the rate-limit state of the key."""
    status, document, headers = await stack.infer(BODY, **{"Idempotency-Key": value})

    assert (status, code_of(document), document["error"]["param"]) == (400, "invalid_request", "Idempotency-Key")
    assert "ratelimit" in headers
    assert stack.gateway.admission.calls == 0


async def test_the_key_survives_the_loss_of_redis(client: Redis, redis_url: str) -> None:
    """What is submitted again takes its key along: a repetition is told to wait, then gets the one answer."""
    async with running_stack(client, redis_url, worker=False) as stack:
        asking = asyncio.create_task(stack.infer(BODY, **KEY))
        await eventually(lambda: any(w.accepted for w in stack.gateway.pending_requests.all()), "it is accepted")
        await client.flushall()
        await stack.worker.heartbeat()
        await eventually(lambda: stack.gateway.recovery.submitted_again == 1, "it is submitted again", 2.0)
        assert code_of((await stack.infer(BODY, **KEY))[1]) == "idempotency_in_progress"
        await stack.worker.turn()
        first = await asking
        again = await stack.infer(BODY, **KEY)

        assert (first[0], again[0], again[1]["request_id"]) == (200, 200, first[1]["request_id"])
        assert len(stack.worker.seen) == 1


async def test_a_key_is_not_taken_past_redis(stack: Stack, redis_server: EmbeddedRedis) -> None:
    """Only Redis knows whether it has run already: while it is away the client is told to come back."""
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        await eventually(lambda: stack.gateway.direct.active, "Redis counts as away", 3.0)
        status, document, headers = await stack.infer(BODY, **KEY)
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)

    assert (status, code_of(document), "retry-after" in headers) == (503, "no_capacity", True)
    assert "Idempotency-Key" in document["error"]["message"]
