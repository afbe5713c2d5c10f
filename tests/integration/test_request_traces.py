"""What traces leave in Redis: of who is sampled 57 bytes at the end of its body, of all others nothing."""

import asyncio
from collections.abc import Mapping

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.inference.traces import RequestTraces
from integration.gateway_fixtures import Stack, running_stack
from scheduler.payload import Payload, context_in, encode_payload
from scheduler.tracing import Span

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
HELLO = encode_payload(Payload("tiny", "hello", {}))


async def stored(stack: Stack, headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """The row of one request while it waits; then it is answered."""
    stack.worker.hold = True
    sent = asyncio.create_task(stack.infer(**headers))
    (key,) = await eventually(lambda: stack.redis.keys("request:*"), "the row")
    row: dict[bytes, bytes] = await stack.redis.hgetall(key)  # type: ignore[misc]
    stack.worker.hold = False
    assert (await sent)[0] == 200
    await stack.redis.delete(key)
    return row


@pytest.mark.parametrize("headers", [{}, CALLER], ids=["nobody's", "a caller's"])
async def test_the_row_of_who_is_not_sampled_is_what_it_is_without_traces(
    client: Redis, redis_url: str, headers: dict[str, str]
) -> None:
    """Gateway without traces, with traces and not sampled: the same fields and the same bytes, but for ids and times."""
    spans: list[Span] = []
    rows = []
    for traces in (None, RequestTraces(spans.extend, 0.0)):
        async with running_stack(client, redis_url, traces=traces) as stack:
            rows.append(await stored(stack, headers))

    without, beside = rows
    assert without.keys() == beside.keys()
    assert without[b"body"] == beside[b"body"] == HELLO
    assert {name: len(value) for name, value in without.items() if name != b"who"} == {
        name: len(value) for name, value in beside.items() if name != b"who"
    }
    assert spans == []


async def test_a_sampled_request_carries_its_context_in_its_body(client: Redis, redis_url: str) -> None:
    """No field more: the body ends with the context of the request's own span, under its caller's trace."""
    spans: list[Span] = []
    async with running_stack(client, redis_url, traces=RequestTraces(spans.extend, 1.0)) as stack:
        row = await stored(stack, CALLER)
        without = await stored(stack, {})

    assert row.keys() == {b"state", b"env", b"who", b"body"} == without.keys()
    assert len(row[b"body"]) == len(HELLO) + 57
    assert context_in(row[b"body"]) == spans[0].context
    assert spans[0].context.trace_id == TRACE
    assert [span.name for span in spans[:3]] == ["request", "enqueue", "queue wait"]


async def test_equal_idempotent_requests_are_equal_though_their_traces_differ(client: Redis, redis_url: str) -> None:
    """The context is no part of what is compared: a second try under the same key is answered from the first."""
    spans: list[Span] = []
    async with running_stack(client, redis_url, traces=RequestTraces(spans.extend, 1.0)) as stack:
        answers = [await stack.infer(**{"Idempotency-Key": "one"}) for _ in range(2)]

    assert [status for status, _, _ in answers] == [200, 200]
    assert answers[1][2]["idempotent-replayed"] == "true"
    told = [span for span in spans if span.name == "request"]
    assert len({span.context.trace_id for span in told}) == 2
    assert len({span.attributes["tierlane.request_id"] for span in told}) == 1
    assert len([span for span in spans if span.name == "queue wait"]) == 1
