"""Spans by OTLP over HTTP: a bounded queue, and a thread of OpenTelemetry that empties it. Callers never wait.

While a collector is not available, only its spans are lost: the thread retries for a while, the oldest spans are dropped when
the queue is full, and the log has one line at the beginning and one at the end of the outage.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from scheduler.tracing import Context, Span, SpanRole

QUEUE = 4096  # Spans; about 4 MB.
AT_A_TIME = 512
EVERY_MS = 1000
PATIENCE_S = 5.0
"""For one export with all its tries."""
FLUSH_S = 1.0
"""For what is left when the process ends; `tierlane up` gives a role no more than 1.5 s in all."""
LAST_TRY_S = 0.25
"""The same, where the last export has failed."""

log = structlog.get_logger("traces")

_KINDS = {SpanRole.INTERNAL: SpanKind.INTERNAL, SpanRole.SERVER: SpanKind.SERVER, SpanRole.CONSUMER: SpanKind.CONSUMER}
_RECORDED = TraceFlags(TraceFlags.SAMPLED)
_FAILED, _UNSET = Status(StatusCode.ERROR), Status(StatusCode.UNSET)


class OtlpSpans:
    """Accepts ended spans of the process `role` and `name`."""

    def __init__(
        self,
        endpoint: str,
        role: str,
        name: str,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        own = version("tierlane")
        named = {"service.name": f"tierlane-{role}", "service.instance.id": name, "service.version": own}
        self._resource = Resource.create(named)
        self._scope = InstrumentationScope("tierlane", own)
        self._wall_ns = wall_ns
        self._clock = clock
        library = logging.getLogger("opentelemetry")  # It logs each failure several times; `Noted` logs it once.
        library.addHandler(logging.NullHandler())
        library.propagate = False
        exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=PATIENCE_S)
        self._noted = Noted(exporter, log.bind(endpoint=endpoint, role=role, name=name))
        self._processor = BatchSpanProcessor(self._noted, QUEUE, EVERY_MS, AT_A_TIME)

    def __call__(self, spans: Sequence[Span]) -> None:
        """As `Spans` says: it is a matter of microseconds. The wall clock is read here alone, for all of them."""
        began_ns = self._wall_ns() - round(self._clock() * 1e9)
        for span in spans:
            self._processor.on_end(self._readable(span, began_ns))

    def close(self) -> None:
        """Send what is left, within a bound; nothing is taken any more. The processor's own bound is 30 s."""
        flush = threading.Thread(target=self._processor.shutdown, name="traces-end", daemon=True)
        flush.start()
        flush.join(FLUSH_S if self._noted.arriving else LAST_TRY_S)
        if flush.is_alive():
            self._noted.shutdown()  # Which ends the tries that are under way.

    def _readable(self, span: Span, began_ns: int) -> ReadableSpan:
        """`began_ns`: the wall clock's time at 0 of the monotonic one."""
        return ReadableSpan(
            span.name,
            _context(span.context, remote=False),
            None if span.parent is None else _context(span.parent, remote=span.remote),
            self._resource,
            span.attributes,
            links=[Link(_context(each, remote=True)) for each in span.links],
            kind=_KINDS[span.kind],
            status=_FAILED if span.failed else _UNSET,
            start_time=began_ns + round(span.began * 1e9),
            end_time=began_ns + round(span.ended * 1e9),
            instrumentation_scope=self._scope,
        )


class Noted(SpanExporter):
    """An exporter whose first failure in a row is logged, and its end; it runs in the thread that exports."""

    def __init__(self, exporter: SpanExporter, log: Any) -> None:
        """`log` says by itself whose spans they are: what is bound in another thread is not known in this one."""
        self._exporter = exporter
        self._log = log
        self._lost = 0

    @property
    def arriving(self) -> bool:
        """Whether the last export went well, as far as there was one."""
        return not self._lost

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send these; they are lost where that is not possible."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                self._log.info("traces arrive again", lost_spans=self._lost)
            self._lost = 0
            return result
        if not self._lost:
            self._log.warning("traces do not arrive")
        self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Give up what is under way."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return self._exporter.force_flush(timeout_millis)


def _context(context: Context, *, remote: bool) -> SpanContext:
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), remote, _RECORDED)
