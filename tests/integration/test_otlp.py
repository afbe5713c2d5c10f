"""Spans by OTLP: what a collector gets, and what one costs that is away, slow or not wanted."""

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from eventually import eventually
from otlp_receiver import Receiver, receiver
from scheduler.errors import StartError
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
    """A collector that takes everything."""
    with receiver() as there:
        yield there


def test_a_span_arrives_as_it_was_told(collector: Receiver) -> None:
    """Name, ids, attributes, links, failure; times are the wall clock's, as far before now as they are by our own clock."""
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


async def test_a_collector_that_is_away_costs_nothing_but_its_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded, whoever tells does not wait, one line is logged, and the end comes in its time."""
    monkeypatch.setattr(tracing, "FLUSH_S", 0.3)
    spans = OtlpSpans(f"http://127.0.0.1:{free_port()}", "gateway", "g1")

    with structlog.testing.capture_logs() as lines:
        began = time.thread_time()
        for _ in range(3 * QUEUE):
            spans([span()])
        told_in = time.thread_time() - began
        left = len(spans._processor._batch_processor._queue)
        ending = time.monotonic()
        spans.close()
        ended_in = time.monotonic() - ending
        thread = spans._processor._batch_processor._worker_thread
        await eventually(lambda: not thread.is_alive(), "the thread that exports has ended", 2.0)

    assert left <= QUEUE
    assert told_in < 3 * QUEUE * 0.0005
    assert ended_in < 1.0
    assert [line["event"] for line in lines] == ["traces do not arrive"]


async def test_a_refusing_collector_is_logged_once_and_once_more_when_it_is_back(collector: Receiver) -> None:
    """However many exports fail in between."""
    collector.status = 400
    spans = OtlpSpans(collector.url, "gateway", "g1")
    with structlog.testing.capture_logs() as lines:
        for tries in (1, 2):
            spans([span(), span()])
            await eventually(lambda tries=tries: len(collector.headers) == tries, f"export {tries}")  # type: ignore[misc]
        collector.status = 200
        spans([span()])
        await eventually(lambda: len(collector.spans) == 1, "the first that arrives")
        spans.close()

    assert [(line["event"], line.get("lost_spans")) for line in lines] == [
        ("traces do not arrive", None), ("traces arrive again", 4),
    ]  # fmt: skip


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    """Neither by a gateway nor by a worker that could send traces; what redis-py imports where it finds it is its own."""
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


def test_missing_packages_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does not start, and says what to install."""
    monkeypatch.delitem(sys.modules, "tierlane.roles.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    settings = Settings(traces_endpoint="http://collector:4318")

    with (
        pytest.raises(StartError, match=r"TIERLANE_TRACES_ENDPOINT.*tierlane\[tracing\]"),
        spans_of(settings, "worker", "w1"),
    ):
        raise AssertionError("must not begin")
