"""From claimed requests to a plan, and from results to outcomes."""

import pytest

from gpu_pool.backends.backend import ItemResult
from gpu_pool.worker.execution import completed, make_plan, refused
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import ClaimedRequest, Outcome

BODY = encode_payload(Payload("tiny", "hello", {"seed": 1}))


def claimed(name: str, ms_left: int, body: bytes = BODY) -> ClaimedRequest:
    return ClaimedRequest(name, ms_left, 1, body)


@pytest.mark.parametrize(
    ("ms_left", "needed_ms", "gone_ms", "runs"),
    [
        (1, 0.0, 0.0, True),  # nothing measured: it is tried
        (50, 50.0, 0.0, False),
        (51, 50.0, 0.0, True),
        (60, 50.0, 9.0, True),
        (60, 50.0, 10.0, False),  # the claim itself took 10 ms
        (-5, 0.0, 0.0, False),
    ],
)
def test_a_request_without_time_for_a_run_is_not_started(
    ms_left: int, needed_ms: float, gone_ms: float, runs: bool
) -> None:
    """Time left, less what is gone since it was read, against what a run needs."""
    plan = make_plan([claimed("r", ms_left)], needed_ms, gone_ms)

    assert (["r"] if runs else [], [] if runs else ["deadline_exceeded"]) == (
        plan.ids,
        [outcome.error_code for outcome in plan.early],
    )


def test_a_body_that_is_gone_fails_alone() -> None:
    """Its neighbours run, as they are stored."""
    plan = make_plan([claimed("a", 1000), claimed("b", 1000, b""), claimed("c", 900)], 50.0, 0.0)

    assert plan.ids == ["a", "c"]
    assert plan.bodies == [BODY] * 2
    assert [(outcome.id, outcome.error_code) for outcome in plan.early] == [("b", "invalid_request")]
    assert plan.longest_ms == 1000


def test_each_that_runs_is_told_the_time_it_has_left() -> None:
    """Less what is gone since it was read; the places are those of the bodies."""
    plan = make_plan([claimed("a", 1000), claimed("late", 10), claimed("c", 900)], 50.0, 20.0)

    assert (plan.ids, plan.left_ms, plan.longest_ms) == (["a", "c"], [980, 880], 980)


def test_every_member_gets_exactly_one_outcome() -> None:
    """Those that never ran come with those that did."""
    plan = make_plan([claimed("a", 1000), claimed("late", 10)], 50.0, 0.0)

    outcomes = completed(plan, [ItemResult("olleh", 2)], 51.5, "v1")

    assert [
        Outcome("late", "deadline_exceeded", -1.0, 0, "", "Too little time was left to run this request."),
        Outcome("a", "", 51.5, 2, "v1", "olleh"),
    ] == outcomes


def test_a_batch_that_cannot_be_sent_is_refused_as_a_whole() -> None:
    """Every member hears the same."""
    plan = make_plan([claimed("a", 1000), claimed("b", 1000)], 0.0, 0.0)

    outcomes = refused(plan, ErrorCode.REQUEST_TOO_LARGE, "Too large.")

    assert [(o.id, o.error_code) for o in outcomes] == [("a", "request_too_large"), ("b", "request_too_large")]
