"""Lists of prompts and of texts with the real `openai` client: as many requests, admitted all or none, one answer."""

import gc

import openai
import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.inference.pipeline import InferenceCall
from gateway.limits.capacity import LiveLimits
from integration.gateway_fixtures import Stack, reverse
from integration.openai_fixtures import caller, stack
from pool import Pool
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.redis_client.keys import Keys

__all__ = ["caller", "stack"]


def counted(member: ClaimedRequest) -> Outcome:
    """The input backwards, two tokens read and one written."""
    text = decode_payload(member.body).input
    return Outcome(member.id, "", 1.5, 3, "v1", text[::-1], 1)


async def test_a_choice_for_each_prompt(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """In the order of the prompts, with the usage of all; each is a request of its own, the first names the answer."""
    stack.worker.answerer = counted
    prompts = [f"prompt {i}" for i in range(40)]

    made = await caller.completions.create(model="tiny", prompt=prompts)

    assert [(each.index, each.text) for each in made.choices] == [(i, p[::-1]) for i, p in enumerate(prompts)]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (80, 40)
    assert len(set(stack.worker.seen)) == 40
    assert made.id == made._request_id
    assert made.id in stack.worker.seen


async def test_a_list_that_does_not_fit_takes_nothing(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Four where three are left: 429 for the list, and three can enter after it."""
    stack.catalog.set(key={"burst": 12.0, "requests_per_second": 0.001})

    with pytest.raises(openai.RateLimitError):
        await caller.completions.create(model="tiny", prompt=["a", "b", "c", "d"])
    made = await caller.completions.create(model="tiny", prompt=["a", "b", "c"])

    assert [each.text for each in made.choices] == ["a", "b", "c"]
    assert len(stack.worker.seen) == 3


@pytest.mark.parametrize(
    ("changes", "count", "words"),
    [
        ({}, 257, "at most 256"),
        ({"burst": 12.0}, 13, "burst of this key allows at most 12"),
        ({"max_concurrency": 5}, 6, "concurrency of this key allows at most 5"),
    ],
)
async def test_a_list_that_could_never_enter_is_a_fault_of_the_body(
    stack: Stack, caller: openai.AsyncOpenAI, changes: dict[str, float], count: int, words: str
) -> None:
    """No retry would help, so it is no 429; the sentence says how many may be asked."""
    stack.catalog.set(key=changes)

    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await caller.completions.create(model="tiny", prompt=["a"] * count)

    assert caught.value.param == "prompt"


async def test_a_list_that_lowered_limits_keep_out_is_no_fault_of_the_body(
    stack: Stack, caller: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fits into the burst that was sold, so it may come back when there is capacity again."""
    monkeypatch.setattr(LiveLimits, "factor", lambda _, tier: 0.01 if tier == "free" else 1.0)

    with pytest.raises(openai.InternalServerError) as caught:
        await caller.completions.create(model="tiny", prompt=["a"] * 20)

    assert (caught.value.status_code, caught.value.code) == (503, "reduced_capacity")
    assert stack.worker.seen == []


async def test_one_that_fails_is_the_answer(stack: Stack, caller: openai.AsyncOpenAI, client: Redis) -> None:
    """A list is one answer: what breaks the model is named, and nothing of the list stays behind."""

    def poisoned(member: ClaimedRequest) -> Outcome:
        bad = decode_payload(member.body).input == "bad"
        return Outcome(member.id, ErrorCode.POISON_REQUEST, 1.5, 0, "v1", "") if bad else reverse(member)

    stack.worker.answerer = poisoned

    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await caller.completions.create(model="tiny", prompt=["good", "bad", "good"])

    assert caught.value.code == "poison_request"
    await eventually(lambda: len(stack.gateway.pending_requests) == 0, "nobody waits")
    assert await client.llen(Keys().queue("free")) == 0


@pytest.mark.parametrize("lost_first", [True, False])
async def test_a_list_that_fails_by_our_fault_costs_nothing(
    stack: Stack, caller: openai.AsyncOpenAI, client: Redis, pool: Pool, *, lost_first: bool
) -> None:
    """One member is lost with its worker: the client gets a 503 for all of them, so all are given back, those too that
    completed or still waited; each row says that code, and none that the client had left.
    """
    stack.catalog.set(key={"quotas": (("1day", 10),)})

    def lost(member: ClaimedRequest) -> Outcome:
        bad = decode_payload(member.body).input == "bad"
        return Outcome(member.id, ErrorCode.WORKER_LOST, 1.5, 0, "v1", "") if bad else reverse(member)

    stack.worker.answerer = lost
    stack.worker.most = 2

    with pytest.raises(openai.InternalServerError) as caught:
        await caller.completions.create(model="tiny", prompt=["bad", "a", "b"] if lost_first else ["a", "b", "bad"])

    assert caught.value.code == "worker_lost"

    async def told() -> bool:
        ends = {end.id: end for end in (await pool.audit())[1]}
        return [end.error_code for end in ends.values()] == ["worker_lost"] * 3

    await eventually(told, "each row says what the client was told")
    assert await client.hget("rl:customer:customer-free", "q:1day") is not None
    spent = await client.hget("rl:customer:customer-free", "q:1day")
    assert spent.split()[1] == b"0"
    assert await client.zcard("rl:leases:customer-free") == 0
    assert len(stack.gateway.pending_requests) == 0


async def test_a_client_that_leaves_ends_the_whole_list(
    stack: Stack, caller: openai.AsyncOpenAI, client: Redis
) -> None:
    """Nothing of it runs for nobody."""
    stack.worker.hold = True

    with pytest.raises(openai.APITimeoutError):
        await caller.with_options(timeout=0.3).completions.create(model="tiny", prompt=["a", "b", "c"])
    await eventually(lambda: len(stack.gateway.pending_requests) == 0, "nobody waits")
    stack.worker.hold = False
    made = await caller.completions.create(model="tiny", prompt="next")

    assert stack.worker.seen == [made.id]


async def test_a_retry_with_its_key_gets_the_same_choices(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Nothing runs twice; another list under the same key is refused."""
    headers = {"Idempotency-Key": "order-7"}

    first = await caller.completions.create(model="tiny", prompt=["ab", "cd"], extra_headers=headers)
    again = await caller.completions.with_raw_response.create(model="tiny", prompt=["ab", "cd"], extra_headers=headers)
    with pytest.raises(openai.UnprocessableEntityError):
        await caller.completions.create(model="tiny", prompt=["ab", "xx"], extra_headers=headers)

    assert again.headers["Idempotent-Replayed"] == "true"
    assert [each.text for each in again.parse().choices] == [each.text for each in first.choices] == ["ba", "dc"]
    assert again.parse().id == first.id
    assert len(stack.worker.seen) == 2


@pytest.mark.parametrize("other", [["ab", "cd", "ef"], ["ab"], "ab", ["cd"]])
async def test_a_key_of_a_list_is_no_other_bodys(
    stack: Stack, caller: openai.AsyncOpenAI, other: str | list[str]
) -> None:
    """A longer list, a shorter one and a single text are other bodies, whichever came first."""
    for number, bodies in enumerate(((["ab", "cd"], other), (other, ["ab", "cd"]))):
        headers = {"Idempotency-Key": f"order-{number}"}
        first = await caller.completions.create(model="tiny", prompt=bodies[0], extra_headers=headers)
        seen = len(stack.worker.seen)

        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await caller.completions.create(model="tiny", prompt=bodies[1], extra_headers=headers)
        again = await caller.completions.create(model="tiny", prompt=bodies[0], extra_headers=headers)

        assert caught.value.code == "idempotency_key_reused"
        assert (again.id, len(stack.worker.seen)) == (first.id, seen)


async def test_every_request_of_a_list_is_known_by_its_id(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Each has its own place in Redis and in the audit."""
    await caller.completions.create(model="tiny", prompt=["a", "b"])

    for request_id in stack.worker.seen:
        _, document = await stack.internal(f"/internal/requests/{request_id}")
        assert document["status"] == "completed"


@pytest.mark.parametrize("rejected", [False, True])
@pytest.mark.parametrize("body", [{"prompt": ["a", "b", "c"]}, {"prompt": "a", "stream": True}])
async def test_lists_and_streams_leave_no_rings_behind(stack: Stack, body: dict[str, object], rejected: bool) -> None:
    """Members reference each other, and a stream its call, until there is a response; then all are freed at once."""
    if rejected:
        stack.gateway.limits.no_gpu = lambda _: True  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        async with stack.http.post(
            f"{stack.url}/v1/completions",
            json={"model": "tiny", **body},
            headers={**stack.key(), "Connection": "close"},
        ) as answer:
            await answer.read()
        await eventually(
            lambda: not [found for found in gc.get_objects() if issubclass(type(found), InferenceCall)], "all are freed"
        )
    finally:
        gc.enable()

    assert answer.status == (503 if rejected else 200)
