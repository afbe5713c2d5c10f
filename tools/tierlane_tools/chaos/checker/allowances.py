"""Allowances for faults: windows of time in which a fault excuses violations of some targets, from the history.

A fault excuses only what it can cause. The rules of each invariant are in `checker`.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierlane_tools.chaos.faults.catalogue import BY_NAME, INSTANT
from tierlane_tools.chaos.faults.fault_kind import ALL_ROLES, Family
from tierlane_tools.chaos.faults.server_clock import CLOCK_STEPS, ClockStep, SteppedClock, parse_step
from tierlane_tools.chaos.history import Answered, Event, FaultEvent, FaultPhase, Invoked, Stalled

STAMP_S = 0.25  # The timestamp of a fault differs from its effect by up to this.
RESTART_S = 20.0  # A killed gateway is back by then.
SERVER_S = 5.0  # A killed Redis or PostgreSQL is back by then.
ENGINE_S = 6.0  # After a fault of the engine, by then what waited meanwhile has run.
LEAVE_S = 10.0  # A terminated gateway responds for this time, so these responses do not show that it is back.
READ_S = 0.1  # A gateway that is stopped may not have read what was sent this shortly before.
RESUME_S = 0.25  # A resumed gateway first processes what arrived meanwhile,
BACKLOG_S = 1.0  # and has read all of it by then.
SETTLE_S = 3.0  # A gateway leaves direct mode after 2 s without a fault of Redis.
RESEND_S = 3.0  # By then a gateway has noticed an empty Redis and resent its requests.
AUDIT_S = 2.0  # By then an auditor has written ended requests, while PostgreSQL is available.
CATCH_UP_S = 10.0  # The same after PostgreSQL is back.
GATEWAY_LOOK_S = 0.25  # The interval at which a gateway reads the clock of Redis.
GONE_S = 1.75  # After 2 s without a heartbeat, of which one is due each 0.25 s, a gateway counts as lost.
QUEUE_S = 2.0  # The longest wait in the queue of each tier: max_queue_ms.
LEAST_FOR_A_RUN_S = 3.4  # After this time less may be left than a slow run takes, so the request is ended.
CALL_S = 0.25  # The timeout of a call of Redis.
ANSWER_S = 4.1
RUN_S = 4.05

LOSSES = frozenset({"kill-redis", "flushall"})
REDIS_FAULTS = LOSSES | {
    "stop-redis",
    "client-kill-normal",
    "client-pause",
    "redis-disk-full",
    "failover",
    "migrate-slot",  # Between its first and its last key.
}
PROXY_FAULTS = frozenset({"delay", "drop-requests", "drop-replies", "cut", "refuse"})
POSTGRES_FAULTS = frozenset({"kill-postgres", "stop-postgres", "pg-terminate", "pg-lock", "pg-disk-full"})
UNNOTICED = POSTGRES_FAULTS | {
    "kill-worker",
    "kill-model",
    "kill-scheduler",
    "term-worker",
    "term-scheduler",
    "script-flush",
    "client-kill-pubsub",
    "hostile-client",
}
"""Faults that no request may notice: the work of a killed worker is repeated while there is time."""
ALL_TARGETS = ""


@dataclass(frozen=True)
class FaultWindow:
    """A fault from `begin` to `end` on a `target`, or on ALL_TARGETS; `step_s` moved the clock of Redis."""

    begin: float
    end: float
    target: str
    name: str
    step_s: float = 0.0

    def overlaps(self, begin: float, end: float) -> bool:
        """Whether the fault was active at any time from `begin` to `end`."""
        return self.begin <= end and begin <= self.end

    def affects(self, target: str) -> bool:
        """Whether it affects this target."""
        return self.target in (ALL_TARGETS, target)

    def meets(self, begin: float, end: float, target: str) -> bool:
        """Whether it affects this target at any time from `begin` to `end`."""
        return self.affects(target) and self.overlaps(begin, end)


def windows(events: Iterable[Event]) -> list[FaultWindow]:
    """Each injected fault in order of begin. Without a heal it lasts until the end, unless it is instantaneous."""
    begun: dict[tuple[str, str], list[FaultEvent]] = defaultdict(list)
    found: list[FaultWindow] = []
    for event in events:
        if not isinstance(event, FaultEvent) or event.error:
            continue
        waiting = begun[event.name, event.target]
        if event.what == FaultPhase.START:
            waiting.append(event)
        elif waiting:
            found.append(_window(waiting.pop(0), event.at))
    found += [_window(fault, None) for several in begun.values() for fault in several]
    return sorted(found, key=lambda window: window.begin)


def _window(start: FaultEvent, healed: float | None) -> FaultWindow:
    kind = BY_NAME.get(start.name)
    instant = kind is not None and kind.length_s == INSTANT
    end = healed if healed is not None else start.at if instant else float("inf")
    if start.name in ("kill-redis", "kill-postgres", "pg-disk-full"):
        end += SERVER_S  # After the heal it has to start.
    if kind is not None and kind.family is Family.ENGINE:
        end += ENGINE_S
    step_s = parse_step(start.details) if start.name in CLOCK_STEPS else 0.0
    return FaultWindow(start.at, end, start.target, start.name, step_s)


class Allowances:
    """The faults of one run by their effects. Gateways have the names that the load uses."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.windows = windows(events)
        gateways = {event.gateway for event in events if isinstance(event, Invoked)}
        # Many gateways may share a single address; then the gateway of a request is unknown.
        self._one_address = len(gateways) <= 1
        # For each gateway the sending times of tries with a response, in order.
        sent: dict[tuple[str, int], Invoked] = {}
        times: dict[str, list[float]] = defaultdict(list)
        for event in events:
            if isinstance(event, Invoked):
                sent[event.nonce, event.turn] = event
            elif isinstance(event, Answered) and (invoked := sent.get((event.nonce, event.turn))):
                times[invoked.gateway].append(invoked.at)
        answers = {gateway: sorted(several) for gateway, several in times.items()}
        self._killed = self._until_back("kill-gateway", STAMP_S, answers)
        self._terminating = self._until_back("term-gateway", LEAVE_S, answers)
        self._stopped = [self._of_gateway(w) for w in self.windows if w.name == "stop-gateway"]
        away = (w for w in self.windows if w.target.startswith("gateway"))
        self._cut_off = [w for w in map(self._at_redis, away) if w is not None]
        # The step at the begin of each window, and its reversal at the end.
        steps = [ClockStep(w.begin, w.step_s) for w in self.windows if w.step_s]
        steps += [ClockStep(w.end, -w.step_s) for w in self.windows if w.step_s]
        self.clock = SteppedClock(steps, STAMP_S)
        # The proxies are part of this tool: during a stall as long as a call may take, no process reaches Redis.
        self._stalls = [
            FaultWindow(event.since, event.at, ALL_TARGETS, "this tool stood still")
            for event in events
            if isinstance(event, Stalled) and event.at - event.since >= CALL_S and not self._one_address
        ]
        self._losses = [w for w in self.windows if w.name in LOSSES]
        self._redis = [w for w in map(self._at_redis, self.windows) if w is not None]
        self._postgres = [w for w in self.windows if w.name in POSTGRES_FAULTS or w.target.endswith(">postgres")]

    def _of_gateway(self, window: FaultWindow) -> FaultWindow:
        target = ALL_TARGETS if self._one_address else window.target
        return FaultWindow(window.begin, window.end, target, window.name)

    def _until_back(self, name: str, at_least_s: float, answers: Mapping[str, Sequence[float]]) -> list[FaultWindow]:
        """The windows of these faults, each until the gateway responded again after `at_least_s`."""
        found = []
        for window in self.windows:
            if window.name == name:
                times, least = answers.get(window.target, []), window.begin + at_least_s
                after = bisect_right(times, least)
                back = times[after] if after < len(times) else least + RESTART_S
                end = max(window.end, min(back, least + RESTART_S))
                found.append(self._of_gateway(FaultWindow(window.begin, end, window.target, name)))
        return found

    def _at_redis(self, window: FaultWindow) -> FaultWindow | None:
        """The window as one in which a process does not reach Redis, or None."""
        client, arrow, server = window.target.partition(">")
        if window.name in REDIS_FAULTS:
            affected = ALL_TARGETS
        elif window.name == "spool-full":
            affected = window.target
        elif window.name in PROXY_FAULTS and arrow and server.startswith("redis"):  # Of the default or another cell.
            affected = ALL_TARGETS if client == ALL_ROLES else client
        else:
            return None
        return self._of_gateway(FaultWindow(window.begin, window.end, affected, window.name))

    def killed(self, gateway: str, sent: float, ended: float) -> bool:
        """Whether the gateway was killed while it had the request, or was not back when it was sent."""
        return any(w.meets(sent - STAMP_S, ended + STAMP_S, gateway) for w in self._killed)

    def terminating(self, gateway: str, at: float) -> bool:
        """Whether the gateway was terminated and may not be back: it must answer accepted requests, but takes no others."""
        return any(w.meets(at, at + STAMP_S, gateway) for w in self._terminating)

    def answer_due(self, gateway: str, sent: float, created: float | None = None) -> float:
        """Until when the gateway must have answered: it has 4.1 s from when it could read the request. `created`: of its row.

        While it is stopped it cannot answer either; then it has RESUME_S from when it goes on.
        """
        due = self._readable(gateway, sent, created) + ANSWER_S
        for window in self._stopped:
            if window.meets(due - RESUME_S, due, gateway):
                due = max(due, window.end + RESUME_S)
        return due

    def run_due(self, gateway: str, sent: float, created: float | None = None) -> float:
        """Until when a run of the request may begin. `created`: of its row.

        A gateway ends what is overdue by its own clock. Where it was killed or stopped, only the clock of Redis does.
        """
        due = self._readable(gateway, sent, created) + RUN_S
        if self.clock and (self.killed(gateway, sent, due) or self.stopped(gateway, sent, due)):
            due += self.clock.backward(sent, due)
        return due

    def clock_ran_ahead(self, sent: float, ended: float) -> bool:
        """Whether a step forwards took what was left of the time of the request.

        Also a step shortly before it: until its next read of the clock a gateway sends an earlier deadline.
        """
        step_s = self.clock.forward(sent - GATEWAY_LOOK_S, ended)
        return step_s > 0 and ended - sent + step_s >= LEAST_FOR_A_RUN_S

    def queue_time_extended(self, sent: float, began: float) -> bool:
        """Whether a request waited until `began` because of a step backwards: without it, queue_timeout would have ended the
        wait, or the loss of its worker would have been noticed.
        """
        return 0 < began - sent - QUEUE_S < self.clock.backward(sent, began)

    def _readable(self, gateway: str, sent: float, created: float | None) -> float:
        for window in self._stopped:
            if window.meets(sent, sent + READ_S, gateway):
                sent = window.end
                if created is not None and created <= window.end + BACKLOG_S:
                    sent = max(sent, created)
        return sent

    def redis_lost(self, begin: float, end: float) -> bool:
        """Whether Redis lost everything in between."""
        # Data is lost at the begin; the outage of the server is another allowance.
        return any(begin - STAMP_S <= w.begin <= end + STAMP_S for w in self._losses)

    def redis_unreliable(self, gateway: str, begin: float, end: float) -> bool:
        """Whether this gateway may have been unable to read from Redis in between."""
        return any(w.meets(begin - SETTLE_S, end + STAMP_S, gateway) for w in (*self._redis, *self._stalls))

    def stopped(self, gateway: str, begin: float, end: float) -> bool:
        """Whether the gateway was stopped in between."""
        return any(w.meets(begin - RESUME_S, end, gateway) for w in self._stopped)

    def counted_as_lost(self, gateway: str, begin: float, end: float) -> bool:
        """Whether the gateway was stopped, or cut off from Redis, in between for so long that it counted as lost."""
        silent = (*self._stopped, *self._cut_off)
        return any(w.meets(begin - RESUME_S, end, gateway) and w.end - w.begin >= GONE_S for w in silent)

    def audit_lost(self, gateway: str, sent: float, ended: float) -> bool:
        """Whether Redis and then the gateway of the request were lost before PostgreSQL had its row."""
        last = ended + AUDIT_S
        for window in self._redis:  # Requests of direct mode reach Redis when it is back.
            if window.meets(sent - SETTLE_S, ended, gateway):
                last = max(last, window.end + RESEND_S + AUDIT_S)
        for window in self._postgres:
            if window.overlaps(sent, last):
                last = max(last, window.end + CATCH_UP_S)
        for loss in self._losses:
            if not sent - STAMP_S <= loss.begin <= last:
                continue
            resent = (
                loss.end + RESEND_S + sum(w.end - w.begin for w in self._stopped if w.meets(loss.begin, last, gateway))
            )
            if any(sent - STAMP_S <= w.begin <= resent and w.affects(gateway) for w in self._killed):
                return True
        return False

    def noticeable(self, gateway: str, begin: float, end: float) -> bool:
        """Whether a fault that a request of this gateway may notice was active in between, or shortly before."""
        for window in (*self.windows, *self._stalls):
            unnoticed = window.name in UNNOTICED or window.target.endswith(">postgres")
            elsewhere = window.name in ("kill-gateway", "stop-gateway", "term-gateway") and not self._of_gateway(
                window
            ).affects(gateway)
            if not (unnoticed or elsewhere or window.step_s) and window.overlaps(begin - SETTLE_S, end + STAMP_S):
                return True
        return False

    def windows_between(self, begin: float, end: float) -> list[FaultWindow]:
        """Every fault that was active in between."""
        return [w for w in self.windows if w.overlaps(begin, end)]
