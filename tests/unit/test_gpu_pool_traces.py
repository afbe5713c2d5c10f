"""Spans of a batch on a worker: parents, links, times, and how the batch and its members ended."""

from collections.abc import Sequence

import pytest

from gpu_pool.worker.traces import MOST_MEMBERS, BatchTraces
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, add_context, context_in, encode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.tracing import Context, Span

PLAIN = encode_payload(Payload("tiny", "hello", {}))


def context(number: int) -> Context:
    return Context(f"{number:032x}", f"{number:016x}")


def member(name: str, trace: Context | None = None) -> ClaimedRequest:
    return ClaimedRequest(name, 1000, 2, add_context(PLAIN, trace) if trace else PLAIN)


class Recorder:
    """Batch traces with a settable clock; claims at 9.5."""

    def __init__(self) -> None:
        self.now = 10.0
        self.spans: list[Span] = []
        self.traces = BatchTraces(self.spans.extend, "w1", "default", lambda: self.now)

    def run(self, *requests: ClaimedRequest, outcomes: Sequence[Outcome] = ()) -> list[ClaimedRequest]:
        """On the model from 10 to 11, settled at 12."""
        with self.traces.of("b1", requests, 9.5) as trace:
            trace.begins()
            self.now = 11.0
            trace.over()
            self.now = 12.0
            trace.ended(outcomes)
        return list(trace.requests)


def test_unsampled_batches_make_no_spans() -> None:
    """Neither without sampled members nor without an exporter; the requests stay the same objects."""
    recorder, plain = Recorder(), [member("a")]
    recorder.run(*plain)
    sampled = [member("a", context(1))]

    assert recorder.spans == []
    assert BatchTraces(None, "w1", "default").of("b1", sampled, 0.0).requests is sampled


def test_batch_span_is_in_the_first_sampled_trace_and_links_all() -> None:
    """The run of each other member is in its own trace and links to the batch; the model gets the context of its run."""
    recorder = Recorder()

    requests = recorder.run(member("a"), member("b", context(1)), member("c", context(2)))

    batch, first, second = recorder.spans
    assert [span.name for span in recorder.spans] == ["batch", "infer", "infer"]
    assert (batch.parent, batch.context.trace_id) == (context(1), context(1).trace_id)
    assert batch.links == [context(1), context(2)]
    assert (first.parent, first.links) == (batch.context, [])
    assert (second.parent, second.links, second.context.trace_id) == (context(2), [batch.context], context(2).trace_id)
    assert [(span.began, span.ended) for span in recorder.spans] == [(9.5, 12.0), (10.0, 11.0), (10.0, 11.0)]
    assert batch.attributes["tierlane.batch_size"] == 3
    assert not any(span.failed for span in recorder.spans)
    assert [context_in(request.body) for request in requests] == [None, first.context, second.context]


def test_spans_and_links_are_bounded() -> None:
    """Inputs of one list share a span and count once; at most MOST_MEMBERS are followed."""
    recorder = Recorder()
    recorder.run(*(member(f"m{number}", context(number // 2)) for number in range(2, 2 * MOST_MEMBERS + 50)))
    assert (len(recorder.spans[0].links), len(recorder.spans)) == (MOST_MEMBERS, MOST_MEMBERS + 1)


def test_run_span_has_the_error_code_of_its_member() -> None:
    """Codes caused by the input are not failures; the output is not recorded."""
    recorder, codes = Recorder(), {"a": "", "b": "poison_request", "c": "gpu_timeout"}
    outcomes = [Outcome(name, code, 1.0, 0, "v", "canary-5d1f") for name, code in codes.items()]
    recorder.run(*(member(name, context(ord(name))) for name in codes), outcomes=outcomes)

    found = [(span.attributes.get("error.type"), span.failed) for span in recorder.spans]
    assert found == [(None, False), (None, False), ("poison_request", False), ("gpu_timeout", True)]
    assert "canary" not in repr(recorder.spans)


@pytest.mark.parametrize(
    ("why", "outcome", "failed"), [(ErrorCode.GPU_TIMEOUT, "gpu_timeout", True), (None, "handed_back", False)]
)
def test_lost_batch_records_its_cause(why: ErrorCode | None, outcome: str, failed: bool) -> None:
    """The run span lasts until the loss; an exception fails the batch span too."""
    recorder = Recorder()
    with recorder.traces.of("b1", [member("a", context(1))], 9.5) as trace:
        trace.begins()
        recorder.now = 13.0
        trace.lost(why)
    batch, infer = recorder.spans
    assert (batch.attributes["tierlane.outcome"], batch.failed) == (outcome, failed)
    assert (infer.ended, infer.failed) == (13.0, failed)

    with pytest.raises(ZeroDivisionError), recorder.traces.of("b2", [member("a", context(1))], 9.5):
        raise ZeroDivisionError
    assert [(span.name, span.failed) for span in recorder.spans[2:]] == [("batch", True)]
