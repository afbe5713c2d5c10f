"""Traces of a whole stack, as a collector gets them: the tree of one request, batches with their members, and planted secrets."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from eventually import eventually
from otlp_receiver import Received, Receiver, receiver
from stack import Stack, start_stack

CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLERS_SPAN = "00f067aa0ba902b7"
PROMPT = "canary-prompt-5d1f"
SECRET = "canary-secret-9a3e"


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    """Where the traces go."""
    with receiver() as there:
        yield there


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: Receiver) -> Iterator[Stack]:
    """One worker of 20 ms a batch; callers decide what is traced, and nothing is without them."""
    environment = {
        "TIERLANE_TRACES_ENDPOINT": collector.url,
        "TIERLANE_TRACES_SAMPLE": "0",
        "TIERLANE_TRACES_TRUST_CALLERS": "on",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=mine",
    }
    options = ("--workers", "1", "--backend", "simulated:20")
    with start_stack(tmp_path_factory.mktemp("traces"), *options, environment=environment) as up:
        yield up


def traced(trace_id: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CALLERS_SPAN}-{flags}"}


async def ask(stack: Stack, path: str = "/v1/inference", body: dict[str, Any] | None = None, **headers: str) -> Any:
    """One call; its status, headers and body."""
    async with (
        aiohttp.ClientSession(headers=stack.headers("enterprise") | headers) as session,
        session.post(stack.url + path, json=body or {"input": PROMPT}) as answer,
    ):
        return answer.status, answer.headers["x-request-id"], await answer.text()


async def whole(collector: Receiver, request_id: str, names: set[str]) -> dict[str, Received]:
    """The spans of a request's trace by name, once they have come."""

    def there() -> bool:
        return names <= {span.name for span in collector.of_request(request_id)}

    await eventually(there, f"{names} of {request_id}")
    return {span.name: span for span in collector.of_request(request_id)}


async def test_one_request_is_one_tree_that_goes_on_from_its_caller(stack: Stack, collector: Receiver) -> None:
    """Request under the caller's span, enqueue and queue wait under it, batch under it with a link to it, infer in the batch."""
    await stack.healthy(1)

    status, request_id, _ = await ask(stack, **traced(CALLER))
    spans = await whole(collector, request_id, {"request", "enqueue", "queue wait", "batch", "infer"})

    request, enqueue, wait, batch, infer = (spans[n] for n in ("request", "enqueue", "queue wait", "batch", "infer"))
    assert status == 200
    assert {span.trace_id for span in spans.values()} == {CALLER}
    assert request.parent == CALLERS_SPAN
    assert {enqueue.parent, wait.parent, batch.parent} == {request.span_id}
    assert infer.parent == batch.span_id
    assert batch.links == ((CALLER, request.span_id),)
    assert [request.service, batch.service] == ["tierlane-gateway", "tierlane-worker"]
    assert request.attributes | {
        "tierlane.tier": "enterprise", "tierlane.model": "simulated", "http.response.status_code": 200,
        "tierlane.batch_size": 1, "http.route": "/v1/inference",
    } == request.attributes  # fmt: skip
    assert request.began == enqueue.began <= enqueue.ended == wait.began <= wait.ended <= request.ended
    assert infer.ended - infer.began >= 19e6
    assert all(span.began <= span.ended and not span.failed for span in spans.values())
    assert {headers["x-tenant"] for headers in collector.headers} == {"mine"}
    assert (await stack.audited([request_id]))[request_id]["trace_id"] == CALLER


async def test_a_batch_links_to_all_its_members(stack: Stack, collector: Receiver) -> None:
    """Callers with traces of their own share a run: one batch span, and in each trace an infer that leads to it."""
    traces = [f"{number:032x}" for number in range(1, 9)]

    answers = await asyncio.gather(*(ask(stack, **traced(trace)) for trace in traces))
    for _, request_id, _ in answers:
        await whole(collector, request_id, {"request", "infer"})

    def linked() -> int:
        return sum(len(span.links) for span in collector.spans if span.name == "batch" and span.trace_id in traces)

    await eventually(lambda: linked() == len(traces), "links to all of them")
    batches = [span for span in collector.spans if span.name == "batch" and span.trace_id in traces]
    requests = {(s.trace_id, s.span_id) for s in collector.spans if s.name == "request" and s.trace_id in traces}
    ids = {(span.trace_id, span.span_id) for span in batches}
    assert {link for span in batches for link in span.links} == requests
    assert len(batches) < len(traces)
    for infer in (span for span in collector.spans if span.name == "infer" and span.trace_id in traces):
        assert (infer.trace_id, infer.parent) in (ids if not infer.links else requests)
        assert set(infer.links) <= ids


async def test_nothing_that_was_planted_reaches_the_collector(stack: Stack, collector: Receiver) -> None:
    """Prompts, keys, parameters and headers go in at every door; spans come out, and nothing of them."""
    chat = {"model": "simulated", "messages": [{"role": "user", "content": PROMPT}]}
    asked = [
        ("/v1/inference", {"input": PROMPT, "parameters": {"x": SECRET}}, 200),
        ("/v1/completions", {"model": "simulated", "prompt": [PROMPT, PROMPT]}, 200),
        ("/v1/completions", {"model": "simulated", "prompt": PROMPT, "stream": True}, 200),
        ("/v1/chat/completions", chat, 200),
        ("/v1/inference", {"input": PROMPT, "model": SECRET}, 404),
        ("/v1/inference", {"input": PROMPT, SECRET: 1}, 400),
    ]
    seen = []
    for number, (path, body, status) in enumerate(asked):
        headers = {"Idempotency-Key": f"{SECRET}-{number}", "User-Agent": SECRET, "tracestate": f"v={SECRET}"}
        answered, request_id, _ = await ask(stack, path, body, **headers, **traced(f"{0xC0 + number:032x}"))
        assert answered == status
        seen.append(request_id)

    for request_id in seen[:4]:
        await whole(collector, request_id, {"request", "infer"})
    every_key = [stack.key(tier) for tier in ("enterprise", "paid", "free")]
    sent = b"".join(collector.bodies)
    assert [text for text in (PROMPT, PROMPT[::-1], SECRET, *every_key, "Bearer") if text.encode() in sent] == []
    two = await whole(collector, seen[1], {"request", "batch"})
    assert two["request"].attributes["tierlane.inputs"] == 2
    assert len([span for span in collector.of_request(seen[1]) if span.name == "request"]) == 1


async def test_a_job_goes_on_in_the_trace_of_its_promise(stack: Stack, collector: Receiver) -> None:
    """The 202 has its span, and the run that comes later stands in the same trace."""
    status, request_id, _ = await ask(stack, Prefer="respond-async", **traced("d" * 32))

    spans = await whole(collector, request_id, {"request", "enqueue", "batch", "infer"})

    assert (status, spans["request"].attributes["http.response.status_code"]) == (202, 202)
    assert spans["batch"].parent == spans["request"].span_id


async def test_a_collector_that_refuses_costs_no_answer_and_one_log_line(stack: Stack, collector: Receiver) -> None:
    """Several exports fail; all are answered, each process says it once, and once more when traces arrive again."""
    log = stack.data_dir.parent / "up.log"

    def told(what: str) -> int:
        return log.read_text().count(what)

    collector.status = 400
    for _ in range(3):
        tries = len(collector.headers)
        assert [(await ask(stack, **traced("e" * 32)))[0] for _ in range(3)] == [200] * 3
        await eventually(lambda tries=tries: len(collector.headers) >= tries + 2, "both processes tried")  # type: ignore[misc]
    assert told("traces do not arrive") == 2
    collector.status = 200
    _, request_id, _ = await ask(stack, **traced("f" * 32))

    await whole(collector, request_id, {"request", "batch"})
    await eventually(lambda: told("traces arrive again") == 2, "both say that it is over")
    assert told("traces do not arrive") == 2
    assert told("opentelemetry") == 0
