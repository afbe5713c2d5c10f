"""Request events: the log line and the spans of a request, by its outcome. Neither contains client data."""

from typing import Any

import pytest
import structlog
from multidict import CIMultiDict, CIMultiDictProxy

from customer_limits import group_of
from direct_parts import submission
from gateway.http.errors import RejectionError
from gateway.inference.events import RequestLog
from gateway.inference.pending import PendingRequest
from gateway.inference.submission import build_submission
from gateway.inference.traces import RequestTraces, trace_id
from identities import identity
from metrics_figures import reply
from ratelimit.request_limits import FUNCTION
from scheduler.errors import ErrorCode, RequestError
from scheduler.payload import Payload, context_in, decode_payload, encode_payload
from scheduler.protocol.admission import Verdict
from scheduler.protocol.replies import Reply
from scheduler.states import Admission
from scheduler.tracing import Span, SpanRole

CANARY = "canary-5d1f"
PATH = "/v1/inference"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
BODY = encode_payload(Payload("tiny", CANARY, {}))
SHED = Verdict(Admission.SHED, depth=120)


def new_request() -> PendingRequest:
    return PendingRequest(
        submission("req_1", nonce=CANARY, model="tiny", input_bytes=11, idempotency=CANARY, body=BODY), 100.0
    )


def headers(traceparent: str | None) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict({} if traceparent is None else {"traceparent": traceparent}))


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            "completed",
            {"status": 200, "outcome": "completed", "latency_ms": 200.0, "inputs": 2, "tokens_used": 2,
             "queue_wait_ms": 20.0, "infer_ms": 50.0, "batch_size": 4, "batch_id": "b", "gpu": "w", "attempt": 1,
             "tier": "free", "model": "tiny"},
        ),
        ("accepted", {"status": 202, "outcome": "accepted", "input_bytes": 11}),
        (
            "rejected",
            {"status": 503, "outcome": "shed_for_priority", "reason": "shed", "retry_after_ms": 300,
             "latency_ms": 250.0},
        ),
        ("unknown", {"status": 401, "outcome": "invalid_api_key", "request_id": "req_1"}),
    ],
)  # fmt: skip
def test_the_log_line_of_a_request(outcome: str, expected: dict[str, Any]) -> None:
    """It has the known fields, no empty ones, and nothing that the client sent."""
    log, customer, pending = RequestLog(lambda: 100.25), identity(), new_request()
    with structlog.testing.capture_logs() as lines:
        if outcome == "completed":
            log.completed(PATH, customer, pending, [reply(output=CANARY), reply(output=CANARY)], 0.2)
        elif outcome == "accepted":
            log.accepted(PATH, "req_1", customer, pending)
        elif outcome == "rejected":
            pending.verdict = SHED
            log.failed(PATH, "req_1", customer, pending, RejectionError(ErrorCode.SHED_FOR_PRIORITY, CANARY, 300))
        else:
            log.failed(PATH, "req_1", None, None, RequestError(ErrorCode.INVALID_API_KEY, CANARY, CANARY))
    (line,) = lines

    assert {name: line.get(name) for name in expected} == expected
    assert line["event"] == "request"
    assert [value for value in line.values() if value in (None, "")] == []
    assert CANARY not in str(line)


class Tracing:
    """Request traces that keep their spans, on a virtual clock."""

    def __init__(self, share: float = 1.0, *, trust_callers: bool = False, chance: float = 0.5) -> None:
        self.now = 100.0
        self.spans: list[Span] = []
        self.traces = RequestTraces(
            self.spans.extend, share, trust_callers=trust_callers, clock=lambda: self.now, chance=lambda: chance
        )

    def request(self, traceparent: str | None = None, first: PendingRequest | None = None) -> PendingRequest:
        trace = self.traces.sampled(headers(traceparent), first)
        if trace is None:
            return new_request()
        customer, payload = identity(), decode_payload(BODY)
        made = build_submission("req_1", customer, payload, group_of(customer), FUNCTION, trace=trace.context)
        return self.traces.pending(made, 100.0, sink=None, created=100.0, trace=trace)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", TRACE),
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE.upper()}-{SPAN}-01", ""),
        (None, ""),
    ],
)
def test_the_trace_id_of_a_valid_traceparent_is_audited(value: str | None, expected: str) -> None:
    """Other values are ignored."""
    assert trace_id(headers(value)) == expected


@pytest.mark.parametrize(
    ("share", "trusted", "flags", "chance", "sampled"),
    [
        (0.01, False, None, 0.009, True),
        (0.01, False, None, 0.01, False),
        (0.01, False, "01", 0.5, False),
        (0.01, False, "00", 0.009, True),
        (0.0, True, "01", 0.5, True),
        (1.0, True, "00", 0.0, False),
        (0.01, True, None, 0.009, True),
        (0.01, True, "invalid", 0.5, False),
    ],
)
def test_sampling(share: float, trusted: bool, flags: str | None, chance: float, sampled: bool) -> None:
    """By the share; the flag of a caller decides only if callers are trusted. An unsampled request is unchanged."""
    tracing = Tracing(share, trust_callers=trusted, chance=chance)
    pending = tracing.request(f"00-{TRACE}-{SPAN}-{flags}" if flags else None)
    tracing.traces.completed(PATH, identity(), pending, [reply()], 0.2)
    tracing.traces.accepted(PATH, "req_1", identity(), pending)
    tracing.traces.failed(PATH, "req_1", None, None, RequestError(ErrorCode.INTERNAL_ERROR))

    assert (pending.trace is not None) == (context_in(pending.submission.body) is not None) == sampled
    assert bool(tracing.spans) is sampled
    if not sampled:
        assert type(pending) is PendingRequest
        assert (pending.submission.body, pending.submission.trace_id) == (BODY, "")


def test_the_callers_trace_is_continued() -> None:
    """Its id is in the audit and in the body, and its span is the remote parent. A list of inputs is one trace."""
    tracing = Tracing()
    pending = tracing.request(f"00-{TRACE}-{SPAN}-00")
    assert context_in(tracing.request(first=pending).submission.body) == context_in(pending.submission.body)
    assert tracing.request(first=new_request()).trace is None  # The first one was not sampled.

    tracing.traces.completed(PATH, identity(), pending, [reply(id="req_1")], 0.2)

    request = tracing.spans[0]
    assert not {"tierlane.inputs", "tierlane.attempts"} & request.attributes.keys()
    assert request.context == context_in(pending.submission.body)
    assert (request.context.trace_id, pending.submission.trace_id) == (TRACE, TRACE)
    assert request.parent is not None
    assert (request.parent.span_id, request.remote, request.kind) == (SPAN, True, SpanRole.SERVER)


def test_the_spans_of_a_completed_request() -> None:
    """The request, its way into Redis, and its time in the queue as Redis measured it; no other attributes."""
    tracing = Tracing()
    pending = tracing.request()
    tracing.now = 100.01
    pending.accepted = True
    tracing.now = 100.9

    tracing.traces.completed(PATH, identity(), pending, [reply(id="req_1", attempts=2), reply()], 0.2)

    spans = {span.name: span for span in tracing.spans}
    assert {name: (span.began, round(span.ended, 6)) for name, span in spans.items()} == {
        "request": (100.0, 100.2), "enqueue": (100.0, 100.01), "queue wait": (100.01, 100.03),
    }  # fmt: skip
    assert spans["request"].attributes == {
        "http.request.method": "POST", "http.route": PATH, "http.response.status_code": 200,
        "tierlane.request_id": "req_1", "tierlane.tier": "free", "tierlane.model": "tiny", "tierlane.inputs": 2,
        "tierlane.attempts": 2, "tierlane.batch_id": "b", "tierlane.batch_size": 4,
    }  # fmt: skip
    assert {spans[name].parent for name in ("enqueue", "queue wait")} == {spans["request"].context}
    assert not spans["request"].failed


@pytest.mark.parametrize(
    ("entered", "outcome", "code", "names", "failed"),
    [
        (False, SHED, ErrorCode.SHED_FOR_PRIORITY, ["request"], True),
        (False, None, ErrorCode.RATE_LIMIT_EXCEEDED, ["request"], False),
        (True, None, ErrorCode.CANCELLED, ["request", "enqueue"], False),
        (True, reply(id="req_1", error_code="queue_timeout"), ErrorCode.QUEUE_TIMEOUT, ["request", "enqueue", "queue wait"], True),
        (True, reply(id="req_1", queue_ms=-1.0), ErrorCode.POISON_REQUEST, ["request", "enqueue"], False),
        (True, reply(id="another"), ErrorCode.POISON_REQUEST, ["request", "enqueue"], False),
        (True, None, None, ["request", "enqueue"], False),
    ],
)  # fmt: skip
def test_the_spans_of_other_outcomes(
    entered: bool, outcome: Reply | Verdict | None, code: ErrorCode | None, names: list[str], failed: bool
) -> None:
    """As far as the request got; 5xx is a failure. A job (no code here) ends with its 202."""
    tracing = Tracing()
    pending = tracing.request()
    pending.accepted = entered
    if outcome is not None:
        pending.finish(outcome)
    tracing.now = 100.25
    if code is None:
        tracing.traces.accepted(PATH, "req_1", identity(), pending)
    else:
        tracing.traces.failed(PATH, "req_1", identity(), pending, RequestError(code, CANARY))

    assert [span.name for span in tracing.spans] == names
    request = tracing.spans[0]
    assert request.attributes.get("error.type", code) == code
    assert code is not None or request.attributes["http.response.status_code"] == 202
    assert (request.failed, request.ended) == (failed, 100.25)
    assert CANARY not in repr(tracing.spans)
