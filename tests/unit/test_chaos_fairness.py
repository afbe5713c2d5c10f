"""The invariants of fairness and of batches: histories that violate them, and histories that do not."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from chaos_history import RecordedRun
from tierlane_tools.chaos.checker.fairness import TimeSpan, batches_in_between, overlaps, union
from tierlane_tools.chaos.checker.results import InvariantResult
from tierlane_tools.chaos.history import BatchFault, BatchLine

RUN_S = 0.05


class Served(NamedTuple):
    """The order in which one worker runs the requests of customers, one a run; all of them were sent before.

    `costs` in ms and `weights` by customer, 50 and 1 by default.
    """

    order: str
    weights: Mapping[str, float] = {}
    costs: Mapping[str, float] = {}


def recorded(served: Served) -> RecordedRun:
    run = RecordedRun()
    for number, customer in enumerate(served.order):
        run.serve(number, customer, 0.0, 0.1 + RUN_S * number, served.costs.get(customer, 50.0))
    run.evidence = replace(run.evidence, weights=dict(served.weights))
    return run


def fairness(served: Served) -> InvariantResult:
    return recorded(served).result("fairness")


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(Served("a" * 120 + "b"), id="one waits all the time"),
        pytest.param(Served("aab" * 50), id="one gets half as much"),
        pytest.param(Served("aaaab" * 40), id="in proportion to what is sent"),
        pytest.param(Served("ab" * 80, weights={"a": 1, "b": 4}), id="weights are ignored"),
        pytest.param(Served("ab" * 80, costs={"a": 80, "b": 20}), id="by requests, not by GPU time"),
        pytest.param(Served("ab" * 20 + "a" * 60 + "ab" * 20), id="unfair for a while"),
        pytest.param(Served("abc" * 30 + "ab" * 60 + "abc" * 10), id="one of three, for a while"),
    ],
)
def test_unfair_histories(served: Served) -> None:
    """A customer that waited got less than its share and the tolerance."""
    result = fairness(served)

    assert (result.holds, result.count) == (False, 1)
    assert "waited for" in result.examples[0].says


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(Served("ab" * 80), id="in turns"),
        pytest.param(Served("abbbb" * 40, weights={"a": 1, "b": 4}), id="by weight"),
        pytest.param(Served("abbbb" * 40, costs={"a": 80, "b": 20}), id="by GPU time"),
        pytest.param(Served("ab" * 70 + "aaaaa" + "ab" * 10), id="within the tolerance"),
    ],
)
def test_fair_histories(served: Served) -> None:
    """Each customer is judged, and has its share."""
    result = fairness(served)

    assert (result.holds, result.measured) == (True, True)
    assert result.shown.startswith("2 customers")


def test_a_quiet_customer_has_no_claim() -> None:
    """A customer that does not always wait gets what it asks for, however little that is."""
    run = recorded(Served("a" * 120))
    for number in range(10):
        run.serve(1000 + number, "b", 0.5 * number, 0.5 * number + 0.01)

    assert (run.result("fairness").holds, run.result("fairness").count) == (True, 0)


def test_a_fault_excuses_the_time_until_it_has_settled() -> None:
    """An interval in which a worker is killed is not judged; with the fault at the end it is."""
    unfair = recorded(Served("aab" * 50))
    unfair.fault("kill-worker", "worker-1", 3.0, 3.0)
    assert not unfair.result("fairness").measured

    unfair = recorded(Served("aab" * 50))
    unfair.fault("kill-worker", "worker-1", 7.0, 7.0)
    assert not unfair.result("fairness").holds


def test_direct_mode_is_not_judged() -> None:
    """There each gateway has an order of its own, so the time until it has settled shows nothing."""
    unfair = recorded(Served("aab" * 50))
    unfair.row(1000, created_ms=2900.0, ended_ms=3000.0, mode="direct")

    assert not unfair.result("fairness").measured


def test_a_request_that_was_never_run_waited() -> None:
    """It waits until it fails, so a customer that is starved completely is found."""
    run = recorded(Served("a" * 70))
    run.send(1000, 0.0, customer="b")
    run.answer(1000, 3.6, 504, "queue_timeout")
    run.row(1000, "failed", "queue_timeout", customer="b")

    assert run.result("fairness").count == 1


def test_short_histories_are_not_judged() -> None:
    """Their tolerance is more than half of the share."""
    assert not fairness(Served("aab" * 15)).measured


def test_intervals() -> None:
    """Unions join what touches; overlaps keep the order; five workers have 14 batches between charge and end."""
    assert union([TimeSpan(2, 3), TimeSpan(0, 1), TimeSpan(1, 1.5)]) == [(0, 1.5), (2, 3)]
    assert overlaps([TimeSpan(0, 2), TimeSpan(3, 5)], [TimeSpan(1, 4)]) == [(1, 2), (3, 4)]
    assert batches_in_between(5) == 14


# --- batches -----------------------------------------------------------------------------------------------------

A, B, C = BatchLine("a", "a"), BatchLine("b", "b"), BatchLine("c", "invalid_request")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"status": None}, id="it has not ended"),
        pytest.param({"status": "expired"}, id="it has expired"),
        pytest.param({"outputs": (A,), "completed": 1, "total": 3}, id="a line is missing"),
        pytest.param({"outputs": (A, B, B), "completed": 3}, id="a line is doubled"),
        pytest.param({"errors": (C, BatchLine("a", "invalid_output")), "failed": 2}, id="a line is in both files"),
        pytest.param({"outputs": (A, B, BatchLine("d", "d")), "completed": 3}, id="a line of another batch"),
        pytest.param({"outputs": (A, BatchLine("b", "a"))}, id="the output of another line"),
        pytest.param({"outputs": (A,), "errors": (C, BatchLine("b", "worker_lost"))}, id="a line failed needlessly"),
        pytest.param({"completed": 1}, id="its counts do not agree"),
    ],
)
def test_batches_that_lost_something(changes: dict[str, Any]) -> None:
    """Each is a violation of this invariant only."""
    run = RecordedRun()
    run.batch(**changes)

    assert run.violations().keys() == {"batches"}


def test_a_correct_batch() -> None:
    """A line may fail with an error that its input may cause each time."""
    run = RecordedRun()
    run.batch(outputs=(A,), errors=(C, BatchLine("b", "gpu_timeout")), completed=1, failed=2)

    assert run.result("batches").shown == "1 batches, 3 lines, 2 of them in error files"
    assert run.violations() == {}


def test_a_call_that_failed() -> None:
    """It is a violation even without a batch."""
    run = RecordedRun()
    run.events.append(BatchFault(at=1.0, detail="GET /v1/batches/batch_1 got 404."))

    assert run.violations() == {"batches": 1}
