"""Tracing: what a collector gets by OTLP, the cost of one that is unavailable, and traces of replays."""

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from redis.asyncio import Redis

from eventually import eventually
from gateway.inference.traces import RequestTraces
from integration.gateway_fixtures import reverse, running_stack
from otlp_receiver import Receiver, receiver
from scheduler.errors import StartError
from scheduler.payload import Payload
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.tracing import Context, Span, SpanRole
from stack import free_port
from tierlane.roles import tracing
from tierlane.roles.process import spans_of
from tierlane.roles.tracing import QUEUE, OtlpSpans
from tierlane.settings.model import Settings

ONE = Context("a" * 32, "b" * 16)
OTHER = Context("c" * 32, "d" * 16)


def span(**changes: Any) -> Span:
    fields = {"name": "request", "context": ONE, "parent": None, "began": 10.0, "ended": 10.25, "attributes": {}}
    return Span(**fields | changes)


@pytest.fixture
def collector() -> Iterator[Receiver]:
    """A collector that accepts everything."""
    with receiver() as running:
        yield running


def test_a_span_arrives(collector: Receiver) -> None:
    """Name, ids, attributes, links and failure arrive; times are converted to the wall clock."""
    spans = OtlpSpans(collector.url, "gateway", "g1", wall_ns=lambda: 1_700_000_000_000_000_000, clock=lambda: 11.0)

    spans([
        span(parent=OTHER, kind=SpanRole.SERVER, remote=True, attributes={"a": 1, "b": "x"}),
        span(name="batch", context=OTHER, links=[ONE], failed=True),
    ])  # fmt: skip
    spans.close()

    first, second = collector.spans
    assert (first.name, first.trace_id, first.span_id, first.parent) == ("request", "a" * 32, "b" * 16, "d" * 16)
    assert (first.began, first.ended) == (1_699_999_999_000_000_000, 1_699_999_999_250_000_000)
    assert (first.attributes, first.failed, first.service) == ({"a": 1, "b": "x"}, False, "tierlane-gateway")
    assert (second.parent, second.links, second.failed) == ("", (("a" * 32, "b" * 16),), True)


async def test_an_unavailable_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded, sending does not wait, one line is logged, and shutdown takes a bounded time."""
    monkeypatch.setattr(tracing, "FLUSH_S", 0.3)
    spans = OtlpSpans(f"http://127.0.0.1:{free_port()}", "gateway", "g1")

    with structlog.testing.capture_logs() as lines:
        began = time.thread_time()
        for _ in range(3 * QUEUE):
            spans([span()])
        sent_in = time.thread_time() - began
        queued = len(spans._processor._batch_processor._queue)
        closing = time.monotonic()
        spans.close()
        closed_in = time.monotonic() - closing
        thread = spans._processor._batch_processor._worker_thread
        await eventually(lambda: not thread.is_alive(), "the thread that exports has ended", 2.0)

    assert queued <= QUEUE
    assert sent_in < 3 * QUEUE * 0.0005
    assert closed_in < 1.0
    assert [line["event"] for line in lines] == ["traces do not arrive"]


async def test_a_rejecting_collector_is_logged_once(collector: Receiver) -> None:
    """However many exports fail, there is one line for the failure, and one with the lost spans when it recovers."""
    collector.status = 400
    spans = OtlpSpans(collector.url, "gateway", "g1")
    with structlog.testing.capture_logs() as lines:
        for tries in (1, 2):
            spans([span(), span()])
            await eventually(lambda tries=tries: len(collector.headers) == tries, f"export {tries}")
        collector.status = 200
        spans([span()])
        await eventually(lambda: len(collector.spans) == 1, "the first span arrives")
        spans.close()

    assert [(line["event"], line.get("lost_spans")) for line in lines] == [
        ("traces do not arrive", None), ("traces arrive again", 4),
    ]  # fmt: skip


def test_without_an_endpoint_opentelemetry_is_not_imported() -> None:
    """Gateway and worker import neither exporter nor SDK (redis-py imports the API of its own accord)."""
    probe = (
        "import sys\n"
        "import tierlane.roles.gateway, tierlane.roles.worker\n"
        "from tierlane.settings.model import Settings\n"
        "from tierlane.roles.process import spans_of\n"
        "with spans_of(Settings(), 'gateway', 'g1') as spans:\n"
        "    assert spans is None\n"
        "ours = ('opentelemetry.exporter', 'opentelemetry.sdk.trace', 'opentelemetry.proto', 'google', 'requests')\n"
        "print([name for name in sys.modules if name.startswith(ours)])\n"
    )
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_missing_packages_are_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does not start, and the error names the setting and the extra to install."""
    monkeypatch.delitem(sys.modules, "tierlane.roles.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    settings = Settings(traces_endpoint="http://collector:4318")

    with (
        pytest.raises(StartError, match=r"TIERLANE_TRACES_ENDPOINT.*tierlane\[tracing\]"),
        spans_of(settings, "worker", "w1"),
    ):
        raise AssertionError("must not begin")


@pytest.mark.parametrize(("share", "added"), [(0.0, 0), (1.0, 57)])
async def test_only_sampled_requests_carry_a_context(client: Redis, redis_url: str, share: float, added: int) -> None:
    """The trace context is at the end of a sampled request's body; any other body is the same as without tracing."""
    bodies: list[bytes] = []

    def record(member: ClaimedRequest) -> Outcome:
        bodies.append(member.body)
        return reverse(member)

    async with running_stack(client, redis_url, traces=RequestTraces([].extend, share)) as stack:
        stack.worker.answerer = record
        await stack.infer()

    plain = Payload("tiny", "hello", {}).encode_for("", 0, "customer-free")
    assert [(body == plain, len(body) - len(plain)) for body in bodies] == [(not added, added)]


async def test_a_replay_has_a_trace_of_its_own(client: Redis, redis_url: str) -> None:
    """The context is not part of the fingerprint: a repetition with an idempotency key is replayed, in its own trace."""
    spans: list[Span] = []
    async with running_stack(client, redis_url, traces=RequestTraces(spans.extend, 1.0)) as stack:
        responses = [await stack.infer(**{"Idempotency-Key": "one"}) for _ in range(2)]

    assert [status for status, _, _ in responses] == [200, 200]
    assert responses[1][2]["idempotent-replayed"] == "true"
    requests = [span for span in spans if span.name == "request"]
    assert len({span.context.trace_id for span in requests}) == 2
    assert len({span.attributes["tierlane.request_id"] for span in requests}) == 1
    assert len([span for span in spans if span.name == "queue wait"]) == 1
