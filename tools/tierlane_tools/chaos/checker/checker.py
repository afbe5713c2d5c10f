"""The invariants, checked from the history and the evidence of one run. Pure: no clock, no file, no network.

A rule excuses a violation only by a fault that can cause it, of this gateway, at this time; never by a number or share.
Excused cases are counted beside the result, under the name of the excuse.

* accepted: a request with an audit row, with a 200 or an error that only accepted requests get, or that ran.
* lost: an accepted request whose row is not final. No fault excuses it: the auditor closes abandoned rows.
* unanswered: no response in time, or a lost or refused connection. Excused where the gateway was killed while it had the
  request, or had not responded since it was killed, and where a client timed out while the gateway was stopped. Such a
  request may have a row or none. A terminated gateway takes no new connection and may close idle ones under a request,
  which then has no row; it must answer accepted requests.
* late answers: a response is due 4.1 s after sending. A gateway that was stopped when the request was sent has 4.1 s from
  when it read the request, as the audit row says, within 1 s of its resume; one that is stopped at the due time has 0.25 s
  from its resume. A response that arrived during a stall of this tool counts from the begin of the stall.
* late execution: a run may begin until 4.0 s (and 50 ms) after a try was sent, or could be read by a stopped gateway; if
  the gateway was killed, later by the steps backwards of the clock of Redis, which alone ends overdue requests then.
* unexpected: bytes or responses without a request, unreadable responses, a replay without an Idempotency-Key.
* duplicated: two responses with one id, two rows of one id or one try. Two completed rows of one Idempotency-Key are
  excused where Redis, which holds the key, was emptied in between, or one of the gateways could not reach Redis.
* crosstalk: an output that is not this input reversed, or a row of another customer or tier. Never excused.
* wrong answers: 500, 502, gateway_lost, and 4xx for errors of the client; all requests are valid and their keys known. While
  PostgreSQL is unavailable, a key that cannot be checked gets 503. Only gateway_lost is excused, where the gateway was
  stopped or cut off from Redis for 2 s.
* missing rows: an accepted request without a row. Until PostgreSQL has the row, Redis and the gateway both hold it; so it
  is excused only where Redis was emptied in that time and the gateway of the request was killed before it could resend.
  Requests of direct mode are in the spool of the gateway before they run, and reach Redis when it is back.
* rows without request: a row of these customers with an unknown trace id, or a run of an unknown nonce. Never excused.
* mismatch: response and row differ in their outcome. A 503 or 504 that a gateway returns by itself is excused ("reported
  timeout") where it could not read the outcome: it was cut off from Redis or stopped at that time, or Redis was emptied
  during the request. A row that the auditor closed as "abandoned" agrees with no response; with a response it is excused
  as a missing row is. A rejected request has no row, or in direct mode a failed one with the same code.
* fencing: a completed row names a worker whose run of the request was over by then, to 20 ms. The end is on the clock of
  Redis, whose steps are known; in direct mode on that of the gateway.
* needless failures: an accepted request failed with deadline_exceeded, gpu_timeout, worker_lost, gateway_lost or
  abandoned although then, and in the 6 s before, there were only faults that must go unnoticed: of workers, models,
  schedulers, PostgreSQL, scripts, subscriptions, the clock of Redis, other gateways, and hostile clients. At most 1 % of
  the affected (retried or failed) requests may fail. A stream that had begun is excused: its run cannot be repeated. No request may be rejected early as too late. A step forwards of the
  clock of Redis excuses a deadline_exceeded that it used up.
* alive again: each gateway that gets requests 15 s after the last fault has completed one since.
* attempts: at most 3 for a request. retries: at most 20 % of the accepted requests, plus 10 a second, plus 100.
* conservation: after the drain Redis has no open request, no queued or running batch, no taken slot, and no unwritten audit
  record.
* batches: each batch ends as completed; each `custom_id` is once in the output or the error file, with its own output;
  `request_counts` are the numbers of these lines. No call gets an error of the client or no success in 60 s. Never excused.
* fairness: a customer that has waiting requests all through an interval without faults and direct mode gets its share of the
  GPU time of its tier, by weight, less a tolerance (see `fairness`).
* leaked keys: no key without a TTL except permanent ones. leaked files: at most 16 more open files in a process than
  before the load, for each cell.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tierlane_tools.chaos.checker import answers, batches, fairness, stack
from tierlane_tools.chaos.checker import audit as rows
from tierlane_tools.chaos.checker.case import Case
from tierlane_tools.chaos.checker.evidence import Evidence
from tierlane_tools.chaos.checker.results import MAX_EXAMPLES, InvariantFinding, InvariantResult, InvariantResults
from tierlane_tools.chaos.checker.timeline import example
from tierlane_tools.chaos.history import Event, Recovery


class Invariant(NamedTuple):
    """One line of the table. `binds`: it must hold; otherwise the line is informational."""

    name: str
    description: str
    find: Callable[[Case], InvariantFinding]
    binds: bool = True


INVARIANTS = (
    Invariant("lost", "every accepted request ends", rows.lost),
    Invariant("unanswered", "every open connection gets a response", answers.unanswered),
    Invariant("unexpected", "there are only responses to requests", answers.unexpected),
    Invariant("duplicated", "one response, one row, one completion each", answers.duplicated),
    Invariant("crosstalk", "every response belongs to its request", answers.crosstalk),
    Invariant("mismatch", "audit row and response agree", rows.mismatch),
    Invariant("alive again", "every gateway serves after the last fault", answers.alive_again),
    Invariant("missing rows", "every accepted request has a row", rows.missing_rows),
    Invariant("rows without request", "every row and run belongs to a request", rows.rows_without_request),
    Invariant("wrong answers", "no valid request gets an error of the client", answers.wrong_answers),
    Invariant("late execution", "no run begins after the deadline", stack.late_execution),
    Invariant("late answers", "every response arrives within 4.1 s", answers.late_answers),
    Invariant("fencing", "only the owner of a run completes it", stack.fencing),
    Invariant("needless failures", "clients do not notice a killed worker", rows.needless_failures),
    Invariant("attempts", "no request runs more than 3 times", rows.attempts),
    Invariant("retries", "retries stay within the global budget", rows.retries),
    Invariant("conservation", "nothing is left open", stack.conservation),
    Invariant("batches", "every line of a batch ends once", batches.lines_end_once),
    Invariant("fairness", "no waiting customer gets less than its share", fairness.fair_shares),
    Invariant("leaked keys", "every key has a TTL", stack.leaked_keys),
    Invariant("leaked files", "no process keeps files open", stack.leaked_files),
    Invariant("evidence", "the stack is idle and could be read", stack.unread),
    Invariant("priority", "latency of enterprise and free", stack.priority, binds=False),
)
RECOVERY = Invariant("recovery", "time from a heal to full service", lambda _: InvariantFinding(), binds=False)


def check(events: Sequence[Event], evidence: Evidence, recoveries: Sequence[Recovery] = ()) -> InvariantResults:
    """Check all invariants of one run."""
    case = Case(events, evidence)
    found = [_result(case, invariant, invariant.find(case)) for invariant in INVARIANTS]
    return InvariantResults((*found, _result(case, RECOVERY, stack.recovered(recoveries))))


def _result(case: Case, invariant: Invariant, finding: InvariantFinding) -> InvariantResult:
    violations = finding.violations
    return InvariantResult(
        name=invariant.name,
        says=invariant.description,
        count=len(violations),
        limit=0 if invariant.binds else None,
        holds=not invariant.binds or not violations,
        measured=finding.measured,
        explained={excuse: count for excuse, count in sorted(finding.explained.items()) if count},
        shown=finding.shown,
        examples=tuple(example(case, violation) for violation in violations[:MAX_EXAMPLES]),
    )
