"""Spans of a batch on a worker: whose trace it stands in, what it links to, and what is told by how it ended."""

from collections.abc import Sequence

import pytest

from gpu_pool.worker.traces import MOST_MEMBERS, BatchTrace, BatchTraces
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, add_context, context_in, encode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.tracing import Context, Span

PLAIN = encode_payload(Payload("tiny", "hello", {}))


def context(number: int) -> Context:
    return Context(f"{number:032x}", f"{number:016x}")


def member(name: str, trace: Context | None = None) -> ClaimedRequest:
    return ClaimedRequest(name, 1000, 2, add_context(PLAIN, trace) if trace else PLAIN)


class Scene:
    """Traces with a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 10.0
        self.spans: list[Span] = []
        self.traces = BatchTraces(self.spans.extend, "w1", "default", lambda: self.now)

    def of(self, requests: Sequence[ClaimedRequest]) -> BatchTrace:
        return self.traces.of("b1", requests, 9.5)

    def run(self, requests: Sequence[ClaimedRequest], outcomes: Sequence[Outcome] = ()) -> None:
        """Claimed at 9.5, on the model from 10 to 11, settled at 12."""
        with self.of(requests) as trace:
            trace.begins()
            self.now = 11.0
            trace.over()
            trace.ended(outcomes)
            self.now = 12.0


@pytest.mark.parametrize("spans", [None, [].extend])
def test_a_batch_without_sampled_members_is_left_as_it_is(spans: object) -> None:
    """Nothing is told, and what runs is what was claimed, the same object."""
    requests = [member("a"), member("b")]
    traces = BatchTraces(spans, "w1", "default")  # type: ignore[arg-type]

    with traces.of("b1", requests, 9.5) as trace:
        trace.begins()
        trace.over()
        trace.ended([])
        trace.lost(None)

    assert trace.requests is requests
    assert trace.began == 9.5


def test_a_worker_that_tells_nothing_passes_contexts_on() -> None:
    """The endpoint behind it hears of the request's own span."""
    requests = [member("a", context(1))]
    assert BatchTraces(None, "w1", "default").of("b1", requests, 0.0).requests is requests


def test_the_first_members_trace_has_the_batch_and_all_are_linked() -> None:
    """One batch span under the first, with a link to each; the other runs stand in their own traces and link to it."""
    scene = Scene()

    scene.run([member("a"), member("b", context(1)), member("c", context(2))])

    batch, first, second = scene.spans
    assert [span.name for span in scene.spans] == ["batch", "infer", "infer"]
    assert (batch.parent, batch.context.trace_id) == (context(1), context(1).trace_id)
    assert batch.links == [context(1), context(2)]
    assert (first.parent, first.links) == (batch.context, [])
    assert (second.parent, second.links, second.context.trace_id) == (context(2), [batch.context], context(2).trace_id)
    assert [(span.began, span.ended) for span in scene.spans] == [(9.5, 12.0), (10.0, 11.0), (10.0, 11.0)]
    assert batch.attributes == {
        "tierlane.batch_id": "b1", "tierlane.batch_size": 3, "tierlane.attempt": 2, "tierlane.pool": "default",
        "tierlane.worker_id": "w1",
    }  # fmt: skip
    assert not any(span.failed for span in scene.spans)


def test_the_model_gets_the_context_of_its_run() -> None:
    """So that what an endpoint does stands under the run, and not beside the queue."""
    scene = Scene()
    requests = [member("a"), member("b", context(1))]

    with scene.of(requests) as trace:
        trace.begins()

    assert trace.requests[0] == requests[0]
    assert context_in(trace.requests[1].body) == scene.spans[1].context


def test_a_list_of_inputs_in_one_batch_is_one_run() -> None:
    """They share one span, so one link and one infer."""
    scene = Scene()
    scene.run([member(name, context(1)) for name in "abc"])
    assert [span.name for span in scene.spans] == ["batch", "infer"]
    assert scene.spans[0].links == [context(1)]


def test_links_are_bounded() -> None:
    """However many are sampled."""
    scene = Scene()
    scene.run([member(f"m{number}", context(number)) for number in range(1, MOST_MEMBERS + 50)])
    assert len(scene.spans[0].links) == MOST_MEMBERS
    assert len(scene.spans) == MOST_MEMBERS + 1


@pytest.mark.parametrize(("code", "failed"), [("", False), ("poison_request", False), ("gpu_timeout", True)])
def test_each_run_says_how_its_member_ended(code: str, failed: bool) -> None:
    """A code where there is one; it is a failure of ours unless the input was at fault."""
    scene = Scene()
    scene.run([member("a", context(1))], [Outcome("a", code, 1.0, 0, "v", "canary-5d1f")])
    batch, infer = scene.spans
    assert (infer.attributes.get("error.type", ""), infer.failed, batch.failed) == (code, failed, False)
    assert "canary" not in repr(scene.spans)


@pytest.mark.parametrize(
    ("why", "outcome", "failed"), [(ErrorCode.GPU_TIMEOUT, "gpu_timeout", True), (None, "handed_back", False)]
)
def test_a_lost_batch_says_why(why: ErrorCode | None, outcome: str, failed: bool) -> None:
    """Its run lasted until then."""
    scene = Scene()
    with scene.of([member("a", context(1))]) as trace:
        trace.begins()
        scene.now = 13.0
        trace.lost(why)
    batch, infer = scene.spans
    assert (batch.attributes["tierlane.outcome"], batch.failed) == (outcome, failed)
    assert (infer.ended, infer.failed) == (13.0, failed)


def test_a_batch_that_ends_in_an_error_is_told_before_it_is_raised() -> None:
    """And one that never began has no run."""
    scene = Scene()
    with pytest.raises(ZeroDivisionError), scene.of([member("a", context(1))]):
        raise ZeroDivisionError
    assert [(span.name, span.failed) for span in scene.spans] == [("batch", True)]
