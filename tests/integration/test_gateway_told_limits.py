"""Every limit as a client meets it, against a real Redis: code, sentence, wait, headers, and who is told of a refusal."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.catalog import IdentityView
from gateway.inference.pipeline import InferencePipeline
from integration.gateway_fixtures import Stack, running_stack, tier
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Verdict
from scheduler.protocol.batches import Outcome
from scheduler.states import Admission

DAY_MS = 86_400_000
PROBLEM = "application/problem+json"


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


def error_of(answer: tuple[int, dict[str, Any], dict[str, str]]) -> tuple[int, str, str]:
    status, document, _ = answer
    return status, document["error"]["code"], document["error"]["message"]


def lowered(stack: Stack, factor: float) -> None:
    """Every tier's limits stand at `factor` of their base."""
    stack.gateway.limits.factor = lambda tier: factor  # type: ignore[method-assign]


async def test_a_used_up_quota_is_told_until_its_window_ends(stack: Stack) -> None:
    """429 quota_exceeded, no retry, and a wait as long as the day has left; what is left counts down before."""
    stack.catalog.set(key={"quotas": (("1day", 2), ("1month", 1000))})
    first, second, third = [await stack.infer() for _ in range(3)]

    assert '"day";q=2;w=86400, "month";q=1000;w=2678400' in first[2]["ratelimit-policy"]
    assert ['"day";r=1;t=' in first[2]["ratelimit"], '"day";r=0;t=' in second[2]["ratelimit"]] == [True, True]
    assert error_of(third) == (
        429,
        "quota_exceeded",
        "The quota of this account, 2 requests per day, is used up.",
    )
    document, headers = third[1], third[2]
    assert headers["x-should-retry"] == "false"
    until_midnight_s = int(headers["ratelimit"].partition('"day";r=0;t=')[2].partition(",")[0])
    assert until_midnight_s * 1000 - 1000 <= document["error"]["retry_after_ms"] <= DAY_MS + 15_000
    assert '"month";r=998;' in headers["ratelimit"]


async def test_tokens_are_charged_by_estimate_and_settled_by_use(stack: Stack) -> None:
    """What was not used comes back; what is over the minute's worth is refused with the number."""
    stack.catalog.set(key={"tokens_per_minute": 4000})
    asked = {"input": "a" * 40, "parameters": {"max_tokens": 890}}
    status, _, headers = await stack.infer(asked)  # A lost bucket begins with a quarter: 1000.
    assert (status, headers["x-ratelimit-limit-tokens"]) == (200, "4000")
    assert int(headers["x-ratelimit-remaining-tokens"]) <= 110

    async def settled() -> bool:
        return int((await stack.infer({"input": "a"}))[2]["x-ratelimit-remaining-tokens"]) > 800

    await eventually(settled, "what was not used has come back")
    refused = await stack.infer({"input": "a", "parameters": {"max_tokens": 3900}})
    assert error_of(refused) == (
        429,
        "rate_limit_exceeded",
        "The rate limit of this account, 4000 tokens per minute, is reached.",
    )
    assert 30_000 < refused[1]["error"]["retry_after_ms"] < 60_000


async def test_tokens_that_only_a_lowered_limit_refuses_are_no_fault_of_the_client(stack: Stack) -> None:
    """The base limit would have room, so it is a 503 with the number of now."""
    stack.catalog.set(key={"tokens_per_minute": 4000})
    lowered(stack, 0.25)
    refused = await stack.infer({"input": "a", "parameters": {"max_tokens": 900}})

    assert error_of(refused) == (
        503,
        "reduced_capacity",
        "The rate limit of this account, 1000 tokens per minute, is reached. It is reduced while less capacity is available.",
    )
    assert (refused[2]["x-ratelimit-limit-tokens"], "x-should-retry" in refused[2]) == ("1000", False)


async def test_concurrency_is_told_and_free_again_when_the_work_ends(stack: Stack) -> None:
    """Two at a time: the third hears of it, and the next is let in when they are done."""
    stack.worker.hold = True
    stack.catalog.set(key={"max_concurrency": 2})
    inside = [asyncio.create_task(stack.infer()) for _ in range(2)]
    await eventually(lambda: sum(w.accepted for w in stack.gateway.pending_requests.all()) == 2, "both are admitted")
    refused = await stack.infer()

    assert error_of(refused) == (
        429,
        "rate_limit_exceeded",
        "The concurrency limit of this account, 2 requests at a time, is reached.",
    )
    assert '"concurrency";q=2;qu="concurrent-requests"' in refused[2]["ratelimit-policy"]
    assert '"concurrency";r=0' in refused[2]["ratelimit"]
    assert int(refused[2]["retry-after-ms"]) >= 250
    stack.worker.hold = False
    assert [answer[0] for answer in await asyncio.gather(*inside)] == [200, 200]
    assert (await stack.infer())[0] == 200


async def test_a_key_with_a_limit_of_its_own(stack: Stack) -> None:
    """It is told its own, smaller limit, and that it was the key's."""
    stack.catalog.set(key={"key_rate": 0.5, "key_burst": 8.0})
    answers = [await stack.infer() for _ in range(4)]
    refused = [answer for answer in answers if answer[0] != 200]

    assert answers[0][2]["ratelimit-policy"].startswith('"requests";q=8;w=16, ')
    assert error_of(refused[-1]) == (
        429,
        "rate_limit_exceeded",
        "The rate limit of this API key, 0.5 requests/s (burst 8), is reached.",
    )


async def test_limits_are_told_as_problem_details_on_request(stack: Stack) -> None:
    """RFC 9457 with the draft's type and the policies by name, for a refusal and for what never came that far."""
    stack.catalog.set(key={"quotas": (("1day", 1),)})
    await stack.infer()
    status, document, headers = await stack.infer(Accept=PROBLEM)

    assert (status, headers["content-type"], document["code"]) == (429, PROBLEM, "quota_exceeded")
    assert document["type"] == "https://iana.org/assignments/http-problem-types#quota-exceeded"
    assert (document["status"], document["violated-policies"]) == (429, ["day"])
    assert (document["request_id"], document["retry_after_ms"] > 0) == (headers["x-request-id"], True)

    status, document, headers = await stack.infer(b"{}", Accept=f"application/json, {PROBLEM}")
    assert (status, document["type"], document["title"], document["param"]) == (
        400,
        "about:blank",
        "Bad Request",
        "input",
    )
    status, document, _ = await stack.infer(b"{}", Accept="*/*")
    assert (status, set(document)) == (400, {"error"})


@pytest.mark.parametrize(
    ("method", "path", "status", "title"),
    [
        ("GET", "/nowhere", 404, "Not Found"),
        ("GET", "/v1/inference", 405, "Method Not Allowed"),
        ("POST", "/v1/inference", 401, "Unauthorized"),
        ("GET", "/internal/health", 401, "Unauthorized"),
    ],
)
async def test_the_edge_speaks_problem_details_too(
    stack: Stack, method: str, path: str, status: int, title: str
) -> None:
    """Wherever a request could be read, its wish is granted."""
    headers = {"Accept": PROBLEM, "Content-Type": "application/json"}
    async with stack.http.request(method, stack.url + path, data=b"{}", headers=headers) as answer:
        document = await answer.json(content_type=PROBLEM)
    assert (answer.status, document["status"], document["title"], document["type"]) == (
        status,
        status,
        title,
        "about:blank",
    )


async def test_everything_that_has_a_key_is_told_the_limits(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """What never reached admission, what failed at work, and a fault of ours: all carry all limits."""
    stack.catalog.set(key={"tokens_per_minute": 4000, "quotas": (("1day", 100),)})
    stack.worker.answerer = lambda member: Outcome(member.id, "worker_lost", 1.0, 0, "v1", "")
    answers = [await stack.infer(b"{}"), await stack.infer({"input": "a"}), await stack.infer(b"{}")]
    monkeypatch.setattr(InferencePipeline, "build_pending", lambda *_, **__: 1 / 0)
    answers.append(await stack.infer())

    assert [answer[0] for answer in answers] == [400, 503, 400, 500]
    for _, document, headers in answers:
        assert headers["ratelimit-policy"].count(";q=") == 4
        assert {"x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"} <= set(headers)
        assert headers["x-request-id"] == document["error"]["request_id"]
    told = ['"day";r=' in headers["ratelimit"] for _, _, headers in answers]
    assert told == [False, True, True, True]  # Before it was asked once, nobody here knows what is left of the day.


async def test_a_tier_in_shadow_refuses_nobody_and_counts(stack: Stack) -> None:
    """Its customers stay inside whatever they do; what would have been refused is counted."""
    stack.catalog.set(
        tiers=(tier("free", 3, 0.1, shadow=True),),
        key={"requests_per_second": 0.001, "burst": 1.0, "max_queue_ms": 2000},
    )
    counted: list[str] = []
    stack.gateway._demand_meter.shadowed = counted.append  # type: ignore[method-assign]
    answers = [await stack.infer() for _ in range(3)]

    assert [answer[0] for answer in answers] == [200, 200, 200]
    await eventually(lambda: len(counted) >= 2, "what would have been refused is counted")


async def test_retries_are_counted(stack: Stack) -> None:
    """A client of OpenAI's says that it tried before."""
    counted: list[str] = []
    stack.gateway._demand_meter.retried = counted.append  # type: ignore[method-assign]
    await stack.infer()
    await stack.infer(**{"x-stainless-retry-count": "0"})
    await stack.infer(**{"x-stainless-retry-count": "2"})

    assert counted == ["free"]


async def test_who_was_refused_and_why_is_noted(stack: Stack) -> None:
    """Whoever explains refusals hears of those that were kept out, and of nothing else."""
    noted: list[tuple[str, str, ErrorCode, str]] = []

    def note(
        request_id: str, identity: IdentityView, error: RequestError, verdict: Verdict | None, factor: float
    ) -> None:
        assert factor == 1.0
        noted.append((request_id, identity.customer_id, error.code, verdict.outcome if verdict else ""))

    handlers = stack.gateway._routes._exact["/v1/inference"]
    inference = handlers["POST"]._pipeline  # type: ignore[attr-defined]  # of its exchange
    assert isinstance(inference, InferencePipeline)
    inference._parts = replace(inference._parts, record_rejection=note)
    stack.catalog.set(key={"quotas": (("1day", 1),)})
    await stack.infer()
    await stack.infer(b"{}")
    _, _, headers = await stack.infer()
    stack.gateway.limits.no_gpu = lambda now: True  # type: ignore[method-assign]
    _, _, later = await stack.infer()

    assert noted == [
        (headers["x-request-id"], "customer-free", ErrorCode.QUOTA_EXCEEDED, Admission.QUOTA),
        (later["x-request-id"], "customer-free", ErrorCode.NO_CAPACITY, ""),
    ]
