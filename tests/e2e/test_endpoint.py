"""`tierlane up --backend openai:URL` before an endpoint that fails in every way under load: one answer, one row, each."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import openai
import pytest

from endpoint_stand_in import StandIn, serving
from eventually import eventually
from key_leaks import leaked_keys
from load import ALL_WELL, Answer, load, one_row_each, verdict
from scheduler.redis_client.connections import command_client
from stack import Stack, start_stack

TIERS = ("enterprise", "paid", "free")
KEY = "sk-endpoint-secret"
FAULTS = ("429", "", "reset", "", "503", "", "half", "", "500", "", "junk", "", "count", "", "stall", "")
"""One after another, between calls that go well: clustered faults are what `pause` is about."""

REFUSED = {"rate_limit_exceeded", "reduced_capacity", "shed_for_priority", "queue_full", "no_capacity"}
LOST = {"worker_lost", "gpu_timeout", "invalid_output", "queue_timeout", "deadline_exceeded"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[StandIn]:
    """Takes 20 ms for a call, and wants a key."""
    with serving(StandIn(api_key=KEY, slow_s=0.02)) as server:
        yield server


@pytest.fixture(scope="module")
def whole_stack(tmp_path_factory: pytest.TempPathFactory, endpoint: StandIn) -> Iterator[Stack]:
    """Two workers before it."""
    home: Path = tmp_path_factory.mktemp("endpoint")
    options = ("--backend", f"openai:{endpoint.url}", "--workers", "2", "--max-batch-size", "16")
    environment = {"TIERLANE_ENDPOINT_API_KEY": KEY, "TIERLANE_ENDPOINT_TOTAL_MS": "700"}
    with start_stack(home, *options, environment=environment) as stack:
        yield stack


@pytest.fixture
async def stack(whole_stack: Stack, endpoint: StandIn) -> AsyncIterator[Stack]:
    """After the test it is well again and holds no leaked key."""
    await whole_stack.healthy(2)
    yield whole_stack
    endpoint.fault = lambda route, body: ""
    await whole_stack.healthy(2)
    client = command_client(whole_stack.redis_url)
    leaks = await leaked_keys(client)
    await client.aclose()
    assert leaks == []


async def one_end_each(stack: Stack, answers: list[Answer]) -> None:
    """Nobody is without an answer or has another's; every accepted request has one row that says what its client heard."""
    wrong = verdict(answers)
    assert {kind: wrong[kind] for kind in ("unanswered", "duplicated", "crossed")} == dict.fromkeys(
        ("unanswered", "duplicated", "crossed"), 0
    )
    certain = [a for a in answers if a.code not in REFUSED]
    rows = await stack.audited([a.request_id for a in certain if a.request_id])
    assert said_by(rows.values()) == {a.request_id: (a.status, a.code or "") for a in certain}
    refused = {a.request_id: a for a in answers if a.code in REFUSED and a.request_id}
    for request_id, found in (await stack.rows(list(refused))).items():  # Most were never accepted.
        assert said_by(found) in ({}, {request_id: (refused[request_id].status, refused[request_id].code)})
        assert len(found) <= 1


def said_by(rows: Iterable[asyncpg.Record]) -> dict[str, tuple[int, str]]:
    return {row["id"]: (row["http_status"], row["error_code"] or "") for row in rows}


async def test_an_endpoint_without_faults_serves_everybody(stack: Stack) -> None:
    """As many requests as two workers are trusted with before they are measured."""
    answers = await load(stack, 30, 3.0, TIERS)

    assert verdict(answers) == ALL_WELL
    assert await one_row_each(stack, answers) == 0


async def test_nothing_is_lost_before_an_endpoint_that_fails_in_every_way(stack: Stack, endpoint: StandIn) -> None:
    """Every other call goes wrong: most requests are served all the same, and what is not is told why, once."""
    faults, seen = itertools.cycle(FAULTS), Counter[str]()

    def fault(route: str, body: dict[str, Any]) -> str:
        named = next(faults) if body else ""
        seen[named] += 1
        return named

    endpoint.fault = fault
    answers = await load(stack, 60, 8.0, TIERS)

    await one_end_each(stack, answers)
    assert set(seen) == set(FAULTS)
    codes = Counter(a.code for a in answers)
    assert codes[None] > len(answers) / 2
    assert codes.keys() <= {None, *REFUSED, *LOST}


async def test_an_endpoint_that_restarts_loses_nothing(stack: Stack, endpoint: StandIn) -> None:
    """Two seconds of 503, as a server that loads its model says it: whoever was accepted gets an end, and it goes on."""
    asking = asyncio.create_task(load(stack, 60, 5.0, TIERS))
    await eventually(lambda: endpoint.asked("completions"), "the load has begun")
    before = len(endpoint.calls)
    endpoint.fault = lambda route, body: "503"

    async def paused() -> bool:
        return (await stack.health())["healthy_gpus"] == 0

    await eventually(paused, "both workers pause", 10.0)
    endpoint.fault = lambda route, body: ""
    answers = await asking

    await one_end_each(stack, answers)
    assert len(endpoint.calls) > before
    assert answers[-1].status == 200


async def test_openai_s_client_sees_through(stack: Stack, endpoint: StandIn) -> None:
    """Chats, streams and vectors are the endpoint's, limits and keys are ours."""
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=stack.key("enterprise")) as client:
        said: list[Any] = [{"role": "user", "content": "hello"}]
        stream = await client.chat.completions.create(
            model="openai", messages=said, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        vectors = await client.embeddings.create(model="openai", input=["four", "seventy"])
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="openai", messages=said, temperature=3)

    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "olleh"
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (6, 6)
    assert [vector.embedding for vector in vectors.data] == [[4.0, 1.0], [7.0, 1.0]]
    assert (refused.value.code, refused.value.param) == ("invalid_request", "temperature")
