"""The invariants of the audit: each accepted request has one final row with the outcome of its response."""

from collections import Counter
from collections.abc import Iterator

from scheduler.errors import http_status
from tierlane_tools.bench.verification.fate import Fate, fate_of
from tierlane_tools.chaos.checker.allowances import LEAST_FOR_A_RUN_S
from tierlane_tools.chaos.checker.case import Case, Request, Try
from tierlane_tools.chaos.checker.evidence import AuditRow
from tierlane_tools.chaos.checker.results import InvariantFinding, Violation
from tierlane_tools.chaos.history import Answered

MAX_ATTEMPTS = 3
RETRY_SHARE = 0.2
RETRIES_A_SECOND = 10.0
RETRIES_AT_START = 100.0
MOST_AFFECTED_LOST = 0.01
WORK_LOST = frozenset({"deadline_exceeded", "gpu_timeout", "worker_lost", "gateway_lost", "abandoned"})
DEADLINE = "deadline_exceeded"
OWN_STATUSES = (503, 504)  # Statuses that a gateway returns by itself where it cannot read the outcome.
ACCEPTED = (Fate.COMPLETED, Fate.FAILED)  # Of a response whose request has a row.
BOTH_LOST = "Redis and then the gateway were lost before PostgreSQL had it"
ABANDONED = "abandoned"  # The code with which the auditor closes a row without an end.
STREAM_BEGUN = "the stream had begun"
REPORTED_TIMEOUT = "reported timeout"
DIRECT = "direct"  # In direct mode the row is written before a worker may reject the request.


def lost(case: Case) -> InvariantFinding:
    """Accepted requests that have not ended."""
    violations = [
        Violation(f"The row is still {row.status}.", case.nonce_of(row), row.id)
        for row in case.evidence.rows
        if not row.final
    ]
    known = {row.id for row in case.evidence.rows}
    violations += [
        Violation("It is still open in Redis, and has no audit row.", row=request_id)
        for request_id in case.evidence.leftovers.open_requests
        if request_id not in known
    ]
    return InvariantFinding(violations)


def missing_rows(case: Case) -> InvariantFinding:
    """Requests that were accepted, as a response or a run shows, without a complete row."""
    violations = [
        Violation("The row has no customer: only its end was recorded.", case.nonce_of(row), row.id)
        for row in case.evidence.rows
        if not row.customer
    ]
    explained: Counter[str] = Counter()
    for request in case.requests.values():
        for one, problem in _without_row(case, request):
            if case.allowances.audit_lost(one.gateway, one.sent, one.ended):
                explained[BOTH_LOST] += 1
            else:
                violations.append(Violation(problem, request.nonce, one.answer.id if one.answer else ""))
    return InvariantFinding(violations, explained)


def _without_row(case: Case, request: Request) -> Iterator[tuple[Try, str]]:
    """The tries whose response, or the last before a run, implies a row that is missing, with the problem."""
    answered = False
    for one in request.tries:
        answer, problem = one.answer, ""
        if answer is not None and answer.replayed:
            if not case.rows_by_id.get(answer.id):
                problem = f"{answer.id} was replayed, but has no row."
        elif answer is not None and not case.rows_of(one) and fate_of(answer.status, answer.code) in ACCEPTED:
            problem = f"Answered {answer.status} {answer.code}".rstrip() + ", and there is no row."
        if problem:
            answered = True
            yield one, problem
    ran = case.runs.get(request.nonce)
    if ran and not answered and request.tries and not any(case.rows_of(one) for one in request.tries):
        # The excuse must hold for any of the tries, so the last one before the run is used.
        before = [one for one in request.tries if one.sent <= ran[0].began] or request.tries
        yield before[-1], "It ran, and there is no row."


def rows_without_request(case: Case) -> InvariantFinding:
    """Rows and runs of unknown requests."""
    violations = [
        Violation("No request was sent with this trace id.", row=row.id)
        for row in case.evidence.rows
        if row.customer and case.try_of(row) is None
    ]
    unknown = [nonce for nonce in case.runs if nonce not in case.requests]
    return InvariantFinding(
        [*violations, *(Violation(f"The nonce {nonce} ran, but was not sent.") for nonce in unknown)]
    )


def mismatch(case: Case) -> InvariantFinding:
    """Responses and rows that contradict each other."""
    violations: list[Violation] = []
    explained: Counter[str] = Counter()
    for one in case.tries:
        answer = one.answer
        if answer is None:
            continue
        for row in case.rows_by_id.get(answer.id, []) if answer.replayed else case.rows_of(one):
            problem = _contradicts(case, one, answer, row)
            if not problem:
                continue
            if _outcome_unknown(case, one, answer):
                explained[REPORTED_TIMEOUT] += 1
            elif row.code == ABANDONED and case.allowances.audit_lost(one.gateway, one.sent, one.ended):
                explained[BOTH_LOST] += 1
            else:
                violations.append(Violation(problem, one.invoked.nonce, row.id))
    return InvariantFinding(violations, explained)


def _contradicts(case: Case, one: Try, answer: Answered, row: AuditRow) -> str:
    """The contradiction between this response and this row; "" where they agree."""
    if answer.replayed:
        if case.nonce_of(row) != one.invoked.nonce:
            return "The replayed response belongs to another request."
    elif answer.id != row.id:
        return f"Answered as {answer.id}, accepted as {row.id}."
    if not row.final:
        return ""  # Counted as lost.
    if fate_of(answer.status, answer.code) is Fate.REFUSED and not (row.mode == DIRECT and row.code == answer.code):
        return f"Rejected with {answer.code}, but accepted: {_outcome(row)}."
    code = "" if answer.status == 200 else answer.code
    if code != row.code:
        return f"Answered {answer.status} {code}".rstrip() + f", but the row has {_outcome(row)}."
    same = row.http_status in (None, answer.status) and answer.status == http_status(row.code)
    return "" if same else f"Answered {answer.status}, but the row has {row.http_status}."


def _outcome(row: AuditRow) -> str:
    return row.status if row.completed else f"{row.status} with {row.code}"


def _outcome_unknown(case: Case, one: Try, answer: Answered) -> bool:
    """Whether the gateway may have been unable to read the outcome."""
    if answer.status not in OWN_STATUSES or fate_of(answer.status, answer.code) is Fate.REFUSED:
        return False
    allowances = case.allowances
    return (
        allowances.redis_unreliable(one.gateway, answer.at, answer.at)
        or allowances.redis_lost(one.sent, answer.at)
        or allowances.stopped(one.gateway, one.sent, answer.at)
    )


def needless_failures(case: Case) -> InvariantFinding:
    """Requests that failed for lack of a worker or of time without a fault that a request may notice."""
    violations: list[Violation] = []
    rejected: list[Violation] = []
    explained: Counter[str] = Counter()
    affected = 0
    for one in case.tries:
        if case.allowances.noticeable(one.gateway, one.sent, one.ended):
            continue
        answer, rows = one.answer, case.rows_of(one)
        late = answer is not None and answer.code == DEADLINE and answer.seconds < LEAST_FOR_A_RUN_S
        if answer is not None and late and not answer.replayed and not rows:
            problem = f"Rejected with {DEADLINE} after {one.ended - one.sent:.3f} s."
            rejected.append(Violation(problem, one.invoked.nonce))
        for row in rows:
            failed = row.code in WORK_LOST
            if failed and answer is not None and answer.begun:
                explained[STREAM_BEGUN] += 1
                continue
            if excuse := _step_of_the_clock(case, one, row):
                explained[excuse] += 1
                continue
            affected += failed or (row.attempts or 0) > 1
            if failed:
                violations.append(Violation(f"It failed with {row.code}.", one.invoked.nonce, row.id))
    failures = len(violations)
    few = failures <= MOST_AFFECTED_LOST * affected
    violations = rejected if few else rejected + violations
    return InvariantFinding(violations, explained, shown=f"{affected} affected, {failures} failed")


def _step_of_the_clock(case: Case, one: Try, row: AuditRow) -> str:
    """The step of Redis' clock that explains a passed deadline; else ""."""
    if row.code != DEADLINE:
        return ""
    if case.allowances.clock_ran_ahead(one.sent, one.ended):
        return "the clock of Redis went forwards"
    runs = [run.began for run in case.runs.get(one.invoked.nonce, ()) if one.sent <= run.began <= one.ended]
    extended = case.allowances.queue_time_extended(one.sent, min(runs, default=one.ended))
    return "the clock of Redis went backwards" if extended else ""


def attempts(case: Case) -> InvariantFinding:
    """Requests with more runs than allowed."""
    violations = [
        Violation(f"It ran {row.attempts} times.", case.nonce_of(row), row.id)
        for row in case.evidence.rows
        if (row.attempts or 0) > MAX_ATTEMPTS
    ]
    return InvariantFinding(violations)


def retries(case: Case) -> InvariantFinding:
    """Compare all retries with the global budget."""
    rows = case.evidence.rows
    used = sum(max(0, (row.attempts or 0) - 1) for row in rows)
    times = [one.sent for one in case.tries]
    seconds = max(times) - min(times) if times else 0.0
    budget = RETRY_SHARE * len(rows) + RETRIES_A_SECOND * seconds + RETRIES_AT_START
    text = f"{used} retries of {len(rows)} accepted; the budget is {budget:.0f}"
    return InvariantFinding([Violation(text)] if used > budget else [], shown=text)
