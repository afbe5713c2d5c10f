"""`/v1/responses` with the real `openai` client: whole, streamed, stored, continued, in the background, deleted."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import asyncpg
import openai
import pytest
from pydantic import BaseModel
from redis.asyncio import Redis

from configs import job_config, response_config
from endpoint_stand_in import StandIn
from eventually import eventually
from gateway.translations.response_store import CustomerTurns
from gateway.translations.response_streams import MOST_STREAMS
from integration.endpoint_fixtures import stand_in
from integration.gateway_fixtures import Stack, openai_client, reverse_or_vector, running_stack
from integration.gpu_pool_fixtures import StartWorker, faulty_models, start_worker
from integration.jobs_fixtures import JobCatalog, add_customers, customer_id
from integration.ledger_fixtures import database_url, db, postgres_server
from integration.streaming_fixtures import scheduling
from pool import Pool
from ratelimit.limits import RemainingLimits
from response_events import events_of, joined
from scheduler.protocol.admission import Verdict
from scheduler.states import Admission

__all__ = ["database_url", "db", "faulty_models", "postgres_server", "stand_in", "start_worker"]

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
async def stack(
    client: Redis, redis_url: str, database_url: str, db: "asyncpg.Connection[asyncpg.Record]"
) -> AsyncIterator[Stack]:
    """A ready gateway with jobs and a store of four responses, and a scheduler."""
    await add_customers(db)
    parts = {
        "jobs": job_config(database_url),
        "responses": response_config(database_url, count=4),
    }
    async with (
        running_stack(client, redis_url, catalog=JobCatalog(), total_ms=30_000, **parts) as running,
        scheduling(client),
    ):
        running.worker.hold = True
        yield running


@pytest.fixture
async def served(stack: Stack, start_worker: StartWorker, stand_in: StandIn) -> StandIn:
    """A worker in front of the stand-in, and the gateway knows that the pool passes chats on."""
    stack.worker.backend = f"openai:{stand_in.url}"
    await (await start_worker(backend=f"openai:{stand_in.url}")).reaches("ready")
    await eventually(lambda: stack.gateway.heartbeat.passes_on, "the pool passes chats on")
    serving = stack.gateway.jobs.serving
    assert serving is not None
    await eventually(lambda: serving.reconciler.active, "the reconciler is active")
    return stand_in


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client without retries."""
    async with openai_client(stack) as made:
        yield made


class Weather(BaseModel):
    """The structured output that the client asks for."""

    answer: str


async def test_whole_and_streamed(caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """A text, structured output by `parse`, and the stream helper, without the store."""
    whole = await caller.responses.create(
        model="tiny", input="hello", instructions="Be brief.", metadata={"a": "b"}, store=False
    )
    parsed = await caller.responses.parse(model="tiny", input="hello", text_format=Weather, store=False)
    async with caller.responses.stream(model="tiny", input="hello", text_format=Weather, store=False) as stream:
        names = [event.type async for event in stream]
        final = await stream.get_final_response()

    assert whole.output_text == "olleh"
    assert (whole.status, whole.metadata, whole.instructions) == ("completed", {"a": "b"}, "Be brief.")
    assert whole.usage is not None
    assert whole.usage.total_tokens > 0
    assert served.asked("chat/completions")[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert parsed.output_parsed is not None
    assert final.output_parsed == parsed.output_parsed
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"


async def test_tools_by_previous_response(caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """A call and its result: the second request has the whole conversation, and the items of the input can be read."""
    tools: Any = [TOOL]
    first = await caller.responses.create(model="tiny", input="What is the weather?", tools=tools)
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"}]
    second = await caller.responses.create(model="tiny", input=result, previous_response_id=first.id, user="me")
    stream = await caller.responses.create(model="tiny", input="And now?", previous_response_id=second.id, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.completed"
    stored = await caller.responses.retrieve(last.response.id)
    items = await caller.responses.input_items.list(second.id)

    assert (call.name, json.loads(call.arguments)["at"]) == ("weather", 0)
    sent = served.asked("chat/completions")[2]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "assistant", "user"]
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == call.call_id
    assert stored == last.response
    assert stored.previous_response_id == second.id
    (item,) = items.data
    assert item.type == "function_call_output"


async def test_background(stack: Stack, caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """A background response is queued, then completed with the same output; a cancelled one stays cancelled."""
    tools: Any = [TOOL]
    whole = await caller.responses.create(model="tiny", input="hello", tools=tools, store=False)
    queued = await caller.responses.create(model="tiny", input="hello", tools=tools, background=True)

    async def ended() -> openai.types.responses.Response | None:
        found = await caller.responses.retrieve(queued.id)
        return found if found.status not in ("queued", "in_progress") else None

    done = await eventually(ended, "the response has ended")
    assert done is not None
    stored = await caller.responses.create(model="tiny", input="hello")
    served.slow_s = 5.0
    slow = await caller.responses.create(model="tiny", input="slow", background=True)
    cancelled = await caller.responses.cancel(slow.id)

    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    assert done.status == "completed"
    assert done.usage == whole.usage
    assert [item.to_dict() | {"id": ""} for item in done.output] == [
        item.to_dict() | {"id": ""} for item in whole.output
    ]
    assert cancelled.status == (await caller.responses.retrieve(slow.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cannot be continued"):
        await caller.responses.create(model="tiny", input="go on", previous_response_id=slow.id)
    assert (await caller.responses.cancel(done.id)).status == "completed"
    running = await caller.responses.create(model="tiny", input="slow", background=True)
    await caller.responses.delete(running.id)
    with pytest.raises(openai.NotFoundError):
        await caller.responses.retrieve(running.id)
    with pytest.raises(openai.BadRequestError, match="`background: true`"):
        await caller.responses.cancel(stored.id)


async def test_an_idempotency_key(caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """The same key returns the same response, whole, as a stream and from the store, without another call."""
    options: Any = {"model": "tiny", "input": "hello", "extra_headers": {"Idempotency-Key": "k"}}
    first = await caller.responses.create(**options)
    second = await caller.responses.create(**options)
    stream = await caller.responses.create(**options, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.completed"

    assert first == second == last.response == await caller.responses.retrieve(first.id)
    assert len(served.asked("chat/completions")) == 1


async def test_an_idempotency_key_of_a_background_response(caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """The same key returns the same response, as it is now, and as a stream."""
    options: Any = {"background": True, "extra_headers": {"Idempotency-Key": "once"}}
    first = await caller.responses.create(model="tiny", input="hello", **options)

    async def again() -> openai.types.responses.Response | None:
        found = await caller.responses.create(model="tiny", input="hello", **options)
        assert found.id == first.id
        return found if found.status == "completed" else None

    found = await eventually(again, "the response has completed")
    stream = await caller.responses.create(model="tiny", input="hello", stream=True, **options)
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.completed"
    assert found == last.response
    assert events[0].type == "response.created"
    assert last.response.output_text == "olleh"


async def test_a_limit_is_checked_before_a_conversation_is_read(
    stack: Stack, caller: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is known to be over a limit of its customer costs no query; one with a key may be a replay.

    The reads of one customer are bounded.
    """
    rejected = Verdict(Admission.CUSTOMER_LIMIT, RemainingLimits(), 200)
    monkeypatch.setattr(stack.gateway.inference.rejections, "verdict_of", lambda *_: rejected)
    options: Any = {"model": "tiny", "input": "hello", "previous_response_id": f"resp_{'0' * 32}"}

    with pytest.raises(openai.RateLimitError, match="The rate limit of this account"):
        await caller.responses.create(**options)
    with pytest.raises(openai.NotFoundError):
        await caller.responses.create(**options, extra_headers={"Idempotency-Key": "k"})
    monkeypatch.undo()
    monkeypatch.setattr(stack.gateway.responses.store, "_turns", CustomerTurns(0))
    with pytest.raises(openai.RateLimitError, match="Too many conversations of this account"):
        await caller.responses.create(**options)


async def test_a_replay_does_not_restore_a_deleted_response(caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """It returns the recorded response, which stays deleted; in the background there is none to return."""
    options: Any = {"model": "tiny", "input": "hello", "extra_headers": {"Idempotency-Key": "k"}}
    later = options | {"background": True, "extra_headers": {"Idempotency-Key": "later"}}
    first, queued = await caller.responses.create(**options), await caller.responses.create(**later)
    await caller.responses.delete(first.id)
    await caller.responses.delete(queued.id)

    assert await caller.responses.create(**options) == first
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        await caller.responses.create(**later)
    for response in (first, queued):
        with pytest.raises(openai.NotFoundError):
            await caller.responses.retrieve(response.id)


async def test_streams_of_a_background_response(stack: Stack, caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """The events while it runs, the rest of them after the last one that was read, and all of them once it has ended."""
    streams = stack.gateway.responses.streams
    served.slow_s = 0.5
    opened = await caller.responses.create(model="tiny", input="hello", background=True, stream=True)
    running = [await anext(opened) for _ in range(3)]
    created: Any = running[0]
    response_id = created.response.id
    await opened.close()
    await eventually(lambda: not streams.count, "the stream of the client that left is closed")
    rest = [event async for event in await caller.responses.retrieve(response_id, stream=True, starting_after=2)]
    again = [event async for event in await caller.responses.retrieve(response_id, stream=True)]
    stored = await caller.responses.retrieve(response_id)
    whole = await caller.responses.create(model="tiny", input="hello")

    assert [event.type for event in running] == ["response.created", "response.queued", "response.in_progress"]
    assert again == running + rest
    assert [event.sequence_number for event in again] == list(range(len(again)))
    assert joined([event.to_dict() for event in again]) | {"status": "completed"} == again[-1].to_dict()["response"]
    assert again[-1].type == "response.completed"
    assert (again[-1].response, stored.output_text) == (stored, "olleh")
    with pytest.raises(openai.BadRequestError, match="Only a response with `background: true`"):
        await caller.responses.retrieve(whole.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="`sequence_number`"):
        await caller.responses.retrieve(response_id, stream=True, extra_query={"starting_after": "x"})
    streams.count[customer_id("free")] = MOST_STREAMS
    for call in (
        caller.responses.retrieve(response_id, stream=True),
        caller.responses.create(model="tiny", input="hello", background=True, stream=True),
    ):
        with pytest.raises(openai.RateLimitError, match="64 open streams"):
            await call


async def test_count_of_tokens(caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """The estimate of the input with its conversation and tools, without a call of the model."""
    tools: Any = [TOOL]
    short = await caller.responses.input_tokens.count(model="tiny", input="hello")
    first = await caller.responses.create(model="tiny", input="hello" * 50)
    longer = await caller.responses.input_tokens.count(
        model="tiny", input="hello", previous_response_id=first.id, tools=tools
    )

    assert short.object == "response.input_tokens"
    assert 0 < short.input_tokens < longer.input_tokens
    assert len(served.asked("chat/completions")) == 1
    with pytest.raises(openai.BadRequestError, match="`max_output_tokens`"):
        await caller.responses.input_tokens.count(model="tiny", input="x", extra_body={"max_output_tokens": 1})


async def test_the_store_belongs_to_a_customer(
    stack: Stack, caller: openai.AsyncOpenAI, served: StandIn, db: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Another customer's response is unknown, a deleted one too; of too many the oldest are deleted."""
    made = [await caller.responses.create(model="tiny", input=str(number)) for number in range(6)]
    other = caller.with_options(api_key=stack.catalog.keys["paid"].text)
    await caller.responses.delete(made[4].id)

    assert await caller.responses.retrieve(made[5].id) == made[5]
    for asking, response in ((other, made[5]), (caller, made[1]), (caller, made[4])):
        with pytest.raises(openai.NotFoundError):
            await asking.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        await other.responses.create(model="tiny", input="x", previous_response_id=made[5].id)
    with pytest.raises(openai.NotFoundError):
        await other.responses.delete(made[5].id)
    assert await db.fetchval("SELECT count(*) FROM responses WHERE bytes > 0") == 3


async def test_a_deleted_response_ends_its_conversation(caller: openai.AsyncOpenAI, served: StandIn) -> None:
    """A conversation is never continued without its beginning."""
    first = await caller.responses.create(model="tiny", input="one")
    second = await caller.responses.create(model="tiny", input="two", previous_response_id=first.id)
    await caller.responses.delete(first.id)

    with pytest.raises(openai.NotFoundError, match="An earlier response of this conversation"):
        await caller.responses.create(model="tiny", input="three", previous_response_id=second.id)


async def test_without_postgresql(stack: Stack, caller: openai.AsyncOpenAI, served: StandIn, pool: Pool) -> None:
    """Only requests that need the store fail, in words that name `store: false`; a stream ends with the error.

    A request that ran has this error in the audit, too.
    """
    store = stack.gateway.responses.store
    await store.close()
    for session in (store._writing, store._reading):
        session._url = "postgresql://nobody@127.0.0.1:1/none"
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="`store: false`") as caught:
            await caller.responses.create(model="tiny", input="hello")
        assert caught.value.status_code == 503
    await eventually(lambda: store._writing.available, "the next attempt is due")

    async def read() -> None:
        async for _ in await caller.responses.create(model="tiny", input="hello", stream=True):
            pass

    with pytest.raises(openai.APIError, match="`store: false`"):  # With its status, if it precedes the text.
        await read()
    whole = await caller.responses.create(model="tiny", input="hello", store=False)

    async def failed() -> list[str]:
        codes = [str(end.error_code) for end in (await pool.audit())[1]]
        return codes if codes.count("catalog_unavailable") == 2 else []

    assert whole.output_text == "olleh"
    assert await eventually(failed, "the first request and the stream have the error in the audit")


def generated(number: int) -> dict[str, Any]:
    """A request whose fields depend on its number."""
    pick = random.Random(number)
    body: dict[str, Any] = {"model": "tiny", "input": f"{number} é", "store": False}
    options: dict[str, Any] = {
        "tools": [TOOL] * pick.randint(1, 3),
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "temperature": pick.random(),
        "max_output_tokens": 100 + number,
    }
    return body | {name: value for name, value in options.items() if pick.random() < 0.4}


def without_ids(document: Any) -> Any:
    """The document without ids and time, which differ between two requests."""
    if isinstance(document, dict):
        return {k: without_ids(v) for k, v in document.items() if k not in ("id", "created_at")}
    return [without_ids(each) for each in document] if isinstance(document, list) else document


@pytest.mark.timeout(120)
async def test_events_add_up_to_the_response(stack: Stack, served: StandIn) -> None:
    """The joined events of a stream, its last event, and the response that is not streamed are equal, for 60 requests."""
    async with aiohttp.ClientSession(headers=stack.key()) as http:
        for number in range(60):
            body = generated(number)
            async with http.post(f"{stack.url}/v1/responses", json=body) as response:
                whole = await response.json()
                assert response.status == 200, whole
            async with http.post(f"{stack.url}/v1/responses", json=body | {"stream": True}) as response:
                events = events_of(await response.text())

            assert joined(events) == events[-1]["response"]
            assert without_ids(events[-1]["response"]) == without_ids(whole)


async def test_a_model_without_a_server(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """A text, whole and streamed, and in the background; what the model cannot do is rejected by the client's field."""
    stack.worker.hold, stack.worker.answerer = False, reverse_or_vector
    whole = await caller.responses.create(model="tiny", input=[{"role": "user", "content": "hello"}])
    async with caller.responses.stream(model="tiny", input="hello", previous_response_id=whole.id) as stream:
        streamed = await stream.get_final_response()
    made = await caller.responses.create(model="tiny", input="hello", background=True)

    async def ended() -> openai.types.responses.Response | None:
        found = await caller.responses.retrieve(made.id)
        return found if found.status != "queued" else None

    found = await eventually(ended, "the response has ended")
    assert found is not None
    assert whole.output_text
    assert found.output_text == whole.output_text
    assert streamed.output_text
    options: list[tuple[str, Any]] = [
        ("tools", [TOOL]),
        ("text", {"format": {"type": "json_object"}}),
        ("reasoning", {"effort": "low"}),
    ]
    for name, value in options:
        with pytest.raises(openai.BadRequestError, match=f"`{name}` needs the capability") as caught:
            await caller.responses.create(model="tiny", input="hello", store=False, **{name: value})
        assert caught.value.param == name
