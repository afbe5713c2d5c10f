"""What is done with an open job, and what is stored of its end."""

import pytest

from gateway.jobs.inbox import GRACE_S, JobStep, end_of, end_without_reply, next_step
from gateway.jobs.reconciler import WRITE_BYTES, WRITE_ROWS, groups
from ledger.jobs import JobEnd
from scheduler.protocol.replies import Reply, RequestStatus

LOST = RequestStatus("")
QUEUED, RUNNING = RequestStatus("queued"), RequestStatus("processing")
CLOSED = RequestStatus("failed", "no_capacity")  # A cancel that came before the admission that it was meant for.
LATE = -GRACE_S


def reply(state: str = "completed", code: str = "", output: str = "olleh") -> Reply:
    """A stored reply."""
    return Reply("r1", "c1", "", state, code, 1, 2.0, "b1", 8, "w1", 3.0, 11, "v1", output)


DONE = RequestStatus("completed", "", reply())


@pytest.mark.parametrize(
    ("left_s", "stand", "step"),
    [
        (500.0, QUEUED, JobStep.WAIT),
        (500.0, RUNNING, JobStep.WAIT),
        (500.0, LOST, JobStep.AGAIN),
        (500.0, None, JobStep.WAIT),  # Redis is away
        (500.0, DONE, JobStep.WRITE),
        (500.0, CLOSED, JobStep.GIVE_UP),
        (0.05, LOST, JobStep.WAIT),  # too little left to begin again
        (-1.0, RUNNING, JobStep.WAIT),  # Redis ends it by itself
        (-1.0, LOST, JobStep.WAIT),
        (-1.0, None, JobStep.WAIT),
        (LATE, QUEUED, JobStep.EXPIRE),
        (LATE, RUNNING, JobStep.EXPIRE),
        (LATE, LOST, JobStep.FAIL),
        (LATE, None, JobStep.FAIL),
        (LATE, DONE, JobStep.WRITE),  # a result stands, however late it is read
        (LATE, CLOSED, JobStep.GIVE_UP),
    ],
)
def test_what_is_done_with_an_open_job(left_s: float, stand: RequestStatus | None, step: JobStep) -> None:
    """Wait, write, queue again, or end it: by what Redis knows and the time that is left."""
    assert next_step(left_s, stand) is step


def test_what_is_stored_of_an_end() -> None:
    """Output and tokens; of a failure its code, which is never empty."""
    assert end_of(reply()) == JobEnd("r1", "", "olleh", "c1", 11)
    assert end_of(reply("failed", "poison_request", "")) == JobEnd("r1", "poison_request", "", "c1", 11)
    assert end_of(reply("failed", "", "")).error_code == "internal_error"
    assert end_without_reply("r1", CLOSED) == JobEnd("r1", "no_capacity")
    assert end_without_reply("r1", RequestStatus("completed")).error_code == "internal_error"


def test_ends_are_written_in_groups() -> None:
    """By number and by size; one that is there twice is written once, as it came first; none makes no group."""
    many = [JobEnd(f"r{n}", "") for n in range(WRITE_ROWS + 1)]
    large = [JobEnd(f"r{n}", "", "x" * (WRITE_BYTES // 2 + 1)) for n in range(3)]

    assert groups([]) == []
    assert [len(group) for group in groups(many)] == [WRITE_ROWS, 1]
    assert [len(group) for group in groups(large)] == [1, 1, 1]
    assert groups([JobEnd("r1", "cancelled"), JobEnd("r1", "")]) == [[JobEnd("r1", "cancelled")]]
    assert groups([JobEnd("r1", "", "x" * (2 * WRITE_BYTES))])[0][0].id == "r1"
