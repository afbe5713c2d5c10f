"""`tierlane up --backend openai:URL`: an endpoint that fails in every way, and a real server as the endpoint."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from configs import endpoint_access
from endpoint_stand_in import StandIn, serving
from eventually import eventually
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.backend import EndpointBackend
from gpu_pool.backends.tiny.backend import TinyBackend
from key_leaks import leaked_keys
from load import Answer, load, verdict
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages
from scheduler.redis_client.connections import command_client
from scheduler.vectors import read_vector
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")
KEY = "sk-endpoint-secret"
FAULTS = ("429", "", "reset", "", "503", "", "half", "", "500", "", "junk", "", "count", "", "stall", "")
"""In turn, with good calls in between."""

REJECTED = {"rate_limit_exceeded", "reduced_capacity", "shed_for_priority", "queue_full", "no_capacity"}
FAILED = {
    *("worker_lost", "gpu_timeout", "invalid_output", "queue_timeout", "deadline_exceeded"),
    "poison_request",  # A 500 again for the same input (docs/endpoint.md).
}
OPTIONS = ("--workers", "2", "--max-batch-size", "16")
ENVIRONMENT = {
    "TIERLANE_ENDPOINT_API_KEY": KEY,
    "TIERLANE_ENDPOINT_TOTAL_MS": "700",
    "TIERLANE_TOTAL_REQUEST_MS": "4000",
}


def audited(rows: Iterable[asyncpg.Record]) -> dict[str, tuple[int, str]]:
    return {row["id"]: (row["http_status"], row["error_code"] or "") for row in rows}


async def check(stack: Stack, answers: list[Answer]) -> None:
    """Each request has one response, and each accepted one a row with the same result."""
    wrong = verdict(answers)
    assert [kind for kind in ("unanswered", "duplicated", "crossed") if wrong[kind]] == []
    accepted = [a for a in answers if a.code not in REJECTED]
    rows = await stack.audited([a.request_id for a in accepted if a.request_id])
    assert audited(rows.values()) == {a.request_id: (a.status, a.code or "") for a in accepted}
    rejected = {a.request_id: (a.status, a.code) for a in answers if a.code in REJECTED and a.request_id}
    for request_id, found in (await stack.rows(list(rejected))).items():  # Most were never accepted.
        assert audited(found) in ({}, {request_id: rejected[request_id]})
        assert len(found) <= 1


async def pausing(stack: Stack) -> bool:
    return (await stack.health())["healthy_gpus"] == 0


async def serves(stack: Stack) -> bool:
    return all(answer.status == 200 for answer in await load(stack, 10, 0.5, TIERS))


@pytest.mark.timeout(90)
async def test_nothing_is_lost_with_an_endpoint_that_fails_in_every_way(tmp_path: Path) -> None:
    """Most requests are served, the others end with a code of the endpoint. After 503s of all calls serving resumes."""
    faults, seen = itertools.cycle(FAULTS), Counter[str]()

    def fault(_: str, body: dict[str, Any]) -> str:
        named = next(faults) if body else ""
        seen[named] += 1
        return named

    with (
        serving(StandIn(api_key=KEY, slow_s=0.02)) as endpoint,
        start_stack(tmp_path, "--backend", f"openai:{endpoint.url}", *OPTIONS, environment=ENVIRONMENT) as stack,
    ):
        await stack.healthy(2)
        endpoint.fault = fault
        # One call in eight is refused, at any load: that leaves each worker a slot or two, and a stalled call takes one for
        # 0.7 s. So they serve about 20 requests a second; of more, the rest would be shed.
        answers = await load(stack, 12, 12.0, TIERS)
        await check(stack, answers)
        codes = Counter(a.code for a in answers)
        assert set(seen) == set(FAULTS)
        assert codes[None] > len(answers) / 2
        assert codes.keys() <= {None, *REJECTED, *FAILED}

        endpoint.fault = lambda _route, _body: "503"

        async def recover_once_paused() -> None:
            await eventually(lambda: pausing(stack), "both workers pause", 10.0)
            endpoint.fault = lambda _route, _body: ""

        paused = asyncio.create_task(recover_once_paused())
        answers = await load(stack, 60, 5.0, TIERS, done=paused.done)  # A worker pauses only after calls.
        await paused
        await check(stack, answers)
        await eventually(lambda: serves(stack), "serving resumes", 10.0)
        await stack.healthy(2)
        client = command_client(stack.redis_url)
        assert await leaked_keys(client) == []
        await client.aclose()


FEW = {"max_tokens": 16, "temperature": 0}


class Reader:
    """A listener that keeps the text of a stream."""

    gone = False

    def __init__(self) -> None:
        self.text = ""

    def emit(self, offset: int, text: str) -> None:
        self.text = self.text[:offset] + text


def results(backend: EndpointBackend | TinyBackend, items: list[Item]) -> list[ItemResult]:
    backend.load()
    try:
        return backend.run(items, lambda: None)
    finally:
        backend.close()


async def test_a_model_behind_an_endpoint_answers_as_it_does_directly(
    tiny_stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is another stack: texts, a conversation, a stream, vectors and token counts are those of its model."""
    chat = encode_messages([PromptMessage("user", "Once upon a time")])
    reader, until = Reader(), time.monotonic() + 30
    items = [
        Item("The sea", FEW, until=until),
        Item("Once upon", FEW, until=until),
        Item(chat, FEW, Task.CHAT, until=until),
        Item("The king", FEW, Task.COMPLETE, reader, until),
        Item("A cat.", {}, Task.EMBED, until=until),
    ]
    near = results(TinyBackend("cpu", 1), [Item(each.input, each.parameters, each.task) for each in items])
    for name, text in endpoint_access(api_key=tiny_stack.key("enterprise")).environment().items():
        monkeypatch.setenv(name, text)

    far = await asyncio.to_thread(results, EndpointBackend(f"openai:{tiny_stack.url}/v1#tiny"), items)

    assert [each.error_code for each in far] == [""] * 5
    assert [each.output for each in far[:4]] == [each.output for each in near[:4]]
    assert reader.text == near[3].output
    assert read_vector(far[4].output) == pytest.approx(read_vector(near[4].output), abs=1e-4)
    tokens = [
        [(each.tokens_used, each.output_tokens, each.finish_reason) for each in side[2:4]] for side in (near, far)
    ]
    assert tokens[0] == tokens[1]
    assert sum(each.tokens_used for each in far[:2]) == sum(each.tokens_used for each in near[:2])
