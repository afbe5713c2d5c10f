"""Pending requests: which reply resolves which request, and which outcome is delivered."""

import pytest

from direct_parts import waiting
from gateway.inference.pending import Outcome, PendingRequests
from gateway.inference.responses import is_looked_for
from scheduler.errors import ErrorCode
from scheduler.protocol.replies import Reply


def reply(request_id: str, customer: str = "c", nonce: str = "n", output: str = "out") -> Reply:
    return Reply(request_id, customer, nonce, "completed", "", 1, 1.0, "b", 1, "w", 1.0, 1, "v1", output)


@pytest.mark.parametrize(
    ("sender", "resolved", "unknown", "refused"),
    [
        (("a", "c", "n"), True, 0, 0),
        (("x", "c", "n"), False, 1, 0),
        (("a", "other", "n"), False, 0, 1),
        (("a", "c", "other"), False, 0, 1),
    ],
)
def test_reply_must_match_id_customer_and_nonce(
    sender: tuple[str, str, str], resolved: bool, unknown: int, refused: int
) -> None:
    """Any other reply is dropped and counted, and the request stays pending."""
    pending_requests, pending = PendingRequests(), waiting("a")
    pending_requests.add(pending)

    assert pending_requests.resolve(reply(*sender)) is resolved
    assert (pending_requests.unknown_replies, pending_requests.refused_replies) == (unknown, refused)
    assert pending.done is resolved


def test_only_the_first_outcome_is_delivered() -> None:
    """Later outcomes are ignored, and the sink is dropped: a kept sink could form a reference cycle."""
    received: list[Outcome] = []
    pending = waiting("a")
    pending.sink = received.append
    pending.finish(ErrorCode.QUEUE_TIMEOUT)
    pending.finish(reply("a"))
    pending.cancel()

    assert received == [ErrorCode.QUEUE_TIMEOUT]
    assert (pending.outcome, pending.error_code) == (ErrorCode.QUEUE_TIMEOUT, ErrorCode.QUEUE_TIMEOUT)
    assert (pending.done, pending.cancelled, pending.sink) == (True, False, None)


def test_cancelled_and_removed_requests_deliver_nothing() -> None:
    """A cancelled request has no outcome; a removed request keeps its outcome for the audit."""
    received: list[Outcome] = []
    pending_requests, cancelled, removed = PendingRequests(), waiting("a"), waiting("b")
    for pending in (cancelled, removed):
        pending.sink = received.append
        pending_requests.add(pending)
    cancelled.cancel()
    pending_requests.remove(removed)
    for pending in (cancelled, removed):
        pending.finish(reply(pending.id))

    assert received == []
    assert (cancelled.done, cancelled.cancelled, cancelled.outcome) == (True, True, None)
    assert (removed.gone, removed.outcome) == (True, reply("b"))


def test_error_of_a_list_replaces_the_outcomes_of_its_members() -> None:
    """The response that was sent is the outcome, also of a member that completed."""
    completed, running = waiting("a"), waiting("b")
    completed.finish(reply("a"))
    for member in (completed, running):
        member.replace_outcome(ErrorCode.POISON_REQUEST)
    running.finish(reply("b"))

    assert [member.error_code for member in (completed, running)] == [ErrorCode.POISON_REQUEST] * 2


def test_requests_are_found_by_age() -> None:
    """`due` returns requests past their deadline, `started_before` those that are older than a time."""
    pending_requests = PendingRequests()
    for index, started in enumerate((0.0, 1.0, 2.0)):
        pending_requests.add(waiting(f"w{index}", started))

    assert [pending.id for pending in pending_requests.due(5.5)] == ["w0", "w1"]
    assert [pending.id for pending in pending_requests.started_before(2.0)] == ["w0", "w1"]


def test_deadlines_in_any_order_are_found() -> None:
    """A client's own deadline, or another limit of the pool, may end a request before older ones."""
    pending_requests = PendingRequests()
    requests = [waiting(f"w{index}", float(index)) for index in range(3)]
    for pending, deadline in zip(requests, (600.0, 3.0, 5.0), strict=True):
        pending.deadline = deadline
        pending_requests.add(pending)

    assert pending_requests.due(2.0) == []
    assert [pending.id for pending in pending_requests.due(3.5)] == ["w1"]
    pending_requests.remove(requests[1])
    assert pending_requests.due(4.0) == []
    assert [pending.id for pending in pending_requests.due(5.0)] == ["w2"]
    pending_requests.remove(requests[2])
    assert [pending.id for pending in pending_requests.due(600.0)] == ["w0"]


@pytest.mark.parametrize(
    ("ages", "times"), [(range(1, 6), 4), (range(6, 10), 0), (range(6, 61), 6), (range(500, 600), 10)]
)
def test_results_of_old_requests_are_looked_for_less_often(ages: range, times: int) -> None:
    """Each second up to an age of five, then each ten seconds: thousands of long answers cost little."""
    assert sum(is_looked_for(age, 1.0) for age in ages) == times
