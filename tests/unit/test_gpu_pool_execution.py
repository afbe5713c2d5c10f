"""Which requests of a claimed batch run, and the outcome of each."""

import pytest

from gpu_pool.backends.backend import ItemResult
from gpu_pool.worker.execution import completed, make_plan, rejected_outcomes
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import ClaimedRequest

BODY = encode_payload(Payload("tiny", "hello", {"seed": 1}))


def claimed(name: str, ms_left: int, body: bytes = BODY) -> ClaimedRequest:
    return ClaimedRequest(name, ms_left, 1, body)


@pytest.mark.parametrize(
    ("ms_left", "needed_ms", "gone_ms", "runs"),
    [
        (1, 0.0, 0.0, True),  # Nothing measured: it is tried.
        (60, 50.0, 9.0, True),
        (60, 50.0, 10.0, False),
        (-5, 0.0, 0.0, False),
    ],
)
def test_request_without_time_for_a_run_is_not_started(
    ms_left: int, needed_ms: float, gone_ms: float, runs: bool
) -> None:
    """The time left, minus the time since it was read, must be over what a run needs."""
    plan = make_plan([claimed("r", ms_left)], needed_ms, gone_ms)

    assert plan.ids == (["r"] if runs else [])
    assert [outcome.error_code for outcome in plan.early] == ([] if runs else ["deadline_exceeded"])


def test_every_member_gets_exactly_one_outcome() -> None:
    """Late requests and missing bodies end without the model; the rest run with the time they have left."""
    requests = [claimed("a", 1000), claimed("late", 10), claimed("lost", 1000, b""), claimed("c", 900)]
    plan = make_plan(requests, 50.0, 20.0)

    outcomes = completed(plan, [ItemResult("olleh", 2), ItemResult("no", 0, "poison_request")], 51.5, "v1")
    rejected = rejected_outcomes(plan, ErrorCode.REQUEST_TOO_LARGE, "Too large.")

    assert (plan.ids, plan.bodies, plan.left_ms, plan.longest_ms) == (["a", "c"], [BODY] * 2, [980, 880], 980)
    assert {o.id: (o.error_code, o.gpu_ms, o.model_version) for o in outcomes} == {
        "a": ("", 51.5, "v1"),
        "late": ("deadline_exceeded", -1.0, ""),
        "lost": ("invalid_request", -1.0, ""),
        "c": ("poison_request", 51.5, "v1"),
    }
    assert {o.id: o.error_code for o in rejected} == {
        "a": "request_too_large",
        "late": "deadline_exceeded",
        "lost": "invalid_request",
        "c": "request_too_large",
    }
