"""The laws about the stack itself: nothing runs too late, nothing is left over, nothing leaks; and figures to read."""

from collections.abc import Iterator, Sequence

from tierlane.bench.statistics import Histogram
from tierlane.chaos.checker.allowances import STAMP_S
from tierlane.chaos.checker.audit import DIRECT
from tierlane.chaos.checker.case import Case, InvariantFinding, Offence, Request
from tierlane.chaos.checker.evidence import AuditRow, ModelRun
from tierlane.chaos.history import Recovery

MOST_NEW_FILES = 16
CLOCKS_S = 0.02  # The distance between two clocks.


def late_execution(case: Case) -> InvariantFinding:
    """Runs that began when no try of their request could want them any more."""
    if case.evidence.runs is None:
        return InvariantFinding(measured=False)
    offences = [offence for request in case.requests.values() for offence in _late_runs(case, request)]
    runs = len(case.evidence.runs)
    more = sum(len(several) - 1 for several in case.runs.values())
    return InvariantFinding(offences, shown=f"{runs} runs, {more} of them runs of one input again")


def _late_runs(case: Case, request: Request) -> Iterator[Offence]:
    for run in case.runs.get(request.nonce, ()):
        if not _wanted(case, request, run):
            sent = min((one.sent for one in request.tries), default=run.began)
            yield Offence(f"A run began {run.began - sent:.3f} s after it was sent ({run.process}).", request.nonce)


def _wanted(case: Case, request: Request, run: ModelRun) -> bool:
    return any(one.sent - STAMP_S <= run.began <= case.excuses.run_due(one.gateway, one.sent) for one in request.tries)


def fencing(case: Case) -> InvariantFinding:
    """Completed by somebody whose run it was not: a worker that had lost its batch ended it all the same."""
    if case.evidence.runs is None:
        return InvariantFinding(measured=False)
    offences = [
        Offence(f"Ended for {row.worker_id or 'nobody'}, whose run was not over.", one.invoked.nonce, row.id)
        for one in case.tries
        for row in case.rows_of(one)
        if row.completed and not _own_run(case, one.invoked.nonce, row)
    ]
    return InvariantFinding(offences)


def _own_run(case: Case, nonce: str, row: AuditRow) -> bool:
    """Whether the worker that the row names had run it to its end by then."""
    if row.ended_ms is None:
        return True
    shown = row.ended_ms / 1000 - case.evidence.wall_offset_s
    # Past Redis the end is told by the gateway, whose clock does not step.
    ended = max([shown] if row.mode == DIRECT else case.excuses.clock.true_times(shown), default=shown) + CLOCKS_S
    return any(
        case.workers.get(run.process) == row.worker_id and run.began + run.takes_s <= ended
        for run in case.runs.get(nonce, ())
    )


def conservation(case: Case) -> InvariantFinding:
    """What is still under way when nothing should be."""
    left = case.evidence.leftovers
    known = {row.id: case.nonce_of(row) for row in case.evidence.rows}
    offences = [
        Offence("Redis still holds it as under way.", known.get(request_id, ""), request_id)
        for request_id in left.open_requests
    ]
    offences += [Offence(f"{key} still holds {length}.") for key, length in left.lengths.items() if length]
    rows = case.evidence.rows
    completed = sum(row.completed for row in rows)
    shown = f"{len(rows)} accepted = {completed} completed + {sum(row.final for row in rows) - completed} failed"
    return InvariantFinding(offences, shown=shown)


def leaked_keys(case: Case) -> InvariantFinding:
    """Keys that would live for ever and may not."""
    return InvariantFinding([Offence(f"{key} has no time to live.") for key in case.evidence.leftovers.leaked_keys])


def leaked_files(case: Case) -> InvariantFinding:
    """Processes that lived through the run and have many more files open than before."""
    files = case.evidence.files
    grown = [one for one in files if one.after - one.before > MOST_NEW_FILES]
    most = max((one.after - one.before for one in files), default=0)
    offences = [Offence(f"{one.process} had {one.before} files open, and has {one.after}.") for one in grown]
    return InvariantFinding(offences, measured=bool(files), shown=f"at most {most:+d} in {len(files)} processes")


def unread(case: Case) -> InvariantFinding:
    """Evidence that could not be read, without which nothing is proved."""
    return InvariantFinding([Offence(sentence) for sentence in case.evidence.errors])


def priority(case: Case) -> InvariantFinding:
    """How enterprise fared beside free."""
    times = {tier: p95(case, tier) for tier in ("enterprise", "free")}
    if None in times.values():
        return InvariantFinding(measured=False)
    said = ", ".join(f"p95 of {tier} {(seconds or 0) * 1000:.0f} ms" for tier, seconds in times.items())
    return InvariantFinding(shown=said)


def p95(case: Case, tier: str) -> float | None:
    """Of the 200 answers of a tier, in seconds; None without one."""
    times = Histogram()
    for one in case.tries:
        if one.answer is not None and one.answer.status == 200 and one.invoked.tier == tier:
            times.record(one.answer.seconds)
    return times.quantile(0.95)


def recovered(recoveries: Sequence[Recovery]) -> InvariantFinding:
    """How long after their heal faults were still felt."""
    times = sorted(recovery.seconds for recovery in recoveries if recovery.seconds is not None)
    never = len(recoveries) - len(times)
    if not recoveries:
        return InvariantFinding(measured=False)
    middle = f"median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s" if times else "none"
    return InvariantFinding(shown=f"{middle}; {never} not before the load ended")
