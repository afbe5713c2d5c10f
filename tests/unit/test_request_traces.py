"""Who is sampled, and which spans a call leaves by how it ended."""

from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.inference.events import EventListeners, RequestLog, told_to
from gateway.inference.pending import PendingRequest
from gateway.inference.traces import RequestTraces
from integration.gateway_fixtures import LiteralCatalog
from metrics_figures import reply
from ratelimit.limits import NO_LIMITS
from scheduler.errors import ErrorCode, RequestError
from scheduler.payload import Payload, context_in, encode_payload
from scheduler.protocol.admission import Submission, Verdict
from scheduler.protocol.replies import Reply
from scheduler.states import Admission
from scheduler.tracing import Span, SpanRole

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
BODY = encode_payload(Payload("tiny", "canary-5d1f", {}))


class Scene:
    """Traces at 100 % whose clock stands where the test puts it; what was told is in `spans`."""

    def __init__(self, share: float = 1.0, *, trust_callers: bool = False, chance: float = 0.5) -> None:
        self.now = 100.0
        self.spans: list[Span] = []
        self.traces = RequestTraces(
            self.spans.extend, share, trust_callers=trust_callers, clock=lambda: self.now, chance=lambda: chance
        )

    def pending(self, traceparent: str = "", first: PendingRequest | None = None) -> PendingRequest:
        submission = Submission(
            id="req_1", tier="free", customer_id="c", api_key_id="k", nonce="n", model="tiny", input_bytes=11,
            total_ms=4000, queue_ms=2000, limits=NO_LIMITS, body=BODY,
        )  # fmt: skip
        headers = CIMultiDictProxy(CIMultiDict([("traceparent", traceparent)] if traceparent else []))
        return self.traces.followed(PendingRequest(submission, 100.0), headers, first)

    def told(self) -> dict[str, Span]:
        return {span.name: span for span in self.spans}


def identity() -> Any:
    snapshot = LiteralCatalog().snapshot
    assert snapshot is not None
    return next(key.identity for key in snapshot.keys.values() if key.identity.tier == "free")


@pytest.mark.parametrize(
    ("share", "trusts", "flags", "chance", "sampled"),
    [
        (0.01, False, None, 0.009, True),
        (0.01, False, None, 0.01, False),
        (0.0, False, None, 0.0, False),
        (1.0, False, None, 0.999, True),
        (0.01, False, "01", 0.5, False),  # A stranger cannot have itself traced,
        (0.01, False, "00", 0.009, True),  # nor keep itself out.
        (0.0, True, "01", 0.5, True),
        (1.0, True, "00", 0.0, False),
        (0.01, True, None, 0.009, True),
        (0.01, True, "junk", 0.009, True),
        (0.01, True, "junk", 0.5, False),
    ],
)
def test_who_is_sampled(share: float, trusts: bool, flags: str | None, chance: float, sampled: bool) -> None:
    """The share decides, and a caller's flag in its place only where callers are trusted."""
    scene = Scene(share, trust_callers=trusts, chance=chance)

    pending = scene.pending(f"00-{TRACE}-{SPAN}-{flags}" if flags else "")

    assert (pending.trace is not None) == sampled
    assert (context_in(pending.submission.body) is not None) == sampled
    if not sampled:
        assert type(pending) is PendingRequest
        assert (pending.submission.body, pending.submission.trace_id) == (BODY, "")


def test_the_callers_trace_goes_on() -> None:
    """Its id is the request's, in the audit and in the body; its span is the parent, which stands elsewhere."""
    scene = Scene()
    pending = scene.pending(f"00-{TRACE}-{SPAN}-00")

    scene.traces.completed("/v1/inference", identity(), pending, [reply(id="req_1")], 0.2)

    request = scene.told()["request"]
    assert not {"tierlane.inputs", "tierlane.attempts"} & request.attributes.keys()
    context = context_in(pending.submission.body)
    assert request.context == context
    assert (request.context.trace_id, pending.submission.trace_id) == (TRACE, TRACE)
    assert request.parent is not None
    assert (request.parent.span_id, request.remote, request.kind) == (SPAN, True, SpanRole.SERVER)


def test_a_list_of_inputs_is_one_trace() -> None:
    """Whoever belongs to a list goes with the first of it, sampled or not."""
    scene = Scene()
    first = scene.pending()
    assert context_in(scene.pending(first=first).submission.body) == context_in(first.submission.body)

    never = Scene(0.0)
    never.traces._share = 1.0
    assert never.pending(first=PendingRequest(first.submission, 0.0)).trace is None


def test_the_spans_of_a_completed_request() -> None:
    """Until Redis kept it, in the queue as Redis measured it, and all of it; the attributes are these and no others."""
    scene = Scene()
    pending = scene.pending()
    scene.now = 100.01
    pending.accepted = True
    scene.now = 100.9

    scene.traces.completed("/v1/inference", identity(), pending, [reply(id="req_1", attempts=2), reply()], 0.2)

    spans = scene.told()
    assert {name: (span.began, round(span.ended, 6)) for name, span in spans.items()} == {
        "request": (100.0, 100.2), "enqueue": (100.0, 100.01), "queue wait": (100.01, 100.03),
    }  # fmt: skip
    assert spans["request"].attributes == {
        "http.request.method": "POST", "http.route": "/v1/inference", "http.response.status_code": 200,
        "tierlane.request_id": "req_1", "tierlane.tier": "free", "tierlane.model": "tiny", "tierlane.inputs": 2,
        "tierlane.attempts": 2, "tierlane.batch_id": "b", "tierlane.batch_size": 4,
    }  # fmt: skip
    assert {spans[name].parent for name in ("enqueue", "queue wait")} == {spans["request"].context}
    assert not spans["request"].failed


@pytest.mark.parametrize(
    ("entered", "outcome", "code", "names", "failed"),
    [
        (False, Verdict(Admission.SHED, depth=9), ErrorCode.SHED_FOR_PRIORITY, ["request"], True),
        (False, None, ErrorCode.RATE_LIMIT_EXCEEDED, ["request"], False),
        (True, None, ErrorCode.CANCELLED, ["request", "enqueue"], False),
        (True, reply(id="req_1", error_code="queue_timeout"), ErrorCode.QUEUE_TIMEOUT, ["request", "enqueue", "queue wait"], True),
        (True, reply(id="req_1", queue_ms=-1.0), ErrorCode.POISON_REQUEST, ["request", "enqueue"], False),
        (True, reply(id="another"), ErrorCode.POISON_REQUEST, ["request", "enqueue"], False),
    ],
)  # fmt: skip
def test_the_spans_of_a_failed_request(
    entered: bool, outcome: Reply | Verdict | None, code: ErrorCode, names: list[str], failed: bool
) -> None:
    """As far as it came; a status of 5xx is a failure of ours, and the code says which."""
    scene = Scene()
    pending = scene.pending()
    pending.accepted = entered
    if outcome is not None:
        pending.finish(outcome)
    scene.now = 100.25

    scene.traces.failed("/v1/inference", "req_1", identity(), pending, RequestError(code, "canary-5d1f"))

    assert [span.name for span in scene.spans] == names
    request = scene.spans[0]
    assert (request.attributes["error.type"], request.failed, request.ended) == (code.value, failed, 100.25)
    assert "canary" not in repr(scene.spans)


def test_a_job_is_told_at_its_promise() -> None:
    """202, and its way into Redis."""
    scene = Scene()
    pending = scene.pending()
    pending.accepted = True

    scene.traces.accepted("/v1/inference", "req_1", identity(), pending)

    assert [span.name for span in scene.spans] == ["request", "enqueue"]
    assert scene.spans[0].attributes["http.response.status_code"] == 202


def test_of_who_is_not_sampled_nothing_is_told() -> None:
    """However its call ends, and whoever it is."""
    scene = Scene(0.0)
    pending, error = scene.pending(), RequestError(ErrorCode.INTERNAL_ERROR)

    scene.traces.completed("/v1/inference", identity(), pending, [reply()], 0.2)
    scene.traces.accepted("/v1/inference", "req_1", identity(), pending)
    scene.traces.failed("/v1/inference", "req_1", identity(), pending, error)
    scene.traces.failed("/v1/inference", "req_1", None, None, error)

    assert scene.spans == []


def test_log_and_traces_are_told_as_one() -> None:
    """Both where both are wanted, the one that is where there is one, nobody where there is none."""
    log, traces = RequestLog(), Scene().traces

    assert isinstance(told_to(log, traces), EventListeners)
    assert told_to(log, None) is log
    assert told_to(None, traces) is traces
    assert told_to(None, None) is None
