"""The trace of a request through a whole stack, as an OTLP collector receives it."""

from pathlib import Path

import aiohttp

from eventually import eventually
from otlp_receiver import Received, Receiver, receiver
from stack import Stack, start_stack

CALLER, CALLERS_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NAMES = ("request", "enqueue", "queue wait", "batch", "infer")


async def send(stack: Stack, trace: str, **headers: str) -> tuple[int, str]:
    """Status and request id of one sampled call."""
    headers |= stack.headers("enterprise") | {"traceparent": f"00-{trace}-{CALLERS_SPAN}-01"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{stack.url}/v1/inference", json={"input": "hello"}) as response,
    ):
        return response.status, response.headers["x-request-id"]


async def spans_of(collector: Receiver, request_id: str, *names: str) -> dict[str, Received]:
    """The spans of a request by name, once all have arrived."""

    def arrived() -> bool:
        return set(names) <= {span.name for span in collector.of_request(request_id)}

    await eventually(arrived, f"{names} of {request_id}")
    return {span.name: span for span in collector.of_request(request_id)}


async def test_the_spans_of_one_request_are_a_tree_under_the_callers_span(tmp_path: Path) -> None:
    """Request; below it enqueue, queue wait and batch, which links to it; infer below the batch. So for a job."""
    environment = {
        "TIERLANE_TRACES_SAMPLE": "0",
        "TIERLANE_TRACES_TRUST_CALLERS": "on",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=mine",
    }
    with receiver() as collector:
        environment["TIERLANE_TRACES_ENDPOINT"] = collector.url
        with start_stack(tmp_path, "--workers", "1", "--backend", "simulated:20", environment=environment) as stack:
            await stack.healthy(1)
            status, request_id = await send(stack, CALLER)
            job_status, job_id = await send(stack, "d" * 32, Prefer="respond-async")
            spans = await spans_of(collector, request_id, *NAMES)
            job = await spans_of(collector, job_id, "request", "enqueue", "batch", "infer")
            row = (await stack.audited([request_id]))[request_id]

    request, enqueue, wait, batch, infer = (spans[name] for name in NAMES)
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
    assert row["trace_id"] == CALLER
    assert (job_status, job["request"].attributes["http.response.status_code"]) == (202, 202)
    assert job["batch"].parent == job["request"].span_id
