"""An OTLP collector for tests: it receives over HTTP in a thread and keeps bodies and spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class Received:
    """One received span; ids in hexadecimal, times in ns of the sender's wall clock."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    began: int
    ended: int
    failed: bool
    links: tuple[tuple[str, str], ...]
    attributes: dict[str, Any]


class Receiver:
    """The requests received so far. `status` is returned to senders."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[Received]:
        return [span for body in list(self.bodies) for span in _read(body)]

    def trace(self, trace_id: str) -> list[Received]:
        """Return the spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def of_request(self, request_id: str) -> list[Received]:
        """Return the spans of a request's trace, or none before its own span has arrived."""
        own = [s for s in self.spans if s.name == "request" and s.attributes["tierlane.request_id"] == request_id]
        return self.trace(own[0].trace_id) if own else []


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A collector on a free port."""
    kept = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.headers.append(dict(self.headers))
            if self.path == "/v1/traces" and kept.status == 200:
                kept.bodies.append(body)
            self.send_response(kept.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    kept.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _read(body: bytes) -> list[Received]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    return [
        Received(
            service=_attributes(resource.resource.attributes)["service.name"],
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            began=span.start_time_unix_nano,
            ended=span.end_time_unix_nano,
            failed=span.status.code == Status.STATUS_CODE_ERROR,
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            attributes=_attributes(span.attributes),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
