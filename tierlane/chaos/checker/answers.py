"""The laws about what clients saw: that they got an answer, one, in time, and their own."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from scheduler.errors import ErrorCode
from tierlane.chaos.checker.allowances import ANSWER_S
from tierlane.chaos.checker.case import Case, InvariantFinding, Offence, Request, Try
from tierlane.chaos.history import Answered, Invoked, Unanswered
from tierlane.chaos.load import NOBODY

STUCK_S = 15.0  # Longer than a restart, a breaker's pauses and the way back from direct mode.
# What a well-formed request of a known customer is never told, whatever dies: the fault would be the client's, or ours.
NEVER = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_API_KEY,
        ErrorCode.ACCOUNT_SUSPENDED,
        ErrorCode.NOT_FOUND,
        ErrorCode.METHOD_NOT_ALLOWED,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.REQUEST_TIMEOUT,
        ErrorCode.REQUEST_TOO_LARGE,
        ErrorCode.UNSUPPORTED_ENCODING,
        ErrorCode.QUOTA_EXCEEDED,
        ErrorCode.POISON_REQUEST,
        ErrorCode.INVALID_OUTPUT,
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.GATEWAY_LOST,
        ErrorCode.CANCELLED,
        ErrorCode.IDEMPOTENCY_KEY_REUSED,
    }
)


def unanswered(case: Case) -> InvariantFinding:
    """Tries whose connection lived and that got no answer, and connections lost without a fault that cut them."""
    offences: list[Offence] = []
    explained: Counter[str] = Counter()
    for request in case.requests.values():
        for excuse, says in _silences(case, request):
            if excuse:
                explained[excuse] += 1
            else:
                offences.append(Offence(says, request.nonce))
    return InvariantFinding(offences, explained)


def _silences(case: Case, request: Request) -> Iterator[tuple[str, str]]:
    """For each silence its excuse, or "" and what is wrong with it."""
    for one in request.tries:
        if one.answer is None:
            yield _silence(case, one)
    for event in request.unsent:
        yield _unsent(case, event), f"{event.gateway} took no connection: {event.detail or event.kind}"


def _unsent(case: Case, event: Unanswered) -> str:
    if event.kind == "stopped":
        return "stopped"
    if case.excuses.gone(event.gateway, event.at, event.at):
        return "gateway killed"
    return "gateway told to end" if case.excuses.leaving(event.gateway, event.at) else ""


def _silence(case: Case, one: Try) -> tuple[str, str]:
    excuses, event = case.excuses, one.silence
    if event is None:
        return "", "The history has no end of it."
    if event.kind == "stopped":
        return "stopped", ""
    if excuses.gone(one.gateway, one.sent, event.at):
        return "gateway killed", ""
    seconds = event.at - one.sent
    if event.kind == "timeout":
        waited = f"No answer from {one.gateway} in {seconds:.2f} s."
        return ("gateway stopped" if event.at <= excuses.answer_due(one.gateway, one.sent) else ""), waited
    if excuses.leaving(one.gateway, event.at) and not case.rows_of(one):
        return "gateway told to end", ""
    return "", f"{one.gateway} broke the connection after {seconds:.2f} s, and no fault did it: {event.detail}"


def unexpected(case: Case) -> InvariantFinding:
    """What came that nobody had asked for."""
    offences = [Offence(f"{stray.gateway}: {stray.detail}", stray.nonce) for stray in case.strays]
    offences += [Offence(f"An answer ({one.status}) that nobody waits for.", one.nonce) for one in case.unasked]
    for one in case.tries:
        if one.answer is not None and one.answer.replayed and not one.invoked.key:
            offences.append(Offence("A replayed answer to a request without Idempotency-Key.", one.invoked.nonce))
    return InvariantFinding(offences)


def alive_again(case: Case) -> InvariantFinding:
    """Gateways that had completed nothing since the last fault when they were asked again long after it."""
    over = max((window.end for window in case.excuses.windows), default=min((t.sent for t in case.tries), default=0.0))
    asked = {one.gateway for one in case.tries if one.sent > over + STUCK_S}
    alive = {one.gateway for one in case.tries if one.sent > over and one.answer and one.answer.status == 200}
    return InvariantFinding([Offence(f"{gateway} completes nothing any more.") for gateway in sorted(asked - alive)])


def crosstalk(case: Case) -> InvariantFinding:
    """Answers and rows that belong to another request or customer."""
    offences: list[Offence] = []
    for nonce, request in case.requests.items():
        for one in request.tries:
            offences += [Offence(says, nonce, row) for says, row in _foreign(case, one)]
    return InvariantFinding(offences)


def _foreign(case: Case, one: Try) -> Iterator[tuple[str, str]]:
    answer, invoked = one.answer, one.invoked
    if answer is not None and answer.status == 200 and answer.owner != invoked.nonce:
        yield f"The output carries {_whose(case, invoked, answer.owner)}.", answer.id
    for row in case.rows_of(one):
        told = (row.customer, row.tier)
        if row.customer and told != (invoked.customer, invoked.tier):
            yield f"The row is of customer {row.customer}, tier {row.tier}.", row.id


def _whose(case: Case, invoked: Invoked, owner: str) -> str:
    if owner in ("", NOBODY):
        return "no nonce at all"
    if owner not in case.requests:
        return f"the nonce {owner}, unknown to this run"
    theirs = {one.invoked.customer for one in case.requests[owner].tries}
    whose = "the same customer" if invoked.customer in theirs else f"customer {', '.join(sorted(theirs)) or '?'}"
    return f"the nonce {owner}, of a request of {whose}"


def wrong_answers(case: Case) -> InvariantFinding:
    """Answers that no well-formed request of a known customer may get."""
    offences = [
        Offence(f"Answered {one.answer.status} {one.answer.code or 'without a code'}.", one.invoked.nonce)
        for one in case.tries
        if one.answer is not None and _is_never(one.answer)
    ]
    return InvariantFinding(offences)


def _is_never(answer: Answered) -> bool:
    return answer.status != 200 and (answer.code in NEVER or not answer.code)


def late_answers(case: Case) -> InvariantFinding:
    """Answers later than 4.1 s after their request, less what this tool itself stood still."""
    offences: list[Offence] = []
    explained: Counter[str] = Counter()
    for one in case.tries:
        if one.answer is None or one.answer.at <= one.sent + ANSWER_S:
            continue
        if case.arrived(one.answer) <= one.sent + ANSWER_S:
            explained["this tool stood still"] += 1
        elif case.arrived(one.answer) <= case.excuses.answer_due(one.gateway, one.sent):
            explained["gateway stopped"] += 1
        else:
            offences.append(Offence(f"Answered after {one.answer.seconds:.3f} s.", one.invoked.nonce))
    return InvariantFinding(offences, explained, shown=_slowest(case))


def _slowest(case: Case) -> str:
    slowest = max((one.answer.seconds for one in case.tries if one.answer), default=0.0)
    stall = max((stall.at - stall.since for stall in case.stalls), default=0.0)
    return f"slowest {slowest:.3f} s, this tool stood still for {stall * 1000:.0f} ms at most"


def duplicated(case: Case) -> InvariantFinding:
    """Ids that were answered twice, or have two rows; requests that were accepted or completed twice."""
    offences = [*_answered_twice(case), *_two_rows(case)]
    explained: Counter[str] = Counter()
    for nonce, request in case.requests.items():
        ids = {row.id for one in request.tries for row in case.rows_of(one) if row.completed}
        if len(ids) < 2:
            continue
        if excuse := _forgotten(case, request):
            explained[excuse] += 1
        else:
            offences.append(Offence(f"Completed {len(ids)} times under one Idempotency-Key.", nonce, min(ids)))
    return InvariantFinding(offences, explained)


def _answered_twice(case: Case) -> Iterator[Offence]:
    seen: dict[str, list[Answered]] = defaultdict(list)
    for one in case.tries:
        if one.answer is not None and one.answer.id and not one.answer.replayed:
            seen[one.answer.id].append(one.answer)
    for request_id, answers in seen.items():
        if len(answers) > 1:
            yield Offence(f"{len(answers)} answers carry the id {request_id}.", answers[-1].nonce, request_id)


def _two_rows(case: Case) -> Iterator[Offence]:
    for request_id, rows in case.rows_by_id.items():
        if len(rows) > 1:
            yield Offence(f"{len(rows)} rows have the id {request_id}.", case.nonce_of(rows[0]), request_id)
    for rows in case.rows_by_trace.values():
        if len({row.id for row in rows}) > 1:
            yield Offence("One try was accepted under two ids.", case.nonce_of(rows[0]), rows[0].id)


def _forgotten(case: Case, request: Request) -> str:
    """Why the first answer to an Idempotency-Key may not have been known when it was used again."""
    if case.excuses.redis_lost(request.sent, request.ended):
        return "Redis lost the Idempotency-Key"
    unsure = (case.excuses.redis_unsure(one.gateway, one.sent, one.ended) for one in request.tries)
    return "a gateway was without Redis" if any(unsure) else ""
