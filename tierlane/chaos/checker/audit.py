"""The laws about the audit: one row for each accepted request, final, and with the same outcome as the client saw."""

from collections import Counter
from collections.abc import Iterator

from scheduler.errors import http_status
from tierlane.bench.verification import Fate, fate_of
from tierlane.chaos.checker.allowances import LEAST_FOR_A_RUN_S
from tierlane.chaos.checker.case import Case, InvariantFinding, Offence, Request, Try
from tierlane.chaos.checker.evidence import AuditRow
from tierlane.chaos.history import Answered

MAX_ATTEMPTS = 3
RETRY_SHARE = 0.2
RETRIES_A_SECOND = 10.0
RETRIES_AT_START = 100.0
MOST_VICTIMS_LOST = 0.01
WORK_LOST = frozenset({"deadline_exceeded", "gpu_timeout", "worker_lost", "gateway_lost", "abandoned"})
DEADLINE = "deadline_exceeded"
TOLD_IN_DOUBT = (503, 504)  # What a gateway says of its own accord where it cannot learn the outcome.
BOTH_WITNESSES = "Redis and then the gateway were lost before PostgreSQL had it"
ABANDONED = "abandoned"  # What the auditor makes of a row whose end nobody has told.
TOLD_TIMEOUT = "told timeout"
DIRECT = "direct"  # Past Redis a row may be there before it is clear that no worker takes the request.


def lost(case: Case) -> InvariantFinding:
    """Accepted, and never brought to an end."""
    offences = [
        Offence(f"The row is still {row.status}.", case.nonce_of(row), row.id)
        for row in case.evidence.rows
        if not row.final
    ]
    known = {row.id for row in case.evidence.rows}
    offences += [
        Offence("Redis still holds it as under way, and the audit has no row.", row=request_id)
        for request_id in case.evidence.leftovers.open_requests
        if request_id not in known
    ]
    return InvariantFinding(offences)


def missing_rows(case: Case) -> InvariantFinding:
    """Accepted, as the answer or a run shows, and not in the audit; or in it without saying whose it was."""
    offences = [
        Offence("The row does not say whose request it was: only its end was noted.", case.nonce_of(row), row.id)
        for row in case.evidence.rows
        if not row.customer
    ]
    explained: Counter[str] = Counter()
    for request in case.requests.values():
        for one, says in _without_row(case, request):
            if excuse := _why_without_row(case, one):
                explained[excuse] += 1
            else:
                offences.append(Offence(says, request.nonce, one.answer.id if one.answer else ""))
    return InvariantFinding(offences, explained)


def _why_without_row(case: Case, one: Try) -> str:
    return BOTH_WITNESSES if case.excuses.audit_lost(one.gateway, one.sent, one.ended) else ""


def _without_row(case: Case, request: Request) -> Iterator[tuple[Try, str]]:
    answered = False
    for one in request.tries:
        says = _implies_row(case, one)
        if says:
            answered = True
            yield one, says
    ran = case.runs.get(request.nonce)
    if ran and not answered and request.tries and not any(case.rows_of(one) for one in request.tries):
        # Whichever try ran, the excuse must hold for it, so ask for the one that is hardest to excuse: the last begun.
        before = [one for one in request.tries if one.sent <= ran[0].began] or request.tries
        yield before[-1], "It ran, and there is no row."


def _implies_row(case: Case, one: Try) -> str:
    """What is wrong where the answer implies a row that is not there; else ""."""
    answer = one.answer
    if answer is None:
        return ""
    if answer.replayed:
        return "" if case.rows_by_id.get(answer.id) else f"Replayed {answer.id}, which has no row."
    if fate_of(answer.status, answer.code) in (Fate.COMPLETED, Fate.FAILED) and not case.rows_of(one):
        return f"Answered {answer.status} {answer.code}".rstrip() + ", and there is no row."
    return ""


def rows_without_request(case: Case) -> InvariantFinding:
    """Rows and runs of requests that nobody sent."""
    offences = [
        Offence("Nobody sent a request with this trace id.", row=row.id)
        for row in case.evidence.rows
        if row.customer and case.try_of(row) is None
    ]
    unknown = [nonce for nonce in case.runs if nonce not in case.requests]
    return InvariantFinding([*offences, *(Offence(f"The nonce {nonce} ran, and nobody sent it.") for nonce in unknown)])


def mismatch(case: Case) -> InvariantFinding:
    """The client was told one thing and the audit says another."""
    offences: list[Offence] = []
    explained: Counter[str] = Counter()
    for one in case.tries:
        for row, says in _contradictions(case, one):
            if _in_doubt(case, one):
                explained[TOLD_TIMEOUT] += 1
            elif row.code == ABANDONED and case.excuses.audit_lost(one.gateway, one.sent, one.ended):
                explained[BOTH_WITNESSES] += 1
            else:
                offences.append(Offence(says, one.invoked.nonce, row.id))
    return InvariantFinding(offences, explained)


def _contradictions(case: Case, one: Try) -> Iterator[tuple[AuditRow, str]]:
    answer = one.answer
    if answer is None:
        return
    rows = case.rows_by_id.get(answer.id, []) if answer.replayed else case.rows_of(one)
    for row in rows:
        if says := _contradicts(case, one, answer, row):
            yield row, says


def _contradicts(case: Case, one: Try, answer: Answered, row: AuditRow) -> str:
    """In one sentence how this answer and this row contradict each other; "" where they agree."""
    if says := _mistaken(case, one, answer, row):
        return says
    if not row.final:
        return ""  # Counted as lost.
    if fate_of(answer.status, answer.code) is Fate.REFUSED and not (row.mode == DIRECT and row.code == answer.code):
        return f"Refused with {answer.code}, and yet accepted: {_outcome(row)}."
    told = "" if answer.status == 200 else answer.code
    if told != row.code:
        return f"Told {answer.status} {told}".rstrip() + f", the row says {_outcome(row)}."
    same = row.http_status in (None, answer.status) and answer.status == http_status(row.code)
    return "" if same else f"Told {answer.status}, the row says {row.http_status}."


def _mistaken(case: Case, one: Try, answer: Answered, row: AuditRow) -> str:
    """Why they are not even of the same request; "" where they are."""
    if answer.replayed:
        mine = case.nonce_of(row) == one.invoked.nonce
        return "" if mine else "The replayed answer is that of another request."
    return "" if answer.id == row.id else f"Answered as {answer.id}, accepted as {row.id}."


def _outcome(row: AuditRow) -> str:
    return row.status if row.completed else f"{row.status} with {row.code}"


def _in_doubt(case: Case, one: Try) -> bool:
    """Whether the gateway may have had to answer without knowing the outcome."""
    answer = one.answer
    if answer is None or answer.status not in TOLD_IN_DOUBT or fate_of(answer.status, answer.code) is Fate.REFUSED:
        return False
    excuses = case.excuses
    return (
        excuses.redis_unsure(one.gateway, answer.at, answer.at)
        or excuses.redis_lost(one.sent, answer.at)
        or excuses.frozen(one.gateway, one.sent, answer.at)
    )


def needless_failures(case: Case) -> InvariantFinding:
    """Accepted and failed for want of a worker or of time, where no fault was there that a request may feel."""
    offences: list[Offence] = []
    refused: list[Offence] = []
    explained: Counter[str] = Counter()
    victims = 0
    for one in case.tries:
        if case.excuses.felt(one.gateway, one.sent, one.ended):
            continue
        if says := _refused_as_late(case, one):
            refused.append(Offence(says, one.invoked.nonce))
        for row in case.rows_of(one):
            failed = row.code in WORK_LOST
            if row.code == DEADLINE and case.excuses.clock_ran_ahead(one.sent, one.ended):
                explained["the clock of Redis went forwards"] += 1
                continue
            victims += failed or (row.attempts or 0) > 1
            if failed:
                offences.append(Offence(f"It failed with {row.code}.", one.invoked.nonce, row.id))
    failures = len(offences)
    few = failures <= MOST_VICTIMS_LOST * victims
    offences = refused if few else refused + offences
    return InvariantFinding(offences, explained, shown=f"{victims} victims, {failures} of them failed")


def _refused_as_late(case: Case, one: Try) -> str:
    """How a request was refused as too late that had just come; "" where it was not."""
    answer = one.answer
    late = answer is not None and answer.code == DEADLINE and not answer.replayed and answer.seconds < LEAST_FOR_A_RUN_S
    return f"Refused with {DEADLINE} after {one.ended - one.sent:.3f} s." if late and not case.rows_of(one) else ""


def attempts(case: Case) -> InvariantFinding:
    """Requests that ran more often than their budget allows."""
    offences = [
        Offence(f"It ran {row.attempts} times.", case.nonce_of(row), row.id)
        for row in case.evidence.rows
        if (row.attempts or 0) > MAX_ATTEMPTS
    ]
    return InvariantFinding(offences)


def retries(case: Case) -> InvariantFinding:
    """All retries of the run against the global budget: a fifth of what was accepted, and 10 a second."""
    rows = case.evidence.rows
    used = sum(max(0, (row.attempts or 0) - 1) for row in rows)
    times = [one.sent for one in case.tries]
    seconds = max(times) - min(times) if times else 0.0
    budget = RETRY_SHARE * len(rows) + RETRIES_A_SECOND * seconds + RETRIES_AT_START
    says = f"{used} retries of {len(rows)} accepted; the budget is {budget:.0f}"
    return InvariantFinding([Offence(says)] if used > budget else [], shown=says)
