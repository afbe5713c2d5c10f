"""The invariants of responses: each request gets one, in time, with its own output."""

from collections import Counter, defaultdict

from scheduler.errors import ErrorCode
from tierlane_tools.chaos.checker.allowances import ANSWER_S
from tierlane_tools.chaos.checker.case import Case, Request, Try
from tierlane_tools.chaos.checker.results import InvariantFinding, Violation
from tierlane_tools.chaos.history import Answered, Invoked
from tierlane_tools.chaos.load.messages import UNKNOWN_OWNER

STUCK_S = 15.0  # Longer than a restart, the pauses of a circuit breaker, and the end of direct mode.
# Errors that a valid request of a known customer never gets.
NEVER_RETURNED = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.INVALID_API_KEY,
        ErrorCode.ACCOUNT_SUSPENDED,
        ErrorCode.NOT_FOUND,
        ErrorCode.METHOD_NOT_ALLOWED,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.REQUEST_TIMEOUT,
        ErrorCode.REQUEST_TOO_LARGE,
        ErrorCode.UNSUPPORTED_MEDIA_TYPE,
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
    """Tries without a response, and connections lost without a fault that explains it."""
    violations: list[Violation] = []
    explained: Counter[str] = Counter()
    for request in case.requests.values():
        missing = [_missing_answer(case, one) for one in request.tries if one.answer is None]
        for event in request.unsent:
            excuse = ""
            if event.kind in ("left", "stopped"):
                excuse = event.kind
            elif case.allowances.killed(event.gateway, event.at, event.at):
                excuse = "gateway killed"
            elif case.allowances.terminating(event.gateway, event.at):
                excuse = "gateway being terminated"
            missing.append((excuse, f"{event.gateway} refused the connection: {event.detail or event.kind}"))
        for excuse, problem in missing:
            if excuse:
                explained[excuse] += 1
            else:
                violations.append(Violation(problem, request.nonce))
    return InvariantFinding(violations, explained)


def _missing_answer(case: Case, one: Try) -> tuple[str, str]:
    """The excuse of a missing response, or "" and the problem."""
    allowances, event = case.allowances, one.no_answer
    if event is None:
        return "", "The history has no outcome."
    if event.kind in ("left", "stopped"):
        return event.kind, ""
    if allowances.killed(one.gateway, one.sent, event.at):
        return "gateway killed", ""
    seconds = event.at - one.sent
    if event.kind == "timeout":
        waited = f"No response from {one.gateway} in {seconds:.2f} s."
        due = allowances.answer_due(one.gateway, one.sent, case.created(one))
        return ("gateway stopped" if event.at <= due else ""), waited
    if allowances.terminating(one.gateway, event.at) and not case.rows_of(one):
        return "gateway being terminated", ""
    return "", f"{one.gateway} closed the connection after {seconds:.2f} s without a fault: {event.detail}"


def unexpected(case: Case) -> InvariantFinding:
    """Bytes and responses without a request, and replays without a key."""
    violations = [Violation(f"{stray.gateway}: {stray.detail}", stray.nonce) for stray in case.strays]
    violations += [
        Violation(f"A response ({one.status}) without an open request.", one.nonce) for one in case.unexpected_answers
    ]
    for one in case.tries:
        if one.answer is not None and one.answer.replayed and not one.invoked.key:
            violations.append(Violation("A replayed response to a request without Idempotency-Key.", one.invoked.nonce))
    return InvariantFinding(violations)


def alive_again(case: Case) -> InvariantFinding:
    """Gateways that get requests long after the last fault and have completed none since."""
    over = max(
        (window.end for window in case.allowances.windows), default=min((t.sent for t in case.tries), default=0.0)
    )
    used = {one.gateway for one in case.tries if one.sent > over + STUCK_S}
    alive = {one.gateway for one in case.tries if one.sent > over and one.answer and one.answer.status == 200}
    return InvariantFinding([Violation(f"{gateway} completes no requests.") for gateway in sorted(used - alive)])


def crosstalk(case: Case) -> InvariantFinding:
    """Responses and rows that belong to another request or customer."""
    violations: list[Violation] = []
    for nonce, request in case.requests.items():
        for one in request.tries:
            answer, invoked = one.answer, one.invoked
            if answer is not None and answer.status == 200 and answer.owner != nonce:
                whose = _whose(case, invoked, answer.owner)
                violations.append(Violation(f"The output has {whose}.", nonce, answer.id))
            violations += [
                Violation(f"The row is of customer {row.customer}, tier {row.tier}.", nonce, row.id)
                for row in case.rows_of(one)
                if row.customer and (row.customer, row.tier) != (invoked.customer, invoked.tier)
            ]
    return InvariantFinding(violations)


def _whose(case: Case, invoked: Invoked, owner: str) -> str:
    if owner in ("", UNKNOWN_OWNER):
        return "no nonce"
    if owner not in case.requests:
        return f"the nonce {owner}, unknown to this run"
    theirs = {one.invoked.customer for one in case.requests[owner].tries}
    whose = "the same customer" if invoked.customer in theirs else f"customer {', '.join(sorted(theirs)) or '?'}"
    return f"the nonce {owner}, of a request of {whose}"


def wrong_answers(case: Case) -> InvariantFinding:
    """Responses that no valid request of a known customer may get. A gateway that goes on may report that it counted as lost."""
    violations: list[Violation] = []
    explained: Counter[str] = Counter()
    for one in case.tries:
        answer = one.answer
        if answer is None or answer.status == 200 or (answer.code and answer.code not in NEVER_RETURNED):
            continue
        lost = answer.code == ErrorCode.GATEWAY_LOST
        if lost and case.allowances.counted_as_lost(one.gateway, one.sent, answer.at):
            explained["gateway counted as lost"] += 1
        else:
            violations.append(
                Violation(f"Answered {answer.status} {answer.code or 'without a code'}.", one.invoked.nonce)
            )
    return InvariantFinding(violations, explained)


def late_answers(case: Case) -> InvariantFinding:
    """Responses later than 4.1 s after their request, apart from stalls of this tool."""
    violations: list[Violation] = []
    explained: Counter[str] = Counter()
    for one in case.tries:
        if one.answer is None or one.answer.at <= one.sent + ANSWER_S:
            continue
        if case.arrived(one.answer) <= one.sent + ANSWER_S:
            explained["this tool stood still"] += 1
        elif case.arrived(one.answer) <= case.allowances.answer_due(one.gateway, one.sent, case.created(one)):
            explained["gateway stopped"] += 1
        else:
            violations.append(Violation(f"Answered after {one.answer.seconds:.3f} s.", one.invoked.nonce))
    slowest = max((one.answer.seconds for one in case.tries if one.answer), default=0.0)
    stall = max((stall.at - stall.since for stall in case.stalls), default=0.0)
    return InvariantFinding(
        violations, explained, shown=f"slowest {slowest:.3f} s, longest stall of this tool {stall * 1000:.0f} ms"
    )


def duplicated(case: Case) -> InvariantFinding:
    """Ids with two responses or rows, and requests that were accepted or completed twice."""
    violations: list[Violation] = []
    answers_by_id: dict[str, list[Answered]] = defaultdict(list)
    for one in case.tries:
        if one.answer is not None and one.answer.id and not one.answer.replayed:
            answers_by_id[one.answer.id].append(one.answer)
    for request_id, answers in answers_by_id.items():
        if len(answers) > 1:
            problem = f"{len(answers)} responses have the id {request_id}."
            violations.append(Violation(problem, answers[-1].nonce, request_id))

    for request_id, rows in case.rows_by_id.items():
        if len(rows) > 1:
            problem = f"{len(rows)} rows have the id {request_id}."
            violations.append(Violation(problem, case.nonce_of(rows[0]), request_id))
    for rows in case.rows_by_trace.values():
        if len({row.id for row in rows}) > 1:
            problem = "One try was accepted under two ids."
            violations.append(Violation(problem, case.nonce_of(rows[0]), rows[0].id))

    explained: Counter[str] = Counter()
    for nonce, request in case.requests.items():
        ids = {row.id for one in request.tries for row in case.rows_of(one) if row.completed}
        if len(ids) < 2:
            continue
        if excuse := _lost_key(case, request):
            explained[excuse] += 1
        else:
            violations.append(Violation(f"Completed {len(ids)} times under one Idempotency-Key.", nonce, min(ids)))
    return InvariantFinding(violations, explained)


def _lost_key(case: Case, request: Request) -> str:
    """Why the first result of an Idempotency-Key may have been unknown to the second try."""
    if case.allowances.redis_lost(request.sent, request.ended):
        return "Redis lost the Idempotency-Key"
    unsure = (case.allowances.redis_unreliable(one.gateway, one.sent, one.ended) for one in request.tries)
    return "a gateway was without Redis" if any(unsure) else ""
