"""The invariants, judged from the history and the evidence of one run. Pure: no clock, no file, no network.

What counts, and what a fault excuses. A rule asks for a fault that can cause what was seen, to this gateway, at this
time; nothing is excused by number or share. What is excused is counted beside the verdict, under the excuse's name.

* accepted: there is an audit row; or the answer was a 200, or an error that only an accepted request gets; or it ran.
* lost: accepted, and its row is not final. No fault excuses it: the auditor closes what nobody else ended.
* unanswered: the connection lived and no answer came in time, or the connection was lost or refused. Excused where the
  gateway was killed while it had the request, or had not answered anything since it was killed; and where a client gave
  up before the gateway's time was over, because the gateway was stopped. Such a request is indeterminate: it may have a
  row or none. A gateway that was told to end takes no new connection, and may close idle ones under a request, which
  then has no row; what it has accepted it must answer.
* in time is 4.1 s after sending. A gateway that was stopped when the request was sent has 4.1 s from when it goes on;
  one that is stopped when the time is over answers within 0.25 s of going on. Nothing else moves the bound. An answer
  that came while this tool itself stood still counts as come when that began.
* a run may begin until 4.0 s (and 50 ms) after a try of its request was sent, or could be read by a stopped gateway; by as
  much later as the clock of Redis went backwards meanwhile, where the gateway was killed: else it ends what is overdue.
* unexpected: bytes nobody asked for, an answer that cannot be read, a replay for a request without Idempotency-Key.
* duplicated: two answers with one id, two rows of one id or one try. Two completed rows under one Idempotency-Key are
  excused where Redis was emptied between the first try and the last answer, which is what knew the key, and where one of
  the gateways could not ask Redis.
* crosstalk: an output that is not this request's reversed; a row of another customer or tier. Never excused.
* wrong answers: 4xx that only a fault of the client deserves, 500, 502; all requests here are well-formed and their
  keys known. Never excused: also while PostgreSQL is away, since a key that cannot be checked gets 503.
* missing: accepted without a row. Until PostgreSQL has a row, Redis and the gateway both hold it; so it is excused
  where Redis was emptied in that time, and the gateway that took the request was killed before it could send it again.
  What went past Redis comes to it when it is back, and is theirs to hold from then on. Nothing else excuses it: a
  gateway without Redis has the row in its spool before a worker is called, so what ran there has a row also where the
  gateway was killed, and what its disk did not take is refused and never ran.
* without request: a row of these customers whose trace id no try had; a run of a nonce that nobody sent. Never excused.
* mismatch: answer and row say different outcomes. A 503 or 504 of the kind that a gateway gives of its own accord is
  excused ("told timeout") where that gateway was cut off from Redis or stopped when it answered, or Redis was emptied in
  the life of the request: it could not learn what had become of it. A row that the auditor had to close ("abandoned"),
  because its gateway was killed in direct mode, contradicts nothing where the client got no answer; where it got one,
  it is excused as a missing one is. A refusal (429, queue_full, ...) must have no row, or in direct mode,
  where the row is written ahead, one that failed with just that code.
* fencing: a completed row names a worker that had run it to its end by then, to 20 ms; the log says how long each run
  takes, 50 or 300 ms. The end is told by the clock of Redis, whose steps are known; in direct mode by the gateway's.
* needless failures: accepted, and failed with deadline_exceeded, gpu_timeout, worker_lost, gateway_lost or abandoned,
  while nothing was wrong, nor in the 6 s before, but killed workers, models or schedulers, PostgreSQL, flushed scripts,
  lost subscriptions, steps of Redis' clock, hostile clients, and other gateways. At most 1 % of such victims (retried or
  failed) may fail. Nor is one refused as too late before it is. Where the clock of Redis went forwards in the life of a
  request, or in the 0.25 s before, its deadline_exceeded is excused if the step took what was left for a run.
* alive again: a gateway that is asked 15 s after the last fault is over has completed a request since.
* attempts: at most 3 a request; retries in all at most 20 % of what was accepted, and 10 a second, and the 100 that the
  budget begins with.
* conservation: after the drain Redis holds no open request, no waiting or running batch, no unwritten audit entry.
* leaks: no key without a time to live but the permanent ones; no process has more than 16 files open above the number
  it had before the load.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierlane.chaos.checker import answers, stack
from tierlane.chaos.checker import audit as rows
from tierlane.chaos.checker.case import MAX_EXAMPLES, Case, InvariantFinding, InvariantResult, InvariantResults, example
from tierlane.chaos.checker.evidence import Evidence
from tierlane.chaos.history import Event, Recovery


class Invariant(NamedTuple):
    """One line of the table. `binds`: none may be broken; else the line only informs."""

    name: str
    says: str
    find: Callable[[Case], InvariantFinding]
    binds: bool = True


LAWS = (
    Invariant("lost", "every accepted request comes to an end", rows.lost),
    Invariant("unanswered", "every connection that lives gets an answer", answers.unanswered),
    Invariant("unexpected", "nothing comes that nobody asked for", answers.unexpected),
    Invariant("duplicated", "one answer, one row, one completion each", answers.duplicated),
    Invariant("crosstalk", "every answer is that of its own request", answers.crosstalk),
    Invariant("mismatch", "the audit says what the client was told", rows.mismatch),
    Invariant("alive again", "after the last fault every gateway serves", answers.alive_again),
    Invariant("missing rows", "every accepted request has a row", rows.missing_rows),
    Invariant("rows without request", "every row and run is of a request", rows.rows_without_request),
    Invariant("wrong answers", "no answer blames a client without fault", answers.wrong_answers),
    Invariant("late execution", "no run begins after its deadline", stack.late_execution),
    Invariant("late answers", "every answer comes within 4.1 s", answers.late_answers),
    Invariant("fencing", "only the owner of a run ends it", stack.fencing),
    Invariant("needless failures", "a killed worker is hidden from clients", rows.needless_failures),
    Invariant("attempts", "no request runs more than 3 times", rows.attempts),
    Invariant("retries", "retries stay within the global budget", rows.retries),
    Invariant("conservation", "nothing is left under way", stack.conservation),
    Invariant("leaked keys", "every key has a time to live", stack.leaked_keys),
    Invariant("leaked files", "no process keeps files open", stack.leaked_files),
    Invariant("evidence", "the stack came to rest and could be read", stack.unread),
    Invariant("priority", "enterprise beside free", stack.priority, binds=False),
)
RECOVERY = Invariant("recovery", "after its heal a fault is felt no more", lambda _: InvariantFinding(), binds=False)


def check(events: Sequence[Event], evidence: Evidence, recoveries: Sequence[Recovery] = ()) -> InvariantResults:
    """Judge one run."""
    case = Case(events, evidence)
    found = [_verdict(case, law, law.find(case)) for law in LAWS]
    return InvariantResults((*found, _verdict(case, RECOVERY, stack.recovered(recoveries))))


def _verdict(case: Case, law: Invariant, finding: InvariantFinding) -> InvariantResult:
    offences = finding.offences
    return InvariantResult(
        name=law.name,
        says=law.says,
        count=len(offences),
        limit=0 if law.binds else None,
        holds=not law.binds or not offences,
        measured=finding.measured,
        explained={excuse: count for excuse, count in sorted(finding.explained.items()) if count},
        shown=finding.shown,
        examples=tuple(example(case, offence) for offence in offences[:MAX_EXAMPLES]),
    )
