"""History and evidence joined: requests, tries, answers and audit rows; verdicts and timelines.

A try and its row meet by the trace id that the try alone sent, so that also a try without an answer finds its row. A
verdict is one row of the invariants table. A timeline is everything that is known of one request, in order of time;
times count from its first sending.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tierlane.chaos.checker.allowances import Allowances
from tierlane.chaos.checker.evidence import AuditRow, Evidence, ModelRun
from tierlane.chaos.history import Answered, Event, Invoked, Stalled, Stray, Unanswered
from tierlane.chaos.load import PERIOD_S

IN_DOUBT_S = 6.0  # So long a try without an end may have been under way.


@dataclass
class Try:
    """One try; `answer` or `silence` is its end, neither where the history was cut."""

    invoked: Invoked
    answer: Answered | None = None
    silence: Unanswered | None = None

    @property
    def sent(self) -> float:
        """When it was sent."""
        return self.invoked.at

    @property
    def gateway(self) -> str:
        """To whom."""
        return self.invoked.gateway

    @property
    def ended(self) -> float:
        """When its end was seen."""
        end = self.answer or self.silence
        return end.at if end else self.sent + IN_DOUBT_S


@dataclass
class Request:
    """One logical request: all tries of one nonce that were sent, in order. `unsent`: how many could not be."""

    nonce: str
    tries: list[Try] = field(default_factory=list)
    unsent: list[Unanswered] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Its Idempotency-Key, "" without one."""
        return self.tries[0].invoked.key if self.tries else ""

    @property
    def sent(self) -> float:
        """When it was sent first."""
        return self.tries[0].sent

    @property
    def ended(self) -> float:
        """When the end of its last try was seen."""
        return max(one.ended for one in self.tries)


class Case:
    """All that the laws look at."""

    def __init__(self, events: Sequence[Event], evidence: Evidence) -> None:
        self.events = events
        self.evidence = evidence
        self.excuses = Allowances(events)
        self.requests: dict[str, Request] = {}
        self.unasked: list[Answered] = []  # Answers to tries that were never sent, or were answered before.
        self.strays = [event for event in events if isinstance(event, Stray)]
        self.stalls = [event for event in events if isinstance(event, Stalled)]
        self._join(events)
        self.tries = [one for request in self.requests.values() for one in request.tries]
        self.by_trace = {one.invoked.trace: one for one in self.tries}
        self.rows_by_id: dict[str, list[AuditRow]] = defaultdict(list)
        self.rows_by_trace: dict[str, list[AuditRow]] = defaultdict(list)
        self.runs: dict[str, list[ModelRun]] = defaultdict(list)
        self._index()
        self.workers = self._workers()

    def _join(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Invoked):
                self._request(event.nonce).tries.append(Try(event))
            elif isinstance(event, Answered):
                self._answer(event)
            elif isinstance(event, Unanswered):
                self._silence(event)

    def _answer(self, event: Answered) -> None:
        tries = self._request(event.nonce).tries
        asked = next((one for one in tries if one.invoked.turn == event.turn and one.answer is None), None)
        if asked is None:
            self.unasked.append(event)
        else:
            asked.answer = event

    def _request(self, nonce: str) -> Request:
        return self.requests.setdefault(nonce, Request(nonce))

    def _silence(self, event: Unanswered) -> None:
        request = self._request(event.nonce)
        sent = next((one for one in request.tries if one.invoked.turn == event.turn), None)
        if sent is None:
            request.unsent.append(event)
        else:
            sent.silence = event

    def _index(self) -> None:
        for row in self.evidence.rows:
            self.rows_by_id[row.id].append(row)
            if row.trace:
                self.rows_by_trace[row.trace].append(row)
        for run in self.evidence.runs or ():
            self.runs[run.nonce].append(run)

    def _workers(self) -> dict[str, str]:
        """To which worker each model process belonged: what most of the rows say of which it ran the input."""
        seen: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self.tries:
            for row in self.rows_of(one):
                for run in self.runs.get(one.invoked.nonce, ()):
                    if row.worker_id:
                        seen[run.process][row.worker_id] += 1
        return {process: workers.most_common(1)[0][0] for process, workers in seen.items()}

    def rows_of(self, one: Try) -> list[AuditRow]:
        """The rows of one try: those with its trace, else those without any that have the id it was answered with."""
        if found := self.rows_by_trace.get(one.invoked.trace):
            return found
        if one.answer is None or one.answer.replayed:
            return []
        return [row for row in self.rows_by_id.get(one.answer.id, []) if not row.trace]

    def try_of(self, row: AuditRow) -> Try | None:
        """The try that a row belongs to; None where nobody sent it."""
        return self.by_trace.get(row.trace)

    def nonce_of(self, row: AuditRow) -> str:
        """Whose row it is, "" where nobody sent it."""
        one = self.try_of(row)
        return one.invoked.nonce if one else ""

    def arrived(self, answer: Answered) -> float:
        """When an answer may have come at the earliest: while this tool stood still it could not see it."""
        for stall in self.stalls:
            if stall.since <= answer.at <= stall.at + PERIOD_S:
                return stall.since
        return answer.at


MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Offence:
    """One breach of a law: by which request (its nonce), by which audit row (its id), and how, in one sentence."""

    says: str
    nonce: str = ""
    row: str = ""


@dataclass(frozen=True)
class InvariantFinding:
    """What one law found. `explained`: what it would have counted, had no fault excused it, by excuse.

    `measured` is false where the evidence for it does not exist; `shown` says in words what there is to say.
    """

    offences: Sequence[Offence] = ()
    explained: Mapping[str, int] = field(default_factory=dict)
    measured: bool = True
    shown: str = ""


@dataclass(frozen=True)
class Example:
    """One offence with what is known of its request, in order of time."""

    says: str
    request: str
    row: str
    timeline: tuple[str, ...] = ()


@dataclass(frozen=True)
class InvariantResult:
    """One line of the table. `limit` is None where nothing is asked of the figure: it only informs."""

    name: str
    says: str
    count: int
    limit: int | None
    holds: bool
    measured: bool = True
    explained: Mapping[str, int] = field(default_factory=dict)
    shown: str = ""
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class InvariantResults:
    """The whole table, in the order in which it is shown."""

    all: tuple[InvariantResult, ...]

    @property
    def hold(self) -> bool:
        """Whether every law holds."""
        return all(verdict.holds for verdict in self.all)


AROUND_S = 1.0
MAX_LINES = 40

Moment = tuple[float, str]


def example(case: Case, offence: Offence) -> Example:
    """The offence with the story of its request."""
    request = case.requests.get(offence.nonce)
    rows = case.rows_by_id.get(offence.row, [])
    if request is None or not request.tries:
        moments = sorted(moment for row in rows for moment in _of_row(case, row))
        begin = moments[0][0] if moments else 0.0
    else:
        moments = sorted({*_of_request(case, request), *(m for row in rows for m in _of_row(case, row))})
        begin = request.sent
    return Example(offence.says, offence.nonce, offence.row, tuple(_lines(moments, begin)))


def _lines(moments: Iterable[Moment], begin: float) -> Iterator[str]:
    for at, says in list(moments)[:MAX_LINES]:
        yield f"{at - begin:+8.3f} s  {says}"


def _of_request(case: Case, request: Request) -> Iterator[Moment]:
    for one in request.tries:
        yield from _of_try(case, one)
    for event in request.unsent:
        yield event.at, f"try {event.turn}: {event.kind} at {event.gateway}, never sent"
    for run in case.runs.get(request.nonce, ()):
        yield run.began, f"run began in {run.process}"
    for window in case.excuses.at(request.sent - AROUND_S, request.ended + AROUND_S):
        yield window.begin, f"fault {window.name} on {window.whom} begins"
        if window.end < request.ended + AROUND_S:
            yield window.end, f"fault {window.name} on {window.whom} is over"


def _of_try(case: Case, one: Try) -> Iterator[Moment]:
    invoked, answer = one.invoked, one.answer
    keyed = f", key {invoked.key}" if invoked.key else ""
    yield invoked.at, f"try {invoked.turn}: sent to {invoked.gateway}, {invoked.tier}, trace {invoked.trace}{keyed}"
    if answer is not None:
        replayed = ", replayed" if answer.replayed else ""
        yield answer.at, f"try {invoked.turn}: {answer.status} {answer.code} as {answer.id}{replayed}"
    if one.silence is not None:
        yield one.silence.at, f"try {invoked.turn}: {one.silence.kind} {one.silence.detail}".rstrip()
    for row in case.rows_of(one):
        yield from _of_row(case, row)


def _of_row(case: Case, row: AuditRow) -> Iterator[Moment]:
    offset = case.evidence.wall_offset_s
    yield row.created_ms / 1000 - offset, f"row {row.id} made, gateway {row.gateway_id or '-'}"
    if row.ended_ms is not None:
        parts = (
            row.status,
            row.code,
            f"{row.attempts} attempts",
            f"worker {row.worker_id}" if row.worker_id else "",
            f"mode {row.mode}" if row.mode else "",
        )
        yield row.ended_ms / 1000 - offset, f"row {row.id} ended: " + ", ".join(filter(None, parts))
