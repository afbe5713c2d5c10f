"""Every row of the table of errors as the exceptions of the real `openai` client: its class, and what it carries."""

import asyncio
from typing import Any

import openai
import pytest

from eventually import eventually
from integration.gateway_fixtures import Stack, tier
from integration.openai_fixtures import caller, stack
from scheduler.errors import HTTP, ErrorCode
from scheduler.protocol.batches import Outcome

__all__ = ["caller", "stack"]

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def failure(caller: openai.AsyncOpenAI, **changes: Any) -> openai.APIStatusError:
    """The exception of a chat that is refused, which names the request it was."""
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, **changes}
    with pytest.raises(openai.APIStatusError) as caught:
        await caller.chat.completions.create(**asked)
    error = caught.value
    assert (error.request_id or "").startswith("req_")
    assert isinstance(error.body, dict)
    assert error.body["request_id"] == error.request_id
    return error


def told(error: openai.APIStatusError) -> tuple[type, str | None, str | None, str | None]:
    return type(error), error.code, error.type, error.param


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": "warm"}, (openai.BadRequestError, "invalid_request", "invalid_request_error", "temperature")),
        ({"model": "gpt-7"}, (openai.NotFoundError, "model_not_found", "invalid_request_error", "model")),
        (
            {"messages": [{"role": "user", "content": "x" * 200_000}]},
            (openai.APIStatusError, "request_too_large", "invalid_request_error", "messages"),
        ),
    ],
)
async def test_what_is_wrong_with_the_request(
    caller: openai.AsyncOpenAI, changes: dict[str, Any], expected: Any
) -> None:
    """The field is named."""
    error = await failure(caller, **changes)

    assert told(error) == expected
    assert error.status_code == HTTP[ErrorCode(expected[1])].status


async def test_who_is_not_known(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """A key that is no key, one that is revoked, and one whose account is suspended."""
    stranger = await failure(caller.with_options(api_key="sk-nobody"))
    stack.catalog.set(key={"revoked": True})
    revoked = await failure(caller)
    stack.catalog.set(key={"suspended": True})
    suspended = await failure(caller)
    stack.catalog.snapshot = None
    unknown = await failure(caller)

    assert told(stranger) == (openai.AuthenticationError, "invalid_api_key", "authentication_error", None)
    assert told(revoked) == told(stranger)
    assert told(suspended) == (openai.PermissionDeniedError, "account_suspended", "permission_error", None)
    assert told(unknown)[:2] == (openai.InternalServerError, "catalog_unavailable")


@pytest.mark.parametrize(
    ("key", "free", "expected"),
    [
        ({"burst": 0.5, "requests_per_second": 0.01}, {}, (openai.RateLimitError, "rate_limit_exceeded")),
        (
            {"max_concurrency": 0, "tokens_per_minute": 1, "burst": 0.1},
            {},
            (openai.RateLimitError, "rate_limit_exceeded"),
        ),
        ({}, {"max_queue_depth": 0}, (openai.InternalServerError, "queue_full")),
    ],
)
async def test_whom_a_limit_keeps_out(
    stack: Stack, caller: openai.AsyncOpenAI, key: dict[str, Any], free: dict[str, Any], expected: Any
) -> None:
    """The customer's own limits are 429, a want of room 503; both say when to come again."""
    stack.catalog.set(tiers=(tier("free", 3, 0.1, **free),), key=key)

    error = await failure(caller)

    assert told(error)[:2] == expected
    assert float(error.response.headers["retry-after-ms"]) > 0
    assert int(error.response.headers["retry-after"]) > 0


async def test_a_quota_and_lowered_limits(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """A quota is not worth a retry, lowered limits are."""
    stack.catalog.set(key={"quotas": (("1day", 0),)})
    quota = await failure(caller)
    stack.catalog.set(key={"requests_per_second": 0.01, "burst": 40.0})
    stack.gateway.limits.factor = lambda tier: 0.001  # type: ignore[method-assign]
    lowered = await failure(caller)

    assert told(quota)[:3] == (openai.RateLimitError, "quota_exceeded", "insufficient_quota")
    assert quota.response.headers["x-should-retry"] == "false"
    assert told(lowered)[:2] == (openai.InternalServerError, "reduced_capacity")


async def test_no_gpu_and_no_memory(stack: Stack, caller: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused without asking Redis at all."""
    full = property(lambda _: True, lambda *_: None)  # Beats would set it anew.
    stack.gateway.limits.no_gpu = lambda since: True  # type: ignore[method-assign]
    no_gpu = await failure(caller)
    del stack.gateway.limits.no_gpu  # type: ignore[method-assign]
    monkeypatch.setattr(type(stack.gateway.limits), "short_of_memory", full, raising=False)
    no_memory = await failure(caller)

    assert told(no_gpu)[:2] == (openai.InternalServerError, "no_capacity")
    assert told(no_memory)[:2] == (openai.RateLimitError, "backpressure")


@pytest.mark.parametrize(
    ("code", "exception", "retry"),
    [
        (ErrorCode.QUEUE_TIMEOUT, openai.InternalServerError, "false"),
        (ErrorCode.DEADLINE_EXCEEDED, openai.InternalServerError, "false"),
        (ErrorCode.GPU_TIMEOUT, openai.InternalServerError, "false"),
        (ErrorCode.POISON_REQUEST, openai.UnprocessableEntityError, "false"),
        (ErrorCode.INVALID_OUTPUT, openai.InternalServerError, None),
        (ErrorCode.WORKER_LOST, openai.InternalServerError, None),
    ],
)
async def test_what_failed_on_the_way(
    stack: Stack, caller: openai.AsyncOpenAI, code: ErrorCode, exception: type, retry: str | None
) -> None:
    """The status of the table, and no retry where one would only repeat it."""
    stack.worker.answerer = lambda member: Outcome(member.id, code, 1.5, 0, "v1", "")

    error = await failure(caller)

    assert told(error)[:3] == (exception, code.value, HTTP[code].type)
    assert error.status_code == HTTP[code].status
    assert error.response.headers.get("x-should-retry") == retry


async def test_whom_others_go_before(stack: Stack, caller: openai.AsyncOpenAI) -> None:
    """Shed because too many wait, and told by a gateway that leaves: both are 503, and worth another try."""
    stack.worker.hold = True
    stack.catalog.set(tiers=(tier("free", 3, 0.1, shed_depth=1),))
    waiting = asyncio.create_task(caller.completions.create(model="tiny", prompt="first"))
    await eventually(lambda: stack.gateway.admission.calls == 1, "the first has been let in")
    shed = await failure(caller)
    stack.worker.hold = False
    await waiting
    stack.gateway.drain_state.closed = True
    draining = await failure(caller)

    assert told(shed)[:2] == (openai.InternalServerError, "shed_for_priority")
    assert told(draining)[:2] == (openai.InternalServerError, "draining")
    assert int(shed.response.headers["retry-after"]) > 0
