"""History and evidence joined: requests with their tries, responses, runs and audit rows.

A try and its row are joined by the trace id, which is unique to the try.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierlane_tools.chaos.checker.allowances import Allowances
from tierlane_tools.chaos.checker.evidence import AuditRow, Evidence, ModelRun
from tierlane_tools.chaos.history import Answered, Event, Invoked, Stalled, Stray, Unanswered
from tierlane_tools.chaos.load.stalls import PERIOD_S

IN_DOUBT_S = 6.0  # The longest time that a try without an outcome may have been open.


@dataclass
class Try:
    """One try with its outcome: `answer` or `no_answer`, or neither where the history ends early."""

    invoked: Invoked
    answer: Answered | None = None
    no_answer: Unanswered | None = None

    @property
    def sent(self) -> float:
        """The time of sending."""
        return self.invoked.at

    @property
    def gateway(self) -> str:
        """The gateway to which it was sent."""
        return self.invoked.gateway

    @property
    def ended(self) -> float:
        """The time of its outcome."""
        end = self.answer or self.no_answer
        return end.at if end else self.sent + IN_DOUBT_S


@dataclass
class Request:
    """One request: all sent tries of one nonce in order. `unsent`: those that could not be sent."""

    nonce: str
    tries: list[Try] = field(default_factory=list)
    unsent: list[Unanswered] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Its Idempotency-Key, "" without one."""
        return self.tries[0].invoked.key if self.tries else ""

    @property
    def sent(self) -> float:
        """The time of its first try."""
        return self.tries[0].sent

    @property
    def ended(self) -> float:
        """The time of its last outcome."""
        return max(one.ended for one in self.tries)


class Case:
    """The input of all invariants."""

    def __init__(self, events: Sequence[Event], evidence: Evidence) -> None:
        self.events = events
        self.evidence = evidence
        self.allowances = Allowances(events)
        self.requests: dict[str, Request] = {}
        self.unexpected_answers: list[Answered] = []  # Without a sent try, or after its first response.
        self.strays = [event for event in events if isinstance(event, Stray)]
        self.stalls = [event for event in events if isinstance(event, Stalled)]
        for event in events:
            if isinstance(event, Invoked):
                self._request(event.nonce).tries.append(Try(event))
            elif isinstance(event, Answered):
                tries = self._request(event.nonce).tries
                open_try = next((one for one in tries if one.invoked.turn == event.turn and one.answer is None), None)
                if open_try is None:
                    self.unexpected_answers.append(event)
                else:
                    open_try.answer = event
            elif isinstance(event, Unanswered):
                request = self._request(event.nonce)
                sent = next((one for one in request.tries if one.invoked.turn == event.turn), None)
                if sent is None:
                    request.unsent.append(event)
                else:
                    sent.no_answer = event
        self.tries = [one for request in self.requests.values() for one in request.tries]
        self.by_trace = {one.invoked.trace: one for one in self.tries}
        self.rows_by_id: dict[str, list[AuditRow]] = defaultdict(list)
        self.rows_by_trace: dict[str, list[AuditRow]] = defaultdict(list)
        self.runs: dict[str, list[ModelRun]] = defaultdict(list)
        for row in self.evidence.rows:
            self.rows_by_id[row.id].append(row)
            if row.trace:
                self.rows_by_trace[row.trace].append(row)
        for run in self.evidence.runs or ():
            self.runs[run.nonce].append(run)
        self.workers = self._workers()

    def _request(self, nonce: str) -> Request:
        return self.requests.setdefault(nonce, Request(nonce))

    def _workers(self) -> dict[str, str]:
        """The worker of each model process: the one in most of the rows whose input it ran last.

        A process that is killed soon has more inputs that another one ran again than such ones.
        """
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self.tries:
            for row in self.rows_of(one):
                runs = self.runs.get(one.invoked.nonce, ())
                if row.worker_id and runs:
                    counts[max(runs, key=lambda run: run.began).process][row.worker_id] += 1
        return {process: workers.most_common(1)[0][0] for process, workers in counts.items()}

    def rows_of(self, one: Try) -> list[AuditRow]:
        """The rows of one try: those with its trace id, else those without one that have the id of its response."""
        if found := self.rows_by_trace.get(one.invoked.trace):
            return found
        if one.answer is None or one.answer.replayed:
            return []
        return [row for row in self.rows_by_id.get(one.answer.id, []) if not row.trace]

    def created(self, one: Try) -> float | None:
        """When its gateway had read this try, by the clock of its row; None without a row."""
        rows = self.rows_of(one)
        return rows[0].created_ms / 1000 - self.evidence.wall_offset_s if rows else None

    def try_of(self, row: AuditRow) -> Try | None:
        """The try of a row; None for an unknown trace id."""
        return self.by_trace.get(row.trace)

    def nonce_of(self, row: AuditRow) -> str:
        """The nonce of a row, "" for an unknown trace id."""
        one = self.try_of(row)
        return one.invoked.nonce if one else ""

    def arrived(self, answer: Answered) -> float:
        """The earliest time at which a response may have arrived: during a stall of this tool it is read late."""
        for stall in self.stalls:
            if stall.since <= answer.at <= stall.at + PERIOD_S:
                return stall.since
        return answer.at
