"""The timeline of a violation: everything known of its request in order of time, from its first sending."""

from collections.abc import Iterator

from tierlane_tools.chaos.checker.case import Case, Request
from tierlane_tools.chaos.checker.evidence import AuditRow
from tierlane_tools.chaos.checker.results import Example, Violation

AROUND_S = 1.0
MAX_LINES = 40

Moment = tuple[float, str]


def example(case: Case, violation: Violation) -> Example:
    """The violation with the timeline of its request."""
    request = case.requests.get(violation.nonce)
    rows = case.rows_by_id.get(violation.row, [])
    if request is None or not request.tries:
        moments = sorted(moment for row in rows for moment in _of_row(case, row))
        begin = moments[0][0] if moments else 0.0
    else:
        moments = sorted({*_of_request(case, request), *(m for row in rows for m in _of_row(case, row))})
        begin = request.sent
    lines = tuple(f"{at - begin:+8.3f} s  {text}" for at, text in moments[:MAX_LINES])
    return Example(violation.says, violation.nonce, violation.row, lines)


def _of_request(case: Case, request: Request) -> Iterator[Moment]:
    for one in request.tries:
        invoked, answer = one.invoked, one.answer
        keyed = f", key {invoked.key}" if invoked.key else ""
        yield invoked.at, f"try {invoked.turn}: sent to {invoked.gateway}, {invoked.tier}, trace {invoked.trace}{keyed}"
        if answer is not None:
            replayed = ", replayed" if answer.replayed else ""
            yield answer.at, f"try {invoked.turn}: {answer.status} {answer.code} as {answer.id}{replayed}"
        if one.no_answer is not None:
            yield one.no_answer.at, f"try {invoked.turn}: {one.no_answer.kind} {one.no_answer.detail}".rstrip()
        for row in case.rows_of(one):
            yield from _of_row(case, row)
    for event in request.unsent:
        yield event.at, f"try {event.turn}: {event.kind} at {event.gateway}, not sent"
    for run in case.runs.get(request.nonce, ()):
        yield run.began, f"run began in {run.process}"
    for window in case.allowances.windows_between(request.sent - AROUND_S, request.ended + AROUND_S):
        yield window.begin, f"fault {window.name} on {window.target} begins"
        if window.end < request.ended + AROUND_S:
            yield window.end, f"fault {window.name} on {window.target} is over"


def _of_row(case: Case, row: AuditRow) -> Iterator[Moment]:
    offset = case.evidence.wall_offset_s
    yield row.created_ms / 1000 - offset, f"row {row.id} created, gateway {row.gateway_id or '-'}"
    if row.ended_ms is not None:
        parts = (
            row.status,
            row.code,
            f"{row.attempts} attempts",
            "" if row.queue_ms is None else f"{row.queue_ms:.0f} ms in the queue",
            f"worker {row.worker_id}" if row.worker_id else "",
            f"mode {row.mode}" if row.mode else "",
        )
        yield row.ended_ms / 1000 - offset, f"row {row.id} ended: " + ", ".join(filter(None, parts))
