"""The chaos checker: each invariant detects a violation, and a fault excuses only what it can cause."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from chaos_history import CUSTOMER, OTHER_CUSTOMER, RecordedRun, nonce_of, trace_of
from tierlane_tools.chaos.checker.checker import INVARIANTS
from tierlane_tools.chaos.checker.open_files import FileCount

LATE_TIMEOUT = (504, "deadline_exceeded")


@pytest.fixture
def run() -> RecordedRun:
    """A run with two correct requests."""
    return RecordedRun()


def test_a_correct_run_has_no_violations(run: RecordedRun) -> None:
    """Completed, failed, rejected and keyed requests, runs and answers just in time, and three attempts are correct."""
    run.complete(1, 1.0, key="k")
    run.run(1, 5.04)
    run.send(2, 1.0)
    run.answer(2, 5.09, 504, "queue_timeout")
    run.row(2, "failed", "queue_timeout", http_status=504)
    for number, rejection in ((3, (429, "rate_limit_exceeded")), (4, (503, "no_capacity"))):
        run.send(number, 1.0)
        run.answer(number, 1.1, *rejection)
    run.send(5, 1.0)
    run.answer(5, 1.1, 503, "shed_for_priority")
    run.row(
        5, "failed", "shed_for_priority", mode="direct"
    )  # Direct mode writes the row before the request is rejected.
    run.rows[0] = replace(run.rows[0], attempts=3)

    assert (run.violations(), run.excused()) == ({}, {})
    assert run.results().hold


# --- each invariant detects its violation ------------------------------------------------------------------------


def lost(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.answer(1, 1.1, *LATE_TIMEOUT)
    run.row(1, "processing")


def unanswered(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.no_answer(1, 7.0, "timeout")


def unanswered_reset(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.no_answer(1, 1.2, "reset")


def unexpected_bytes(run: RecordedRun) -> None:
    run.stray(1.0)


def duplicated_row(run: RecordedRun) -> None:
    run.complete(1, 1.0)
    run.row(1, created_ms=5.0)


def duplicated_completion(run: RecordedRun) -> None:
    """Both tries of one Idempotency-Key are completed, although the first result was known."""
    run.send(1, 1.0, key="k")
    run.fault("kill-gateway", "gateway-1", 1.2, 1.2)
    run.no_answer(1, 1.2, "reset")
    run.row(1)
    run.send(1, 1.4, turn=1, gateway="gateway-2", key="k")
    run.answer(1, 1.5, turn=1)
    run.row(1, turn=1)


def crossed_output(run: RecordedRun) -> None:
    run.complete(2, 1.0)
    run.send(1, 1.0)
    run.answer(1, 1.1, owner=nonce_of(2))
    run.row(1)


def mismatched_http_status(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.answer(1, 2.0, 504, "queue_timeout")
    run.row(1, "failed", "queue_timeout", http_status=503)


def stuck_gateway(run: RecordedRun) -> None:
    """Gateway 1 still rejects everything more than 15 s after the last fault."""
    run.fault("stop-redis", "redis", 1.0, 2.0)
    run.complete(1, 3.0, gateway="gateway-2")
    run.send(2, 17.5)
    run.answer(2, 17.6, 503, "no_capacity")


def missing_row(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.answer(1, 2.0)


def unknown_row(run: RecordedRun) -> None:
    run.row(5, trace=trace_of(99))


def wrong_answer(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.answer(1, 1.1, 401, "invalid_api_key")


def late_run(run: RecordedRun) -> None:
    run.complete(1, 1.0)
    run.run(1, 5.06)


def late_answer(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.answer(1, 5.11, *LATE_TIMEOUT)


def foreign_worker(run: RecordedRun) -> None:
    """The row names worker-1, which did not run the request; only worker-2 did."""
    for number, (process, worker) in enumerate((("m1", "worker-1"), ("m2", "worker-2")), 10):
        run.send(number, 1.0)
        run.run(number, 1.1, process)
        run.answer(number, 1.2)
        run.row(number, worker_id=worker)
    run.send(1, 1.0)
    run.run(1, 2.0, "m2")
    run.answer(1, 2.2)
    run.row(1, worker_id="worker-1", ended_ms=2055.0)


def unfinished_run(run: RecordedRun) -> None:
    """The row was closed 150 ms after the start of a run of 300 ms."""
    run.send(1, 1.0)
    run.run(1, 1.1, takes_s=0.3)
    run.answer(1, 1.4)
    run.row(1, ended_ms=1250.0)


def needless_failure(run: RecordedRun) -> None:
    run.fault("kill-worker", "worker-1", 10.0, 10.0)
    run.send(1, 9.9)
    run.answer(1, 13.9, *LATE_TIMEOUT)
    run.row(1, "failed", "deadline_exceeded")


def reported_lost(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.answer(1, 4.4, 503, "gateway_lost")
    run.row(1, "failed", "gateway_lost", attempts=0)


def too_many_attempts(run: RecordedRun) -> None:
    run.complete(1, 1.0)
    run.rows[-1] = replace(run.rows[-1], attempts=4)


def too_many_retries(run: RecordedRun) -> None:
    for number in range(1, 90):
        run.complete(number, 1.0)
        run.rows[-1] = replace(run.rows[-1], attempts=3)


def unwritten_audit(run: RecordedRun) -> None:
    run.leftovers(lengths={"outbox": 1})


def leaked_key(run: RecordedRun) -> None:
    run.leftovers(leaked_keys=("request:x",))


def leaked_files(run: RecordedRun) -> None:
    files = (FileCount("gateway-1 (5)", 20, 30), FileCount("gateway-2 (6)", 20, 60))
    run.evidence = replace(run.evidence, files=files)


def unread_audit(run: RecordedRun) -> None:
    run.evidence = replace(run.evidence, errors=("The audit cannot be read: no.",))


def unended_batch(run: RecordedRun) -> None:
    run.batch(status=None)


def unfair_order(run: RecordedRun) -> None:
    """One customer waits for 3.5 s while another one is served."""
    for number in range(70):
        run.serve(number, CUSTOMER, 0.05 * number, 0.3 + 0.05 * number)
    run.serve(100, OTHER_CUSTOMER, 0.0, 3.6)


VIOLATIONS: list[tuple[Callable[[RecordedRun], None], str]] = [
    (lost, "lost"),
    (unanswered, "unanswered"),
    (unanswered_reset, "unanswered"),
    (unexpected_bytes, "unexpected"),
    (duplicated_row, "duplicated"),
    (duplicated_completion, "duplicated"),
    (crossed_output, "crosstalk"),
    (mismatched_http_status, "mismatch"),
    (stuck_gateway, "alive again"),
    (missing_row, "missing rows"),
    (unknown_row, "rows without request"),
    (wrong_answer, "wrong answers"),
    (late_run, "late execution"),
    (late_answer, "late answers"),
    (foreign_worker, "fencing"),
    (unfinished_run, "fencing"),
    (needless_failure, "needless failures"),
    (too_many_attempts, "attempts"),
    (too_many_retries, "retries"),
    (unwritten_audit, "conservation"),
    (unended_batch, "batches"),
    (unfair_order, "fairness"),
    (leaked_key, "leaked keys"),
    (leaked_files, "leaked files"),
    (unread_audit, "evidence"),
]


@pytest.mark.parametrize(("violate", "invariant"), VIOLATIONS, ids=lambda value: getattr(value, "__name__", value))
def test_a_violation_is_detected(run: RecordedRun, violate: Callable[[RecordedRun], None], invariant: str) -> None:
    """The violation is counted once, under its invariant and no other."""
    violate(run)
    assert run.violations() == {invariant: 1}


def test_a_worker_that_is_killed_soon_owns_what_it_completed(run: RecordedRun) -> None:
    """Its process ran more inputs that another worker ran again than such ones."""
    run.send(1, 1.0)
    run.run(1, 1.1, "m1")
    run.answer(1, 1.2)
    run.row(1, worker_id="worker-1", ended_ms=1200.0)
    for number in (2, 3):
        run.send(number, 1.0)
        run.run(number, 1.2, "m1")
        run.run(number, 2.0, "m2")
        run.answer(number, 2.1)
        run.row(number, worker_id="worker-2", attempts=2, ended_ms=2100.0)
    run.fault("kill-worker", "worker-1", 1.25, 1.25)

    assert run.violations() == {}


def test_every_invariant_has_a_violation() -> None:
    """A new invariant comes with a violation that it detects."""
    assert {invariant for _, invariant in VIOLATIONS} == {law.name for law in INVARIANTS if law.binds}


@pytest.mark.parametrize(
    ("status", "code", "row_status", "row_code"),
    [
        (200, "", "failed", "queue_timeout"),
        (503, "worker_lost", "failed", "queue_timeout"),
        (503, "queue_full", "completed", ""),
    ],
)
def test_answer_and_row_must_agree(run: RecordedRun, status: int, code: str, row_status: str, row_code: str) -> None:
    """Without a fault every answer is the outcome in the audit, and a rejected request has no row."""
    run.send(1, 1.0)
    run.answer(1, 2.0, status, code)
    run.row(1, row_status, row_code)
    assert run.violations() == {"mismatch": 1}


# --- a fault excuses only what it can cause ----------------------------------------------------------------------


def unknown_outcome(run: RecordedRun) -> None:
    """A timeout at 5.0 with a completed row."""
    run.send(1, 1.0)
    run.answer(1, 5.0, *LATE_TIMEOUT)
    run.row(1)


def late_work(run: RecordedRun) -> None:
    run.send(1, 1.0)
    run.run(1, 5.2)
    run.answer(1, 5.3)
    run.row(1)


def lost_in_direct_mode(run: RecordedRun) -> None:
    run.send(1, 2.4)
    run.run(1, 2.45)
    run.no_answer(1, 2.5, "reset")


Faults = tuple[tuple[str, str, float, float], ...]


@pytest.mark.parametrize(
    ("case", "faults", "violations"),
    [
        # The gateway could not read the outcome from Redis at that time.
        (unknown_outcome, (("stop-redis", "redis", 4.5, 6.0),), {}),
        (unknown_outcome, (("stop-redis", "redis", 1.0, 2.0),), {}),  # Direct mode ends 5 s later.
        (unknown_outcome, (("drop-replies", "gateway-1>redis", 4.5, 6.0),), {}),
        (unknown_outcome, (("drop-replies", "roles>redis-c2", 4.5, 6.0),), {}),  # The cell may be that of the request.
        (unknown_outcome, (("migrate-slot", "redis", 4.5, 6.0),), {}),
        (unknown_outcome, (("failover", "redis", 4.5, 4.5),), {}),
        (unknown_outcome, (("flushall", "redis", 2.0, 2.0),), {}),
        (unknown_outcome, (("stop-gateway", "gateway-1", 2.0, 4.9),), {}),
        (unknown_outcome, (("stop-redis", "redis", 5.5, 6.0),), {"mismatch": 1}),
        (unknown_outcome, (("drop-replies", "gateway-2>redis", 4.5, 6.0),), {"mismatch": 1}),
        (unknown_outcome, (("drop-replies", "gateway-1>postgres", 4.5, 6.0),), {"mismatch": 1}),
        (unknown_outcome, (("failover", "redis", 5.5, 5.5),), {"mismatch": 1}),
        (unknown_outcome, (("client-kill-pubsub", "redis", 1.5, 1.5),), {"mismatch": 1}),
        # Redis lost the Idempotency-Key, or a gateway could not read it.
        (duplicated_completion, (("flushall", "redis", 1.3, 1.3),), {}),
        (duplicated_completion, (("refuse", "gateway-2>redis", 1.3, 1.35),), {}),
        (duplicated_completion, (("refuse", "worker-1>redis", 1.3, 1.35),), {"duplicated": 1}),
        # Redis and the gateway of the request were lost before PostgreSQL had the row.
        (missing_row, (("flushall", "redis", 2.1, 2.1), ("kill-gateway", "gateway-1", 2.5, 2.5)), {}),
        (missing_row, (("flushall", "redis", 2.1, 2.1), ("kill-gateway", "gateway-2", 2.5, 2.5)), {"missing rows": 1}),
        (missing_row, (("flushall", "redis", 2.1, 2.1), ("kill-gateway", "gateway-1", 6.5, 6.5)), {"missing rows": 1}),
        (missing_row, (("flushall", "redis", 8.0, 8.0), ("kill-gateway", "gateway-1", 8.1, 8.1)), {"missing rows": 1}),
        (
            lost_in_direct_mode,
            (("stop-redis", "redis", 1.0, 4.0), ("kill-gateway", "gateway-1", 2.5, 2.5)),
            {"missing rows": 1},
        ),
        # Only the end of its own gateway closes a connection.
        (unanswered_reset, (("kill-gateway", "gateway-1", 1.1, 1.1),), {}),
        (unanswered_reset, (("term-gateway", "gateway-1", 1.1, 1.1),), {}),
        (unanswered_reset, (("kill-gateway", "gateway-2", 1.1, 1.1),), {"unanswered": 1}),
        (unanswered_reset, (("flushall", "redis", 1.1, 1.1),), {"unanswered": 1}),
        (unanswered_reset, (("hostile-client", "gateway-1", 1.0, 2.0),), {"unanswered": 1}),
        # Only a stopped gateway may be late.
        (late_work, (("stop-gateway", "gateway-1", 1.0, 1.5),), {}),
        (late_work, (("stop-gateway", "gateway-2", 1.0, 1.5),), {"late execution": 1, "late answers": 1}),
        (late_work, (("stop-redis", "redis", 1.0, 6.0),), {"late execution": 1, "late answers": 1}),
        # A gateway counts as lost if it is stopped for 2 s.
        (reported_lost, (("stop-gateway", "gateway-1", 1.2, 4.3),), {}),
        (reported_lost, (("spool-full", "gateway-1", 1.2, 4.3),), {}),
        (reported_lost, (("stop-redis", "redis", 1.2, 4.3),), {"wrong answers": 1}),
        (reported_lost, (("stop-gateway", "gateway-1", 1.2, 2.2),), {"wrong answers": 1}),
        (reported_lost, (("stop-gateway", "gateway-2", 1.2, 4.3),), {"wrong answers": 1, "needless failures": 1}),
        # Killed workers and an unavailable PostgreSQL must not be noticed.
        (needless_failure, (("stop-worker", "worker-1", 10.0, 11.0),), {}),
        (needless_failure, (("delay", "worker-1>redis", 10.0, 11.0),), {}),
        (needless_failure, (("stop-gateway", "gateway-2", 10.0, 11.0),), {"needless failures": 1}),
        (needless_failure, (("stop-postgres", "postgres", 10.0, 11.0),), {"needless failures": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_excuses_only_what_it_can_cause(
    run: RecordedRun, case: Callable[[RecordedRun], None], faults: Faults, violations: dict[str, int]
) -> None:
    """A violation is excused only by a fault that can cause it, of the same gateway, at the right time."""
    case(run)
    for name, target, begin, end in faults:
        run.fault(name, target, begin, end)
    assert run.violations() == violations


def test_a_fault_that_was_not_injected_is_no_excuse(run: RecordedRun) -> None:
    """An event with an error is no fault."""
    unanswered_reset(run)
    run.fault("kill-gateway", "gateway-1", 1.1, error="It is down already.")
    assert run.violations() == {"unanswered": 1}


def test_a_gateway_that_answers_again_has_no_excuse(run: RecordedRun) -> None:
    """A killed gateway may refuse connections until its first answer, for at most 20 s."""
    run.fault("kill-gateway", "gateway-1", 2.0, 2.0)
    run.no_answer(5, 21.0, "refused")
    assert run.violations() == {}
    run.no_answer(6, 24.0, "refused")
    assert run.violations() == {"unanswered": 1}
    run.complete(2, 4.0)
    assert run.violations() == {"unanswered": 2}


def test_a_stall_of_the_tool_excuses_an_answer_that_was_read_late(run: RecordedRun) -> None:
    """An answer that was read just after the stall may have arrived before; a later one may not."""
    run.stall(5.0, 5.3)
    run.send(1, 1.0)
    run.answer(1, 5.3, *LATE_TIMEOUT)
    assert run.violations() == {}
    run.send(2, 1.0)
    run.answer(2, 5.35, *LATE_TIMEOUT)
    assert run.violations() == {"late answers": 1}


@pytest.mark.parametrize(("failed", "holds"), [(1, True), (2, False)])
def test_one_retried_request_in_a_hundred_may_fail(run: RecordedRun, failed: int, *, holds: bool) -> None:
    """Two of a hundred requests of killed workers are too many."""
    for number in range(1, 101):
        run.send(number, 10.0)
        if number <= failed:
            run.answer(number, 14.0, *LATE_TIMEOUT)
            run.row(number, "failed", "deadline_exceeded")
        else:
            run.answer(number, 11.0)
            run.row(number, attempts=2)
    assert run.result("needless failures").holds is holds


def test_a_process_may_keep_more_files_with_more_cells(run: RecordedRun) -> None:
    """It has connections to each."""
    run.complete(1, 1.0)
    leaked_files(run)
    run.evidence = replace(run.evidence, cells=4)
    assert run.violations() == {}
