"""The invariants of the stack: no late runs, nothing left open, no leaks; and informational figures."""

from collections.abc import Sequence

from tierlane_tools.bench.measurement.histogram import Histogram
from tierlane_tools.chaos.checker.allowances import STAMP_S
from tierlane_tools.chaos.checker.audit import DIRECT
from tierlane_tools.chaos.checker.case import Case
from tierlane_tools.chaos.checker.results import InvariantFinding, Violation
from tierlane_tools.chaos.history import Recovery

MOST_NEW_FILES = 16  # For each cell, to which a process has connections of its own.
CLOCKS_S = 0.02  # The difference between two clocks.


def late_execution(case: Case) -> InvariantFinding:
    """Runs that began after the deadline of every try."""
    if case.evidence.runs is None:
        return InvariantFinding(measured=False)
    violations: list[Violation] = []
    for request in case.requests.values():
        # In which a run may begin, for each try.
        spans = [
            (one.sent - STAMP_S, case.allowances.run_due(one.gateway, one.sent, case.created(one)))
            for one in request.tries
        ]
        for run in case.runs.get(request.nonce, ()):
            if not any(begin <= run.began <= due for begin, due in spans):
                sent = min((one.sent for one in request.tries), default=run.began)
                problem = f"A run began {run.began - sent:.3f} s after it was sent ({run.process})."
                violations.append(Violation(problem, request.nonce))
    runs = len(case.evidence.runs)
    more = sum(len(several) - 1 for several in case.runs.values())
    return InvariantFinding(violations, shown=f"{runs} runs, {more} of them repeated")


def fencing(case: Case) -> InvariantFinding:
    """Rows completed for a worker that had not finished a run of the request, as after a lost lease."""
    if case.evidence.runs is None:
        return InvariantFinding(measured=False)
    violations: list[Violation] = []
    for one in case.tries:
        for row in case.rows_of(one):
            if not row.completed or row.ended_ms is None:
                continue
            shown = row.ended_ms / 1000 - case.evidence.wall_offset_s
            # In direct mode the end is on the clock of the gateway, which does not step.
            times = [shown] if row.mode == DIRECT else case.allowances.clock.true_times(shown)
            ended = max(times, default=shown) + CLOCKS_S
            if not any(
                case.workers.get(run.process) == row.worker_id and run.began + run.takes_s <= ended
                for run in case.runs.get(one.invoked.nonce, ())
            ):
                problem = f"Completed for {row.worker_id or 'no worker'} before the end of a run."
                violations.append(Violation(problem, one.invoked.nonce, row.id))
    return InvariantFinding(violations)


def conservation(case: Case) -> InvariantFinding:
    """Open requests and lists that are not empty after the drain."""
    left = case.evidence.leftovers
    known = {row.id: case.nonce_of(row) for row in case.evidence.rows}
    violations = [
        Violation("It is still open in Redis.", known.get(request_id, ""), request_id)
        for request_id in left.open_requests
    ]
    violations += [Violation(f"{key} still has {length} entries.") for key, length in left.lengths.items() if length]
    rows = case.evidence.rows
    completed = sum(row.completed for row in rows)
    shown = f"{len(rows)} accepted = {completed} completed + {sum(row.final for row in rows) - completed} failed"
    return InvariantFinding(violations, shown=shown)


def leaked_keys(case: Case) -> InvariantFinding:
    """Keys without a TTL that are not permanent."""
    return InvariantFinding([Violation(f"{key} has no TTL.") for key in case.evidence.leftovers.leaked_keys])


def leaked_files(case: Case) -> InvariantFinding:
    """Processes with many more open files than before the run."""
    files = case.evidence.files
    grown = [one for one in files if one.after - one.before > case.evidence.cells * MOST_NEW_FILES]
    most = max((one.after - one.before for one in files), default=0)
    violations = [Violation(f"{one.process} has {one.after} open files, {one.before} before.") for one in grown]
    return InvariantFinding(violations, measured=bool(files), shown=f"at most {most:+d} in {len(files)} processes")


def unread(case: Case) -> InvariantFinding:
    """Evidence that could not be read."""
    return InvariantFinding([Violation(sentence) for sentence in case.evidence.errors])


def priority(case: Case) -> InvariantFinding:
    """The latency of enterprise and free."""
    times = {tier: p95(case, tier) for tier in ("enterprise", "free")}
    if None in times.values():
        return InvariantFinding(measured=False)
    shown = ", ".join(f"p95 of {tier} {(seconds or 0) * 1000:.0f} ms" for tier, seconds in times.items())
    return InvariantFinding(shown=shown)


def p95(case: Case, tier: str) -> float | None:
    """The latency of a tier's 200s in seconds; None without one."""
    times = Histogram()
    for one in case.tries:
        if one.answer is not None and one.answer.status == 200 and one.invoked.tier == tier:
            times.record(one.answer.seconds)
    return times.quantile(0.95)


def recovered(recoveries: Sequence[Recovery]) -> InvariantFinding:
    """The times from a heal to full service."""
    times = sorted(recovery.seconds for recovery in recoveries if recovery.seconds is not None)
    never = len(recoveries) - len(times)
    if not recoveries:
        return InvariantFinding(measured=False)
    middle = f"median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s" if times else "none"
    return InvariantFinding(shown=f"{middle}; {never} not before the load ended")
